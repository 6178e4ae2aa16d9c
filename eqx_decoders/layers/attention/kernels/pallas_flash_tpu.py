"""Flash attention in Pallas kernels for TPUs.

Laid out as JAX's splash attention: a kernel holds one block of sums while blocks of the other side stream past it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.call import AttentionCall
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.layers.attention.kernels.pallas_flash_schedule import (
    SCALAR_BYTES,
    Tiles,
    chosen_tiles,
    list_tiles,
    make_schedule,
    word_range,
)
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashKernels,
    FlashPlan,
    Softmax,
    fill_length,
    tile_product,
)
from eqx_decoders.layers.mask import Bidirectional, seen_keys
from eqx_decoders.layers.tpu import MIB, block_sizes


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import


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


def _mask_places(plan: FlashPlan) -> tuple[str, ...]:
    """Return the places of the arrays of the mask."""
    bits = () if plan.selected_heads == 0 else ("lanes",) if plan.by_lanes else ("words",)
    return ("intervals", "positions", *bits)


def _make_table(
    plan: FlashPlan, named: dict[str, Array], query_block: int, key_block: int, keys_held: bool
) -> list[Array]:
    """Compute the fields of the table."""
    blocks, positions = (query_block, key_block), named["positions"]
    schedule = make_schedule(plan.segments, named["intervals"], positions, *blocks, keys_held)
    if plan.selected_heads == 0:
        return jax.tree.leaves(schedule)
    chosen = chosen_tiles(plan.by_lanes, named[_mask_places(plan)[-1]], positions[:, -1], *blocks)
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
    if tiles.batch > 1 and tiles.table_bytes > SCALAR_BYTES:
        options: dict = dict(scratch=scratch, features=features, keys_held=keys_held)
        return _row_by_row(functools.partial(_call, plan, kernel, **options), operands, results)
    blocks = tiles.query_block, tiles.key_block
    schedule = _make_table(plan, named, *blocks, keys_held)
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


def _row_by_row(
    call: Callable, operands: Sequence[tuple[str, Array]], results: Sequence[tuple[str, tuple[int, ...], Any]]
) -> Sequence[Array]:
    """Run a call for one row of the batch after another."""
    of_row = [(place, (1, *shape[1:]), dtype) for place, shape, dtype in results]

    def run(row: Sequence[Array]) -> Sequence[Array]:
        found = call([(place, x[None]) for (place, _), x in zip(operands, row, strict=True)], of_row)
        return [x[0] for x in found]

    return jax.lax.map(run, [array for _, array in operands])


@functools.partial(jax.jit, static_argnums=0)  # a Pallas call by itself is never dropped from a backward pass
def _forward(plan: FlashPlan, query: Array, key: Array, value: Array, places: tuple[Array, ...]) -> tuple[Array, Array]:
    dim, kinds = value.shape[3], ("queries", "keys", "keys", *_mask_places(plan))
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
    kinds = ("queries", "keys", "keys", *_mask_places(plan), "queries", "rows")
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


def refusal(call: AttentionCall) -> str | None:
    """Return what the kernels cannot do in this call, in words, or None.

    A row's lists of chosen tiles must fit the scalar memory, and the words of a block of queries, of which two are held
    at a time, a quarter of the vector memory (found by compiling).
    """
    if call.selected_heads == 0:
        return None
    plan = _plan(call)
    words, most = 4 * call.group_words * plan.query_blocks.held, (plan.query_blocks.vmem_bytes or 16 * MIB) // 4
    if words > most:
        return f"a selection whose words take {words} > {most} bytes of a block of queries"
    lengths = (fill_length(x, n) for x, n in ((plan.query_blocks, call.length), (plan.key_blocks, call.kv_length)))
    query, key = ((1, max(1, call.selected_heads), length) for length in lengths)
    most = max(_tiles(plan, query, key, keys_held).table_bytes for keys_held in (False, True))
    fits = most <= SCALAR_BYTES
    return None if fits else f"a selection whose lists of tiles take {most} > {SCALAR_BYTES} bytes of a row"


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
