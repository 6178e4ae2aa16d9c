"""Grouped matrix products: rows sorted by group, and a weight for each group (expert), as in `jax.lax.ragged_dot`.

TPUs use `jax.lax.ragged_dot`, or a Pallas kernel on generations for which XLA has no kernel; GPUs use a Pallas kernel.
On other platforms XLA multiplies every row by every weight, so a loop over tiles of rows of one group is used instead:
its work is proportional to the number of rows, not to rows times groups.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from eqx_decoders.numerics import grouped_matmul_gpu, megablox
from eqx_decoders.numerics.grouped_matmul_gpu import GroupedPlan, grouped_columns, grouped_rows
from eqx_decoders.numerics.matmul import cast_in_loop, cast_weight, matmul, row_major_transpose
from eqx_decoders.sharding.backend import Backend


BLOCKS = "grouped_blocks"  # named scope of the loop over tiles, whose trip count depends on the rows, for FLOP counting


class GroupedForm(NamedTuple):
    """Implementation of grouped products.

    **Arguments:**

    - `kind`: `jax.lax.ragged_dot`; a Pallas kernel for TPU ("megablox") or GPUs ("triton"); or a loop over row tiles
        ("blocks").
    - `block`: rows of a tile of the loop; the input must end with this number of rows that belong to no group. 0 for
        other kinds.
    - `interpret`: whether Pallas kernels are interpreted (for tests on CPUs).
    """

    kind: Literal["ragged_dot", "megablox", "triton", "blocks"]
    block: int = 0
    interpret: bool = False


def choose_form(
    backend: Backend, device: Any, dtype: DTypeLike, *, rows: int, groups: int, largest: int
) -> GroupedForm:
    """Return the implementation for a device.

    **Arguments:**

    - `rows`, `groups`: number of rows, of all groups together, and of groups.
    - `largest`: number of elements of the largest array.
    """
    if backend.pallas_gpu and grouped_matmul_gpu.fits(device, dtype, largest):
        return GroupedForm("triton")
    if backend.grouped_matmul_loop:
        return GroupedForm("blocks", block_rows(rows, groups))
    return GroupedForm("megablox" if megablox.fits(device.device_kind, dtype) else "ragged_dot")


def grouped_arrays(x: Array, weights: tuple[Array, ...], counts: Array, form: GroupedForm) -> tuple[Array, ...]:
    """Multiply sorted rows by several arrays `groups inner outer` (see `grouped_products`)."""
    if form.kind == "triton":
        return _triton(form, x, weights, counts)
    return _tiled(form.block, x, weights, counts) if form.kind == "blocks" else _ragged(form, x, weights, counts)


def block_rows(rows: int, groups: int) -> int:
    """Return the rows of a tile: 1.25x the mean group, so that most groups have one tile; at most 256.

    If 1.25x the mean group is more than 256, that is divided into equal tiles.
    """
    group_rows = -(-5 * rows // (4 * groups))
    tiles = -(-group_rows // 256)
    return max(8, -(-group_rows // (8 * tiles)) * 8)


def _ragged(form: GroupedForm, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    # on TPU, results of rows beyond the groups are undefined, possibly NaN: mask inputs and outputs, and so gradients
    is_in_group = in_groups(x, counts)
    zero = jnp.zeros((), x.dtype)
    x = jnp.where(is_in_group, x, zero)
    sizes = counts.astype(jnp.int32)
    # products of 16-bit floats are exact, and the TPU kernel rejects "highest", which a user may have set globally
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None

    def product(weight: Array) -> Array:
        if form.kind == "megablox":
            return megablox.kernel_product(form.interpret, x, weight, sizes)
        return lax.ragged_dot(x, weight, sizes, precision=precision, preferred_element_type=x.dtype)

    outs = (product(cast_in_loop(w, x.dtype)) for w in weights)
    return tuple(jnp.where(is_in_group, out, zero) for out in outs)


def in_groups(x: Array, counts: Array) -> Bool[Array, "rows 1"]:
    """Return which rows belong to a group."""
    return (jnp.arange(x.shape[0]) < jnp.sum(counts))[:, None]


class _RowTiles(NamedTuple):
    """Tiles of rows in order; each tile has rows of one group only.

    **Arguments:**

    - `number`: number of tiles. The arrays have the maximum number of tiles as their size.
    - `group`, `start`, `size`: group, first row and number of rows of each tile; only the last tile of a group may have
        fewer rows than the others.
    - `is_first`: whether it is the first tile of its group.
    """

    number: Int32[Array, ""]
    group: Int32[Array, "tiles"]
    start: Int32[Array, "tiles"]
    size: Int32[Array, "tiles"]
    is_first: Bool[Array, "tiles"]


def _split_into_tiles(counts: Array, tile_rows: int, rows: int) -> _RowTiles:
    counts = counts.astype(jnp.int32)
    max_tiles = rows // tile_rows + counts.shape[0]
    group_tiles = -(-counts // tile_rows)
    row_ends = jnp.cumsum(counts)
    tile_ends = jnp.cumsum(group_tiles)
    index = jnp.arange(max_tiles, dtype=jnp.int32)
    is_in_group = ((tile_ends - group_tiles)[None] <= index[:, None]) & (index[:, None] < tile_ends[None])

    def by_tile(group_values):
        return jnp.sum(jnp.where(is_in_group, group_values[None], 0), axis=1, dtype=jnp.int32)

    index_in_group = index - by_tile(tile_ends - group_tiles)
    end = by_tile(row_ends)
    start = by_tile(row_ends - counts) + index_in_group * tile_rows
    group = by_tile(jnp.arange(counts.shape[0], dtype=jnp.int32))
    return _RowTiles(tile_ends[-1], group, start, jnp.minimum(end - start, tile_rows), index_in_group == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(tile_rows: int, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    return _tiled_forward(tile_rows, x, weights, counts)[0]


@jax.named_scope(BLOCKS)
def _loop_over_tiles(tiles: _RowTiles, step: Callable[..., Any], start: Any) -> Any:
    return lax.fori_loop(0, tiles.number, step, start)


def _tiled_forward(tile_rows, x, weights, counts):
    cast = tuple(cast_weight(w, x.dtype) for w in weights)
    # empty arrays carry the dtypes of the weights' gradients
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return _multiply_tiles(tile_rows, x, cast, counts, x.dtype), (x, cast, counts, likes)


def _multiply_tiles(
    tile_rows: int,
    x: Array,
    weights: tuple[Any, ...],
    counts: Array,
    dtype: DTypeLike,
    transposed: bool = False,
    frozen: bool = False,
) -> tuple[Array, ...]:
    """Multiply each row by its group's weight, or by the transpose; weights are arrays, or quantized if `frozen`."""
    tiles = _split_into_tiles(counts, tile_rows, x.shape[0])
    inner, outer = (1, 1) if transposed else (0, 2)

    def step(index, outs):
        start = tiles.start[index]
        group = tiles.group[index]
        tile = lax.dynamic_slice_in_dim(x, start, tile_rows)
        group_weights = (w.dequantized_at(group, x.dtype) if frozen else _at(w, group) for w in weights)
        results = (matmul(tile, weight, (1, inner), dtype) for weight in group_weights)
        # rows that a tile writes beyond its group are overwritten by the next tile
        return tuple(
            lax.dynamic_update_slice_in_dim(out, result, start, 0) for out, result in zip(outs, results, strict=True)
        )

    outs = _zeros(counts, 0, *((x.shape[0], w.shape[outer], dtype) for w in weights))
    return _loop_over_tiles(tiles, step, outs)


def _tiled_backward(tile_rows, residuals, gradients):
    x, cast, counts, likes = residuals
    sum_dtype = np.promote_types(x.dtype, np.float32)
    tiles = _split_into_tiles(counts, tile_rows, x.shape[0])

    def step(index, carry):
        x_gradient, weight_gradients, sums = carry
        start = tiles.start[index]
        group = tiles.group[index]
        is_in_tile = (jnp.arange(tile_rows, dtype=jnp.int32) < tiles.size[index])[:, None]
        g_tiles = [lax.dynamic_slice_in_dim(g, start, tile_rows) for g in gradients]
        g_tiles = [jnp.where(is_in_tile, g, jnp.zeros((), g.dtype)) for g in g_tiles]
        terms = [matmul(g, _at(w, group), (1, 1), sum_dtype) for g, w in zip(g_tiles, cast, strict=True)]
        x_tile_gradient = sum(terms[1:], terms[0]).astype(x.dtype)
        x_gradient = lax.dynamic_update_slice_in_dim(x_gradient, x_tile_gradient, start, 0)
        # the sum of a group is carried until its last tile, so that the large array is never read
        columns = row_major_transpose(lax.dynamic_slice_in_dim(x, start, tile_rows))
        previous = (jnp.where(tiles.is_first[index], jnp.zeros((), sum_dtype), s) for s in sums)
        sums = tuple(s + matmul(columns, g, (1, 0), sum_dtype) for s, g in zip(previous, g_tiles, strict=True))
        weight_gradients = tuple(
            lax.dynamic_update_index_in_dim(w, s.astype(w.dtype), group, 0)
            for w, s in zip(weight_gradients, sums, strict=True)
        )
        return x_gradient, weight_gradients, sums

    weight_shapes = ((*w.shape, like.dtype) for w, like in zip(cast, likes, strict=True))
    zeros = _zeros(counts, 8, (*x.shape, x.dtype), *weight_shapes)  # 8: none of the indices of the forward pass
    carry = zeros[0], zeros[1:], tuple(jnp.zeros(w.shape[1:], sum_dtype) for w in cast)
    x_gradient, weight_gradients, _ = _loop_over_tiles(tiles, step, carry)
    return x_gradient, weight_gradients, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


# --- Pallas kernels for GPUs ---


def _triton_rows(
    form: GroupedForm,
    pairs: tuple[tuple[Array, Array], ...],
    counts: Array,
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    transposed: bool = False,
) -> Array:
    """Run `grouped_rows`. Rows of no group are an additional group without a weight, so their results are zeros."""
    rows = pairs[0][0].shape[0]
    counts = counts.astype(jnp.int32)
    tile_rows = grouped_matmul_gpu.choose_tile_rows(rows, counts.shape[0])
    tiles = _split_into_tiles(jnp.append(counts, rows - jnp.sum(counts)), tile_rows, rows)
    plan = GroupedPlan(np.dtype(dtype), np.dtype(out_dtype), tile_rows, transposed, form.interpret)
    return grouped_rows(plan, pairs, jnp.stack([tiles.group, tiles.start, tiles.size], axis=1))


def _triton_columns(
    form: GroupedForm, x: Array, y: Array, counts: Array, dtype: DTypeLike, out_dtype: DTypeLike
) -> Array:
    plan = GroupedPlan(np.dtype(dtype), np.dtype(out_dtype), interpret=form.interpret)
    return grouped_columns(plan, x, y, counts.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _triton(form: GroupedForm, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    return _triton_forward(form, x, weights, counts)[0]


def _triton_forward(form, x, weights, counts):
    cast = tuple(cast_in_loop(w, x.dtype) for w in weights)
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    outs = tuple(_triton_rows(form, ((x, w),), counts, x.dtype, x.dtype) for w in cast)
    return outs, (x, cast, counts, likes)


def _triton_backward(form, residuals, gradients):
    x, cast, counts, likes = residuals
    pairs = tuple(zip(gradients, cast, strict=True))
    x_gradient = _triton_rows(form, pairs, counts, x.dtype, x.dtype, transposed=True)
    weight_gradients = tuple(
        _triton_columns(form, x, g, counts, x.dtype, like.dtype) for g, like in zip(gradients, likes, strict=True)
    )
    return x_gradient, weight_gradients, None


_triton.defvjp(_triton_forward, _triton_backward)


# --- frozen weights, which are dequantized group by group ---


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_frozen(tile_rows: int, x: Array, weight: Any, counts: Array) -> Array:
    """Multiply sorted rows by a quantized weight; `weight.dequantized_at` dequantizes the weight of one group."""
    return _multiply_tiles(tile_rows, x, (weight,), counts, x.dtype, frozen=True)[0]


def _frozen_backward(tile_rows, residuals, g):
    weight, counts = residuals
    g = jnp.where(in_groups(g, counts), g, jnp.zeros((), g.dtype))
    return _multiply_tiles(tile_rows, g, (weight,), counts, g.dtype, transposed=True, frozen=True)[0], None, None


def _frozen_forward(tile_rows, x, weight, counts):
    return grouped_frozen(tile_rows, x, weight, counts), (weight, counts)


grouped_frozen.defvjp(_frozen_forward, _frozen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_scaled(form: GroupedForm, x: Array, values: Array, scales: Array, counts: Array) -> Array:
    """Multiply sorted rows by frozen 8-bit values with column scales `groups outer`, with the kernels for GPUs.

    The kernels read the 8-bit values directly, without a dequantized copy. The scales multiply the result.
    """
    return (rows_times_groups(form, x, values, counts, x.dtype) * of_rows(scales, x, counts)).astype(x.dtype)


def _scaled_forward(form, x, values, scales, counts):
    return grouped_scaled(form, x, values, scales, counts), (values, scales, counts)


def _scaled_backward(form, residuals, g):
    values, scales, counts = residuals
    scaled = (g * of_rows(scales, g, counts)).astype(g.dtype)
    return rows_times_groups(form, scaled, values, counts, g.dtype, transposed=True).astype(g.dtype), None, None, None


grouped_scaled.defvjp(_scaled_forward, _scaled_backward)


# --- building blocks of 8-bit products and of gradients ---


def of_rows(table: Float[Array, "groups outer"], x: Array, counts: Array) -> Float[Array, "rows outer"]:
    """Return the row of a table for the group of each row of `x`."""
    ends = jnp.cumsum(counts)
    groups = jnp.sum((ends[None] <= jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]), axis=1, dtype=jnp.int32)
    return table.at[groups].get(mode="clip")


def _sum_dtype(x: Array) -> np.dtype:
    """Return the dtype in which `jax.lax.ragged_dot` accumulates."""
    return np.dtype(np.int32 if x.dtype == np.int8 else np.promote_types(x.dtype, np.float32))


def rows_times_groups(
    form: GroupedForm, x: Array, weight: Array, counts: Array, dtype: DTypeLike, *, transposed: bool = False
) -> Array:
    """Multiply each row by its group's weight, or by the transpose; the result is float32.

    All implementations except `jax.lax.ragged_dot` convert 8-bit values to `dtype`, which is exact.
    """
    if form.kind == "triton":
        return _triton_rows(form, ((x, weight),), counts, dtype, jnp.float32, transposed)
    if form.kind == "megablox":
        operands = x.astype(dtype), weight.astype(dtype), counts.astype(jnp.int32)
        out = megablox.multiply_rows(form.interpret, *operands, jnp.float32, transposed=transposed)
        return jnp.where(in_groups(x, counts), out, jnp.zeros((), out.dtype))
    weight = weight.transpose(0, 2, 1) if transposed else weight
    if form.kind == "ragged_dot":
        sizes = counts.astype(jnp.int32)
        sum_dtype = _sum_dtype(x)
        out = lax.ragged_dot(x, weight, sizes, preferred_element_type=sum_dtype, precision=lax.Precision.DEFAULT)
        return jnp.where(in_groups(x, counts), out, jnp.zeros((), sum_dtype)).astype(jnp.float32)
    sum_dtype = np.promote_types(dtype, np.float32)
    return _multiply_tiles(form.block, x.astype(dtype), (weight.astype(dtype),), counts, sum_dtype)[0]


def columns_times_rows(form: GroupedForm, x: Array, g: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Return `x^T g` over the rows of each group, in float32; rows that belong to no group must be zeros."""
    if form.kind == "triton":
        return _triton_columns(form, x, g, counts, dtype, jnp.float32)
    if form.kind == "megablox":
        operands = x.astype(dtype), g.astype(dtype), counts.astype(jnp.int32)
        return megablox.kernel_columns(form.interpret, *operands, jnp.float32)
    if form.kind == "ragged_dot":
        dimensions = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        sizes = counts.astype(jnp.int32)
        precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None  # products of 8 and 16 bits are exact
        out = lax.ragged_dot_general(x, g, sizes, dimensions, preferred_element_type=_sum_dtype(x), precision=precision)
        return out.astype(jnp.float32)
    tile_rows = form.block
    sum_dtype = np.promote_types(dtype, np.float32)
    tiles = _split_into_tiles(counts, tile_rows, x.shape[0])
    x = x.astype(dtype)
    g = g.astype(dtype)

    def step(index, carry):
        total, group_sum = carry
        start = tiles.start[index]
        group = tiles.group[index]
        is_in_tile = (jnp.arange(tile_rows, dtype=jnp.int32) < tiles.size[index])[:, None]
        g_tile = lax.dynamic_slice_in_dim(g, start, tile_rows)
        g_tile = jnp.where(is_in_tile, g_tile, jnp.zeros((), dtype))
        group_sum = jnp.where(tiles.is_first[index], jnp.zeros((), sum_dtype), group_sum)
        group_sum = group_sum + matmul(lax.dynamic_slice_in_dim(x, start, tile_rows), g_tile, (0, 0), sum_dtype)
        return lax.dynamic_update_index_in_dim(total, group_sum, group, 0), group_sum

    shape = x.shape[1], g.shape[1]
    carry = _zeros(counts, 8, (len(counts), *shape, sum_dtype))[0], jnp.zeros(shape, sum_dtype)
    return _loop_over_tiles(tiles, step, carry)[0]


def _at(weights: Float[Array, "groups inner outer"], group: Int32[Array, ""]) -> Float[Array, "inner outer"]:
    return lax.dynamic_index_in_dim(weights, group, keepdims=False)


def _zeros(counts: Array, first_index: int, *arrays: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return arrays of zeros, each given as `(*shape, dtype)`.

    XLA would create one constant and copy it for each use, which takes twice as long. So each array is a broadcast of
    another expression that is always 0, `counts[0] < -index` with different indices from `first_index` on.
    """
    scalars = ((counts[0] < -index).astype(dtype) for index, (*_, dtype) in enumerate(arrays, first_index))
    return tuple(jnp.broadcast_to(scalar, shape) for scalar, (*shape, _) in zip(scalars, arrays, strict=True))
