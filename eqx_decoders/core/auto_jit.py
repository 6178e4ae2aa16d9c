"""Compilation of eager calls as one program, instead of one for each operation. Old programs make room for new ones."""

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

FEW = 64  # programs that are never dropped: then others have taken the room
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def bounded_jit(function: Callable[P, T], *, donate: Literal["none", "all-except-first"] = "none") -> Callable[P, T]:
    """Compile a function as `eqx.filter_jit` does; its programs are kept while there is room for others.

    XLA ends the process where it gets no further map of memory. A program for CPUs takes about 150 of the 65,530 that
    Linux lets a process have: some hundred programs, such as of one model after the other, take them all. Where two
    thirds are taken, the programs of all such functions are dropped, and compiled again if they are needed.
    """
    compiled: Any = eqx.filter_jit(function, donate=donate)
    _bounded.append(compiled._cached)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _make_room()
        return compiled(*args, **kwargs)

    return call


_bounded: list[Any] = []  # functions with programs
_seen = 0  # of their programs, when maps were counted last


def _make_room() -> None:
    """Drop programs if there are new ones, and little room."""
    global _seen
    count = sum(each._cache_size() for each in _bounded)
    if count > max(_seen, FEW) and _taken_maps() > 2 / 3:
        for each in _bounded:
            each.clear_cache()
        count = 0
    _seen = count


def _taken_maps() -> float:
    """Return the share of the maps of memory that the process has taken; 0 where there is no bound."""
    try:
        return MAPS.read_bytes().count(b"\n") / int(MOST_MAPS.read_text())
    except (OSError, ValueError):
        return 0.0


def jit_if_eager(function: Callable[P, T]) -> Callable[P, T]:
    """Compile the function unless it is called inside of `jax.jit`; `jax.grad` and `jax.vmap` do not count."""
    compiled = bounded_jit(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (function if is_staged() else compiled)(*args, **kwargs)

    return call


def is_staged() -> bool:
    """Return whether operations are recorded for a program here, as within `jax.jit`, and not run."""
    return isinstance(jnp.zeros(()), Tracer)


def concrete(x: Array | np.ndarray | None) -> np.ndarray | None:
    """Return an array's numbers; None if it is traced, or parts of it are only on devices of other processes."""
    if x is None or isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return None
    return np.asarray(x)
