"""Flash attention in Pallas kernels for TPUs.

The structure follows JAX's splash attention: a kernel accumulates the sums of one resident tile in VMEM, while the
tiles of the other side are streamed.
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
    list_tiles,
    make_schedule,
    selected_tiles,
    word_range,
)
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashKernels,
    FlashPlan,
    OnlineSoftmax,
    padded_length,
)
from eqx_decoders.layers.attention.kernels.tile_sizes import MIB, tile_sizes
from eqx_decoders.layers.mask import Bidirectional, seen_keys


pl, pltpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.tpu")  # slow to import


# --- the kernels ---


class _TileRefs(NamedTuple):
    """References to the tiles that all kernels read."""

    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any
    bits: Any

    @classmethod
    def of(cls, plan: FlashPlan, refs: tuple[Any, ...]) -> "tuple[_TileRefs, tuple[Any, ...]]":
        """Split a kernel's references into these tiles, with `bits=None` without a selection, and the others."""
        count = len(cls._fields) - (plan.selected_heads == 0)
        return cls(*(*refs[:count], None)[: len(cls._fields)]), refs[count:]


def _tile_mask(
    plan: FlashPlan, tiles: Tiles, table: Any, batch: Any, j: Any, bits: Any, intervals: Any, positions: Any
) -> Bool[Array, "rows columns"]:
    """Return the mask of a tile, whose sequence is `batch` and whose tile of keys is `j`."""
    mask = plan.visible(intervals, positions[:2])
    if plan.selected_heads == 0:
        return mask
    return mask & tiles.selection_mask(table, batch, j, bits, positions[2:])


def _split(x: Any, axis: int) -> list[Array]:
    """Split an array, or a reference to one, into its rows (axis 0) or columns (axis 1)."""
    return [x[i : i + 1, :] if axis == 0 else x[:, i : i + 1] for i in range(x.shape[axis])]


def _forward_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out, lse, interval_columns, max_score, total, acc = others
    batch, head, resident, step = (pl.program_id(i) for i in range(4))

    @pl.when(step == 0)
    def _():
        interval_columns[...] = intervals[0].T
        max_score[...] = jnp.full_like(max_score, EMPTY)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def add(masked, j):
        scores = plan.scores(query[0, 0], key[0, 0])
        if masked:
            columns, rows = _split(interval_columns, 1), _split(positions[0], 0)
            scores = jnp.where(_tile_mask(plan, tiles, table, batch, j, bits, columns, rows), scores, -jnp.inf)
        state = OnlineSoftmax(max_score[...], total[...], acc[...]).add(scores, value[0, 0])
        max_score[...], total[...], acc[...] = state

    tiles.visit(table, batch, head, resident, step, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        result, lse_column = OnlineSoftmax(max_score[...], total[...], acc[...]).results()
        out[0, 0], lse[0, 0] = result.astype(out.dtype), lse_column.T


def _query_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out_bar, lse_delta, query_bar, interval_columns, lse_delta_columns, acc = others
    batch, head, resident, step = (pl.program_id(i) for i in range(4))

    @pl.when(step == 0)
    def _():
        interval_columns[...], lse_delta_columns[...] = intervals[0].T, lse_delta[0, 0].T
        acc[...] = jnp.zeros_like(acc)

    def add(masked, j):
        columns, rows = _split(interval_columns, 1), _split(positions[0], 0)
        mask = _tile_mask(plan, tiles, table, batch, j, bits, columns, rows) if masked else None
        out_bar_and_value = out_bar[0, 0], value[0, 0]
        _, score_bar = plan.weights_and_score_bar(
            query[0, 0], key[0, 0], out_bar_and_value, _split(lse_delta_columns, 1), mask
        )
        acc[...] += tile_product(score_bar.astype(key.dtype), key[0, 0], 1, 0)

    tiles.visit(table, batch, head, resident, step, add)

    @pl.when(step == pl.num_programs(3) - 1)
    def _():
        query_bar[0, 0] = acc[...].astype(query_bar.dtype)


def _key_kernel(plan: FlashPlan, tiles: Tiles, table: Any, *refs: Any) -> None:
    (query, key, value, intervals, positions, bits), others = _TileRefs.of(plan, refs)
    out_bar, lse_delta, key_bar, value_bar, position_columns, key_acc, value_acc = others
    batch, kv_head, resident, query_head, step = (pl.program_id(i) for i in range(5))

    @pl.when((query_head == 0) & (step == 0))
    def _():
        position_columns[...] = positions[0].T
        key_acc[...], value_acc[...] = jnp.zeros_like(key_acc), jnp.zeros_like(value_acc)

    def add(masked, j):
        rows, columns = _split(intervals[0], 0), _split(position_columns, 1)
        mask = _tile_mask(plan, tiles, table, batch, j, bits, rows, columns) if masked else None
        value_and_out_bar = value[0, 0], out_bar[0, 0]
        weights, score_bar = plan.weights_and_score_bar(
            key[0, 0], query[0, 0], value_and_out_bar, _split(lse_delta[0, 0], 0), mask
        )
        key_acc[...] += tile_product(score_bar.astype(query.dtype), query[0, 0], 1, 0)
        value_acc[...] += tile_product(weights.astype(out_bar.dtype), out_bar[0, 0], 1, 0)

    tiles.visit(table, batch, kv_head * tiles.queries_per_kv + query_head, resident, step, add)

    @pl.when((query_head == tiles.queries_per_kv - 1) & (step == pl.num_programs(4) - 1))
    def _():
        key_bar[0, 0], value_bar[0, 0] = key_acc[...].astype(key_bar.dtype), value_acc[...].astype(value_bar.dtype)


# --- calls of the kernels ---


def _tiles(plan: FlashPlan, query: tuple[int, ...], key: tuple[int, ...], keys_resident: bool) -> Tiles:
    """Return the grid for queries and keys of these shapes, [batch, heads, length, dim]."""
    if keys_resident:
        query_tile, key_tile = plan.query_tiles.streamed, plan.key_tiles.held
    else:
        query_tile, key_tile = plan.query_tiles.held, plan.key_tiles.streamed
    return Tiles(
        batch=query[0],
        queries_per_kv=query[1] // key[1],
        query_tile=query_tile,
        key_tile=key_tile,
        num_query_tiles=query[2] // query_tile,
        num_key_tiles=key[2] // key_tile,
        keys_resident=keys_resident,
        selected_heads=plan.selected_heads,
        group_words=plan.group_words,
    )


def _make_table(
    plan: FlashPlan, by_layout: dict[str, Array], query_tile: int, key_tile: int, keys_resident: bool
) -> list[Array]:
    """Compute the fields of the table; see `Tiles.field_sizes`."""
    positions = by_layout["positions"]
    schedule = make_schedule(plan.segments, by_layout["intervals"], positions, query_tile, key_tile, keys_resident)
    if plan.selected_heads == 0:
        return jax.tree.leaves(schedule)
    bits = by_layout[plan.mask_layouts[-1]]
    selected = selected_tiles(plan.by_lanes, bits, positions[:, -1], query_tile, key_tile)
    words = word_range(positions[:, -1], key_tile) if plan.group_words > 0 else []
    return [*list_tiles(schedule, selected, keys_resident), *words]


def _visible_keys_per_query(plan: FlashPlan, kv_length: int) -> int:
    """Estimate the number of keys that a query sees, for the compiler's cost model."""
    max_keys = kv_length if isinstance(plan.mask, Bidirectional) else kv_length // 2
    return min(seen_keys(plan.mask, kv_length), max_keys)


def _select_kernel(
    part: str, query: Array, value: Array, positions: Array
) -> tuple[Callable, list[tuple[int, Any]], int]:
    """Return the kernel of a part, its scratch buffers, and the contracted features of all products of a tile.

    A scratch buffer is given by its number of columns and its dtype; its rows are those of the resident tile.
    """
    dim, value_dim = query.shape[3], value.shape[3]
    if part == "forward":
        scratch = [(3, jnp.int32), (1, jnp.float32), (1, jnp.float32), (value_dim, jnp.float32)]
        return _forward_kernel, scratch, dim + value_dim
    if part == "queries":
        return _query_kernel, [(3, jnp.int32), (2, jnp.float32), (dim, jnp.float32)], 2 * dim + value_dim
    scratch = [(positions.shape[1], jnp.int32), (dim, jnp.float32), (value_dim, jnp.float32)]
    return _key_kernel, scratch, 2 * dim + 2 * value_dim


def _run(
    plan: FlashPlan,
    part: str,
    operands: Sequence[tuple[str, Array]],
    results: Sequence[tuple[str, tuple[int, ...], Any]],
) -> Sequence[Array]:
    """Implement `FlashKernels.run`: run the `pallas_call` of a part."""
    arrays, by_layout = [array for _, array in operands], dict(operands)
    query, key, value = arrays[:3]
    keys_resident = part == "keys"
    kernel, scratch, features = _select_kernel(part, query, value, by_layout["positions"])
    tiles = _tiles(plan, query.shape, key.shape, keys_resident)
    if tiles.batch > 1 and tiles.table_bytes > SCALAR_BYTES:
        return _map_sequences(functools.partial(_run, plan, part), operands, results)
    table = _make_table(plan, by_layout, tiles.query_tile, tiles.key_tile, keys_resident)
    # The compiled grid has as many steps as the longest list of streamed tiles. Grids of the interpreter are static.
    max_steps = tiles.num_query_tiles if keys_resident else tiles.num_key_tiles
    steps = max_steps if plan.interpret else jnp.maximum(table[1].max(), 1)
    batch, heads, length, _ = query.shape
    kv_heads, kv_length = key.shape[1:3]
    if keys_resident:
        resident_tile = tiles.key_tile
        grid = (batch, kv_heads, tiles.num_key_tiles, tiles.queries_per_kv, steps)
    else:
        resident_tile = tiles.query_tile
        grid = (batch, heads, tiles.num_query_tiles, steps)
    shapes = [jax.ShapeDtypeStruct(*result[1:]) for result in results]
    pairs = batch * heads * length * _visible_keys_per_query(plan, kv_length)
    return pl.pallas_call(
        functools.partial(kernel, plan, tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[tiles.spec(layout, array.shape) for layout, array in operands],
            out_specs=[tiles.spec(layout, shape) for layout, shape, _ in results],
            scratch_shapes=[pltpu.VMEM((resident_tile, columns), dtype) for columns, dtype in scratch],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3),
            vmem_limit_bytes=plan.query_tiles.vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * features,
            transcendentals=pairs if plan.soft_cap is None else 2 * pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        ),
        interpret=plan.interpret,
        name=f"interval_attention{kernel.__name__}",
    )(jnp.concatenate([x.reshape(-1) for x in table]), *arrays)


def _map_sequences(
    call: Callable, operands: Sequence[tuple[str, Array]], results: Sequence[tuple[str, tuple[int, ...], Any]]
) -> Sequence[Array]:
    """Run a call for each sequence of the batch separately, so that the table fits into scalar memory."""
    sequence_results = [(layout, (1, *shape[1:]), dtype) for layout, shape, dtype in results]

    def run(arrays: Sequence[Array]) -> Sequence[Array]:
        outputs = call([(layout, x[None]) for (layout, _), x in zip(operands, arrays, strict=True)], sequence_results)
        return [x[0] for x in outputs]

    return jax.lax.map(run, [array for _, array in operands])


def unsupported(call: AttentionCall) -> str | None:
    """Return a noun phrase for a property of the call that the kernels do not support, or None.

    The lists of selected tiles of one sequence must fit into scalar memory. The selection words of a tile of queries
    must fit into a quarter of VMEM, because two tiles are in VMEM at a time (the limit was found by compiling).
    """
    if call.selected_heads == 0:
        return None
    plan = _plan(call)
    word_bytes = 4 * call.group_words * plan.query_tiles.held
    max_word_bytes = (plan.query_tiles.vmem_bytes or 16 * MIB) // 4
    if word_bytes > max_word_bytes:
        return f"a selection whose words take {word_bytes} > {max_word_bytes} bytes for a tile of queries"
    heads = max(1, call.selected_heads)
    query_shape = (1, heads, padded_length(plan.query_tiles, call.length))
    key_shape = (1, heads, padded_length(plan.key_tiles, call.kv_length))
    table_bytes = max(_tiles(plan, query_shape, key_shape, resident).table_bytes for resident in (False, True))
    if table_bytes > SCALAR_BYTES:
        return f"a selection whose lists of tiles take {table_bytes} > {SCALAR_BYTES} bytes for one sequence"
    return None


def _plan(call: AttentionCall) -> FlashPlan:
    sizes = tile_sizes()
    by_lanes = call.selected_heads > 0 and call.group_words == 0
    return FlashPlan(
        mask=call.mask,
        soft_cap=call.soft_cap,
        segments=call.segments,
        interpret=not call.backend.pallas_tpu,
        query_tiles=sizes.fit(call.length),
        key_tiles=sizes.fit(call.kv_length, whole_words=by_lanes),
        selected_heads=call.selected_heads,
        group_words=call.group_words,
    )


TPU = FlashKernels(_plan, _run, heads_first=True)
