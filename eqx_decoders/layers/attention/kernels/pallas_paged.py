"""Paged attention in a Pallas kernel for TPU, which reads the pages of a cache where they are.

A step has some pages of one row, and a block of the row's queries: flash attention (Dao et al., 2022) with a softmax
that runs from step to step. A list in scalar memory assigns them to steps, so rows cost what they see of their cache,
whatever the others do. Pages come in through blocks that the list names: while one step computes, the pages of the
next, perhaps of another row, are on their way.

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
from eqx_decoders.layers.cache.page_layout import LANE, Pages
from eqx_decoders.layers.tpu import block_sizes
from eqx_decoders.sharding.backend import backend_of


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import
MOST = jnp.iinfo(jnp.int32).max
# They compile; they have not been timed. A step should take longer to read than to begin, and its blocks, twice each,
# fit into vector memory beside the queries' sums.
_STEP_BYTES = 2**20
_STEP_PAGES = 16
_STEP_TOKENS = 128, 1024
_QUERY_NUMBERS = 2**19  # of a block of queries, or fewer where these do not fit into vector memory
_VMEM_BYTES = 16 * 2**20  # the default limit of kernels
_SCALAR_BYTES = 2**19  # half of the scalar memory
_UNROLLED = 8  # heads that are code of their own each
# Fields of a block of queries: its first block of keys, and how many there are; the first position that one of
# them sees; the first and the last that all see.
_OF_QUERIES = "start", "count", "low", "all_low", "all_high"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PagedPlan:
    """Static description of one call. Rows of a block are tokens, with all query heads that share a key head."""

    soft_cap: float | None
    interpret: bool
    batch: int
    heads: int  # heads of keys
    groups: int
    width: int
    tokens: int  # of a block of queries
    query_blocks: int
    page_size: int
    pages: int  # of a step
    key_blocks: int
    scale_heads: int  # 0: no scales
    values: bool  # whether there are values, not keys alone

    @property
    def rows(self) -> int:
        """Rows of a block of queries."""
        return self.tokens * self.groups

    @property
    def keys(self) -> int:
        """Tokens of a step's pages."""
        return self.pages * self.page_size

    @property
    def held(self) -> int:
        """Blocks of queries of all rows."""
        return self.batch * self.query_blocks

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the list in scalar memory, with the count of numbers in each."""
        steps = self.held * self.key_blocks
        each = dict.fromkeys(_OF_QUERIES, self.held)
        table = self.batch * self.key_blocks * self.pages
        return {
            "layer": 1,
            "head": 1,
            "total": 1,
            "of": steps,
            "block": steps,
            **each,
            "length": self.batch,
            "table": table,
        }

    def number(self, numbers: Any, field: str, index: Any = 0) -> Any:
        """Read one number of the list."""
        names = list(self.fields)
        return numbers[sum(self.fields[name] for name in names[: names.index(field)]) + index]

    def step(self, numbers: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        """Return a step's row, its block of queries in the row and in all rows, and its block of keys."""
        held = self.number(numbers, "of", step)
        row = jax.lax.div(held, self.query_blocks)
        return row, held - row * self.query_blocks, held, self.number(numbers, "block", step)


def fits(past: Pages, dtype: Any, heads: int, device: Any) -> bool:
    """Return whether any TPU can read these pages in place: whole lanes and tiles, and numbers that it can widen."""
    rows = 8 * 4 // past.key.dtype.itemsize  # of a tile
    whole = past.key.shape[4] % LANE == 0 and past.page_size % rows == 0
    return past.suits_kernels(heads) and whole and jnp.dtype(dtype) != jnp.float16


# --- the kernel ---


def _kernel(plan: _PagedPlan, numbers: Any, query: Any, *refs: Any) -> None:
    names = iter(refs)
    keys = [next(names) for _ in range(plan.pages)]
    values = [next(names) for _ in range(plan.pages)] if plan.values else None
    scales = [next(names) for _ in range(2)] if plan.scale_heads else None
    intervals, out, lse, top, total, sums = names
    step = pl.program_id(0)
    row, _, held, block = plan.step(numbers, step)
    start, count, low, all_low, all_high = (plan.number(numbers, name, held) for name in _OF_QUERIES)
    length, begin = plan.number(numbers, "length", row), block * plan.keys
    real = step < plan.number(numbers, "total")

    @pl.when(real & (block == start))
    def _():
        top[...], total[...], sums[...] = jnp.full_like(top, EMPTY), jnp.zeros_like(total), jnp.zeros_like(sums)

    def add(masked: bool) -> None:
        across = begin + jax.lax.broadcasted_iota(jnp.int32, (1, plan.keys), 1)
        down = begin + jax.lax.broadcasted_iota(jnp.int32, (plan.keys, 1), 0)

        def in_row(positions: Array) -> Array:
            return (positions >= low) & (positions < length)

        def head(index: Any, _: None) -> None:
            scale_head = 0 if plan.scale_heads == 1 else index
            q = query[index]
            key = _joined(keys, index, q.dtype)
            scores = tile_product(q, key, 1, 1)
            scores = scores if scales is None else scores * scales[0][scale_head]
            scores = cap_scores(scores, plan.soft_cap)
            if masked:
                seen = (across >= intervals[:, 0:1]) & (across <= intervals[:, 1:2]) & (across < length)
                scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top[index], scores.max(1, keepdims=True))
            fade, weights = jnp.exp(top[index] - new_top), jnp.exp(scores - new_top)
            top[index] = new_top
            total[index] = total[index] * fade + weights.sum(1, keepdims=True)
            value = key if values is None else _joined(values, index, q.dtype)
            if masked:  # what others left has weight 0, and 0 times NaN would be NaN
                value = jnp.where(in_row(down), value.astype(jnp.float32), 0.0).astype(q.dtype)
            if scales is not None:
                scale = scales[1][scale_head]
                weights = weights * (jnp.where(in_row(across), scale, 0.0) if masked else scale)
            sums[index] = sums[index] * fade + tile_product(weights.astype(q.dtype), value, 1, 0)

        if plan.heads <= _UNROLLED:
            for index in range(plan.heads):
                head(index, None)
        else:
            jax.lax.fori_loop(0, plan.heads, head, None)

    everything = (all_low <= begin) & (begin + plan.keys - 1 <= all_high)
    pl.when(real & (count > 0) & everything)(lambda: add(False))
    pl.when(real & (count > 0) & ~everything)(lambda: add(True))

    @pl.when(real & (block == start + jnp.maximum(count, 1) - 1))
    def _():
        safe = jnp.where(total[...] > 0, total[...], 1.0)
        out[...] = (sums[...] / safe).astype(out.dtype)
        lse[...] = jnp.where(total[...] > 0, top[...] + jnp.log(safe), EMPTY)


def _joined(pages: Sequence[Any], head: Any, dtype: Any) -> Array:
    """Concatenate one head of a step's pages."""
    parts = [_widened(page[head], dtype) for page in pages]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)


def _widened(x: Array, dtype: Any) -> Array:
    """Widen numbers of 8 bits, which are exact in 16; a TPU does it by way of 32."""
    return x.astype(jnp.float32).astype(dtype) if x.dtype.itemsize == 1 else x.astype(dtype)


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
    platform: str = "tpu",
) -> Result:
    """Attend to one device's pages: `attend`'s results, with a row's tokens as keys.

    **Arguments:**

    - `query`: scaled queries, whose heads share `kv_heads` key heads, in order.
    - `past`, `layer`: pages whose `fits` is true, and the layer to read; off TPUs the kernel is interpreted, and any
        do.
    - `seen`: the first and the last position that each query sees.
    - `first_head`: the first of these key heads in the pages; a multiple of `kv_heads`.
    """
    _, length, heads, _ = query.shape
    plan = _make_plan(query, past, kv_heads, soft_cap, platform)
    groups, filled = plan.groups, plan.query_blocks * plan.tokens
    query = jnp.pad(query, ((0, 0), (0, filled - length), (0, 0), (0, 0)))
    query = group_by_kv_head(query, kv_heads, plan.width)
    first, last = (
        jnp.pad(x, ((0, 0), (0, filled - length)), constant_values=fill) for x, fill in zip(seen, (0, -1), strict=True)
    )
    intervals = jnp.repeat(jnp.stack([first, last], axis=2), groups, axis=1)
    numbers = _numbers(plan, past, layer, first, last, first_head)
    out, lse = _call(plan, numbers, query, past, intervals, _scales(plan, past, layer, first_head))
    out, lse = (ungroup_kv_heads(x, length, heads) for x in (out, lse))
    return past.lanes.values(out), lse[..., 0]


def _make_plan(query: Array, past: Pages, kv_heads: int, soft_cap: float | None, platform: str) -> _PagedPlan:
    batch, length, heads, _ = query.shape
    size, width, groups = past.page_size, past.key.shape[4], heads // kv_heads
    token = kv_heads * width * past.key.dtype.itemsize * (1 if past.value is None else 2)
    fewest, most = _STEP_TOKENS
    whole = math.lcm(size, fewest) // size  # pages whose tokens fill lanes of scores
    wanted = min(most, max(fewest, _STEP_BYTES // token)) // size
    pages = max(whole, min(wanted, _STEP_PAGES) // whole * whole)
    rows = 16 // math.gcd(16, groups)  # tokens whose query heads fill a tile
    most = min(_QUERY_NUMBERS // (heads * width), _most_rows(query, past, kv_heads, pages * size) // groups)
    tokens = max(rows, most // rows * rows)
    tokens = length if length <= tokens else tokens
    return _PagedPlan(
        soft_cap=soft_cap,
        interpret=not backend_of(platform).pallas_tpu,
        batch=batch,
        heads=kv_heads,
        groups=groups,
        width=width,
        tokens=tokens,
        query_blocks=-(-length // tokens),
        page_size=size,
        pages=pages,
        key_blocks=-(-past.table.shape[1] // pages),
        scale_heads=0 if past.key_scale is None else min(past.key_scale.shape[2], kv_heads),
        values=past.value is not None,
    )


def _most_rows(query: Array, past: Pages, kv_heads: int, keys: int) -> int:
    """Return how many rows of queries fit into vector memory next to a step's keys; a width of one takes whole lanes.

    Blocks are there twice, sums once, and about three arrays of one head's scores in f32.
    """
    width, item = -(-past.key.shape[4] // LANE) * LANE, query.dtype.itemsize
    stored = past.key.dtype.itemsize * (1 if past.value is None else 2)
    scales = 0 if past.key_scale is None else 2 * 8 * 4 * past.key_scale.shape[2]
    fixed = keys * (2 * kv_heads * width * stored + 2 * width * 4 + 2 * scales)
    each = kv_heads * (4 * width * item + 4 * width + 4 * 4 * LANE) + 2 * 4 * LANE + 3 * 4 * keys
    return max(0, (block_sizes().vmem_bytes or _VMEM_BYTES) * 9 // 10 - fixed) // each


def _table(plan: _PagedPlan, past: Pages) -> Int[Array, "batch row_pages"]:
    """Pad the page table to whole steps."""
    more = plan.key_blocks * plan.pages - past.table.shape[1]
    return jnp.pad(past.table.astype(jnp.int32), ((0, 0), (0, more)), constant_values=-1)


def _numbers(
    plan: _PagedPlan, past: Pages, layer: Array, first: Array, last: Array, first_head: Any
) -> Int[Array, "numbers"]:
    """Build the list: each step's block of keys and block of queries, and their bounds."""
    lengths = jnp.minimum(past.lengths, past.table.shape[1] * plan.page_size).astype(jnp.int32)
    last = jnp.minimum(last, lengths[:, None] - 1)
    first, last = (x.astype(jnp.int32).reshape(plan.held, plan.tokens) for x in (first, last))
    sees = first <= last
    low, high = jnp.where(sees, first, MOST).min(1), jnp.where(sees, last, -1).max(1)
    start = jnp.where(high < 0, 0, low // plan.keys)
    count = jnp.where(high < 0, 0, high // plan.keys + 1 - start)
    every = sees.all(1)
    all_low, all_high = jnp.where(every, first.max(1), MOST), jnp.where(every, last.min(1), -1)
    steps = jnp.maximum(count, 1)  # a block that sees nothing has results, too
    ends, index = jnp.cumsum(steps), jnp.arange(plan.held * plan.key_blocks, dtype=jnp.int32)
    of = jnp.repeat(jnp.arange(plan.held, dtype=jnp.int32), steps, total_repeat_length=index.size)
    block = jnp.minimum(start[of] + index - (ends - steps)[of], start[of] + steps[of] - 1)
    fields = {
        "layer": layer,
        "head": jnp.asarray(first_head, jnp.int32) // plan.heads,
        "total": ends[-1],
        "of": of,
        "block": block,
        "start": start,
        "count": count,
        "low": low,
        "all_low": all_low,
        "all_high": all_high,
        "length": lengths,
        "table": _table(plan, past),
    }
    numbers = jnp.concatenate([fields[name].astype(jnp.int32).reshape(-1) for name in plan.fields])
    rule = "numbers that say where pages are fit into a TPU's scalar memory beside others"
    sentence = f"{plan.batch} rows of {past.table.shape[1]} pages: {_SCALAR_BYTES // 4} {rule}, not {numbers.size}"
    check(4 * numbers.size <= _SCALAR_BYTES, f"{sentence}. Make PageConfig.page_size={plan.page_size} larger.")
    return numbers


def _scales(plan: _PagedPlan, past: Pages, layer: Array, first_head: Any) -> list[Array]:
    """Gather the scales of keys and values, which are few: [batch, heads, 1, slots]."""
    if past.key_scale is None:
        return []
    pages = jnp.maximum(_table(plan, past), 0)

    def gathered(x: Array) -> Array:
        if x.shape[2] > plan.scale_heads:
            x = jax.lax.dynamic_slice_in_dim(x, first_head, plan.scale_heads, axis=2)
        x = jnp.swapaxes(x[layer, pages][..., : plan.page_size], 1, 2).astype(jnp.float32)
        return x.reshape(plan.batch, plan.scale_heads, 1, -1)

    key = gathered(past.key_scale)
    return [key, key if past.value_scale is None else gathered(past.value_scale)]


def _call(
    plan: _PagedPlan, numbers: Array, query: Array, past: Pages, intervals: Array, scales: Sequence[Array]
) -> Sequence[Array]:
    """Run one `pallas_call`."""
    block = (None, plan.heads, plan.rows, plan.width)

    def of_queries(*shape: int | None) -> Any:
        def index(step: Any, numbers: Any) -> tuple[Any, ...]:
            row, queries, _, _ = plan.step(numbers, step)
            return (row, 0, queries, 0) if len(shape) == 4 else (row, queries, 0)

        return pl.BlockSpec(shape, index)

    def of_page(kind: int) -> Any:
        def index(step: Any, numbers: Any) -> tuple[Any, ...]:
            row, _, _, block = plan.step(numbers, step)
            page = plan.number(numbers, "table", (row * plan.key_blocks + block) * plan.pages + kind)
            return plan.number(numbers, "layer"), jnp.maximum(page, 0), plan.number(numbers, "head"), 0, 0

        return pl.BlockSpec((None, None, plan.heads, plan.page_size, plan.width), index)

    def of_scales(step: Any, numbers: Any) -> tuple[Any, ...]:
        row, _, _, block = plan.step(numbers, step)
        return row, 0, 0, block

    pages = [of_page(kind) for kind in range(plan.pages)]
    stored = [past.key] if past.value is None else [past.key, past.value]
    operands = [query, *(x for x in stored for _ in pages), *scales, intervals]
    in_specs = [of_queries(*block), *(spec for _ in stored for spec in pages)]
    in_specs += [pl.BlockSpec((None, plan.scale_heads, 1, plan.keys), of_scales) for _ in scales]
    in_specs += [of_queries(None, plan.rows, 2)]
    narrow = (*block[:3], 1)
    steps = plan.held * plan.key_blocks if plan.interpret else plan.number(numbers, "total")
    seen = plan.batch * plan.key_blocks * plan.keys // 2
    kernel: Callable[..., None] = functools.partial(_kernel, plan)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=[of_queries(*block), of_queries(*narrow)],
            scratch_shapes=[pltpu.VMEM(shape[1:], jnp.float32) for shape in (narrow, narrow, block)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=block_sizes().vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * seen * plan.heads * plan.rows * plan.query_blocks * plan.width,
            transcendentals=seen * plan.heads * plan.rows * plan.query_blocks,
            bytes_accessed=len(stored) * seen * plan.heads * plan.width * past.key.dtype.itemsize,
        ),
        interpret=plan.interpret,
        name="paged_attention",
    )(numbers, *operands)
