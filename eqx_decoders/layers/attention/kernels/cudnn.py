"""Attention by cuDNN's fused kernels for NVIDIA GPUs, through `jax.nn.dot_product_attention`.

cuDNN masks by index, not by position: causal, or a window of earlier indices. This is the right mask if positions equal
indices. In other cases the mask is passed as an array [length, kv_length] in the dtype of queries, which is exact for
any positions, segments, spans and selections, but takes memory. The mask has no gradient.

For packed sequences causality is passed in addition to the mask, so that cuDNN skips the upper half of the scores.
cuDNN could also skip other documents, given their offsets instead of a mask; but it needs a static bound on the number
of documents, and no public function of JAX supports this. A window is passed only without a mask, because not every
version of cuDNN supports both.

cuDNN's log-sum-exp is rounded and has no gradient, so this kernel does not support calls that read it.
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
MASK_BYTES = 2**30  # bound of the mask array; one sequence of 16,384 tokens takes half of it
HOPPER = (9, 0)


def unsupported(call: AttentionCall) -> str | None:
    """Return a noun phrase for a property of the call that cuDNN does not support, or None."""
    if call.compute_capability is None:
        return "devices without a compute capability (only NVIDIA GPUs are supported)"
    if any(jnp.dtype(dtype).itemsize != 2 for dtype in call.dtypes) or len(set(map(jnp.dtype, call.dtypes))) > 1:
        return "dtypes other than bfloat16 or float16 for all of query, key and value"
    if call.head_dim % 8 or call.head_dim > (256 if call.compute_capability >= HOPPER else 128):
        return f"head_dim={call.head_dim}"
    if call.length % 2 or call.kv_length % 2:  # JAX does not support their gradients, even without a mask
        return "an odd length"
    size = mask_bytes(call)
    return None if size <= MASK_BYTES else f"a mask array of {size} bytes (the limit is {MASK_BYTES})"


def mask_bytes(call: AttentionCall) -> int:
    """Return the size of the mask array in bytes; 0 if masking by index is enough."""
    elements = call.batch * max(1, call.selected_heads) * call.length * call.kv_length
    return jnp.dtype(call.dtypes[0]).itemsize * elements if _needs_mask(call) else 0


def _needs_mask(call: AttentionCall) -> bool:
    """Return whether cuDNN's masking by index does not express the mask of the call."""
    depends_on_data = call.segments or call.spans or call.selected_heads > 0
    has_chunks = isinstance(call.mask, Chunked) or (isinstance(call.mask, Bidirectional) and call.mask.size is not None)
    return not call.dense_positions or depends_on_data or has_chunks


def _call_cudnn(
    causal: bool, window: tuple[int, int] | None, query: Array, key: Array, value: Array, mask: Array | None
):
    options: Any = dict(scale=1.0, is_causal=causal, local_window_size=window, implementation=IMPLEMENTATION)
    return jax.nn.dot_product_attention(query, key, value, mask=mask, **options)


_attend = jax.custom_vjp(_call_cudnn, nondiff_argnums=(0, 1))


def _attend_fwd(causal: bool, window: tuple[int, int] | None, query: Array, key: Array, value: Array, mask: Any):
    """Name the residuals of cuDNN's backward pass "context".

    JAX does not name them, so remat policies could not save them and would recompute the forward pass.
    """
    out, pull = jax.vjp(lambda q, k, v: _call_cudnn(causal, window, q, k, v, mask), query, key, value)
    named = checkpoint_name(out, "context")
    lse_shape = (query.shape[0], query.shape[2], query.shape[1])

    def name(residual: Array) -> Array:
        if residual is out:
            return named
        return checkpoint_name(residual, "context") if residual.shape == lse_shape else residual

    return named, jax.tree.map(name, pull)


def _attend_bwd(causal: bool, window: tuple[int, int] | None, pull: Any, out_bar: Array):
    return *pull(out_bar), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def cudnn_attention(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Compute `attend`; lse is NaN. Remat policies that save "context" avoid recomputing the forward pass."""
    query, key, value, positions, selected, *_ = inputs
    # if queries and keys are the same tokens in order, a query sees no later index, except within spans
    causal = call.aligned and not call.spans and not isinstance(call.mask, Bidirectional)
    lse = jnp.full(query.shape[:3], jnp.nan, jnp.float32)
    if not _needs_mask(call):
        window = (call.mask.size - 1, 0) if isinstance(call.mask, SlidingWindow) else None
        return _attend(causal, window, query, key, value, None), lse
    mask = visible(call.mask, *positions)[:, None]
    mask = mask if selected is None else mask & as_mask(selected, key.shape[1])
    out = _attend(causal, None, query, key, value, mask)
    sees_any = mask.any(3).swapaxes(1, 2)[..., None]  # for a query that sees no key cuDNN averages all values
    return jnp.where(sees_any, out, jnp.zeros((), out.dtype)), lse
