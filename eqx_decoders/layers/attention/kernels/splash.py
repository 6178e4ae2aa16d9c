"""Attention by JAX's splash attention kernel for TPUs (Pallas), for calls where it is exact.

Splash masks by index and segment id: a query sees earlier indices (all, or a window) with its own id. This equals our
masks if queries and keys are the same tokens in order; a window also needs positions without gaps. Padding gets a
separate id, and each chunk of a document gets an id. Splash skips tiles that are masked by index, but not tiles of
other documents, which the interval kernel also skips.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.call import AttentionCall, AttentionInputs
from eqx_decoders.layers.attention.kernels.common import Result
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Chunked, Mask, SlidingWindow
from eqx_decoders.sharding.chips import LANES


_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
splash, masks = map(LazyModule, (f"{_SPLASH}_kernel", f"{_SPLASH}_mask"))  # slow to import
BLOCK = 512  # max tile size of queries and keys: stays within XLA's default VMEM limit on every TPU
EXACT_IN_16_BITS = (None, "default", "fastest", "bfloat16")  # TPUs support no other precision for 16-bit matmuls
PADDING = jnp.iinfo(jnp.int32).min  # segment id of padding


def unsupported(call: AttentionCall) -> str | None:
    """Return a noun phrase for a property of the call that splash attention does not support, or None."""
    if not call.aligned:
        return "queries and keys that are not the same tokens in the same order (aligned=False)"
    if isinstance(call.mask, SlidingWindow) and not call.dense_positions:
        return "a sliding window over positions that may have gaps (dense_positions=False)"
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    if precision not in EXACT_IN_16_BITS and any(jnp.dtype(dtype).itemsize < 4 for dtype in call.dtypes):
        return f"jax_default_matmul_precision={precision!r} with 16-bit inputs"
    return None


def splash_attention(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Compute `attend`; lse is NaN, because splash returns none with a gradient. Without a TPU it is interpreted.

    Remat policies that save "context" avoid recomputing the forward pass.
    """
    query, key, value, positions, *_ = inputs
    length, heads = query.shape[1:3]
    padding = -length % LANES
    size = length + padding
    # the largest multiple of LANES that divides the length
    tile = next(n for n in range(min(BLOCK, size), 0, -LANES) if size % n == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([_mask(call.mask, size)] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, tile)),
        attn_logits_soft_cap=call.soft_cap,
        residual_checkpoint_name="context",
        interpret=not call.backend.pallas_tpu,
    )
    real = positions.query_positions >= 0
    ids = jnp.pad(_segment_ids(call.mask, positions), ((0, 0), (0, padding)), constant_values=PADDING)
    arrays = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (query, key, value))
    out: Any = jax.vmap(kernel)(*arrays, splash.SegmentIds(ids, ids))
    out = out[:, :, :length].swapaxes(1, 2)
    out = jnp.where(real[:, :, None, None], out, jnp.zeros((), out.dtype))
    return out, jnp.full(query.shape[:3], jnp.nan, jnp.float32)


def _mask(mask: Mask, size: int) -> Any:
    if isinstance(mask, Bidirectional):
        return masks.FullMask((size, size))
    if isinstance(mask, SlidingWindow):
        return masks.LocalMask((size, size), window_size=(mask.size - 1, 0), offset=0)
    return masks.CausalMask((size, size))


def _segment_ids(mask: Mask, positions: AttentionPositions) -> Int[Array, "batch length"]:
    """Return an id for each token's document, or for its chunk of a document; PADDING for padding tokens."""
    query_positions, segments = positions.query_positions, positions.query_segments
    ids = jnp.zeros_like(query_positions) if segments is None else segments.astype(jnp.int32)
    if isinstance(mask, Chunked | Bidirectional) and mask.size is not None:
        ids = _number_pairs(ids, query_positions // mask.size)
    return jnp.where(query_positions >= 0, ids, PADDING)


def _number_pairs(first: Array, second: Array) -> Int[Array, "batch length"]:
    """Number the distinct pairs (first, second) of each sequence; equal pairs get equal numbers."""

    def number_sequence(first: Array, second: Array) -> Array:
        order = jnp.lexsort((second, first))
        sorted_first, sorted_second = first[order], second[order]
        is_new = (sorted_first[1:] != sorted_first[:-1]) | (sorted_second[1:] != sorted_second[:-1])
        return jnp.zeros_like(first).at[order].set(jnp.cumsum(jnp.pad(is_new, (1, 0)), dtype=first.dtype))

    return jax.vmap(number_sequence)(first, second)
