"""Random initial values of weights."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.errors import check_integer, check_number, check_word


# Standard deviation of a standard normal cut off at two.
_TRUNCATED_STDDEV = 0.87962566103423978
_SHAPES_ALONE = contextvars.ContextVar("shapes_alone", default=False)


@contextlib.contextmanager
def shapes_alone() -> Iterator[None]:
    """Let weights be zeros within this context, where only their shapes are read: tracing draws takes most of that."""
    token = _SHAPES_ALONE.set(True)
    try:
        yield
    finally:
        _SHAPES_ALONE.reset(token)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, stddev: float) -> Float[Array, "..."]:
    """Draw normal numbers of standard deviation `stddev`, in f32, and cast them."""
    check_number("normal stddev", stddev, least=0.0)
    if _SHAPES_ALONE.get():
        return jnp.zeros(shape, dtype)
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
    if distribution == "normal" or _SHAPES_ALONE.get():
        return normal(key, shape, dtype, stddev)
    draws = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return (stddev / _TRUNCATED_STDDEV * draws).astype(dtype)
