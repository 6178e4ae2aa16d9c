"""Sums and means over the tokens of each completion of a row, and over masked tokens."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped


def _membership(completion_ids: Int[Array, "batch length"], count: int) -> Bool[Array, "batch length count"]:
    """Return which tokens belong to each completion. XLA fuses it into its consumers, and it is local to a row."""
    return completion_ids[:, :, None] == jnp.arange(1, count + 1, dtype=completion_ids.dtype)[None, None]


def completion_sums(
    values: Float[Array, "batch length"], completion_ids: Int[Array, "batch length"], count: int
) -> Float[Array, "batch count"]:
    """Return `sum over t with completion_ids[t] = k of values[t]` for k = 1, 2, ..., `count`.

    Tokens with id 0 belong to no completion; their values may be anything, also NaN.
    """
    return jnp.sum(jnp.where(_membership(completion_ids, count), values[:, :, None], 0), axis=1)


def completion_lengths(completion_ids: Int[Array, "batch length"], count: int) -> Int[Array, "batch count"]:
    """Return the number of tokens of each completion; 0 for ids that a row does not have."""
    return jnp.sum(_membership(completion_ids, count).astype(jnp.int32), axis=1)


def completion_means(
    values: Float[Array, "batch length"], completion_ids: Int[Array, "batch length"], count: int
) -> Float[Array, "batch count"]:
    """Return the mean over the tokens of each completion; 0 for ids that a row does not have."""
    lengths = jnp.maximum(completion_lengths(completion_ids, count), 1)
    return completion_sums(values, completion_ids, count) / lengths.astype(values.dtype)


def to_tokens(
    values: Float[Array, "batch count"], completion_ids: Int[Array, "batch length"]
) -> Float[Array, "batch length"]:
    """Broadcast a value of each completion to its tokens, `values[completion_ids[t] - 1]`; 0 for tokens with id 0."""
    members = _membership(completion_ids, values.shape[1])
    return jnp.sum(jnp.where(members, values[:, None, :], 0), axis=2)


def masked(values: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the values in float32, and 0 outside of the mask, where they may be anything, also NaN."""
    return jnp.where(mask, values.astype(jnp.float32), 0.0)


def masked_sum(values: Shaped[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float32[Array, ""]:
    """Return the sum over the mask, for metrics: without gradient."""
    return stop_gradient(jnp.sum(masked(values, mask)))
