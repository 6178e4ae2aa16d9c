"""Attention by cuDNN's fused kernels, for NVIDIA's GPUs: `jax.nn.dot_product_attention`.

By itself cuDNN knows indices, not positions: all earlier indices, or a window of them. That is the mask where
positions are the indices. Elsewhere the mask goes in as an array of `length x kv_length`, in the dtype of queries,
which is exact for any positions, segments, spans and selections, and costs memory; its gradient does not exist.

Packed rows are told to be causal, too, so that cuDNN skips the half that no query sees. It could skip other documents
as well where it is told their offsets, without a mask; but it needs a bound on their number, which data decide, and
JAX offers that in no public function. A window is told where there is no mask alone: not every cuDNN takes both.

The log-sum-exp comes rounded and without gradient, so this kernel does nothing that reads it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.attention.kernels.selection import as_mask
from eqx_decoders.layers.mask import Bidirectional, Chunked, SlidingWindow, visible


IMPLEMENTATION = "cudnn"
MASK_BYTES = 2**30  # what a mask may take: that of a row of 16,384 tokens takes half of it
HOPPER = (9, 0)


def refusal(call: AttentionCall) -> str | None:
    """Return what cuDNN cannot do in this call, in words, or None."""
    if call.compute_capability is None:
        return "devices without a compute capability, which NVIDIA's have"
    if any(jnp.dtype(dtype).itemsize != 2 for dtype in call.dtypes) or len(set(map(jnp.dtype, call.dtypes))) > 1:
        return "dtypes other than bfloat16 or float16, one for all"
    if call.head_dim % 8 or call.head_dim > (256 if call.compute_capability >= HOPPER else 128):
        return f"head_dim={call.head_dim}"
    if call.length % 2 or call.kv_length % 2:  # JAX refuses their gradients, also those of calls without a mask
        return "an odd length"
    size = mask_bytes(call)
    return None if size <= MASK_BYTES else f"a mask that takes {size} bytes"


def mask_bytes(call: AttentionCall) -> int:
    """Return the bytes of the mask that goes in as an array; 0 where indices say it."""
    cells = call.batch * max(1, call.selected_heads) * call.length * call.kv_length
    return jnp.dtype(call.dtypes[0]).itemsize * cells if _needs_mask(call) else 0


def _needs_mask(call: AttentionCall) -> bool:
    selects = call.segments or call.spans or call.selected_heads > 0
    blocks = isinstance(call.mask, Chunked) or (isinstance(call.mask, Bidirectional) and call.mask.size is not None)
    return not call.dense_positions or selects or blocks


def _product(causal: bool, window: tuple[int, int] | None, query: Array, key: Array, value: Array, mask: Array | None):
    options: Any = dict(scale=1.0, is_causal=causal, local_window_size=window, implementation=IMPLEMENTATION)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **options)


_attend = jax.custom_vjp(_product, nondiff_argnums=(0, 1))


def _attend_fwd(causal: bool, window: tuple[int, int] | None, query: Array, key: Array, value: Array, mask: Any):
    """Name what cuDNN keeps for its backward pass: JAX gives it no name, and remat would compute all of it again."""
    out, pull = jax.vjp(lambda q, k, v: _product(causal, window, q, k, v, mask), query, key, value)
    named = checkpoint_name(out, "context")
    rows = (query.shape[0], query.shape[2], query.shape[1])  # of the log-sum-exp

    def name(residual: Array) -> Array:
        if residual is out:
            return named
        return checkpoint_name(residual, "context") if residual.shape == rows else residual

    return named, jax.tree.map(name, pull)


def _attend_bwd(causal: bool, window: tuple[int, int] | None, pull: Any, out_bar: Array):
    return *pull(out_bar), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def cudnn_attention(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it; lse is NaN. Under remat, saving "context" saves the whole forward pass."""
    query, key, value, positions, selected, *_ = inputs
    # of the same tokens in order, none sees a later index, but for spans
    causal = call.aligned and not call.spans and not isinstance(call.mask, Bidirectional)
    lse = jnp.full(query.shape[:3], jnp.nan, jnp.float32)
    if not _needs_mask(call):
        window = (call.mask.size - 1, 0) if isinstance(call.mask, SlidingWindow) else None
        return _attend(causal, window, query, key, value, None), lse
    seen = visible(call.mask, *positions)[:, None]
    seen = seen if selected is None else seen & as_mask(selected, key.shape[1])
    out = _attend(causal, None, query, key, value, seen)
    some = seen.any(3).swapaxes(1, 2)[..., None]  # of nothing cuDNN would make a mean of all values
    return jnp.where(some, out, jnp.zeros((), out.dtype)), lse
