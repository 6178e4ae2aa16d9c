"""Sums over what counts: the tokens of a batch, and those of each answer of a row, and back to tokens."""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped


def _members(answers: Int[Array, "batch length"], count: int) -> Bool[Array, "batch length count"]:
    """Return which tokens belong to the answers 1, 2, …, `count`. Fused into what reads it, and local to a row."""
    return answers[:, :, None] == jnp.arange(1, count + 1, dtype=answers.dtype)[None, None]


def answer_sums(
    values: Float[Array, "batch length"], answers: Int[Array, "batch length"], count: int
) -> Float[Array, "batch count"]:
    """Sum over the tokens of each answer: `sum over t with answers[t] = k of values[t]`, k = 1, 2, …, `count`.

    Tokens of number 0 belong to no answer and may hold anything, also NaN.
    """
    return jnp.sum(jnp.where(_members(answers, count), values[:, :, None], 0), axis=1)


def answer_lengths(answers: Int[Array, "batch length"], count: int) -> Int[Array, "batch count"]:
    """Count the tokens of each answer; 0 of a number that a row does not have."""
    return jnp.sum(_members(answers, count).astype(jnp.int32), axis=1)


def answer_means(
    values: Float[Array, "batch length"], answers: Int[Array, "batch length"], count: int
) -> Float[Array, "batch count"]:
    """Average over the tokens of each answer; 0 of a number that a row does not have."""
    lengths = jnp.maximum(answer_lengths(answers, count), 1)
    return answer_sums(values, answers, count) / lengths.astype(values.dtype)


def to_tokens(values: Float[Array, "batch count"], answers: Int[Array, "batch length"]) -> Float[Array, "batch length"]:
    """Give each token what its answer has: `values[answers[t] - 1]`; 0 to tokens of number 0."""
    members = _members(answers, values.shape[1])
    return jnp.sum(jnp.where(members, values[:, None, :], 0), axis=2)


def masked(values: Shaped[Array, "*shape"], real: Bool[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return float32 numbers of what counts, and 0 elsewhere, where there may be anything, also NaN."""
    return jnp.where(real, values.astype(jnp.float32), 0.0)


def masked_sum(values: Shaped[Array, "*shape"], real: Bool[Array, "*shape"]) -> Float32[Array, ""]:
    """Sum what counts, for metrics: without gradient."""
    return stop_gradient(jnp.sum(masked(values, real)))
