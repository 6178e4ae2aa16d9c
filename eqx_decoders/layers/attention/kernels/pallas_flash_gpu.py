"""Flash attention in Pallas Triton kernels for NVIDIA GPUs.

A program accumulates the sums of one resident tile in registers, and loops over the visible tiles of the other side:
first over those that need a mask, then, in a loop without conditions, over the run of tiles that need none. Tile sizes
are powers of two. Other head dimensions are padded with zeros when a tile is loaded, not in memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.layers.attention.kernels.call import AttentionCall
from eqx_decoders.layers.attention.kernels.common import EMPTY, tile_product
from eqx_decoders.layers.attention.kernels.pallas_flash_schedule import make_schedule, may_see, unmasked_run
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashKernels,
    FlashPlan,
    OnlineSoftmax,
)
from eqx_decoders.layers.attention.kernels.tile_sizes import TileSizes
from eqx_decoders.sharding.chips import KERNEL_GENERATIONS, has_kernels


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import


_MIN_DOT_DIM = 16  # smallest rows and columns of a matrix product
_PADDED_TILE = TileSizes(held=128, streamed=128)  # lengths are padded to a multiple of this, and so of all tiles


class Tile(NamedTuple):
    """Tile sizes, number of warps, and number of pipeline stages of a kernel."""

    resident: int
    streamed: int
    warps: int = 8
    stages: int = 3


# Tiles of each part, by the bytes of a row (padded head dimension). Tuned on an H100 in bfloat16: all parts for rows of
# 128 and 256 bytes, and the forward pass for rows of 512 bytes; other tiles are the largest that fit shared memory.
_TILES: dict[int, dict[str, Tile]] = {
    128: {"forward": Tile(64, 64, warps=4), "queries": Tile(128, 64, warps=4), "keys": Tile(64, 64, warps=4)},
    256: {"forward": Tile(128, 128), "queries": Tile(128, 64), "keys": Tile(128, 64)},
    512: {"forward": Tile(128, 64, stages=2), "queries": Tile(128, 32, stages=2), "keys": Tile(64, 16, stages=2)},
}


def unsupported(call: AttentionCall) -> str | None:
    """Return a noun phrase for a property of the call that the kernels do not support, or None."""
    if not has_kernels(call.compute_capability):
        return f"devices of compute capability {call.compute_capability}, not {KERNEL_GENERATIONS}"
    if len(set(map(jnp.dtype, call.dtypes))) > 1:
        return "queries, keys and values of different dtypes"
    row_bytes, max_row_bytes = _row_bytes((call.head_dim, call.value_dim), call.dtypes[0]), max(_TILES)
    if row_bytes > max_row_bytes:
        return f"a padded head dimension of {row_bytes} > {max_row_bytes} bytes"
    return None


def tile_of(part: str, dims: tuple[int, int], dtype: DTypeLike) -> Tile:
    """Return the tile of a part; `dims` are the features of keys and of values."""
    return _TILES[min(size for size in _TILES if size >= _row_bytes(dims, dtype))][part]


def _row_bytes(dims: tuple[int, int], dtype: DTypeLike) -> int:
    return _padded_dim(max(dims)) * jnp.dtype(dtype).itemsize


# --- tables and tiles ---


def _padded_dim(dim: int) -> int:
    """Round a head dimension up to a power of two, at least 16."""
    return max(_MIN_DOT_DIM, pl.next_power_of_2(dim))


def _make_table(
    plan: FlashPlan, tile: Tile, intervals: Array, positions: Array, *, keys_resident: bool
) -> tuple[Int[Array, "batch held_blocks 6"], Int[Array, "batch streamed_blocks 2"]]:
    """Return the table of resident tiles, and the minimum and maximum codes of streamed tiles.

    The fields of a resident tile are the start of its reach, the start and the end of its run without a mask, the end
    of its reach, and its minimum and maximum code; see `Schedule`.
    """
    sizes = (tile.streamed, tile.resident) if keys_resident else (tile.resident, tile.streamed)
    schedule = make_schedule(plan.segments, intervals, positions, *sizes, keys_resident)
    start, count = schedule.reach
    if keys_resident:
        resident, streamed = schedule.keys, schedule.queries
    else:
        resident, streamed = schedule.queries, schedule.keys
    table = [start, *unmasked_run(schedule, keys_resident), start + count, *resident[:2]]
    return jnp.stack(table, 2), jnp.stack(streamed[:2], 2)


def _stored_columns(dim: int) -> Array | None:
    """Return the mask of the columns of a tile that exist in memory; None: all columns do."""
    return None if _padded_dim(dim) == dim else (jnp.arange(_padded_dim(dim)) < dim)[None]


def _read(ref: Any, dim: int) -> Array:
    """Load a tile, and pad its columns from `dim` on with zeros."""
    mask = _stored_columns(dim)
    return plgpu.load(ref) if mask is None else plgpu.load(ref, mask=mask, other=0.0)


def _write(ref: Any, tile: Array, dim: int) -> None:
    plgpu.store(ref, tile.astype(ref.dtype), mask=_stored_columns(dim))


# --- the kernels ---


class _Refs(NamedTuple):
    """References that all kernels read: tables, the resident tile, and all of the streamed side."""

    table: Any
    codes: Any
    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any


_NUM_SHARED_REFS = len(_Refs._fields)


def _fold_tiles(refs: _Refs, add: Callable[[Any, bool, Any], Any], state: Any) -> Any:
    """Fold `add(tile, masked, state)` over the streamed tiles that the resident tile sees."""
    start, run_start, run_end, end, *resident_codes = (refs.table[i] for i in range(6))

    def add_masked(step, state):
        tile = step + jnp.where(step < run_start, 0, run_end - run_start)  # skip the run of tiles without a mask
        any_visible = may_see(resident_codes, [refs.codes[tile, i] for i in range(2)])
        return jax.lax.cond(any_visible, lambda state: add(tile, True, state), lambda state: state, state)

    state = jax.lax.fori_loop(start, end - (run_end - run_start), add_masked, state)
    return jax.lax.fori_loop(run_start, run_end, lambda tile, state: add(tile, False, state), state)


def _forward_kernel(plan: FlashPlan, dims: tuple[int, int], streamed_size: int, *refs: Any) -> None:
    dim, value_dim = dims
    shared, (out, lse) = _Refs(*refs[:_NUM_SHARED_REFS]), refs[_NUM_SHARED_REFS:]
    query = _read(shared.query, dim)
    interval_columns = [shared.intervals[i][:, None] for i in range(3)]

    def add(tile: Any, masked: bool, state: OnlineSoftmax) -> OnlineSoftmax:
        at = pl.ds(tile * streamed_size, streamed_size)
        scores = plan.scores(query, _read(shared.key.at[at, :], dim))
        if masked:
            mask = plan.visible(interval_columns, [shared.positions[i, at][None] for i in range(2)])
            scores = jnp.where(mask, scores, -jnp.inf)
        return state.add(scores, _read(shared.value.at[at, :], value_dim))

    column = jnp.zeros((query.shape[0], 1), jnp.float32)
    start = OnlineSoftmax(column + EMPTY, column, jnp.zeros((query.shape[0], _padded_dim(value_dim)), jnp.float32))
    result, lse_column = _fold_tiles(shared, add, start).results()
    _write(out, result, value_dim)
    lse[0] = lse_column[:, 0]


def _query_kernel(plan: FlashPlan, dims: tuple[int, int], streamed_size: int, *refs: Any) -> None:
    dim, value_dim = dims
    shared, (out_bar, lse_delta, query_bar) = _Refs(*refs[:_NUM_SHARED_REFS]), refs[_NUM_SHARED_REFS:]
    query, query_out_bar = _read(shared.query, dim), _read(out_bar, value_dim)
    interval_columns, lse_delta_columns = (
        [x[i][:, None] for i in range(x.shape[0])] for x in (shared.intervals, lse_delta)
    )

    def add(tile: Any, masked: bool, acc: Array) -> Array:
        at = pl.ds(tile * streamed_size, streamed_size)
        key = _read(shared.key.at[at, :], dim)
        mask = plan.visible(interval_columns, [shared.positions[i, at][None] for i in range(2)]) if masked else None
        out_bar_and_value = query_out_bar, _read(shared.value.at[at, :], value_dim)
        _, score_bar = plan.weights_and_score_bar(query, key, out_bar_and_value, lse_delta_columns, mask)
        return acc + tile_product(score_bar.astype(key.dtype), key, 1, 0)

    _write(query_bar, _fold_tiles(shared, add, jnp.zeros(query.shape, jnp.float32)), dim)


def _key_kernel(plan: FlashPlan, dims: tuple[int, int], streamed_size: int, *refs: Any) -> None:
    dim, value_dim = dims
    shared, (out_bar, lse_delta, key_bar, value_bar) = _Refs(*refs[:_NUM_SHARED_REFS]), refs[_NUM_SHARED_REFS:]
    key, value = _read(shared.key, dim), _read(shared.value, value_dim)
    position_columns = [shared.positions[i][:, None] for i in range(2)]

    def add_head(head: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        def add(tile: Any, masked: bool, state: tuple[Array, Array]) -> tuple[Array, Array]:
            key_acc, value_acc = state
            at = pl.ds(tile * streamed_size, streamed_size)
            query, query_out_bar = (
                _read(shared.query.at[at, head, :], dim),
                _read(out_bar.at[at, head, :], value_dim),
            )
            mask = plan.visible([shared.intervals[i, at][None] for i in range(3)], position_columns) if masked else None
            lse_delta_rows = [lse_delta[head, i, at][None] for i in range(2)]
            weights, score_bar = plan.weights_and_score_bar(key, query, (value, query_out_bar), lse_delta_rows, mask)
            key_acc = key_acc + tile_product(score_bar.astype(query.dtype), query, 1, 0)
            return key_acc, value_acc + tile_product(weights.astype(query_out_bar.dtype), query_out_bar, 1, 0)

        return _fold_tiles(shared, add, state)

    zeros = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    key_acc, value_acc = jax.lax.fori_loop(0, shared.query.shape[1], add_head, zeros)
    _write(key_bar, key_acc, dim)
    _write(value_bar, value_acc, value_dim)


# --- calls of the kernels ---


def _spec(layout: str, shape: tuple[int, ...], tile: int, queries_per_kv: int, keys_resident: bool) -> Any:
    """Return the `BlockSpec` of an array with a layout: a tile of the resident side, or all of the streamed side.

    The grid is (query tiles, heads, batch), or (key tiles, kv heads, batch) if keys are resident.
    """
    is_key_side = layout in ("keys", "positions")
    is_resident = is_key_side == keys_resident
    heads = queries_per_kv if keys_resident and not is_key_side else None

    def spec(sizes: tuple[int | None, ...], index: Callable[..., tuple]) -> Any:
        def program_index(at: Any, head: Any, batch: Any) -> tuple:
            head = jax.lax.div(head, queries_per_kv) if is_key_side and not keys_resident else head
            return index(batch, head, at if is_resident else 0)

        return pl.BlockSpec(sizes, program_index)

    match layout:
        case "table":
            return pl.BlockSpec((None, None, shape[2]), lambda at, head, batch: (batch, at, 0))
        case "codes":
            return pl.BlockSpec((None, *shape[1:]), lambda at, head, batch: (batch, 0, 0))
        case "queries" | "keys":
            rows = tile if is_resident else shape[1]
            return spec((None, rows, heads, _padded_dim(shape[3])), lambda batch, head, at: (batch, at, head, 0))
        case "intervals" | "positions":
            columns = tile if is_resident else shape[2]
            return spec((None, shape[1], columns), lambda batch, head, at: (batch, 0, at))
        case _:
            columns = tile if is_resident else shape[3]
            return spec((None, heads, shape[2], columns), lambda batch, head, at: (batch, head, 0, at))


_KERNELS = {"forward": _forward_kernel, "queries": _query_kernel, "keys": _key_kernel}


def _run(
    plan: FlashPlan,
    part: str,
    operands: Sequence[tuple[str, Array]],
    results: Sequence[tuple[str, tuple[int, ...], Any]],
) -> Sequence[Array]:
    """Implement `FlashKernels.run`: run the `pallas_call` of a part."""
    kernel, keys_resident = _KERNELS[part], part == "keys"
    by_layout = dict(operands)
    query, key, value = (array for _, array in operands[:3])
    dims = query.shape[3], value.shape[3]
    tile = tile_of(part, dims, query.dtype)
    tables = _make_table(plan, tile, by_layout["intervals"], by_layout["positions"], keys_resident=keys_resident)
    operands = [*zip(("table", "codes"), tables, strict=True), *operands]
    queries_per_kv = query.shape[2] // key.shape[2]
    batch, length, heads, _ = (key if keys_resident else query).shape

    def spec(layout: str, shape: tuple[int, ...]) -> Any:
        return _spec(layout, shape, tile.resident, queries_per_kv, keys_resident)

    return pl.pallas_call(
        functools.partial(kernel, plan, dims, tile.streamed),
        grid=(length // tile.resident, heads, batch),
        in_specs=[spec(layout, array.shape) for layout, array in operands],
        out_specs=[spec(layout, shape) for layout, shape, _ in results],
        out_shape=[jax.ShapeDtypeStruct(*result[1:]) for result in results],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=plan.interpret,
        name=f"flash_attention{kernel.__name__}",
    )(*(array for _, array in operands))


def _plan(call: AttentionCall) -> FlashPlan:
    return FlashPlan(
        mask=call.mask,
        soft_cap=call.soft_cap,
        segments=call.segments,
        interpret=not call.backend.pallas_gpu,
        query_tiles=_PADDED_TILE,
        key_tiles=_PADDED_TILE,
    )


GPU = FlashKernels(_plan, _run, heads_first=False)
