"""A setting of glibc's malloc that keeps freed memory in the process, on CPU."""

import ctypes
import glob
from typing import Any

import jax


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_ACCELERATORS = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/nvidiactl", "/dev/kfd"  # of TPUs and graphics cards


def keep_memory() -> bool:
    """Tell glibc's malloc to keep freed memory if JAX computes on the CPU; return whether it does.

    JAX computes there without an accelerator, or if `JAX_PLATFORMS=cpu` says so.

    XLA's CPU backend allocates a program's temporaries anew at every call. By default blocks this large are mapped and
    unmapped each time, and the page faults cost more than the arithmetic of memory-bound steps such as AdamW or one
    token. The price is that the process keeps the most that it has needed, and what lies between: 0.8 GB more than the
    2.2 GB of a training step. Other C libraries and accelerators have no such problem, and are left alone.
    `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in the environment helps as much and has no price, but comes before a start.

    Call it once, before JAX lists its devices: threads that exist have arenas already, whose large blocks are mapped
    and unmapped as before.
    """
    config: Any = jax.config
    if config.jax_platforms != "cpu" and any(map(glob.glob, _ACCELERATORS)):
        return False  # JAX is not asked for its backend, because that would start the threads
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # TypeError: on Windows
        return False
    settings = ((_M_MMAP_THRESHOLD, 2**31 - 1), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
    accepted = [mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)
