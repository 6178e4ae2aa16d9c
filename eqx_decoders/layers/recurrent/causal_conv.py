"""Depthwise causal convolutions over a row's tokens, in front of recurrent layers.

    y_t = sum_i kernel[:, taps - 1 - i] x_{t - i dilation} + bias

A token sees tokens of its own document alone, and padding (a position below 0) is skipped: it is no zero in between.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_convolution(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    tail: Float[Array, "batch tail channels"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    dilation: int = 1,
) -> Float[Array, "batch length channels"]:
    """Convolve a row's tokens, summed in f32, in the dtype of `x`.

    `tail` are the `(taps - 1) dilation` inputs before this call, oldest first; None for zeros. Tokens are moved
    together where a row has gaps between them: that is known only when the program runs. Padding gives 0.
    """
    size = (kernel.shape[1] - 1) * dilation
    real = positions >= 0
    document = document_numbers(real, segment_ids)

    @jax.checkpoint  # a stream is saved for the gradient, not a term in f32 for each tap
    def dense_rows(x: Array, kernel: Array, bias: Array | None, tail: Array | None, document: Array) -> Array:
        batch, length, channels = x.shape
        before = jnp.zeros((batch, size, channels), x.dtype) if tail is None else tail.astype(x.dtype)
        stream = jnp.concatenate([before, x], axis=1)
        owner = jnp.concatenate([jnp.zeros((batch, size), jnp.int32), document], axis=1)
        y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)[None, None]
        for tap, weight in enumerate(kernel.astype(jnp.float32).T[:, None, None]):
            start = tap * dilation
            seen = jax.lax.slice_in_dim(owner, start, start + length, axis=1) == document
            term = jax.lax.slice_in_dim(stream, start, start + length, axis=1).astype(jnp.float32)
            y = y + jnp.where(seen[:, :, None], term * weight, 0.0)
        return y.astype(x.dtype)

    def across_gaps(x: Array, *others: Any) -> Array:
        order = jnp.argsort(~real, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        x = _permuted(x, order, back)
        return _permuted(dense_rows(x, *others, jnp.take_along_axis(document, order, axis=1)), back, order)

    x = jnp.where(real[:, :, None], x, 0)
    if x.shape[1] == 1 or size == 0:
        y = dense_rows(x, kernel, bias, tail, document)
    else:
        dense_positions = _dense_positions(real, tail is None)
        y = jax.lax.cond(
            dense_positions, lambda *arrays: dense_rows(*arrays, document), across_gaps, x, kernel, bias, tail
        )
    return jnp.where(real[:, :, None], y, 0)


@jax.custom_vjp
def _permuted(
    x: Float[Array, "batch length channels"], order: Int[Array, "batch length"], back: Int[Array, "batch length"]
) -> Array:
    """Permute tokens, `back` being the inverse order; the gradient is permuted back, and not added up."""
    return jnp.take_along_axis(x, order[:, :, None], axis=1)


def _permuted_forward(x: Array, order: Array, back: Array) -> tuple[Array, Array]:
    return _permuted(x, order, back), back


def _permuted_backward(back: Array, bar: Array) -> tuple[Array, None, None]:
    return jnp.take_along_axis(bar, back[:, :, None], axis=1), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def document_starts(
    positions: Int[Array, "batch length"], segment_ids: Int[Array, "batch length"] | None
) -> Bool[Array, "batch length"] | None:
    """Return the first tokens of all documents in a row but its first, which may be a continuation; None for one."""
    if segment_ids is None:
        return None
    real = positions >= 0
    index = jnp.where(real, jnp.arange(real.shape[1])[None], -1)
    last = jnp.pad(jax.lax.cummax(index, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    known = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
    return real & (last >= 0) & (known != segment_ids)


def document_numbers(real: Array, segment_ids: Array | None) -> Int[Array, "batch length"]:
    """Number each token's document in its row."""
    starts = document_starts(jnp.where(real, 0, -1), segment_ids)
    return jnp.zeros(real.shape, jnp.int32) if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=1)


def _dense_positions(real: Array, anywhere: bool) -> Bool[Array, ""]:
    """Return whether every row's tokens are consecutive, from its start on unless they may begin anywhere."""
    ended = jnp.cumsum(real[:, :-1] & ~real[:, 1:], axis=1) > 0
    consecutive = jnp.all(~(real[:, 1:] & ended))
    return consecutive if anywhere else consecutive & jnp.all(real[:, 0] | ~real.any(axis=1))
