"""Compilation of eager calls as one program, instead of one for each operation."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


P = ParamSpec("P")
T = TypeVar("T")


def jit_if_eager(function: Callable[P, T]) -> Callable[P, T]:
    """Compile the function unless it is called inside of `jax.jit`; `jax.grad` and `jax.vmap` do not count."""
    compiled = eqx.filter_jit(function)

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
