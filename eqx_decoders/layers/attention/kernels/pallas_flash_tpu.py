"""Flash attention in Pallas kernels for TPUs.

Laid out as JAX's splash attention: a kernel holds one block of sums while blocks of the other side stream past it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_decoders.core.chips import LANES
from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.call import AttentionCall
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashKernels,
    FlashPlan,
    Softmax,
    all_see,
    chosen_tiles,
    list_tiles,
    make_schedule,
    may_see,
    spread_groups,
    spread_lanes,
    tile_product,
    word_range,
)
from eqx_decoders.layers.attention.kernels.selection import PACKED, WORD
from eqx_decoders.layers.mask import Bidirectional, seen_keys
from eqx_decoders.layers.tpu import block_sizes


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of a grid: each step's tile, by the schedule as one row of numbers in scalar memory.

    Several dimensions would be padded there. The grid is (batch, heads, blocks of queries, steps), or (batch, key
    heads, blocks of keys, groups, steps).
    """

    batch: int
    groups: int
    query_block: int
    key_block: int
    rows: int  # blocks of queries
    columns: int  # blocks of keys
    keys_held: bool
    selected_heads: int = 0
    group_words: int = 0

    @property
    def sizes(self) -> list[int]:
        """Entries of the table's fields for a row of the batch.

        The first two are the schedule's reach, then come 7 of the queries and 7 of the keys; under a selection `reach`
        are lists, and then come only the words in which a block of keys has bits.
        """
        held, streamed = (self.columns, self.rows) if self.keys_held else (self.rows, self.columns)
        if self.selected_heads == 0:
            return [held] * 2 + [self.rows] * 7 + [self.columns] * 7
        lists = self.selected_heads * held
        return [lists * -(-streamed // 2), lists] + [self.columns] * 2 * (self.group_words > 0)

    def entry(self, table: Any, field: int, batch: Any, index: Any) -> Any:
        """Read an entry of a field."""
        return table[self.batch * sum(self.sizes[:field]) + batch * self.sizes[field] + index]

    def streamed(self, table: Any, batch: Any, head: Any, held: Any, step: Any) -> tuple[Any, Any]:
        """Return the block to read, and the number of steps.

        Where a row ends before others do its last block stays, and is not read again.
        """
        lists, numbers, *_ = self.sizes
        row = head * (numbers // self.selected_heads) + held if self.selected_heads > 1 else held
        count = self.entry(table, 1, batch, row)
        step = jnp.minimum(step, jnp.maximum(count - 1, 0))
        if self.selected_heads == 0:
            return self.entry(table, 0, batch, row) + step, count
        pair = self.entry(table, 0, batch, row * (lists // numbers) + jax.lax.div(step, 2))
        return jax.lax.shift_right_logical(pair, 16 * jax.lax.rem(step, 2)) & 0xFFFF, count

    def visit(
        self, table: Any, batch: Any, head: Any, held: Any, step: Any, add: Callable[[bool, Any], None]
    ) -> None:
        """Run `add(masked, block of keys)` if anything in the step's tile is visible."""
        block, count = self.streamed(table, batch, head, held, step)

        @pl.when(step < count)
        def _():
            i, j = (block, held) if self.keys_held else (held, block)
            if self.selected_heads > 0:
                return add(True, j)
            queries = [self.entry(table, field, batch, i) for field in range(2, 9)]
            keys = [self.entry(table, field, batch, j) for field in range(9, 16)]
            some, everything = may_see(queries, keys), all_see(queries, keys)
            pl.when(some & everything)(lambda: add(False, j))
            pl.when(some & ~everything)(lambda: add(True, j))

    def chosen(self, table: Any, batch: Any, j: Any, bits: Any, groups: Sequence[Array]) -> Bool[Array, "rows columns"]:
        """Return the mask of a selection: keys as rows where these are held, else queries."""
        if self.group_words == 0:
            first = jax.lax.rem(j * (self.key_block // LANES), WORD)
            words, axis = (bits[0, 0].T, 0) if self.keys_held else (bits[0, 0], 1)
            return spread_lanes(words, first, self.key_block, axis) == 1
        low, high = (self.entry(table, field, batch, j) for field in (2, 3))

        def word(n: Any) -> Array:
            row = bits[0, 0, pl.ds(n, 1), :]
            return row if self.keys_held else row.T

        shape = (self.key_block, self.query_block) if self.keys_held else (self.query_block, self.key_block)
        return spread_groups(word, groups[0], low, high, shape) == 1

    def spec(self, place: str, dims: tuple[int, ...]) -> Any:
        """Return the `BlockSpec` of an array that lies in a place."""
        shape = {
            "queries": (1, 1, self.query_block, dims[-1]),
            "keys": (1, 1, self.key_block, dims[-1]),
            "intervals": (1, dims[-2], self.query_block),
            "positions": (1, dims[-2], self.key_block),
            "rows": (1, 1, dims[-2], self.query_block),
            "lanes": (1, 1, self.query_block, LANES),
        }["rows" if place == "words" else place]

        def index(*ids: Any) -> tuple:
            batch, head, kv_head, i, j = self._at(*ids)
            selected = head if self.selected_heads > 1 else 0
            return {
                "queries": (batch, head, i, 0),
                "keys": (batch, kv_head, j, 0),
                "intervals": (batch, 0, i),
                "positions": (batch, 0, j),
                "rows": (batch, head, 0, i),
                "words": (batch, selected, 0, i),
                "lanes": (batch, selected, i, jax.lax.div(j * self.key_block, PACKED)),
            }[place]

        return pl.BlockSpec(shape, index)

    def _at(self, *ids: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Return (batch, head, key head, block of queries, block of keys)."""
        *at, table = ids
        if self.keys_held:
            batch, kv_head, held, group, step = at
            head = kv_head * self.groups + group
            return batch, head, kv_head, self.streamed(table, batch, head, held, step)[0], held
        batch, head, held, step = at
        return batch, head, jax.lax.div(head, self.groups), held, self.streamed(table, batch, head, held, step)[0]


# --- the kernels ---


def _with_bits(plan: FlashPlan, refs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Insert None for the bits of a selection where there are none."""
    at = _ForwardRefs._fields.index("bits")
    return refs if plan.selected_heads > 0 else (*refs[:at], None, *refs[at:])


def _seen(
    plan: FlashPlan, tiles: Tiles, table: Any, at: tuple[Any, Any], bits: Any, intervals: Any, positions: Any
) -> Bool[Array, "rows columns"]:
    """Return the mask of a tile, which is at `(row of the batch, block of keys)`."""
    seen = plan.seen(intervals, positions[:2])
    return seen if plan.selected_heads == 0 else seen & tiles.chosen(table, *at, bits, positions[2:])


def _split(x: Any, axis: int) -> list[Array]:
    """Split an array, or a reference to one, into its rows (axis 0) or columns (axis 1)."""
    return [x[i : i + 1, :] if axis == 0 else x[:, i : i + 1] for i in range(x.shape[axis])]


class _ForwardRefs(NamedTuple):
    """Blocks that the forward kernel reads, blocks that it writes, and its scratch memory."""

    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any
    bits: Any
    out: Any
    lse: Any
    columns: Any
    top: Any
    total: Any
    sums: Any


def _forward_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    query, key, value, intervals, positions, bits, out, lse, columns, top, total, sums = _ForwardRefs(
        *_with_bits(plan, refs)
    )
    batch, head, held, step = (pl.program_id(i) for i in range(4))

    @pl.when(step == 0)
    def _():
        columns[...] = intervals[0].T
        top[...], total[...], sums[...] = jnp.full_like(top, EMPTY), jnp.zeros_like(total), jnp.zeros_like(sums)

    def add(masked, j):
        scores = plan.scores(query[0, 0], key[0, 0])
        if masked:
            sides = _split(columns, 1), _split(positions[0], 0)
            scores = jnp.where(_seen(plan, tiles, table, (batch, j), bits, *sides), scores, -jnp.inf)
        top[...], total[...], sums[...] = Softmax(top[...], total[...], sums[...]).add(scores, value[0, 0])

    tiles.visit(table, batch, head, held, step, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        result, row = Softmax(top[...], total[...], sums[...]).results()
        out[0, 0], lse[0, 0] = result.astype(out.dtype), row.T


class _BackwardBlocks(NamedTuple):
    """Blocks that both backward kernels read."""

    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any
    bits: Any
    out_bar: Any
    lse_delta: Any


_BLOCKS = len(_BackwardBlocks._fields)


def _query_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    refs = _with_bits(plan, refs)
    query, key, value, intervals, positions, bits, out_bar, lse_delta = _BackwardBlocks(*refs[:_BLOCKS])
    query_bar, columns, lse_delta_columns, sums = refs[_BLOCKS:]
    batch, head, held, step = (pl.program_id(i) for i in range(4))

    @pl.when(step == 0)
    def _():
        columns[...], lse_delta_columns[...] = intervals[0].T, lse_delta[0, 0].T
        sums[...] = jnp.zeros_like(sums)

    def add(masked, j):
        sides = _split(columns, 1), _split(positions[0], 0)
        seen = _seen(plan, tiles, table, (batch, j), bits, *sides) if masked else None
        bars = out_bar[0, 0], value[0, 0]
        _, slopes = plan.slopes(query[0, 0], key[0, 0], bars, _split(lse_delta_columns, 1), seen)
        sums[...] += tile_product(slopes.astype(key.dtype), key[0, 0], 1, 0)

    tiles.visit(table, batch, head, held, step, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        query_bar[0, 0] = sums[...].astype(query_bar.dtype)


def _key_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    refs = _with_bits(plan, refs)
    query, key, value, intervals, positions, bits, out_bar, lse_delta = _BackwardBlocks(*refs[:_BLOCKS])
    key_bar, value_bar, columns, key_sums, value_sums = refs[_BLOCKS:]
    batch, kv_head, held, group, step = (pl.program_id(i) for i in range(5))

    @pl.when((group == 0) & (step == 0))
    def _():
        columns[...] = positions[0].T
        key_sums[...], value_sums[...] = jnp.zeros_like(key_sums), jnp.zeros_like(value_sums)

    def add(masked, j):
        sides = _split(intervals[0], 0), _split(columns, 1)
        seen = _seen(plan, tiles, table, (batch, j), bits, *sides) if masked else None
        bars = value[0, 0], out_bar[0, 0]
        weights, slopes = plan.slopes(key[0, 0], query[0, 0], bars, _split(lse_delta[0, 0], 0), seen)
        key_sums[...] += tile_product(slopes.astype(query.dtype), query[0, 0], 1, 0)
        value_sums[...] += tile_product(weights.astype(out_bar.dtype), out_bar[0, 0], 1, 0)

    tiles.visit(table, batch, kv_head * tiles.groups + group, held, step, add)

    @pl.when((group == tiles.groups - 1) & (step == pl.num_programs(4) - 1))
    def _():
        key_bar[0, 0], value_bar[0, 0] = key_sums[...].astype(key_bar.dtype), value_sums[...].astype(value_bar.dtype)


# --- their calls ---


def _tiles(plan: FlashPlan, query: tuple[int, ...], key: tuple[int, ...], keys_held: bool) -> Tiles:
    """Return the tiles for arrays of these shapes."""
    if keys_held:
        query_block, key_block = plan.query_blocks.streamed, plan.key_blocks.held
    else:
        query_block, key_block = plan.query_blocks.held, plan.key_blocks.streamed
    return Tiles(
        batch=query[0],
        groups=query[1] // key[1],
        query_block=query_block,
        key_block=key_block,
        rows=query[2] // query_block,
        columns=key[2] // key_block,
        keys_held=keys_held,
        selected_heads=plan.selected_heads,
        group_words=plan.group_words,
    )


def _kinds(plan: FlashPlan) -> tuple[str, ...]:
    """Return the places of the arrays of the mask."""
    bits = () if plan.selected_heads == 0 else ("lanes",) if plan.by_lanes else ("words",)
    return ("intervals", "positions", *bits)


def _schedule(
    plan: FlashPlan, named: dict[str, Array], query_block: int, key_block: int, keys_held: bool
) -> list[Array]:
    """Compute the fields of the table."""
    blocks, positions = (query_block, key_block), named["positions"]
    schedule = make_schedule(plan.segments, named["intervals"], positions, *blocks, keys_held)
    if plan.selected_heads == 0:
        return jax.tree.leaves(schedule)
    chosen = chosen_tiles(plan, named[_kinds(plan)[-1]], positions[:, -1], *blocks)
    words = word_range(positions[:, -1], key_block) if plan.group_words > 0 else []
    return [*list_tiles(schedule, chosen, keys_held), *words]


def _keys_seen(plan: FlashPlan, kv_length: int) -> int:
    """Estimate the number of keys that a query sees, for the compiler's cost model."""
    before = kv_length if isinstance(plan.mask, Bidirectional) else kv_length // 2
    return min(seen_keys(plan.mask, kv_length), before)


def _call(
    plan: FlashPlan,
    kernel: Callable,
    operands: Sequence[tuple[str, Array]],
    results: Sequence[tuple[str, tuple[int, ...], Any]],
    scratch: Sequence[tuple[int, Any]],
    *,
    features: int,
    keys_held: bool = False,
) -> Sequence[Array]:
    """Run one `pallas_call`.

    **Arguments:**

    - `operands`, `results`: arrays, or shapes and dtypes, with the places of their blocks; query and key come first.
    - `scratch`: columns and dtypes of the arrays that persist while a block is held.
    - `features`: of all products of a tile together.
    - `keys_held`: whether blocks of keys are held and blocks of queries stream.
    """
    arrays, named = [array for _, array in operands], dict(operands)
    tiles = _tiles(plan, arrays[0].shape, arrays[1].shape, keys_held)
    blocks = tiles.query_block, tiles.key_block
    schedule = _schedule(plan, named, *blocks, keys_held)
    # compiled, the grid ends with the longest row of tiles; the interpreter's grids are static
    longest = tiles.rows if keys_held else tiles.columns
    steps = longest if plan.interpret else jnp.maximum(schedule[1].max(), 1)
    (batch, heads, length, _), (_, kv_heads, kv_length, _) = arrays[0].shape, arrays[1].shape
    grid = (batch, kv_heads, tiles.columns, tiles.groups) if keys_held else (batch, heads, tiles.rows)
    held, grid = tiles.key_block if keys_held else tiles.query_block, (*grid, steps)
    shapes = [jax.ShapeDtypeStruct(*result[1:]) for result in results]
    pairs = batch * heads * length * _keys_seen(plan, kv_length)
    return pl.pallas_call(
        functools.partial(kernel, plan, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[tiles.spec(place, array.shape) for place, array in operands],
            out_specs=[tiles.spec(place, shape) for place, shape, _ in results],
            scratch_shapes=[pltpu.VMEM((held, count), dtype) for count, dtype in scratch],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3),
            vmem_limit_bytes=plan.query_blocks.vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * features,
            transcendentals=pairs if plan.soft_cap is None else 2 * pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        interpret=plan.interpret,
        name=f"interval_attention{kernel.__name__}",
    )(jnp.concatenate([x.reshape(-1) for x in schedule]), *arrays)


@functools.partial(jax.jit, static_argnums=0)  # a Pallas call by itself is never dropped from a backward pass
def _forward(
    plan: FlashPlan, query: Array, key: Array, value: Array, places: tuple[Array, ...]
) -> tuple[Array, Array]:
    dim, kinds = value.shape[3], ("queries", "keys", "keys", *_kinds(plan))
    out, lse = _call(
        plan,
        _forward_kernel,
        list(zip(kinds, (query, key, value, *places), strict=True)),
        [
            ("queries", (*query.shape[:3], dim), query.dtype),
            ("rows", (*query.shape[:2], 1, query.shape[2]), jnp.float32),
        ],
        [(3, jnp.int32), (1, jnp.float32), (1, jnp.float32), (dim, jnp.float32)],
        features=query.shape[3] + dim,
    )
    return out, lse


def _backward(
    plan: FlashPlan,
    query: Array,
    key: Array,
    value: Array,
    places: tuple[Array, ...],
    out_bar: Array,
    lse_delta: Array,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    dim, value_dim = query.shape[3], value.shape[3]
    arrays = query, key, value, *places, out_bar, lse_delta
    kinds = ("queries", "keys", "keys", *_kinds(plan), "queries", "rows")
    operands = list(zip(kinds, arrays, strict=True))
    (query_bar,) = _call(
        plan,
        _query_kernel,
        operands,
        [("queries", query.shape, dtype or query.dtype)],
        [(3, jnp.int32), (2, jnp.float32), (dim, jnp.float32)],
        features=2 * dim + value_dim,
    )
    key_bar, value_bar = _call(
        plan,
        _key_kernel,
        operands,
        [("keys", key.shape, dtype or key.dtype), ("keys", value.shape, dtype or value.dtype)],
        [(places[1].shape[1], jnp.int32), (dim, jnp.float32), (value_dim, jnp.float32)],
        features=2 * dim + 2 * value_dim,
        keys_held=True,
    )
    return query_bar, key_bar, value_bar


def _plan(call: AttentionCall) -> FlashPlan:
    sizes, by_lanes = block_sizes(), call.selected_heads > 0 and call.group_words == 0
    return FlashPlan(
        mask=call.mask,
        soft_cap=call.soft_cap,
        segments=call.segments,
        interpret=not call.backend.pallas_tpu,
        query_blocks=sizes.fit(call.length),
        key_blocks=sizes.fit(call.kv_length, whole_words=by_lanes),
        selected_heads=call.selected_heads,
        group_words=call.group_words,
    )


TPU = FlashKernels(_plan, _forward, _backward, heads_first=True)
