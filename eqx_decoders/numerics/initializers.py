"""Random initial values of weights."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.errors import check_integer, check_number, check_option


# Standard deviation of a standard normal distribution truncated to [-2, 2].
_TRUNCATED_STDDEV = 0.87962566103423978
_ONLY_SHAPES = contextvars.ContextVar("only_shapes", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Initialize weights with zeros inside this context manager.

    For `jax.eval_shape` and similar: most of its time would be spent on tracing random number generation.
    """
    token = _ONLY_SHAPES.set(True)
    try:
        yield
    finally:
        _ONLY_SHAPES.reset(token)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, stddev: float) -> Float[Array, "..."]:
    """Sample a normal distribution with standard deviation `stddev` in float32, and cast to `dtype`."""
    check_number("normal stddev", stddev, minimum=0.0)
    if _ONLY_SHAPES.get():
        return jnp.zeros(shape, dtype)
    return (stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def fan_in(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, fan: int, distribution: str = "truncated"
) -> Float[Array, "..."]:
    """Sample values of variance `1 / fan` in float32, and cast to `dtype`; `fan` is the size of the contracted axes.

    `distribution` is `"normal"`, or `"truncated"`: a normal distribution truncated to two standard deviations, rescaled
    to this variance.
    """
    check_integer("fan_in fan", fan)
    check_option("fan_in distribution", distribution, ("truncated", "normal"))
    stddev = fan**-0.5
    if distribution == "normal" or _ONLY_SHAPES.get():
        return normal(key, shape, dtype, stddev)
    samples = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return (stddev / _TRUNCATED_STDDEV * samples).astype(dtype)
