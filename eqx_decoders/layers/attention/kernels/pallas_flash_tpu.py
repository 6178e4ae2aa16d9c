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
from eqx_decoders.layers.attention.kernels.common import EMPTY, tile_product
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
)
from eqx_decoders.layers.mask import Bidirectional, seen_keys
from eqx_decoders.layers.tpu import MIB, block_sizes


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import


# --- the kernels ---


class _TileRefs(NamedTuple):
    """Blocks that all kernels read."""

    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any
    bits: Any

    @classmethod
    def of(cls, plan: FlashPlan, refs: tuple[Any, ...]) -> "tuple[_TileRefs, tuple[Any, ...]]":
        """Return these blocks, with None for the bits of a selection where there is none, and all others."""
        count = len(cls._fields) - (plan.selected_heads == 0)
        return cls(*(*refs[:count], None)[: len(cls._fields)]), refs[count:]


def _seen(
    plan: FlashPlan, tiles: Tiles, table: Any, at: tuple[Any, Any], bits: Any, intervals: Any, positions: Any
) -> Bool[Array, "rows columns"]:
    """Return the mask of a tile, which is at `(row of the batch, block of keys)`."""
    seen = plan.seen(intervals, positions[:2])
    return seen if plan.selected_heads == 0 else seen & tiles.chosen(table, *at, bits, positions[2:])


def _split(x: Any, axis: int) -> list[Array]:
    """Split an array, or a reference to one, into its rows (axis 0) or columns (axis 1)."""
    return [x[i : i + 1, :] if axis == 0 else x[:, i : i + 1] for i in range(x.shape[axis])]


def _forward_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out, lse, columns, top, total, sums = others
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


def _query_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out_bar, lse_delta, query_bar, columns, lse_delta_columns, sums = others
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
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out_bar, lse_delta, key_bar, value_bar, columns, key_sums, value_sums = others
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


def _make_table(
    plan: FlashPlan, named: dict[str, Array], query_block: int, key_block: int, keys_held: bool
) -> list[Array]:
    """Compute the fields of the table."""
    blocks, positions = (query_block, key_block), named["positions"]
    schedule = make_schedule(plan.segments, named["intervals"], positions, *blocks, keys_held)
    if plan.selected_heads == 0:
        return jax.tree.leaves(schedule)
    chosen = chosen_tiles(plan.by_lanes, named[plan.mask_places[-1]], positions[:, -1], *blocks)
    words = word_range(positions[:, -1], key_block) if plan.group_words > 0 else []
    return [*list_tiles(schedule, chosen, keys_held), *words]


def _keys_seen(plan: FlashPlan, kv_length: int) -> int:
    """Estimate the number of keys that a query sees, for the compiler's cost model."""
    before = kv_length if isinstance(plan.mask, Bidirectional) else kv_length // 2
    return min(seen_keys(plan.mask, kv_length), before)


def _kernel_of(part: str, query: Array, value: Array, positions: Array) -> tuple[Callable, list[tuple[int, Any]], int]:
    """Return the kernel of a part; columns and dtypes of the arrays that persist while it holds a block; and features
    of all products of a tile together."""
    dim, value_dim = query.shape[3], value.shape[3]
    if part == "forward":
        persist = [(3, jnp.int32), (1, jnp.float32), (1, jnp.float32), (value_dim, jnp.float32)]
        return _forward_kernel, persist, dim + value_dim
    if part == "queries":
        return _query_kernel, [(3, jnp.int32), (2, jnp.float32), (dim, jnp.float32)], 2 * dim + value_dim
    persist = [(positions.shape[1], jnp.int32), (dim, jnp.float32), (value_dim, jnp.float32)]
    return _key_kernel, persist, 2 * dim + 2 * value_dim


def _run(
    plan: FlashPlan,
    part: str,
    operands: Sequence[tuple[str, Array]],
    results: Sequence[tuple[str, tuple[int, ...], Any]],
) -> Sequence[Array]:
    """Run the `pallas_call` of a part, as `FlashKernels.run` says."""
    arrays, named = [array for _, array in operands], dict(operands)
    keys_held, (kernel, scratch, features) = part == "keys", _kernel_of(part, arrays[0], arrays[2], named["positions"])
    tiles = _tiles(plan, arrays[0].shape, arrays[1].shape, keys_held)
    if tiles.batch > 1 and tiles.table_bytes > SCALAR_BYTES:
        return _row_by_row(functools.partial(_run, plan, part), operands, results)
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


def unsupported(call: AttentionCall) -> str | None:
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


TPU = FlashKernels(_plan, _run, heads_first=True)
