"""Grouped products in Pallas kernels for NVIDIA's GPUs, by Triton.

    rows:     out[r] = sum over pairs of x[r] @ w[g],  or of x[r] @ w[g]'  for the gradient by rows
    columns:  out[g] = x[rows of g]' @ y[rows of g]    for the gradient by weights

A program of `rows` has a block of rows of one group and a tile of its results; blocks begin where groups do, so that
no row is multiplied twice. One of `columns` has a tile of one group's result, and goes through the group's rows. Rows
of no group are never read, and their results are zero. Numbers of 8 bits are widened as they are read.
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


pl, plgpu = LazyModule("jax.experimental.pallas"), LazyModule("jax.experimental.pallas.triton")  # slow to import

KERNELS = "grouped_rows", "grouped_columns"  # names in programs
_DTYPES = jnp.bfloat16, jnp.float16, jnp.float32  # of products
_MOST = 2**31  # elements of an array: places are counted in 32 bits
_ROWS = 16, 128  # of a block of one group
_TILE = 128  # columns of a tile of results
_SUMMED = 128  # bytes of a tile along the summed dimension


def fits(device: Any, dtype: DTypeLike, largest: int) -> bool:
    """Return whether a device has these kernels for products in a dtype, of arrays of at most `largest` elements."""
    return has_kernels(compute_capability(device)) and jnp.dtype(dtype) in _DTYPES and largest < _MOST


class GroupedPlan(NamedTuple):
    """Static description of a call.

    **Arguments:**

    - `dtype`, `result`: of products, and of results.
    - `block`: rows of a block of one group, of which one program makes results; 0 where a group is not cut.
    - `transposed`: whether weights are `groups outer summed`.
    - `interpret`: whether the kernel is interpreted.
    """

    dtype: np.dtype
    result: np.dtype
    block: int = 0
    transposed: bool = False
    interpret: bool = False

    @property
    def summed(self) -> int:
        """Size of a tile along the summed dimension."""
        return _SUMMED // self.dtype.itemsize

    def product(self, left: Array, right: Array, axes: tuple[int, int]) -> Float32[Array, "rows columns"]:
        """Multiply two tiles in f32. Products of 16-bit numbers are exact, whatever precision is the default."""
        precision = jax.lax.Precision.DEFAULT if self.dtype.itemsize < 4 else None
        numbers = ((axes[:1], axes[1:]), ((), ()))
        return jax.lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=jnp.float32)

    def read(self, tile: Any, *masks: Array | None) -> Array:
        """Read a tile as the dtype of products; zeros where it is masked."""
        mask, narrow = _all_of(masks), tile.dtype.itemsize == 1
        read = plgpu.load(tile, mask=mask, other=None if mask is None or narrow else 0)
        if not narrow:
            return read.astype(self.dtype)
        wide = read.astype(jnp.float32).astype(self.dtype)  # as Triton widens short floats, which have no zero to load
        return wide if mask is None else jnp.where(mask, wide, jnp.zeros((), self.dtype))


def _all_of(masks: tuple[Array | None, ...]) -> Array | None:
    there = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, there) if there else None


def _tile(at: Any, size: int, total: int) -> tuple[Int32[Array, "tile"], Bool[Array, "tile"] | None]:
    """Return the places of a tile in a dimension, and which of them there are; None: all."""
    places = at * size + jnp.arange(size, dtype=jnp.int32)
    return places, None if total % size == 0 else places < total


def _over(axis: int, mask: Array | None) -> Array | None:
    """Spread a mask of rows (0) or columns (1) over a tile."""
    return None if mask is None else jnp.expand_dims(mask, 1 - axis)


# --- the kernels ---


def _rows_kernel(plan: GroupedPlan, blocks: Any, *refs: Any) -> None:
    *operands, out = refs
    group, begin, size = (blocks[pl.program_id(1), i] for i in range(3))
    row = jnp.arange(plan.block, dtype=jnp.int32)
    columns, there = _tile(pl.program_id(0), _TILE, out.shape[1])
    total = jnp.zeros((plan.block, _TILE), jnp.float32)
    for x, weight in zip(operands[::2], operands[1::2], strict=True):
        # what is read beyond the block is not written
        places = jnp.minimum(begin + row, x.shape[0] - 1)[:, None]

        def add(step, total, x=x, weight=weight, places=places):
            summed, real = _tile(step, plan.summed, x.shape[1])
            left = plan.read(x.at[places, summed[None]], _over(1, real))
            if plan.transposed:
                part = weight.at[group, columns[:, None], summed[None]]
                return total + plan.product(left, plan.read(part, _over(0, there), _over(1, real)), (1, 1))
            part = weight.at[group, summed[:, None], columns[None]]
            return total + plan.product(left, plan.read(part, _over(0, real), _over(1, there)), (1, 0))

        has_weight = (size > 0) & (group < weight.shape[0])
        steps = has_weight.astype(jnp.int32) * -(-x.shape[1] // plan.summed)
        total = jax.lax.fori_loop(0, steps, add, total)
    mask = _all_of(((row < size)[:, None], _over(1, there)))
    plgpu.store(out.at[(begin + row)[:, None], columns[None]], total.astype(out.dtype), mask=mask)


def _columns_kernel(plan: GroupedPlan, ends: Any, x: Any, y: Any, out: Any) -> None:
    group = pl.program_id(2)
    begin, end = ends[group], ends[group + 1]
    (left, of_left), (right, of_right) = (_tile(pl.program_id(i), _TILE, ref.shape[1]) for i, ref in enumerate((x, y)))

    def add(step, total):
        row = begin + step * plan.summed + jnp.arange(plan.summed, dtype=jnp.int32)
        inside, places = (row < end)[:, None], row[:, None]
        of_x = plan.read(x.at[places, left[None]], inside, _over(1, of_left))
        return total + plan.product(of_x, plan.read(y.at[places, right[None]], inside, _over(1, of_right)), (0, 0))

    steps = jax.lax.div(end - begin + plan.summed - 1, plan.summed)
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((_TILE, _TILE), jnp.float32))
    mask = _all_of((_over(0, of_left), _over(1, of_right)))
    plgpu.store(out.at[group, left[:, None], right[None]], total.astype(out.dtype), mask=mask)


# --- their calls ---


def block_size(rows: int, groups: int) -> int:
    """Return the rows of a block: a power of two about the mean group, within what a tile may have."""
    least, most = _ROWS
    return min(most, max(least, pl.next_power_of_2(-(-rows // groups))))


@functools.partial(jax.jit, static_argnums=0)
def grouped_rows(
    plan: GroupedPlan,
    pairs: tuple[tuple[Shaped[Array, "rows _"], Shaped[Array, "groups _ _"]], ...],
    blocks: Int[Array, "blocks 3"],
) -> Float[Array, "rows outer"]:
    """Compute the sum over pairs of `x[r] @ w[g]`, or of `x[r] @ w[g]'`.

    `blocks` has of each block the group, the first row, and the number of rows; below 1 there are none. Rows of a group
    beyond the last become zero.
    """
    (x, weight), *_ = pairs
    outer = weight.shape[1 if plan.transposed else 2]
    grid, shape = (-(-outer // _TILE), blocks.shape[0], 1), (x.shape[0], outer)
    return _call(plan, _rows_kernel, grid, shape, blocks, *(array for pair in pairs for array in pair))


@functools.partial(jax.jit, static_argnums=0)
def grouped_columns(
    plan: GroupedPlan,
    x: Shaped[Array, "rows inner"],
    y: Shaped[Array, "rows outer"],
    counts: Int[Array, "groups"],
) -> Float[Array, "groups inner outer"]:
    """Compute `x' @ y` over the rows of each group."""
    ends = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    groups, inner, outer = shape = counts.shape[0], x.shape[1], y.shape[1]
    return _call(plan, _columns_kernel, (-(-inner // _TILE), -(-outer // _TILE), groups), shape, ends, x, y)


def _call(
    plan: GroupedPlan, kernel: Callable, grid: tuple[int, int, int], shape: tuple[int, ...], *operands: Array
) -> Array:
    small = 0 < plan.block < 64
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid=grid,
        in_specs=[pl.BlockSpec() for _ in operands],
        out_specs=pl.BlockSpec(),
        out_shape=jax.ShapeDtypeStruct(shape, plan.result),
        compiler_params=plgpu.CompilerParams(num_warps=4 if small else 8, num_stages=4 if small else 3),
        interpret=plan.interpret,
        name=f"grouped{kernel.__name__}",
    )(*operands)
