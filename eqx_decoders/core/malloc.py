"""Configuration of glibc's malloc that avoids page faults on CPU."""

import ctypes
import glob
from typing import Any

import jax


# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

# Device files of TPUs and GPUs.
_ACCELERATORS = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/nvidiactl", "/dev/kfd"


def keep_memory() -> bool:
    """Make glibc's malloc keep freed memory in the process if JAX runs on CPU. Returns whether the setting took effect.

    JAX runs on CPU if there is no accelerator, or with `JAX_PLATFORMS=cpu`. On other platforms and with other C
    libraries, this function does nothing.

    XLA's CPU backend allocates the temporaries of a program at every call. By default, malloc maps and unmaps such
    large blocks each time, and the page faults take longer than the arithmetic of memory-bound programs, such as AdamW
    or the decoding of one token. The disadvantage is that the process keeps its peak memory and fragments (0.8 GB more
    for a training step that needs 2.2 GB). `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` is as fast without this
    disadvantage, but must be set before the process starts.

    Call this function once, before JAX lists its devices: existing threads keep their malloc arenas, which the setting
    does not affect.
    """
    config: Any = jax.config
    if config.jax_platforms != "cpu" and any(map(glob.glob, _ACCELERATORS)):
        return False  # asking JAX for its backend instead would start its threads
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # Windows raises TypeError
        return False
    settings = ((_M_MMAP_THRESHOLD, 2**31 - 1), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
    accepted = [mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)
