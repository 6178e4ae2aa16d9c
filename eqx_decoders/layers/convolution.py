"""Depthwise causal convolutions over a row's tokens, as recurrent layers have them in front.

    y_t = sum_i kernel[:, taps - 1 - i] x_{t - i dilation} + bias

A token sees tokens of its own document alone, and padding (a position below 0) is skipped: it is no zero in between.
"""

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
    """The convolution, summed in f32, in the dtype of `x`.

    `tail` are the `(taps - 1) dilation` inputs before this call, oldest first; None for zeros. Tokens that stand in a
    row without gaps are shifted, others gathered: that is known only when the program runs.
    """
    batch, length, channels = x.shape
    size = (kernel.shape[1] - 1) * dilation
    before = jnp.zeros((batch, size, channels), x.dtype) if tail is None else tail.astype(x.dtype)
    real = positions >= 0
    document, (_, place) = document_numbers(real, segment_ids), _places(real, size)
    stream = jnp.concatenate([before, jnp.where(real[:, :, None], x, 0)], axis=1)
    owner = jnp.concatenate([jnp.zeros((batch, size), jnp.int32), document], axis=1)
    lags = [tap * dilation for tap in range(kernel.shape[1])]

    def shifted(lag: int) -> Array:
        start = size - lag
        seen = jax.lax.slice_in_dim(owner, start, start + length, axis=1) == document
        return jnp.where(seen[:, :, None], jax.lax.slice_in_dim(stream, start, start + length, axis=1), 0)

    def gathered(lag: int) -> Array:
        at = place(jnp.cumsum(real, axis=1) - 1 - lag)
        seen = jnp.take_along_axis(owner, at, axis=1) == document
        return jnp.where(seen[:, :, None], jnp.take_along_axis(stream, at[:, :, None], axis=1), 0)

    def total(source):
        weights = kernel.astype(jnp.float32)[:, ::-1].T[:, None, None]
        terms = [source(lag).astype(jnp.float32) * weight for lag, weight in zip(lags, weights, strict=True)]
        return sum(terms[1:], terms[0])

    if length == 1 or size == 0:
        y = total(shifted)
    else:
        y = jax.lax.cond(_gapless(real, tail is None), lambda: total(shifted), lambda: total(gathered))
    y = y if bias is None else y + bias.astype(jnp.float32)[None, None]
    return y.astype(x.dtype)


def document_starts(
    positions: Int[Array, "batch length"], segment_ids: Int[Array, "batch length"] | None
) -> Bool[Array, "batch length"] | None:
    """The first tokens of all documents in a row but its first, which may go on from before; None if there is one."""
    if segment_ids is None:
        return None
    real = positions >= 0
    index = jnp.where(real, jnp.arange(real.shape[1])[None], -1)
    last = jnp.pad(jax.lax.cummax(index, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    known = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
    return real & (last >= 0) & (known != segment_ids)


def document_numbers(real: Array, segment_ids: Array | None) -> Int[Array, "batch length"]:
    """The number of each token's document in its row."""
    starts = document_starts(jnp.where(real, 0, -1), segment_ids)
    return jnp.zeros(real.shape, jnp.int32) if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=1)


def _gapless(real: Array, anywhere: bool) -> Bool[Array, ""]:
    """Whether every row's tokens stand side by side, from its start on unless they may begin anywhere."""
    ended = jnp.cumsum(real[:, :-1] & ~real[:, 1:], axis=1) > 0
    together = jnp.all(~(real[:, 1:] & ended))
    return together if anywhere else together & jnp.all(real[:, 0] | ~real.any(axis=1))


def _places(real: Array, size: int):
    """How many tokens each row has, and where the n-th of them stands behind a tail (n < 0: in the tail)."""
    order = jnp.argsort(~real, axis=1, stable=True)

    def place(rank: Array) -> Array:
        inside = jnp.take_along_axis(order, jnp.maximum(rank, 0), axis=1)
        return jnp.where(rank >= 0, inside + size, jnp.maximum(rank + size, 0))

    return real.sum(axis=1), place
