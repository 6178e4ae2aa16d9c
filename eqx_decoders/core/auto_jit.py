"""Compilation of eager calls to one program per call instead of one per operation, with eviction of old programs."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


P = ParamSpec("P")
T = TypeVar("T")

MIN_PROGRAMS = 64  # below this number, other users of memory maps are to blame, and programs are not evicted
MAPS = Path("/proc/self/maps")
MAX_MAPS = Path("/proc/sys/vm/max_map_count")


def bounded_jit(function: Callable[P, T], *, donate: Literal["none", "all-except-first"] = "none") -> Callable[P, T]:
    """Compile a function like `eqx.filter_jit`, but evict compiled programs before the process runs out of memory maps.

    XLA aborts the process if the kernel refuses another memory map. A CPU program uses about 150 of the 65,530 maps
    that Linux allows per process, so a few hundred programs (for example of several models) use all of them. When two
    thirds of the maps are in use, the programs of all functions that this decorator compiled are evicted. They are
    compiled again when they are needed.
    """
    compiled: Any = eqx.filter_jit(function, donate=donate)
    _jitted_functions.append(compiled._cached)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _evict_if_needed()
        return compiled(*args, **kwargs)

    return call


_jitted_functions: list[Any] = []
_num_programs = 0  # compiled programs of these functions at the previous call


def _evict_if_needed() -> None:
    """Evict all compiled programs if there are new programs and few memory maps are left."""
    global _num_programs
    count = sum(function._cache_size() for function in _jitted_functions)
    if count > max(_num_programs, MIN_PROGRAMS) and _used_maps() > 2 / 3:
        for function in _jitted_functions:
            function.clear_cache()
        count = 0
    _num_programs = count


def _used_maps() -> float:
    """Return the fraction of the allowed memory maps that the process uses; 0 on systems other than Linux."""
    try:
        return MAPS.read_bytes().count(b"\n") / int(MAX_MAPS.read_text())
    except (OSError, ValueError):
        return 0.0


def jit_if_eager(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function if it is called eagerly. Inside `jax.jit` it is traced as part of the outer program.

    Calls inside `jax.grad` or `jax.vmap` count as eager if these are not inside `jax.jit`.
    """
    compiled = bounded_jit(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (function if is_staged() else compiled)(*args, **kwargs)

    return call


def is_staged() -> bool:
    """Return whether operations are traced here, as inside `jax.jit`, and not executed."""
    return isinstance(jnp.zeros(()), Tracer)


def concrete(x: Array | np.ndarray | None) -> np.ndarray | None:
    """Return the values of an array. None: it is None, traced, or partly on devices of other processes only."""
    if x is None or isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    return np.asarray(x)
