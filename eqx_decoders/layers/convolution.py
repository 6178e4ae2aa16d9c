"""Causal convolution over the tokens of a document, a filter for each channel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def causal_convolution(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    tail: Float[Array, "batch back channels"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    dilation: int = 1,
) -> Float[Array, "batch length channels"]:
    """`y_t = sum_j kernel[taps - 1 - j] x_{t - j dilation}` over real tokens of a document; `tail` stands before `x`.

    Padding, at positions below 0, is skipped.
    """
    taps = kernel.shape[1]
    back = (taps - 1) * dilation
    tail = jnp.zeros((x.shape[0], back, x.shape[2]), x.dtype) if tail is None else tail.astype(x.dtype)
    joined = jnp.concatenate([tail, x], axis=1)
    real = jnp.pad(positions >= 0, ((0, 0), (back, 0)), constant_values=True)
    segments = jnp.zeros_like(positions) if segment_ids is None else segment_ids
    segments = jnp.pad(segments, ((0, 0), (back, 0)))
    places = jnp.argsort(~real, axis=1, stable=True)  # of real inputs, in their order
    order = jnp.cumsum(real, axis=1, dtype=jnp.int32)[:, back:] - 1
    out = jnp.zeros_like(x)
    for tap in range(taps):
        earlier = order - (taps - 1 - tap) * dilation
        place = jnp.take_along_axis(places, jnp.maximum(earlier, 0), axis=1)
        same = (earlier >= 0) & (jnp.take_along_axis(segments, place, axis=1) == segments[:, back:])
        inputs = jnp.where(same[..., None], jnp.take_along_axis(joined, place[..., None], axis=1), 0)
        out = out + inputs * kernel[:, tap].astype(x.dtype)[None, None]
    return out if bias is None else out + bias.astype(x.dtype)[None, None]
