"""Grouped matrix products on NVIDIA GPUs: Pallas kernels, compiled by Triton.

    rows:     out[r] = sum over pairs of x[r] @ w[group of r]  (or w', for the gradient of x)
    columns:  out[g] = x[rows of g]' @ y[rows of g]            (for the gradient of the weights)

A program of the rows kernel computes a tile of rows of one group by a tile of output columns. Row tiles start where
groups start, so that no row is multiplied twice. A program of the columns kernel computes a tile of one group's result
and loops over the rows of the group. Rows of no group are not read, and their results are zeros. 8-bit values are
converted to the compute dtype when they are read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Shaped

from eqx_decoders.core.lazy_imports import LazyModule
from eqx_decoders.sharding.chips import compute_capability, has_kernels


# slow to import
pl = LazyModule("jax.experimental.pallas")
plgpu = LazyModule("jax.experimental.pallas.triton")

KERNELS = "grouped_rows", "grouped_columns"  # names of the jitted functions below, by which FLOPs are counted
_COMPUTE_DTYPES = jnp.bfloat16, jnp.float16, jnp.float32
_MAX_ELEMENTS = 2**31  # arrays must be smaller, because offsets have 32 bits
_MIN_TILE_ROWS = 16
_MAX_TILE_ROWS = 128
_TILE_COLUMNS = 128
_INNER_TILE_BYTES = 128  # size of a tile along the contracted dimension


def fits(device: Any, dtype: DTypeLike, largest: int) -> bool:
    """Return whether these kernels support a device, a compute dtype, and arrays of at most `largest` elements."""
    is_supported_dtype = jnp.dtype(dtype) in _COMPUTE_DTYPES
    return has_kernels(compute_capability(device)) and is_supported_dtype and largest < _MAX_ELEMENTS


class GroupedPlan(NamedTuple):
    """Static description of a kernel call.

    **Arguments:**

    - `dtype`, `out_dtype`: compute dtype, and dtype of the result.
    - `tile_rows`: rows of a tile of the rows kernel; 0 for the columns kernel.
    - `transposed`: whether weights are `groups outer inner`.
    - `interpret`: whether the kernel is interpreted (for tests on CPUs).
    """

    dtype: np.dtype
    out_dtype: np.dtype
    tile_rows: int = 0
    transposed: bool = False
    interpret: bool = False

    @property
    def inner_tile(self) -> int:
        """Elements of a tile along the contracted dimension."""
        return _INNER_TILE_BYTES // self.dtype.itemsize

    def product(self, left: Array, right: Array, axes: tuple[int, int]) -> Float32[Array, "rows columns"]:
        """Multiply two tiles in float32, contracting dimension `axes[0]` of `left` with `axes[1]` of `right`."""
        # products of 16-bit floats are exact; ignore a precision that the user has set for all of JAX
        precision = jax.lax.Precision.DEFAULT if self.dtype.itemsize < 4 else None
        dimensions = ((axes[:1], axes[1:]), ((), ()))
        return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)

    def load(self, tile: Any, *masks: Array | None) -> Array:
        """Load a tile in the compute dtype, with zeros where a mask is False."""
        mask = _combine_masks(masks)
        is_8_bit = tile.dtype.itemsize == 1
        # Triton has no zero of FP8 dtypes to load, so 8-bit tiles are masked after the conversion
        values = plgpu.load(tile, mask=mask, other=None if mask is None or is_8_bit else 0)
        if not is_8_bit:
            return values.astype(self.dtype)
        values = values.astype(jnp.float32).astype(self.dtype)  # via float32, as Triton converts FP8
        return values if mask is None else jnp.where(mask, values, jnp.zeros((), self.dtype))


def _combine_masks(masks: tuple[Array | None, ...]) -> Array | None:
    present = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, present) if present else None


def _tile_indices(tile: Any, size: int, total: int) -> tuple[Int32[Array, "tile"], Bool[Array, "tile"] | None]:
    """Return the indices of a tile in a dimension of `total` elements, and the mask of valid ones (None: all)."""
    indices = tile * size + jnp.arange(size, dtype=jnp.int32)
    return indices, None if total % size == 0 else indices < total


def _broadcast_mask(axis: int, mask: Array | None) -> Array | None:
    """Add a dimension to a mask of rows (axis 0) or columns (axis 1), so that it broadcasts to a tile."""
    return None if mask is None else jnp.expand_dims(mask, 1 - axis)


# --- the kernels ---


def _rows_kernel(plan: GroupedPlan, tiles: Any, *refs: Any) -> None:
    *operands, out = refs
    group, start, size = (tiles[pl.program_id(1), i] for i in range(3))
    row = jnp.arange(plan.tile_rows, dtype=jnp.int32)
    columns, column_mask = _tile_indices(pl.program_id(0), _TILE_COLUMNS, out.shape[1])
    total = jnp.zeros((plan.tile_rows, _TILE_COLUMNS), jnp.float32)
    for x, weight in zip(operands[::2], operands[1::2], strict=True):
        # rows beyond the tile are read, but their results are not stored
        x_rows = jnp.minimum(start + row, x.shape[0] - 1)[:, None]

        def add(step, total, x=x, weight=weight, x_rows=x_rows):
            inner, inner_mask = _tile_indices(step, plan.inner_tile, x.shape[1])
            left = plan.load(x.at[x_rows, inner[None]], _broadcast_mask(1, inner_mask))
            if plan.transposed:
                tile = weight.at[group, columns[:, None], inner[None]]
                right = plan.load(tile, _broadcast_mask(0, column_mask), _broadcast_mask(1, inner_mask))
                return total + plan.product(left, right, (1, 1))
            tile = weight.at[group, inner[:, None], columns[None]]
            right = plan.load(tile, _broadcast_mask(0, inner_mask), _broadcast_mask(1, column_mask))
            return total + plan.product(left, right, (1, 0))

        has_weight = (size > 0) & (group < weight.shape[0])
        steps = has_weight.astype(jnp.int32) * -(-x.shape[1] // plan.inner_tile)
        total = jax.lax.fori_loop(0, steps, add, total)
    mask = _combine_masks(((row < size)[:, None], _broadcast_mask(1, column_mask)))
    plgpu.store(out.at[(start + row)[:, None], columns[None]], total.astype(out.dtype), mask=mask)


def _columns_kernel(plan: GroupedPlan, bounds: Any, x: Any, y: Any, out: Any) -> None:
    group = pl.program_id(2)
    start = bounds[group]
    end = bounds[group + 1]
    x_columns, x_mask = _tile_indices(pl.program_id(0), _TILE_COLUMNS, x.shape[1])
    y_columns, y_mask = _tile_indices(pl.program_id(1), _TILE_COLUMNS, y.shape[1])

    def add(step, total):
        row = start + step * plan.inner_tile + jnp.arange(plan.inner_tile, dtype=jnp.int32)
        row_mask = (row < end)[:, None]
        rows = row[:, None]
        x_tile = plan.load(x.at[rows, x_columns[None]], row_mask, _broadcast_mask(1, x_mask))
        y_tile = plan.load(y.at[rows, y_columns[None]], row_mask, _broadcast_mask(1, y_mask))
        return total + plan.product(x_tile, y_tile, (0, 0))

    steps = jax.lax.div(end - start + plan.inner_tile - 1, plan.inner_tile)
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((_TILE_COLUMNS, _TILE_COLUMNS), jnp.float32))
    mask = _combine_masks((_broadcast_mask(0, x_mask), _broadcast_mask(1, y_mask)))
    plgpu.store(out.at[group, x_columns[:, None], y_columns[None]], total.astype(out.dtype), mask=mask)


# --- calls of the kernels ---


def choose_tile_rows(rows: int, groups: int) -> int:
    """Return the rows of a tile: the mean group rounded up to a power of two, within the limits of a tile."""
    return min(_MAX_TILE_ROWS, max(_MIN_TILE_ROWS, pl.next_power_of_2(-(-rows // groups))))


@functools.partial(jax.jit, static_argnums=0)
def grouped_rows(
    plan: GroupedPlan,
    pairs: tuple[tuple[Shaped[Array, "rows _"], Shaped[Array, "groups _ _"]], ...],
    tiles: Int[Array, "tiles 3"],
) -> Float[Array, "rows outer"]:
    """Return the sum over pairs `(x, w)` of `x[r] @ w[g]`, or of `x[r] @ w[g]'` if `plan.transposed`.

    `tiles`: group, first row, and number of rows of each tile of rows; a tile with 0 or fewer rows is skipped. A group
    that has no weight, because its index is past the last weight, has zeros as its result.
    """
    (x, weight), *_ = pairs
    outer = weight.shape[1 if plan.transposed else 2]
    grid = (-(-outer // _TILE_COLUMNS), tiles.shape[0], 1)
    operands = [array for pair in pairs for array in pair]
    return _call(plan, _rows_kernel, grid, (x.shape[0], outer), tiles, *operands)


@functools.partial(jax.jit, static_argnums=0)
def grouped_columns(
    plan: GroupedPlan,
    x: Shaped[Array, "rows inner"],
    y: Shaped[Array, "rows outer"],
    counts: Int[Array, "groups"],
) -> Float[Array, "groups inner outer"]:
    """Return `x' @ y` over the rows of each group."""
    bounds = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    groups, inner, outer = shape = counts.shape[0], x.shape[1], y.shape[1]
    grid = (-(-inner // _TILE_COLUMNS), -(-outer // _TILE_COLUMNS), groups)
    return _call(plan, _columns_kernel, grid, shape, bounds, x, y)


def _call(
    plan: GroupedPlan, kernel: Callable, grid: tuple[int, int, int], shape: tuple[int, ...], *operands: Array
) -> Array:
    is_small = 0 < plan.tile_rows < 64
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=grid,
        in_specs=[pl.BlockSpec() for _ in operands],
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct(shape, plan.out_dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4 if is_small else 8, num_stages=4 if is_small else 3),
        interpret=plan.interpret,
        name=f"grouped{kernel.__name__}",
    )(*operands)
