"""Paged attention in a Pallas Triton kernel for NVIDIA GPUs that reads the pages of a KV cache in place.

A program processes a tile of queries that share a KV head, and a part of the cached tokens of their sequence. Long
sequences are split into several parts to occupy more processors; partial results are merged by their log-sum-exp (flash
decoding; Dao et al., 2023). A program loads one tile of tokens at a time, through the page table, and skips tiles that
its queries do not see.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.common import (
    EMPTY,
    Result,
    cap_scores,
    group_by_kv_head,
    tile_product,
    ungroup_kv_heads,
)
from eqx_decoders.layers.attention.kernels.page_layout import Pages
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import OnlineSoftmax
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.chips import compute_capability, has_kernels


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import


_TILE_TOKENS = 32  # cached tokens of a tile
_PART_TOKENS = 512  # cached tokens of a part, if a sequence has one query tile
_MIN_ROWS, _MAX_ROWS = 16, 64  # rows of a query tile
_MAX_WIDTH = 256  # features of a tile that fit into registers
_MAX_INT32 = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PagedGpuPlan:
    """Static description of one call. The rows of a query tile are its tokens times the query heads per KV head."""

    soft_cap: float | None
    interpret: bool
    rows: int  # of a query tile
    query_tiles: int  # per sequence
    key_tiles: int  # per part
    parts: int  # of the cached tokens of a sequence
    width: int  # features of a query and a key
    page_size: int
    scale_heads: int  # 0: the cache has no scales
    values: bool  # False: keys are also used as values


def fits(pages: Pages, dtype: Any, heads: int, device: Any) -> bool:
    """Return whether a GPU can read these pages in place: a supported device and dtype, and at most 256 features."""
    return (
        has_kernels(compute_capability(device)) and pages.supports_kernels(heads) and pages.key.shape[4] <= _MAX_WIDTH
    )


# --- the kernel ---


def _kernel(
    plan: _PagedGpuPlan, query: Any, bounds: Any, intervals: Any, layer_and_head: Any, table: Any, *refs: Any
) -> None:
    stored, (out, lse) = iter(refs[:-2]), refs[-2:]
    keys = next(stored)
    values = next(stored) if plan.values else None
    scales = [next(stored) for _ in range(2)] if plan.scale_heads else None
    layer, head, length = layer_and_head[0], layer_and_head[1] + pl.program_id(1), bounds[2]
    part = jax.lax.rem(pl.program_id(2), plan.parts)
    features = jnp.arange(pl.next_power_of_2(plan.width))[None]
    feature_mask = None if features.size == plan.width else features < plan.width
    tile_query = plgpu.load(query) if feature_mask is None else plgpu.load(query, mask=feature_mask, other=0.0)
    first, last = (intervals[i][:, None] for i in range(2))

    def add(tile: Any, state: OnlineSoftmax) -> OnlineSoftmax:
        tokens = tile * _TILE_TOKENS + jnp.arange(_TILE_TOKENS)
        page = plgpu.load(table.at[jax.lax.div(tokens, plan.page_size)], mask=tokens < length, other=-1)
        has_page, page_index, slot = page >= 0, jnp.maximum(page, 0), jax.lax.rem(tokens, plan.page_size)

        def read(pages: Any) -> Array:
            mask = has_page[:, None] if feature_mask is None else has_page[:, None] & feature_mask
            mask = jnp.broadcast_to(mask, (_TILE_TOKENS, features.size))
            x = plgpu.load(pages.at[layer, page_index[:, None], head, slot[:, None], features], mask=mask)
            return jnp.where(mask, x.astype(jnp.float32) if x.dtype.itemsize == 1 else x, 0).astype(tile_query.dtype)

        def read_scale(index: int) -> Array | None:
            if scales is None:
                return None
            scale_head = 0 if plan.scale_heads == 1 else head
            ref = scales[index].at[layer, page_index, scale_head, slot]
            return plgpu.load(ref, mask=has_page, other=0.0).astype(jnp.float32)[None]

        key, key_scale = read(keys), read_scale(0)
        scores = tile_product(tile_query, key, 1, 1)
        scores = cap_scores(scores if key_scale is None else scores * key_scale, plan.soft_cap)
        mask = (tokens[None] >= first) & (tokens[None] <= last) & has_page[None]
        value = key if values is None else read(values)
        return state.add(jnp.where(mask, scores, -jnp.inf), value, read_scale(1))

    part_start = part * plan.key_tiles
    start, end = jnp.maximum(bounds[0], part_start), jnp.minimum(bounds[1], part_start + plan.key_tiles)
    column = jnp.zeros((plan.rows, 1), jnp.float32)
    state = OnlineSoftmax(column + EMPTY, column, jnp.zeros((plan.rows, features.size), jnp.float32))
    result, lse_column = jax.lax.fori_loop(start, end, add, state).results()
    plgpu.store(out, result, mask=feature_mask)
    lse[...] = lse_column[:, 0]


# --- call of the kernel ---


def paged_attention(
    query: Float[Array, "batch length heads head_dim"],
    pages: Pages,
    layer: Int[Array, ""],
    visible: tuple[Int[Array, "batch length"], Int[Array, "batch length"]],
    first_head: Int[Array, ""] | int = 0,
    *,
    kv_heads: int,
    soft_cap: float | None = None,
    platform: str = "gpu",
) -> Result:
    """Attend to cached pages, as `pallas_paged.paged_attention` does; on other platforms the kernel is interpreted."""
    _, length, heads, _ = query.shape
    queries_per_kv = heads // kv_heads
    plan = _make_plan(pages, length * queries_per_kv, kv_heads, soft_cap, platform)
    padding = plan.query_tiles * plan.rows - length * queries_per_kv
    query = jnp.pad(group_by_kv_head(query, kv_heads, plan.width), ((0, 0), (0, 0), (0, padding), (0, 0)))

    def repeat_and_pad(x: Array, fill: int) -> Array:
        """Return a bound per query row instead of per token."""
        rows = jnp.repeat(x.astype(jnp.int32), queries_per_kv, axis=1)
        return jnp.pad(rows, ((0, 0), (0, padding)), constant_values=fill)

    first, last = visible
    intervals = jnp.stack([repeat_and_pad(first, 0), repeat_and_pad(last, -1)], axis=1)  # padding sees nothing
    layer_and_head = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, first_head)])
    out, lse = _call(plan, query, _bounds(plan, pages, intervals), intervals, layer_and_head, pages)
    total_lse = jax.nn.logsumexp(lse, axis=2)
    out = (jnp.exp(lse - total_lse[:, :, None])[..., None] * out).sum(2)
    out, total_lse = (ungroup_kv_heads(x, length, heads) for x in (out, total_lse))
    return pages.lanes.values(out).astype(query.dtype), jnp.maximum(total_lse, EMPTY)


def _make_plan(pages: Pages, rows: int, kv_heads: int, soft_cap: float | None, platform: str) -> _PagedGpuPlan:
    tile_rows = min(_MAX_ROWS, max(_MIN_ROWS, pl.next_power_of_2(rows)))
    query_tiles = -(-rows // tile_rows)
    key_tiles = -(-pages.table.shape[1] * pages.page_size // _TILE_TOKENS)
    part_tiles = key_tiles if query_tiles > 1 else _PART_TOKENS // _TILE_TOKENS
    return _PagedGpuPlan(
        soft_cap=soft_cap,
        interpret=not backend_of(platform).pallas_gpu,
        rows=tile_rows,
        query_tiles=query_tiles,
        key_tiles=part_tiles,
        parts=-(-key_tiles // part_tiles),
        width=pages.key.shape[4],
        page_size=pages.page_size,
        scale_heads=0 if pages.key_scale is None else pages.key_scale.shape[2],
        values=pages.value is not None,
    )


def _bounds(plan: _PagedGpuPlan, pages: Pages, intervals: Array) -> Int[Array, "batch blocks 3"]:
    """Return, for each query tile, the range (start, end) of key tiles that it sees, and the sequence's length."""
    lengths = jnp.minimum(pages.lengths, pages.table.shape[1] * plan.page_size).astype(jnp.int32)[:, None]
    first, last = (intervals[:, i].reshape(intervals.shape[0], plan.query_tiles, plan.rows) for i in range(2))
    last = jnp.minimum(last, lengths[:, :, None] - 1)
    low, high = jnp.where(first <= last, first, _MAX_INT32).min(2), jnp.where(first <= last, last, -1).max(2)
    start = jnp.where(high < 0, 0, low // _TILE_TOKENS)
    return jnp.stack([start, high // _TILE_TOKENS + 1, jnp.broadcast_to(lengths, start.shape)], axis=2)


def _call(
    plan: _PagedGpuPlan, query: Array, bounds: Array, intervals: Array, layer_and_head: Array, pages: Pages
) -> tuple[Array, Array]:
    """Run the `pallas_call`; return out and lse of each part, [batch, kv_heads, parts, rows, width] and without width.

    The last grid index enumerates query tiles and parts; parts vary fastest.
    """
    batch, kv_heads, rows, _ = query.shape
    width = pl.next_power_of_2(plan.width)
    stored = [x for x in (pages.key, pages.value, pages.key_scale) if x is not None]
    if pages.key_scale is not None:
        stored.append(pages.key_scale if pages.value_scale is None else pages.value_scale)

    def query_tile(index: Any) -> Any:
        return jax.lax.div(index, plan.parts)

    def part(index: Any) -> Any:
        return jax.lax.rem(index, plan.parts)

    in_specs = [
        pl.BlockSpec((None, None, plan.rows, width), lambda b, h, i: (b, h, query_tile(i), 0)),
        pl.BlockSpec((None, None, 3), lambda b, h, i: (b, query_tile(i), 0)),
        pl.BlockSpec((None, 2, plan.rows), lambda b, h, i: (b, 0, query_tile(i))),
        pl.BlockSpec(),
        pl.BlockSpec((None, pages.table.shape[1]), lambda b, h, i: (b, 0)),
        *(pl.BlockSpec() for _ in stored),
    ]
    out_specs = [
        pl.BlockSpec((None, None, None, plan.rows, width), lambda b, h, i: (b, h, part(i), query_tile(i), 0)),
        pl.BlockSpec((None, None, None, plan.rows), lambda b, h, i: (b, h, part(i), query_tile(i))),
    ]
    shape = (batch, kv_heads, plan.parts, rows)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(batch, kv_heads, plan.query_tiles * plan.parts),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct((*shape, plan.width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=plan.interpret,
        name="paged_attention",
    )(query, bounds, intervals, layer_and_head, pages.table.astype(jnp.int32), *stored)
    return out, lse
