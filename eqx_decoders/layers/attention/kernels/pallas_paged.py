"""Paged attention in a Pallas TPU kernel that reads the pages of a KV cache in place.

A grid step processes a tile of queries and a tile of keys of one sequence, where the tile of keys is several pages:
flash attention (Dao et al., 2022), with an online softmax over the steps of a query tile. A schedule in scalar memory
assigns tiles to steps, so the cost of a sequence depends only on the keys that its own queries see. The block specs of
pages look up their indices in the schedule: while a step computes, the pages of the next step, possibly of another
sequence, are prefetched.

    S = scale_k * (Q K'),  S = cap tanh(S / cap),  out = softmax(S) (scale_v * V),  lse = logsumexp S
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.kernels.common import (
    EMPTY,
    Result,
    cap_scores,
    group_by_kv_head,
    tile_product,
    ungroup_kv_heads,
)
from eqx_decoders.layers.attention.kernels.page_layout import Pages
from eqx_decoders.layers.attention.kernels.tile_sizes import tile_sizes
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.chips import LANES


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import
MAX_INT32 = jnp.iinfo(jnp.int32).max
# These sizes compile, but have not been timed. The pages of a step should take longer to load than the
# overhead of a step, and two steps' pages and the accumulators of the queries must fit into VMEM.
_STEP_BYTES = 2**20  # keys and values of a step
_MAX_STEP_PAGES = 16
_MIN_STEP_TOKENS, _MAX_STEP_TOKENS = 128, 1024
_MAX_QUERY_ELEMENTS = 2**19  # of a query tile; less if the tile would not fit into VMEM
_VMEM_BYTES = 16 * 2**20  # default VMEM limit of kernels
_MAX_SCHEDULE_BYTES = 2**19  # half of the scalar memory
_MAX_UNROLLED_HEADS = 8
# Fields of the schedule per query tile: the first key tile and the number of key tiles that the query tile sees; the
# smallest position that any query sees; the smallest and the largest position that all queries see.
_QUERY_TILE_FIELDS = "start", "count", "low", "all_low", "all_high"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PagedPlan:
    """Static description of one call. The rows of a query tile are its tokens times the query heads per KV head."""

    soft_cap: float | None
    interpret: bool
    batch: int
    kv_heads: int
    queries_per_kv: int
    width: int  # padded features of a query and a key
    tokens: int  # per query tile
    query_tiles: int  # per sequence
    page_size: int
    pages: int  # per step
    key_tiles: int  # per sequence; one key tile is the pages of one step
    scale_heads: int  # 0: the cache has no scales
    values: bool  # False: keys are also used as values

    @property
    def rows(self) -> int:
        """Rows of a query tile."""
        return self.tokens * self.queries_per_kv

    @property
    def keys(self) -> int:
        """Tokens of a key tile."""
        return self.pages * self.page_size

    @property
    def total_query_tiles(self) -> int:
        """Number of query tiles of all sequences."""
        return self.batch * self.query_tiles

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the schedule in scalar memory, with the number of integers in each."""
        steps = self.total_query_tiles * self.key_tiles
        return {
            "layer": 1,
            "head": 1,
            "total": 1,
            "query_tile": steps,
            "key_tile": steps,
            **dict.fromkeys(_QUERY_TILE_FIELDS, self.total_query_tiles),
            "length": self.batch,
            "table": self.batch * self.key_tiles * self.pages,
        }

    def read(self, schedule: Any, field: str, index: Any = 0) -> Any:
        """Read an integer of a field of the schedule."""
        names = list(self.fields)
        return schedule[sum(self.fields[name] for name in names[: names.index(field)]) + index]

    def step(self, schedule: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        """Return a step's sequence, its query tile within the sequence and within the batch, and its key tile."""
        query_tile = self.read(schedule, "query_tile", step)
        sequence = jax.lax.div(query_tile, self.query_tiles)
        tile_in_sequence = query_tile - sequence * self.query_tiles
        return sequence, tile_in_sequence, query_tile, self.read(schedule, "key_tile", step)


def fits(pages: Pages, dtype: Any, heads: int, device: Any) -> bool:
    """Return whether TPUs can read these pages in place: full lanes and tiles, and a supported dtype."""
    tile_rows = 8 * 4 // pages.key.dtype.itemsize
    fills_tiles = pages.key.shape[4] % LANES == 0 and pages.page_size % tile_rows == 0
    return pages.supports_kernels(heads) and fills_tiles and jnp.dtype(dtype) != jnp.float16


# --- the kernel ---


def _kernel(plan: _PagedPlan, schedule: Any, query: Any, *refs: Any) -> None:
    remaining = iter(refs)
    keys = [next(remaining) for _ in range(plan.pages)]
    values = [next(remaining) for _ in range(plan.pages)] if plan.values else None
    scales = [next(remaining) for _ in range(2)] if plan.scale_heads else None
    intervals, out, lse, max_score, total, acc = remaining
    step = pl.program_id(0)
    sequence, _, query_tile, key_tile = plan.step(schedule, step)
    start, count, low, all_low, all_high = (plan.read(schedule, name, query_tile) for name in _QUERY_TILE_FIELDS)
    length, first_position = plan.read(schedule, "length", sequence), key_tile * plan.keys
    is_step = step < plan.read(schedule, "total")

    @pl.when(is_step & (key_tile == start))
    def _():
        max_score[...] = jnp.full_like(max_score, EMPTY)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def add(masked: bool) -> None:
        row_positions = first_position + jax.lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
        column_positions = first_position + jax.lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0)

        def is_visible(positions: Array) -> Array:
            return (positions >= low) & (positions < length)

        def add_head(head: Any, _: None) -> None:
            scale_head = 0 if plan.scale_heads == 1 else head
            q = query[head]
            key = _join_pages(keys, head, q.dtype)
            scores = tile_product(q, key, 1, 1)
            scores = scores if scales is None else scores * scales[0][scale_head]
            scores = cap_scores(scores, plan.soft_cap)
            if masked:
                mask = (row_positions >= intervals[:, 0:1]) & (row_positions <= intervals[:, 1:2])
                scores = jnp.where(mask & (row_positions < length), scores, -jnp.inf)
            new_max = jnp.maximum(max_score[head], scores.max(1, keepdims=True))
            rescale, weights = jnp.exp(max_score[head] - new_max), jnp.exp(scores - new_max)
            max_score[head] = new_max
            total[head] = total[head] * rescale + weights.sum(1, keepdims=True)
            value = key if values is None else _join_pages(values, head, q.dtype)
            if masked:  # masked slots contain arbitrary data: their weight is 0, but 0 * NaN would be NaN
                value = jnp.where(is_visible(column_positions), value.astype(jnp.float32), 0.0).astype(q.dtype)
            if scales is not None:
                scale = scales[1][scale_head]
                weights = weights * (jnp.where(is_visible(row_positions), scale, 0.0) if masked else scale)
            acc[head] = acc[head] * rescale + tile_product(weights.astype(q.dtype), value, 1, 0)

        if plan.kv_heads <= _MAX_UNROLLED_HEADS:
            for head in range(plan.kv_heads):
                add_head(head, None)
        else:
            jax.lax.fori_loop(0, plan.kv_heads, add_head, None)

    all_visible = (all_low <= first_position) & (first_position + plan.keys - 1 <= all_high)
    pl.when(is_step & (count > 0) & all_visible)(lambda: add(False))
    pl.when(is_step & (count > 0) & ~all_visible)(lambda: add(True))

    @pl.when(is_step & (key_tile == start + jnp.maximum(count, 1) - 1))
    def _():
        safe_total = jnp.where(total[...] > 0, total[...], 1.0)
        out[...] = (acc[...] / safe_total).astype(out.dtype)
        lse[...] = jnp.where(total[...] > 0, max_score[...] + jnp.log(safe_total), EMPTY)


def _join_pages(pages: Sequence[Any], head: Any, dtype: Any) -> Array:
    """Concatenate the pages of a step for one head, upcast to `dtype`."""
    parts = [_upcast(page[head], dtype) for page in pages]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _upcast(x: Array, dtype: Any) -> Array:
    """Cast to `dtype`; 8-bit values are cast to float32 first, because TPUs have no direct cast to 16 bits."""
    return x.astype(jnp.float32).astype(dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


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
    platform: str = "tpu",
) -> Result:
    """Attend to cached pages, with arrays that are local to one device; return (out, lse) as `attend` does.

    **Arguments:**

    - `query`: scaled queries; consecutive query heads share one of `kv_heads` KV heads.
    - `pages`, `layer`: cached pages and the layer to read. On TPUs `fits` must be true for the pages. On other
        platforms the kernel is interpreted, and supports any pages.
    - `visible`: first and last position that each query sees.
    - `first_head`: index of the first of the `kv_heads` KV heads in the pages; a multiple of `kv_heads`.
    """
    _, length, heads, _ = query.shape
    plan = _make_plan(query, pages, kv_heads, soft_cap, platform)
    padding = plan.query_tiles * plan.tokens - length
    query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
    query = group_by_kv_head(query, kv_heads, plan.width)
    first, last = (  # padding sees nothing
        jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill) for x, fill in zip(visible, (0, -1), strict=True)
    )
    intervals = jnp.repeat(jnp.stack([first, last], axis=2), plan.queries_per_kv, axis=1)
    schedule = _make_schedule(plan, pages, layer, first, last, first_head)
    out, lse = _call(plan, schedule, query, pages, intervals, _scales(plan, pages, layer, first_head))
    out, lse = (ungroup_kv_heads(x, length, heads) for x in (out, lse))
    return pages.lanes.values(out), lse[..., 0]


def _make_plan(query: Array, pages: Pages, kv_heads: int, soft_cap: float | None, platform: str) -> _PagedPlan:
    batch, length, heads, _ = query.shape
    page_size, width = pages.page_size, pages.key.shape[4]
    queries_per_kv = heads // kv_heads
    token_bytes = kv_heads * width * pages.key.dtype.itemsize * (1 if pages.value is None else 2)
    # the number of pages must be a multiple of this, so that their tokens fill the lanes of scores
    page_multiple = math.lcm(page_size, _MIN_STEP_TOKENS) // page_size
    target_pages = min(_MAX_STEP_TOKENS, max(_MIN_STEP_TOKENS, _STEP_BYTES // token_bytes)) // page_size
    step_pages = max(page_multiple, min(target_pages, _MAX_STEP_PAGES) // page_multiple * page_multiple)
    # the number of tokens must be a multiple of this, so that their query heads fill the rows of a tile
    token_multiple = 16 // math.gcd(16, queries_per_kv)
    max_tokens = min(
        _MAX_QUERY_ELEMENTS // (heads * width),
        _max_query_rows(query, pages, kv_heads, step_pages * page_size) // queries_per_kv,
    )
    tokens = max(token_multiple, max_tokens // token_multiple * token_multiple)
    tokens = length if length <= tokens else tokens
    return _PagedPlan(
        soft_cap=soft_cap,
        interpret=not backend_of(platform).pallas_tpu,
        batch=batch,
        kv_heads=kv_heads,
        queries_per_kv=queries_per_kv,
        width=width,
        tokens=tokens,
        query_tiles=-(-length // tokens),
        page_size=page_size,
        pages=step_pages,
        key_tiles=-(-pages.table.shape[1] // step_pages),
        scale_heads=0 if pages.key_scale is None else min(pages.key_scale.shape[2], kv_heads),
        values=pages.value is not None,
    )


def _max_query_rows(query: Array, pages: Pages, kv_heads: int, keys: int) -> int:
    """Return the number of query rows that fit into VMEM together with the pages of a step.

    Inputs and outputs are double-buffered, accumulators exist once, and the scores of one head take about three float32
    arrays. Features are rounded up to full lanes; an array with one column takes a full lane.
    """
    width, item = -(-pages.key.shape[4] // LANES) * LANES, query.dtype.itemsize
    stored_bytes = pages.key.dtype.itemsize * (1 if pages.value is None else 2)
    scale_bytes = 0 if pages.key_scale is None else 2 * 8 * 4 * pages.key_scale.shape[2]
    fixed_bytes = keys * (2 * kv_heads * width * stored_bytes + 2 * width * 4 + 2 * scale_bytes)
    row_bytes = kv_heads * (4 * width * item + 4 * width + 4 * 4 * LANES) + 2 * 4 * LANES + 3 * 4 * keys
    return max(0, (tile_sizes().vmem_bytes or _VMEM_BYTES) * 9 // 10 - fixed_bytes) // row_bytes


def _padded_table(plan: _PagedPlan, pages: Pages) -> Int[Array, "batch row_pages"]:
    """Pad the page table to a multiple of the pages of a step; -1 means no page."""
    padding = plan.key_tiles * plan.pages - pages.table.shape[1]
    return jnp.pad(pages.table.astype(jnp.int32), ((0, 0), (0, padding)), constant_values=-1)


def _make_schedule(
    plan: _PagedPlan, pages: Pages, layer: Array, first: Array, last: Array, first_head: Any
) -> Int[Array, "numbers"]:
    """Build the schedule: the query tile and the key tile of each step, and the fields of `_PagedPlan.fields`.

    Raises ConfigError if it does not fit into scalar memory.
    """
    lengths = jnp.minimum(pages.lengths, pages.table.shape[1] * plan.page_size).astype(jnp.int32)
    last = jnp.minimum(last, lengths[:, None] - 1)
    first, last = (x.astype(jnp.int32).reshape(plan.total_query_tiles, plan.tokens) for x in (first, last))
    sees_any = first <= last
    low, high = jnp.where(sees_any, first, MAX_INT32).min(1), jnp.where(sees_any, last, -1).max(1)
    start = jnp.where(high < 0, 0, low // plan.keys)
    count = jnp.where(high < 0, 0, high // plan.keys + 1 - start)
    all_see = sees_any.all(1)
    all_low, all_high = jnp.where(all_see, first.max(1), MAX_INT32), jnp.where(all_see, last.min(1), -1)
    steps = jnp.maximum(count, 1)  # a query tile that sees nothing needs a step that writes its results
    ends, index = jnp.cumsum(steps), jnp.arange(plan.total_query_tiles * plan.key_tiles, dtype=jnp.int32)
    tile_indices = jnp.arange(plan.total_query_tiles, dtype=jnp.int32)
    query_tile = jnp.repeat(tile_indices, steps, total_repeat_length=index.size)
    first_step = (ends - steps)[query_tile]
    key_tile = jnp.minimum(start[query_tile] + index - first_step, start[query_tile] + steps[query_tile] - 1)
    fields = {
        "layer": layer,
        "head": jnp.asarray(first_head, jnp.int32) // plan.kv_heads,
        "total": ends[-1],
        "query_tile": query_tile,
        "key_tile": key_tile,
        "start": start,
        "count": count,
        "low": low,
        "all_low": all_low,
        "all_high": all_high,
        "length": lengths,
        "table": _padded_table(plan, pages),
    }
    schedule = jnp.concatenate([fields[name].astype(jnp.int32).reshape(-1) for name in plan.fields])
    check(
        4 * schedule.size <= _MAX_SCHEDULE_BYTES,
        f"Paged attention to {plan.batch} sequences of {pages.table.shape[1]} pages needs a schedule of "
        f"{schedule.size} integers, but only {_MAX_SCHEDULE_BYTES // 4} fit into a TPU's scalar memory. Increase "
        f"PageConfig.page_size={plan.page_size}.",
    )
    return schedule


def _scales(plan: _PagedPlan, pages: Pages, layer: Array, first_head: Any) -> list[Array]:
    """Gather the scales of keys and values, [batch, scale heads, 1, slots]; they are small compared with the pages."""
    if pages.key_scale is None:
        return []
    page_indices = jnp.maximum(_padded_table(plan, pages), 0)

    def gather(x: Array) -> Array:
        if x.shape[2] > plan.scale_heads:
            x = jax.lax.dynamic_slice_in_dim(x, first_head, plan.scale_heads, axis=2)
        x = jnp.swapaxes(x[layer, page_indices][..., : plan.page_size], 1, 2).astype(jnp.float32)
        return x.reshape(plan.batch, plan.scale_heads, 1, -1)

    key_scale = gather(pages.key_scale)
    return [key_scale, key_scale if pages.value_scale is None else gather(pages.value_scale)]


def _call(
    plan: _PagedPlan, schedule: Array, query: Array, pages: Pages, intervals: Array, scales: Sequence[Array]
) -> Sequence[Array]:
    """Run the `pallas_call`."""
    query_tile = (None, plan.kv_heads, plan.rows, plan.width)
    lse_tile = (*query_tile[:3], 1)

    def query_spec(*shape: int | None) -> Any:
        def index(step: Any, schedule: Any) -> tuple[Any, ...]:
            sequence, tile, _, _ = plan.step(schedule, step)
            return (sequence, 0, tile, 0) if len(shape) == 4 else (sequence, tile, 0)

        return pl.BlockSpec(shape, index)

    def page_spec(page_of_step: int) -> Any:
        def index(step: Any, schedule: Any) -> tuple[Any, ...]:
            sequence, _, _, key_tile = plan.step(schedule, step)
            page = plan.read(schedule, "table", (sequence * plan.key_tiles + key_tile) * plan.pages + page_of_step)
            return plan.read(schedule, "layer"), jnp.maximum(page, 0), plan.read(schedule, "head"), 0, 0

        return pl.BlockSpec((None, None, plan.kv_heads, plan.page_size, plan.width), index)

    def scale_index(step: Any, schedule: Any) -> tuple[Any, ...]:
        sequence, _, _, key_tile = plan.step(schedule, step)
        return sequence, 0, 0, key_tile

    page_specs = [page_spec(index) for index in range(plan.pages)]
    stored = [pages.key] if pages.value is None else [pages.key, pages.value]
    operands = [query, *(x for x in stored for _ in page_specs), *scales, intervals]
    in_specs = [query_spec(*query_tile), *(spec for _ in stored for spec in page_specs)]
    in_specs += [pl.BlockSpec((None, plan.scale_heads, 1, plan.keys), scale_index) for _ in scales]
    in_specs += [query_spec(None, plan.rows, 2)]
    # grids of the interpreter are static
    steps = plan.total_query_tiles * plan.key_tiles if plan.interpret else plan.read(schedule, "total")
    visible_keys = plan.batch * plan.key_tiles * plan.keys // 2  # estimate for the compiler's cost model
    kernel: Callable[..., None] = functools.partial(_kernel, plan)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=[query_spec(*query_tile), query_spec(*lse_tile)],
            scratch_shapes=[pltpu.VMEM(shape[1:], jnp.float32) for shape in (lse_tile, lse_tile, query_tile)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=tile_sizes().vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * visible_keys * plan.kv_heads * plan.rows * plan.query_tiles * plan.width,
            transcendentals=visible_keys * plan.kv_heads * plan.rows * plan.query_tiles,
            bytes_accessed=len(stored) * visible_keys * plan.kv_heads * plan.width * pages.key.dtype.itemsize,
        ),
        interpret=plan.interpret,
        name="paged_attention",
    )(schedule, *operands)
