"""Attention by JAX's splash kernel for TPUs (Pallas), where it is exact.

Splash goes by indices and ids: a query sees what stands before it in the row (all of it, or a window) and has its id.
That is our mask where queries and keys are the same tokens in order; a window also needs positions without gaps.
Padding gets an id of its own, and each chunk of a segment one. Tiles that no query of any row could see by index are
skipped, tiles of other documents are not: the interval kernel skips these, too.
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
BLOCK = 512  # of queries and keys: within XLA's own limit of the vector memory on every TPU
EXACT_IN_16_BITS = (None, "default", "fastest", "bfloat16")  # TPUs refuse others for products of 16-bit numbers
PADDING = jnp.iinfo(jnp.int32).min


def refusal(call: AttentionCall) -> str | None:
    """Return what splash attention cannot do in this call, in words, or None."""
    if not call.aligned:
        return "queries that are not the keys, in the same order"
    if isinstance(call.mask, SlidingWindow) and not call.dense_positions:
        return "a window over positions that may have gaps"
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    if precision not in EXACT_IN_16_BITS and any(jnp.dtype(dtype).itemsize < 4 for dtype in call.dtypes):
        return f"jax_default_matmul_precision={precision!r} for 16-bit numbers"
    return None


def splash_attention(inputs: AttentionInputs, call: AttentionCall) -> Result:
    """Attend as `attend` defines it; lse, which would have no gradient, is NaN. Interpreted where there is no TPU.

    Under remat, saving "context" saves the whole forward pass.
    """
    query, key, value, positions, *_ = inputs
    length, heads = query.shape[1:3]
    more = -length % LANES
    size = length + more
    # the largest block of whole registers that divides the length
    block = next(n for n in range(min(BLOCK, size), 0, -LANES) if size % n == 0)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([_mask(call.mask, size)] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        attn_logits_soft_cap=call.soft_cap,
        residual_checkpoint_name="context",
        interpret=not call.backend.pallas_tpu,
    )
    real = positions.query_positions >= 0
    ids = jnp.pad(_ids(call.mask, positions), ((0, 0), (0, more)), constant_values=PADDING)
    arrays = (jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, more), (0, 0))) for x in (query, key, value))
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


def _ids(mask: Mask, positions: AttentionPositions) -> Int[Array, "batch length"]:
    """Number each token's document, or its chunk of a document; -1 for padding."""
    query_positions, segments = positions.query_positions, positions.query_segments
    ids = jnp.zeros_like(query_positions) if segments is None else segments.astype(jnp.int32)
    if isinstance(mask, Chunked | Bidirectional) and mask.size is not None:
        ids = _ranks(ids, query_positions // mask.size)
    return jnp.where(query_positions >= 0, ids, PADDING)


def _ranks(one: Array, other: Array) -> Int[Array, "batch length"]:
    """Rank the pairs in each row: equal pairs have equal numbers."""

    def of_row(one: Array, other: Array) -> Array:
        order = jnp.lexsort((other, one))
        first, second = one[order], other[order]
        new = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
        return jnp.zeros_like(one).at[order].set(jnp.cumsum(jnp.pad(new, (1, 0)), dtype=one.dtype))

    return jax.vmap(of_row)(one, other)
