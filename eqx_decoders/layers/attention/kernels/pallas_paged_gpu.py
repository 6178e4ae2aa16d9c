"""Paged attention in a Pallas kernel for NVIDIA's GPUs, by Triton, which reads the pages of a cache where they are.

A program has a block of a row's queries, all those that share a key head, and a part of the row's tokens: long rows
keep many processors busy, whose results are merged by their log-sum-exp (flash decoding; Dao et al., 2023). It reads
some tokens at a time, each from the page that the row's table names, and none that its queries do not see.
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
    ungroup_kv_heads,
)
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import Softmax, tile_product
from eqx_decoders.layers.cache.page_layout import Pages
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.chips import compute_capability, has_kernels


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import


_KEYS = 32  # tokens of a tile
_PART = 512  # tokens of a part, where a row has one block of queries
_ROWS = 16, 64  # of a block of queries
_WIDEST = 256  # features of a tile
_MOST = jnp.iinfo(jnp.int32).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PagedGpuPlan:
    """Static description of one call. Rows of a block are tokens, with all query heads that share a key head."""

    soft_cap: float | None
    interpret: bool
    rows: int  # of a block of queries
    blocks: int  # of queries
    tiles: int  # of tokens, in a part
    parts: int
    width: int
    page_size: int
    scale_heads: int  # 0: no scales
    values: bool  # whether there are values, not keys alone


def fits(past: Pages, dtype: Any, heads: int, device: Any) -> bool:
    """Return whether a GPU can read these pages in place: numbers that it can widen, and widths that registers hold."""
    return has_kernels(compute_capability(device)) and past.suits_kernels(heads) and past.key.shape[4] <= _WIDEST


# --- the kernel ---


def _kernel(plan: _PagedGpuPlan, query: Any, bounds: Any, intervals: Any, numbers: Any, table: Any, *refs: Any) -> None:
    stored, (out, lse) = iter(refs[:-2]), refs[-2:]
    keys = next(stored)
    values = next(stored) if plan.values else None
    scales = [next(stored) for _ in range(2)] if plan.scale_heads else None
    layer, head, length = numbers[0], numbers[1] + pl.program_id(1), bounds[2]
    part = jax.lax.rem(pl.program_id(2), plan.parts)
    features = jnp.arange(pl.next_power_of_2(plan.width))[None]
    there = None if features.size == plan.width else features < plan.width
    held = plgpu.load(query) if there is None else plgpu.load(query, mask=there, other=0.0)
    first, last = (intervals[i][:, None] for i in range(2))

    def add(tile: Any, state: Softmax) -> Softmax:
        tokens = tile * _KEYS + jnp.arange(_KEYS)
        page = plgpu.load(table.at[jax.lax.div(tokens, plan.page_size)], mask=tokens < length, other=-1)
        real, place, slot = page >= 0, jnp.maximum(page, 0), jax.lax.rem(tokens, plan.page_size)

        def read(pages: Any) -> Array:
            mask = jnp.broadcast_to(real[:, None] if there is None else real[:, None] & there, (_KEYS, features.size))
            x = plgpu.load(pages.at[layer, place[:, None], head, slot[:, None], features], mask=mask)
            return jnp.where(mask, x.astype(jnp.float32) if x.dtype.itemsize == 1 else x, 0).astype(held.dtype)

        def scale(index: int) -> Array | None:
            scale_head = 0 if plan.scale_heads == 1 else head
            rows = None if scales is None else scales[index].at[layer, place, scale_head, slot]
            return None if rows is None else plgpu.load(rows, mask=real, other=0.0).astype(jnp.float32)[None]

        key, key_scale = read(keys), scale(0)
        scores = tile_product(held, key, 1, 1)
        scores = cap_scores(scores if key_scale is None else scores * key_scale, plan.soft_cap)
        seen = (tokens[None] >= first) & (tokens[None] <= last) & real[None]
        return state.add(jnp.where(seen, scores, -jnp.inf), key if values is None else read(values), scale(1))

    begin = part * plan.tiles
    start, end = jnp.maximum(bounds[0], begin), jnp.minimum(bounds[1], begin + plan.tiles)
    column = jnp.zeros((plan.rows, 1), jnp.float32)
    state = Softmax(column + EMPTY, column, jnp.zeros((plan.rows, features.size), jnp.float32))
    result, row = jax.lax.fori_loop(start, end, add, state).results()
    plgpu.store(out, result, mask=there)
    lse[...] = row[:, 0]


# --- its call ---


def paged_attention(
    query: Float[Array, "batch length heads head_dim"],
    past: Pages,
    layer: Int[Array, ""],
    seen: tuple[Int[Array, "batch length"], Int[Array, "batch length"]],
    first_head: Int[Array, ""] | int = 0,
    *,
    kv_heads: int,
    soft_cap: float | None = None,
    platform: str = "gpu",
) -> Result:
    """Attend to one device's pages, as `pallas_paged.paged_attention` does; off GPUs the kernel is interpreted."""
    _, length, heads, _ = query.shape
    groups = heads // kv_heads
    plan = _make_plan(past, length * groups, kv_heads, soft_cap, platform)
    more = plan.blocks * plan.rows - length * groups
    query = jnp.pad(group_by_kv_head(query, kv_heads, plan.width), ((0, 0), (0, 0), (0, more), (0, 0)))
    intervals = jnp.stack(
        [
            jnp.pad(jnp.repeat(x.astype(jnp.int32), groups, axis=1), ((0, 0), (0, more)), constant_values=fill)
            for x, fill in zip(seen, (0, -1), strict=True)
        ],
        axis=1,
    )
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer, first_head)])
    out, lse = _call(plan, query, _bounds(plan, past, intervals), intervals, numbers, past)
    total = jax.nn.logsumexp(lse, axis=2)  # of all parts
    out = (jnp.exp(lse - total[:, :, None])[..., None] * out).sum(2)
    out, total = (ungroup_kv_heads(x, length, heads) for x in (out, total))
    return past.lanes.values(out).astype(query.dtype), jnp.maximum(total, EMPTY)


def _make_plan(past: Pages, rows: int, kv_heads: int, soft_cap: float | None, platform: str) -> _PagedGpuPlan:
    fewest, most = _ROWS
    size = min(most, max(fewest, pl.next_power_of_2(rows)))
    blocks, tiles = -(-rows // size), -(-past.table.shape[1] * past.page_size // _KEYS)
    of_part = tiles if blocks > 1 else _PART // _KEYS
    return _PagedGpuPlan(
        soft_cap=soft_cap,
        interpret=not backend_of(platform).pallas_gpu,
        rows=size,
        blocks=blocks,
        tiles=of_part,
        parts=-(-tiles // of_part),
        width=past.key.shape[4],
        page_size=past.page_size,
        scale_heads=0 if past.key_scale is None else past.key_scale.shape[2],
        values=past.value is not None,
    )


def _bounds(plan: _PagedGpuPlan, past: Pages, intervals: Array) -> Int[Array, "batch blocks 3"]:
    """Return of each block of queries the first tile that it sees, the end of the last, and the row's length."""
    lengths = jnp.minimum(past.lengths, past.table.shape[1] * plan.page_size).astype(jnp.int32)[:, None]
    first, last = (intervals[:, i].reshape(intervals.shape[0], plan.blocks, plan.rows) for i in range(2))
    last = jnp.minimum(last, lengths[:, :, None] - 1)
    low, high = jnp.where(first <= last, first, _MOST).min(2), jnp.where(first <= last, last, -1).max(2)
    start = jnp.where(high < 0, 0, low // _KEYS)
    return jnp.stack([start, high // _KEYS + 1, jnp.broadcast_to(lengths, start.shape)], axis=2)


def _call(
    plan: _PagedGpuPlan, query: Array, bounds: Array, intervals: Array, numbers: Array, past: Pages
) -> tuple[Array, Array]:
    """Run one `pallas_call`: results of each part, `[batch, kv_heads, parts, rows, width]`."""
    (batch, kv_heads, rows, _), width = query.shape, pl.next_power_of_2(plan.width)
    stored = [x for x in (past.key, past.value, past.key_scale) if x is not None]
    if past.key_scale is not None:
        stored.append(past.key_scale if past.value_scale is None else past.value_scale)

    def block(at: Any) -> Any:
        return jax.lax.div(at, plan.parts)

    in_specs = [
        pl.BlockSpec((None, None, plan.rows, width), lambda row, head, at: (row, head, block(at), 0)),
        pl.BlockSpec((None, None, 3), lambda row, head, at: (row, block(at), 0)),
        pl.BlockSpec((None, 2, plan.rows), lambda row, head, at: (row, 0, block(at))),
        pl.BlockSpec(),
        pl.BlockSpec((None, past.table.shape[1]), lambda row, head, at: (row, 0)),
        *(pl.BlockSpec() for _ in stored),
    ]

    def part(at: Any) -> Any:
        return jax.lax.rem(at, plan.parts)

    out_specs = [
        pl.BlockSpec((None, None, None, plan.rows, width), lambda row, head, at: (row, head, part(at), block(at), 0)),
        pl.BlockSpec((None, None, None, plan.rows), lambda row, head, at: (row, head, part(at), block(at))),
    ]
    shape = (batch, kv_heads, plan.parts, rows)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(batch, kv_heads, plan.blocks * plan.parts),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=[
            jax.ShapeDtypeStruct((*shape, plan.width), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=plan.interpret,
        name="paged_attention",
    )(query, bounds, intervals, numbers, past.table.astype(jnp.int32), *stored)
    return out, lse
