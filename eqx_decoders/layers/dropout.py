"""Dropout (Srivastava et al. 2014) with one mask for all positions of a sequence, as in MaxText."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(
    x: Float[Array, "batch length *features"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "batch length *features"]:
    """Apply dropout, `x * keep / (1 - rate)`, with one random mask for all positions of a sequence.

    Returns `x` if `key` is None or `rate` is 0.
    """
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, (x.shape[0], 1, *x.shape[2:]))
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))
