"""Random initial values of weights."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.errors import check_integer, check_number, check_word


# Standard deviation of a standard normal cut off at two.
_TRUNCATED_STDDEV = 0.87962566103423978


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, stddev: float) -> Float[Array, "..."]:
    """Draw normal numbers of standard deviation `stddev`, in f32, and cast them."""
    check_number("normal stddev", stddev, least=0.0)
    return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def fan_in(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, fan: int, distribution: str = "truncated"
) -> Float[Array, "..."]:
    """Draw numbers of variance `1 / fan` in f32, and cast them; `fan` is the size of the contracted axes.

    `distribution` is `"normal"`, or `"truncated"`: a normal cut at two standard deviations, widened to this variance.
    """
    check_integer("fan_in fan", fan)
    check_word("fan_in distribution", distribution, ("truncated", "normal"))
    stddev = fan**-0.5
    if distribution == "normal":
        return normal(key, shape, dtype, stddev)
    draws = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return (stddev / _TRUNCATED_STDDEV * draws).astype(dtype)
