"""Dtypes of a model's stored weights and activations, and casts of placed arrays."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from eqx_decoders.errors import ConfigError, check_option


_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Mixed-precision policy: weights are stored in `params` and cast to `compute`, the dtype of activations.

    Dtypes may be given as `jnp.bfloat16` or `"bfloat16"`. Raises ConfigError for a dtype that is not floating-point.
    """

    params: DTypeLike = jnp.float32
    compute: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        for field in ("params", "compute"):
            object.__setattr__(self, field, _floating(f"Precision.{field}", getattr(self, field)))


def as_precision(value: Precision | DTypeLike | None) -> Precision:
    """Return a precision: `value`, both dtypes equal to the dtype `value`, or float32 for None."""
    if value is None:
        return Precision()
    return value if isinstance(value, Precision) else Precision(params=value, compute=value)


def _floating(field: str, value: DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(value)
    except TypeError as error:
        raise ConfigError(f"{field}={value!r} is not a dtype. Use one of {', '.join(_FLOATS)}.") from error
    check_option(field, dtype.name, _FLOATS)
    return dtype


def cast(leaf: Array, dtype: Any, sharding: Any = None) -> Array:
    """Return a copy of an array in `dtype`, with its own sharding unless `sharding` is given."""
    return _cast_program(jnp.dtype(dtype), leaf.sharding if sharding is None else sharding)(leaf)


@functools.lru_cache(64)
def _cast_program(dtype: np.dtype, sharding: Any) -> Any:
    """Return a jitted cast, cached so that later calls do not compile again."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)
