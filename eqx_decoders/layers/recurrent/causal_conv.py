"""Depthwise causal convolutions over the tokens of a sequence, as recurrent layers use them.

    y_t = sum_i kernel[:, taps - 1 - i] x_{t - i dilation} + bias

A token sees only tokens of its own document. Padding (positions below 0) is skipped: a token after padding sees the
tokens before the padding, not zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.layers.documents import document_indices


def causal_convolution(
    x: Float[Array, "batch length channels"],
    kernel: Float[Array, "channels taps"],
    bias: Float[Array, "channels"] | None,
    conv_state: Float[Array, "batch conv_inputs channels"] | None,
    positions: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None,
    dilation: int = 1,
) -> Float[Array, "batch length channels"]:
    """Return the convolution in the dtype of `x`, accumulated in float32; outputs at padding are 0.

    `conv_state` holds the `(taps - 1) * dilation` inputs before this call, oldest first; None means zeros. If a
    sequence has padding between its tokens, a branch taken at run time moves the tokens together first.
    """
    size = (kernel.shape[1] - 1) * dilation
    real = positions >= 0
    document = document_indices(real, segment_ids)

    @jax.checkpoint  # the backward pass saves the input, not one float32 product per tap
    def convolve_dense(x: Array, kernel: Array, bias: Array | None, conv_state: Array | None, document: Array) -> Array:
        batch, length, channels = x.shape
        before = jnp.zeros((batch, size, channels), x.dtype) if conv_state is None else conv_state.astype(x.dtype)
        inputs = jnp.concatenate([before, x], axis=1)
        input_document = jnp.concatenate([jnp.zeros((batch, size), jnp.int32), document], axis=1)
        y = jnp.zeros((), jnp.float32) if bias is None else bias.astype(jnp.float32)[None, None]
        for tap, weight in enumerate(kernel.astype(jnp.float32).T[:, None, None]):
            start = tap * dilation
            visible = jax.lax.slice_in_dim(input_document, start, start + length, axis=1) == document
            shifted = jax.lax.slice_in_dim(inputs, start, start + length, axis=1).astype(jnp.float32)
            y = y + jnp.where(visible[:, :, None], shifted * weight, 0.0)
        return y.astype(x.dtype)

    def convolve_with_gaps(x: Array, *weights_and_state: Any) -> Array:
        order = jnp.argsort(~real, axis=1, stable=True)
        inverse = jnp.argsort(order, axis=1)
        x = _permute(x, order, inverse)
        y = convolve_dense(x, *weights_and_state, jnp.take_along_axis(document, order, axis=1))
        return _permute(y, inverse, order)

    x = jnp.where(real[:, :, None], x, 0)
    if x.shape[1] == 1 or size == 0:
        y = convolve_dense(x, kernel, bias, conv_state, document)
    else:
        y = jax.lax.cond(
            _is_dense(real, may_start_with_padding=conv_state is None),
            lambda *arrays: convolve_dense(*arrays, document),
            convolve_with_gaps,
            x,
            kernel,
            bias,
            conv_state,
        )
    return jnp.where(real[:, :, None], y, 0)


@jax.custom_vjp
def _permute(
    x: Float[Array, "batch length channels"], order: Int[Array, "batch length"], inverse: Int[Array, "batch length"]
) -> Array:
    """Permute tokens; the gradient is a gather by the inverse permutation instead of a scatter-add."""
    return jnp.take_along_axis(x, order[:, :, None], axis=1)


def _permute_forward(x: Array, order: Array, inverse: Array) -> tuple[Array, Array]:
    return _permute(x, order, inverse), inverse


def _permute_backward(inverse: Array, out_bar: Array) -> tuple[Array, None, None]:
    return jnp.take_along_axis(out_bar, inverse[:, :, None], axis=1), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _is_dense(real: Array, may_start_with_padding: bool) -> Bool[Array, ""]:
    """Return whether no sequence has padding between its tokens, nor, unless allowed, before them."""
    ended = jnp.cumsum(real[:, :-1] & ~real[:, 1:], axis=1) > 0
    consecutive = jnp.all(~(real[:, 1:] & ended))
    return consecutive if may_start_with_padding else consecutive & jnp.all(real[:, 0] | ~real.any(axis=1))
