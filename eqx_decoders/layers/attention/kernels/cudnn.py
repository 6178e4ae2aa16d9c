"""Attention by cuDNN's fused kernels, for NVIDIA's GPUs: `jax.nn.dot_product_attention`.

By itself cuDNN knows indices, not positions: all earlier indices, or a window of them. That is the mask where
positions are the indices. Elsewhere the mask goes in as an array of `length x kv_length`, which is exact for any
positions, segments, spans and selections, and costs memory: twice, since cuDNN returns its gradient, too. The
log-sum-exp comes rounded and without gradient, so this kernel does nothing that reads it.
"""

import re

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.mask import Bidirectional, Chunked, SlidingWindow, visible


IMPLEMENTATION = "cudnn"
MASK_BYTES = 2**30  # what the mask and its gradient may take: a row of 16,384 tokens, or four of 8,192


def refusal(call: AttentionCall) -> str | None:
    """Return what cuDNN cannot do in this call, in words, or None."""
    if any(jnp.dtype(dtype).itemsize != 2 for dtype in call.dtypes) or len(set(map(jnp.dtype, call.dtypes))) > 1:
        return "dtypes other than bfloat16 or float16, one for all"
    if call.head_dim % 8 or call.head_dim > largest_head_dim():
        return f"head_dim={call.head_dim}"
    if not _needs_mask(call):
        return None
    if call.length % 2 or call.kv_length % 2:
        return "a mask of an odd length"
    size = 4 * call.batch * max(1, call.selected_heads) * call.length * call.kv_length
    return None if size <= MASK_BYTES else f"a mask that takes {size} bytes with its gradient"


def largest_head_dim() -> int:
    """Return 256 on Hopper and later, 128 before; 0 where the first device has no cuDNN."""
    capability = re.fullmatch(r"(\d+)\.\d+", str(getattr(jax.devices()[0], "compute_capability", "")))
    return 0 if capability is None else 256 if int(capability[1]) >= 9 else 128


def _needs_mask(call: AttentionCall) -> bool:
    selects = call.segments or call.spans or call.selected_heads > 0
    blocks = isinstance(call.mask, Chunked) or (isinstance(call.mask, Bidirectional) and call.mask.size is not None)
    return not call.dense_positions or selects or blocks


def cudnn_attention(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it; lse is NaN. Under remat it is computed again: its residuals have no name."""
    query, key, value, positions, selected, _ = inputs
    options: dict = dict(scale=1.0, implementation=IMPLEMENTATION)
    lse = jnp.full(query.shape[:3], jnp.nan, jnp.float32)
    if not _needs_mask(call):
        window = (call.mask.size - 1, 0) if isinstance(call.mask, SlidingWindow) else None
        causal = not isinstance(call.mask, Bidirectional)
        out = jax.nn.dot_product_attention(query, key, value, is_causal=causal, local_window_size=window, **options)
        return checkpoint_name(out, "context"), lse
    seen = visible(call.mask, *positions)[:, None]
    seen = seen if selected is None else seen & selected
    out = jax.nn.dot_product_attention(query, key, value, mask=seen, **options)
    some = seen.any(3).swapaxes(1, 2)[..., None]  # of nothing cuDNN would make a mean of all values
    return checkpoint_name(jnp.where(some, out, jnp.zeros((), out.dtype)), "context"), lse
