"""Flash attention in Pallas kernels for NVIDIA's GPUs, by Triton.

A program has one block of sums in registers, and goes through the blocks of the other side that its own sees: first
those that need a mask, then, without any condition in the loop, the run of those that are seen whole. All sizes of a
tile are powers of two: rows of other widths are filled up with zeros as they are read, never in memory.
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
from eqx_decoders.layers.attention.kernels.pallas_flash_schedule import make_schedule, may_see, whole_run
from eqx_decoders.layers.attention.kernels.pallas_flash_tiles import (
    FlashKernels,
    FlashPlan,
    Softmax,
)
from eqx_decoders.layers.tpu import BlockSizes
from eqx_decoders.sharding.chips import KERNEL_GENERATIONS, has_kernels


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import


_SMALLEST = 16  # rows and columns of a product
_WHOLE = BlockSizes(held=128, streamed=128)  # what queries and keys are filled up to: a multiple of all blocks


class Tile(NamedTuple):
    """Sizes of a kernel's tile, and its warps and the depth of its pipeline."""

    held: int
    streamed: int
    warps: int = 8
    stages: int = 3


# Of each part, by the bytes of a row. Measured on an H100 in bfloat16, rows of 128 and 256 bytes in all sizes around
# these; of 512 bytes the forward pass alone, and the others as the shared memory holds them.
_TILES: dict[int, dict[str, Tile]] = {
    128: {"forward": Tile(64, 64, warps=4), "queries": Tile(128, 64, warps=4), "keys": Tile(64, 64, warps=4)},
    256: {"forward": Tile(128, 128), "queries": Tile(128, 64), "keys": Tile(128, 64)},
    512: {"forward": Tile(128, 64, stages=2), "queries": Tile(128, 32, stages=2), "keys": Tile(64, 16, stages=2)},
}


def unsupported(call: AttentionCall) -> str | None:
    """Return what the kernels cannot do in this call, in words, or None."""
    if not has_kernels(call.compute_capability):
        return f"devices of compute capability {call.compute_capability}, not {KERNEL_GENERATIONS}"
    if len(set(map(jnp.dtype, call.dtypes))) > 1:
        return "arrays of several dtypes"
    size, most = _row_bytes((call.head_dim, call.value_dim), call.dtypes[0]), max(_TILES)
    return None if size <= most else f"heads whose tiles have rows of {size} > {most} bytes"


def tile_of(part: str, dims: tuple[int, int], dtype: DTypeLike) -> Tile:
    """Return the tile of a part, for keys and values of so many features."""
    return _TILES[min(size for size in _TILES if size >= _row_bytes(dims, dtype))][part]


def _row_bytes(dims: tuple[int, int], dtype: DTypeLike) -> int:
    return _width(max(dims)) * jnp.dtype(dtype).itemsize


# --- tables and tiles ---


def _width(dim: int) -> int:
    """Return the columns of a tile of so many features."""
    return max(_SMALLEST, pl.next_power_of_2(dim))


def _make_table(
    plan: FlashPlan, tile: Tile, intervals: Array, positions: Array, *, keys_held: bool
) -> tuple[Int[Array, "batch held_blocks 6"], Int[Array, "batch streamed_blocks 2"]]:
    """Return of each held block the ends of its reach and of its run without mask, and its codes; codes of the others.

    The ends are start, first of the run, end of the run, end.
    """
    blocks = (tile.streamed, tile.held) if keys_held else (tile.held, tile.streamed)
    schedule = make_schedule(plan.segments, intervals, positions, *blocks, keys_held)
    start, count = schedule.reach
    own, other = (schedule.keys, schedule.queries) if keys_held else (schedule.queries, schedule.keys)
    return jnp.stack([start, *whole_run(schedule, keys_held), start + count, *own[:2]], 2), jnp.stack(other[:2], 2)


def _features(dim: int) -> Array | None:
    """Return which columns of a tile there are in memory; None: all."""
    return None if _width(dim) == dim else (jnp.arange(_width(dim)) < dim)[None]


def _read(rows: Any, dim: int) -> Array:
    """Read a tile, whose columns beyond `dim` are zero."""
    there = _features(dim)
    return plgpu.load(rows) if there is None else plgpu.load(rows, mask=there, other=0.0)


def _write(rows: Any, tile: Array, dim: int) -> None:
    plgpu.store(rows, tile.astype(rows.dtype), mask=_features(dim))


# --- the kernels ---


class _Refs(NamedTuple):
    """What all kernels read: tables, and blocks of the held side, or all of the other."""

    table: Any
    codes: Any
    query: Any
    key: Any
    value: Any
    intervals: Any
    positions: Any


_READ = len(_Refs._fields)


def _over_tiles(read: _Refs, add: Callable[[Any, bool, Any], Any], state: Any) -> Any:
    """Fold `add(block, masked, state)` over the blocks that the held one sees."""
    start, whole, rest, end, *own = (read.table[i] for i in range(6))

    def masked(step, state):
        block = step + jnp.where(step < whole, 0, rest - whole)
        some = may_see(own, [read.codes[block, i] for i in range(2)])
        return jax.lax.cond(some, lambda state: add(block, True, state), lambda state: state, state)

    state = jax.lax.fori_loop(start, end - (rest - whole), masked, state)
    return jax.lax.fori_loop(whole, rest, lambda block, state: add(block, False, state), state)


def _forward_kernel(plan: FlashPlan, dims: tuple[int, int], size: int, *refs: Any) -> None:
    dim, value_dim = dims
    read, (out, lse) = _Refs(*refs[:_READ]), refs[_READ:]
    held, rows = _read(read.query, dim), [read.intervals[i][:, None] for i in range(3)]

    def add(block: Any, masked: bool, state: Softmax) -> Softmax:
        at = pl.ds(block * size, size)
        scores = plan.scores(held, _read(read.key.at[at, :], dim))
        if masked:
            scores = jnp.where(plan.seen(rows, [read.positions[i, at][None] for i in range(2)]), scores, -jnp.inf)
        return state.add(scores, _read(read.value.at[at, :], value_dim))

    column = jnp.zeros((held.shape[0], 1), jnp.float32)
    start = Softmax(column + EMPTY, column, jnp.zeros((held.shape[0], _width(value_dim)), jnp.float32))
    result, row = _over_tiles(read, add, start).results()
    _write(out, result, value_dim)
    lse[0] = row[:, 0]


def _query_kernel(plan: FlashPlan, dims: tuple[int, int], size: int, *refs: Any) -> None:
    dim, value_dim = dims
    read, (out_bar, lse_delta, query_bar) = _Refs(*refs[:_READ]), refs[_READ:]
    held, held_bar = _read(read.query, dim), _read(out_bar, value_dim)
    rows, lse_delta_columns = ([x[i][:, None] for i in range(x.shape[0])] for x in (read.intervals, lse_delta))

    def add(block: Any, masked: bool, sums: Array) -> Array:
        at = pl.ds(block * size, size)
        keys = _read(read.key.at[at, :], dim)
        seen = plan.seen(rows, [read.positions[i, at][None] for i in range(2)]) if masked else None
        bars = held_bar, _read(read.value.at[at, :], value_dim)
        _, slopes = plan.slopes(held, keys, bars, lse_delta_columns, seen)
        return sums + tile_product(slopes.astype(keys.dtype), keys, 1, 0)

    _write(query_bar, _over_tiles(read, add, jnp.zeros(held.shape, jnp.float32)), dim)


def _key_kernel(plan: FlashPlan, dims: tuple[int, int], size: int, *refs: Any) -> None:
    dim, value_dim = dims
    read, (out_bar, lse_delta, key_bar, value_bar) = _Refs(*refs[:_READ]), refs[_READ:]
    keys, values = _read(read.key, dim), _read(read.value, value_dim)
    columns = [read.positions[i][:, None] for i in range(2)]

    def of_head(head: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        def add(block: Any, masked: bool, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            at = pl.ds(block * size, size)
            queries, bars = _read(read.query.at[at, head, :], dim), _read(out_bar.at[at, head, :], value_dim)
            seen = plan.seen([read.intervals[i, at][None] for i in range(3)], columns) if masked else None
            lse_delta_rows = [lse_delta[head, i, at][None] for i in range(2)]
            weights, slopes = plan.slopes(keys, queries, (values, bars), lse_delta_rows, seen)
            key_sums = sums[0] + tile_product(slopes.astype(queries.dtype), queries, 1, 0)
            return key_sums, sums[1] + tile_product(weights.astype(bars.dtype), bars, 1, 0)

        return _over_tiles(read, add, state)

    zeros = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    key_sums, value_sums = jax.lax.fori_loop(0, read.query.shape[1], of_head, zeros)
    _write(key_bar, key_sums, dim)
    _write(value_bar, value_sums, value_dim)


# --- their calls ---


def _spec(place: str, shape: tuple[int, ...], block: int, groups: int, keys_held: bool) -> Any:
    """Return the `BlockSpec` of an array that lies in a place: a block of the held side, all of the other.

    The grid is (blocks of queries, heads, batch), or (blocks of keys, key heads, batch).
    """
    of_keys = place in ("keys", "positions")
    held = of_keys == keys_held
    heads = groups if keys_held and not of_keys else None

    def spec(sizes: tuple[int | None, ...], index: Callable[..., tuple]) -> Any:
        def of_program(at: Any, head: Any, batch: Any) -> tuple:
            head = jax.lax.div(head, groups) if of_keys and not keys_held else head
            return index(batch, head, at if held else 0)

        return pl.BlockSpec(sizes, of_program)

    match place:
        case "table":
            return pl.BlockSpec((None, None, shape[2]), lambda at, head, batch: (batch, at, 0))
        case "codes":
            return pl.BlockSpec((None, *shape[1:]), lambda at, head, batch: (batch, 0, 0))
        case "queries" | "keys":
            rows = block if held else shape[1]
            return spec((None, rows, heads, _width(shape[3])), lambda batch, head, at: (batch, at, head, 0))
        case "intervals" | "positions":
            columns = block if held else shape[2]
            return spec((None, shape[1], columns), lambda batch, head, at: (batch, 0, at))
        case _:
            columns = block if held else shape[3]
            return spec((None, heads, shape[2], columns), lambda batch, head, at: (batch, head, 0, at))


_KERNELS = {"forward": _forward_kernel, "queries": _query_kernel, "keys": _key_kernel}


def _run(
    plan: FlashPlan,
    part: str,
    operands: Sequence[tuple[str, Array]],
    results: Sequence[tuple[str, tuple[int, ...], Any]],
) -> Sequence[Array]:
    """Run the `pallas_call` of a part, as `FlashKernels.run` says."""
    kernel, keys_held = _KERNELS[part], part == "keys"
    named, (query, key, value) = dict(operands), (array for _, array in operands[:3])
    dims = query.shape[3], value.shape[3]
    tile, heads = tile_of(part, dims, query.dtype), key if keys_held else query
    tables = _make_table(plan, tile, named["intervals"], named["positions"], keys_held=keys_held)
    operands = [*zip(("table", "codes"), tables, strict=True), *operands]
    groups, rest = query.shape[2] // key.shape[2], (heads.shape[2], heads.shape[0])

    def spec(place: str, shape: tuple[int, ...]) -> Any:
        return _spec(place, shape, tile.held, groups, keys_held)

    return pl.pallas_call(
        functools.partial(kernel, plan, dims, tile.streamed),
        grid=(heads.shape[1] // tile.held, *rest),
        in_specs=[spec(place, array.shape) for place, array in operands],
        out_specs=[spec(place, shape) for place, shape, _ in results],
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
        query_blocks=_WHOLE,
        key_blocks=_WHOLE,
    )


GPU = FlashKernels(_plan, _run, heads_first=False)
