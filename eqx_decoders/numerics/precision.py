"""Dtypes of a model: of its stored weights and of its activations; copies of arrays in another one."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_decoders.errors import ConfigError, check_word


_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of a model: weights are stored in `params` and cast to `compute`, the dtype of activations, at their use.

    Any spelling of a floating dtype is taken (`jnp.bfloat16`, `"bfloat16"`); others raise ConfigError.
    """

    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for field in ("params", "compute"):
            object.__setattr__(self, field, _floating(f"Precision.{field}", getattr(self, field)))


def _floating(field: str, value: DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} is not a dtype. Known: {', '.join(_FLOATS)}.") from error
    check_word(field, dtype.name, _FLOATS)
    return dtype


def cast(leaf: Array, dtype: Any, sharding: Any = None) -> Array:
    """Return a copy of an array in another dtype, and with another sharding if one is given."""
    return _cast_program(jnp.dtype(dtype), leaf.sharding if sharding is None else sharding)(leaf)


@functools.lru_cache(64)
def _cast_program(dtype: np.dtype, sharding: Any) -> Any:
    """Return a program for arrays of other dtypes, which later calls find again."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)
