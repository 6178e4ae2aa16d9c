"""Boundaries of packed documents and padding, from positions and segment ids."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def previous_tokens(real: Bool[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Return the index of the last token before each token, without padding; -1 if there is none.

    `real`: False for padding.
    """
    index = jnp.where(real, jnp.arange(real.shape[1], dtype=jnp.int32)[None], -1)
    return jnp.pad(jax.lax.cummax(index, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]


def document_starts(
    positions: Int[Array, "batch length"], segment_ids: Int[Array, "batch length"] | None
) -> Bool[Array, "batch length"] | None:
    """Return a mask of the tokens that start a new document; None without `segment_ids` (one document per sequence).

    The first token of a sequence is never marked, because it may continue a document of an earlier call.
    """
    if segment_ids is None:
        return None
    real = positions >= 0
    previous = previous_tokens(real)
    previous_segment = jnp.take_along_axis(segment_ids, jnp.maximum(previous, 0), axis=1)
    return real & (previous >= 0) & (previous_segment != segment_ids)


def document_indices(real: Array, segment_ids: Array | None) -> Int[Array, "batch length"]:
    """Return the index of each token's document within its sequence, counted from 0."""
    starts = document_starts(jnp.where(real, 0, -1), segment_ids)
    return jnp.zeros(real.shape, jnp.int32) if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=1)


def zero_padding(x: Float[Array, "batch length *dims"], positions: Int[Array, "batch length"]) -> Array:
    """Set padding tokens (positions below 0) to zero."""
    real = (positions >= 0).reshape(*positions.shape, *(1,) * (x.ndim - 2))
    return jnp.where(real, x, jnp.zeros((), x.dtype))
