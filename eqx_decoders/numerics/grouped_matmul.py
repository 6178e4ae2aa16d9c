"""Grouped products: sorted rows with a weight per group; the rows of one expert stand together, in order of experts.

On TPU this is `jax.lax.ragged_dot`, or a Pallas kernel where XLA has none for it; on GPUs a Pallas kernel. Elsewhere
XLA multiplies every row by every weight and drops most of it, so there a loop runs over blocks of rows of one group:
its work grows with the rows, not with the number of groups.
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


BLOCKS = "grouped_blocks"  # name in programs of the loop over blocks: its trips are as many as the rows need


class GroupedForm(NamedTuple):
    """How sorted rows are multiplied.

    **Arguments:**

    - `kind`: `jax.lax.ragged_dot`; a Pallas kernel for TPU ("megablox") or GPUs ("triton"); or a loop over blocks.
    - `block`: rows of a block of the loop, after whose rows of all groups so many follow that belong to none; else 0.
    - `interpret`: whether kernels are interpreted.
    """

    kind: Literal["ragged_dot", "megablox", "triton", "blocks"]
    block: int = 0
    interpret: bool = False


def choose_form(
    backend: Backend, device: Any, dtype: DTypeLike, *, rows: int, groups: int, largest: int
) -> GroupedForm:
    """Choose the form that suits a device, for groups of so many rows, and arrays of at most `largest` elements."""
    if backend.pallas_gpu and grouped_matmul_gpu.fits(device, dtype, largest):
        return GroupedForm("triton")
    if backend.expert_blocks:
        return GroupedForm("blocks", block_rows(rows, groups))
    return GroupedForm("megablox" if megablox.fits(device.device_kind, dtype) else "ragged_dot")


def grouped_arrays(x: Array, weights: tuple[Array, ...], counts: Array, form: GroupedForm) -> tuple[Array, ...]:
    """Multiply sorted rows by several arrays `groups inner outer` at once (`grouped_products`)."""
    if form.kind == "triton":
        return _by_triton(form, x, weights, counts)
    return _blocked(form.block, x, weights, counts) if form.kind == "blocks" else _ragged(form, x, weights, counts)


def block_rows(rows: int, groups: int) -> int:
    """Return the rows of a block: a quarter more than the mean group, so that most groups are one block.

    Where that is above 256, an equal part of it.
    """
    usual = -(-5 * rows // (4 * groups))
    parts = -(-usual // 256)
    return max(8, -(-usual // (8 * parts)) * 8)


def _ragged(form: GroupedForm, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    # on TPU rows beyond the groups may come out as anything, NaN too; masked on both sides they stay out of gradients
    inside = in_groups(x, counts)
    x, sizes, zero = jnp.where(inside, x, jnp.zeros((), x.dtype)), counts.astype(jnp.int32), jnp.zeros((), x.dtype)
    # products of 16-bit numbers are exact, and TPU's kernel refuses "highest", which a user may have set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None

    def product(weight: Array) -> Array:
        if form.kind == "megablox":
            return megablox.kernel_product(form.interpret, x, weight, sizes)
        return lax.ragged_dot(x, weight, sizes, precision=precision, preferred_element_type=x.dtype)

    outs = (product(cast_in_loop(w, x.dtype)) for w in weights)
    return tuple(jnp.where(inside, out, zero) for out in outs)


def in_groups(x: Array, counts: Array) -> Bool[Array, "rows 1"]:
    """Return which rows belong to a group."""
    return (jnp.arange(x.shape[0]) < jnp.sum(counts))[:, None]


class _Blocks(NamedTuple):
    """Blocks of rows, none of which spans two groups, in the order of their rows.

    **Arguments:**

    - `number`: number of blocks; the arrays have room for as many as there may be.
    - `group`, `begin`, `size`: each block's group, first row and rows; only a group's last block has less than all.
    - `first`: whether it is its group's first.
    """

    number: Int32[Array, ""]
    group: Int32[Array, "blocks"]
    begin: Int32[Array, "blocks"]
    size: Int32[Array, "blocks"]
    first: Bool[Array, "blocks"]


def _split_blocks(counts: Array, block: int, rows: int) -> _Blocks:
    counts = counts.astype(jnp.int32)
    room = rows // block + counts.shape[0]
    each = -(-counts // block)
    ends, last = jnp.cumsum(counts), jnp.cumsum(each)
    index = jnp.arange(room, dtype=jnp.int32)
    mine = ((last - each)[None] <= index[:, None]) & (index[:, None] < last[None])  # whose block it is

    def of(values):
        return jnp.sum(jnp.where(mine, values[None], 0), axis=1, dtype=jnp.int32)

    nth, end = index - of(last - each), of(ends)
    begin = of(ends - counts) + nth * block
    group = of(jnp.arange(counts.shape[0], dtype=jnp.int32))
    return _Blocks(last[-1], group, begin, jnp.minimum(end - begin, block), nth == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block: int, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    return _blocked_forward(block, x, weights, counts)[0]


@jax.named_scope(BLOCKS)
def _over_blocks(blocks: Any, step: Callable[..., Any], start: Any) -> Any:
    return lax.fori_loop(0, blocks.number, step, start)


def _blocked_forward(block, x, weights, counts):
    cast = tuple(cast_weight(w, x.dtype) for w in weights)
    # empty arrays carry the dtypes of the weights' gradients
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return _multiply_blocks(block, x, cast, counts, x.dtype), (x, cast, counts, likes)


def _multiply_blocks(
    block: int,
    x: Array,
    weights: tuple[Any, ...],
    counts: Array,
    dtype: DTypeLike,
    transposed: bool = False,
    frozen: bool = False,
) -> tuple[Array, ...]:
    """Multiply each row by its group's weight, or by its transpose; weights are arrays, or `frozen` ones."""
    blocks, inner, outer = _split_blocks(counts, block, x.shape[0]), *((1, 1) if transposed else (0, 2))

    def step(index, outs):
        begin, group = blocks.begin[index], blocks.group[index]
        piece = lax.dynamic_slice_in_dim(x, begin, block)
        of_group = (w.widened_at(group, x.dtype) if frozen else _at(w, group) for w in weights)
        news = (matmul(piece, weight, (1, inner), dtype) for weight in of_group)
        # what a block writes beyond its group, the next one overwrites
        return tuple(lax.dynamic_update_slice_in_dim(o, new, begin, 0) for o, new in zip(outs, news, strict=True))

    start = _zeros(counts, 0, *((x.shape[0], w.shape[outer], dtype) for w in weights))
    return _over_blocks(blocks, step, start)


def _blocked_backward(block, saved, gradients):
    x, cast, counts, likes = saved
    wide, blocks = np.promote_types(x.dtype, np.float32), _split_blocks(counts, block, x.shape[0])

    def step(index, carry):
        to_x, to_weights, sums = carry
        begin, group = blocks.begin[index], blocks.group[index]
        inside = (jnp.arange(block, dtype=jnp.int32) < blocks.size[index])[:, None]
        pieces = [lax.dynamic_slice_in_dim(g, begin, block) for g in gradients]
        pieces = [jnp.where(inside, g, jnp.zeros((), g.dtype)) for g in pieces]
        parts = [matmul(g, _at(w, group), (1, 1), wide) for g, w in zip(pieces, cast, strict=True)]
        to_x = lax.dynamic_update_slice_in_dim(to_x, sum(parts[1:], parts[0]).astype(x.dtype), begin, 0)
        # a group's sum stays separate until its last block: nothing is read back from the large array
        columns = row_major_transpose(lax.dynamic_slice_in_dim(x, begin, block))
        so_far = (jnp.where(blocks.first[index], jnp.zeros((), wide), s) for s in sums)
        sums = tuple(s + matmul(columns, g, (1, 0), wide) for s, g in zip(so_far, pieces, strict=True))
        news = zip(to_weights, sums, strict=True)
        return to_x, tuple(lax.dynamic_update_index_in_dim(w, s.astype(w.dtype), group, 0) for w, s in news), sums

    kinds = (*x.shape, x.dtype), *((*w.shape, like.dtype) for w, like in zip(cast, likes, strict=True))
    zeros = _zeros(counts, 8, *kinds)  # other numbers than the forward pass has
    start = zeros[0], zeros[1:], tuple(jnp.zeros(w.shape[1:], wide) for w in cast)
    to_x, to_weights, _ = _over_blocks(blocks, step, start)
    return to_x, to_weights, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


# --- by the kernels for GPUs ---


def _triton_rows(
    form: GroupedForm,
    pairs: tuple[tuple[Array, Array], ...],
    counts: Array,
    dtype: DTypeLike,
    result: DTypeLike,
    transposed: bool = False,
) -> Array:
    """Compute `grouped_rows`, with zeros for rows of no group: one more group without a weight has them."""
    rows, counts = pairs[0][0].shape[0], counts.astype(jnp.int32)
    block = grouped_matmul_gpu.block_size(rows, counts.shape[0])
    split = _split_blocks(jnp.append(counts, rows - jnp.sum(counts)), block, rows)
    plan = GroupedPlan(np.dtype(dtype), np.dtype(result), block, transposed, form.interpret)
    return grouped_rows(plan, pairs, jnp.stack([split.group, split.begin, split.size], axis=1))


def _triton_columns(form: GroupedForm, x: Array, y: Array, counts: Array, dtype: DTypeLike, result: DTypeLike) -> Array:
    plan = GroupedPlan(np.dtype(dtype), np.dtype(result), interpret=form.interpret)
    return grouped_columns(plan, x, y, counts.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_triton(form: GroupedForm, x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    return _by_triton_forward(form, x, weights, counts)[0]


def _by_triton_forward(form, x, weights, counts):
    cast = tuple(cast_in_loop(w, x.dtype) for w in weights)
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    outs = tuple(_triton_rows(form, ((x, w),), counts, x.dtype, x.dtype) for w in cast)
    return outs, (x, cast, counts, likes)


def _by_triton_backward(form, saved, gradients):
    x, cast, counts, likes = saved
    to_x = _triton_rows(form, tuple(zip(gradients, cast, strict=True)), counts, x.dtype, x.dtype, transposed=True)
    pairs = zip(gradients, likes, strict=True)
    return to_x, tuple(_triton_columns(form, x, g, counts, x.dtype, like.dtype) for g, like in pairs), None


_by_triton.defvjp(_by_triton_forward, _by_triton_backward)


# --- frozen weights, which are widened group by group ---


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_frozen(block: int, x: Array, weight: Any, counts: Array) -> Array:
    """Multiply sorted rows by a weight without a gradient, of which `widened_at` gives one group as an array."""
    return _multiply_blocks(block, x, (weight,), counts, x.dtype, frozen=True)[0]


def _frozen_backward(block, saved, g):
    weight, counts = saved
    g = jnp.where(in_groups(g, counts), g, jnp.zeros((), g.dtype))
    return _multiply_blocks(block, g, (weight,), counts, g.dtype, transposed=True, frozen=True)[0], None, None


def _frozen_forward(block, x, weight, counts):
    return grouped_frozen(block, x, weight, counts), (weight, counts)


grouped_frozen.defvjp(_frozen_forward, _frozen_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_scaled(form: GroupedForm, x: Array, values: Array, scales: Array, counts: Array) -> Array:
    """Multiply sorted rows by 8-bit numbers without a gradient, whose columns' scales `groups outer` multiply results.

    By the kernels for GPUs: no wide copy of the numbers is made.
    """
    return (rows_times_groups(form, x, values, counts, x.dtype) * of_rows(scales, x, counts)).astype(x.dtype)


def _scaled_forward(form, x, values, scales, counts):
    return grouped_scaled(form, x, values, scales, counts), (values, scales, counts)


def _scaled_backward(form, saved, g):
    values, scales, counts = saved
    scaled = (g * of_rows(scales, g, counts)).astype(g.dtype)
    return rows_times_groups(form, scaled, values, counts, g.dtype, transposed=True).astype(g.dtype), None, None, None


grouped_scaled.defvjp(_scaled_forward, _scaled_backward)


# --- parts of products in 8 bits, and of gradients ---


def of_rows(table: Float[Array, "groups outer"], x: Array, counts: Array) -> Float[Array, "rows outer"]:
    """Return for each row the entry of a table for its group."""
    ends = jnp.cumsum(counts)
    owners = jnp.sum((ends[None] <= jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]), axis=1, dtype=jnp.int32)
    return table.at[owners].get(mode="clip")


def _sums(x: Array) -> np.dtype:
    """Return the dtype in which `jax.lax.ragged_dot` sums."""
    return np.dtype(np.int32 if x.dtype == np.int8 else np.promote_types(x.dtype, np.float32))


def rows_times_groups(
    form: GroupedForm, x: Array, weight: Array, counts: Array, dtype: DTypeLike, *, transposed: bool = False
) -> Array:
    """Sum each row's products with its group's weight, or with its transpose, in f32.

    Loops and kernels for GPUs multiply 8-bit numbers as `dtype`, exactly.
    """
    if form.kind == "triton":
        return _triton_rows(form, ((x, weight),), counts, dtype, jnp.float32, transposed)
    weight = weight.transpose(0, 2, 1) if transposed else weight
    if form.kind != "blocks":
        sizes, sums = counts.astype(jnp.int32), _sums(x)
        out = lax.ragged_dot(x, weight, sizes, preferred_element_type=sums, precision=lax.Precision.DEFAULT)
        return jnp.where(in_groups(x, counts), out, jnp.zeros((), sums)).astype(jnp.float32)
    wide = np.promote_types(dtype, np.float32)
    return _multiply_blocks(form.block, x.astype(dtype), (weight.astype(dtype),), counts, wide)[0]


def columns_times_rows(form: GroupedForm, x: Array, g: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Compute `x^T g` over the rows of each group, in f32; beyond the groups rows are zero."""
    if form.kind == "triton":
        return _triton_columns(form, x, g, counts, dtype, jnp.float32)
    if form.kind == "megablox" and megablox.multiplies(x.dtype):
        return megablox.kernel_columns(form.interpret, x, g, counts.astype(jnp.int32), jnp.float32)
    if form.kind != "blocks":
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        sizes, sums = counts.astype(jnp.int32), _sums(x)
        precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None  # of 16 bits and 8 all is exact
        out = lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=sums, precision=precision)
        return out.astype(jnp.float32)
    block, wide = form.block, np.promote_types(dtype, np.float32)
    blocks = _split_blocks(counts, block, x.shape[0])
    x, g = x.astype(dtype), g.astype(dtype)

    def step(index, carry):
        total, group_sum = carry
        begin, group = blocks.begin[index], blocks.group[index]
        inside = (jnp.arange(block, dtype=jnp.int32) < blocks.size[index])[:, None]
        piece = lax.dynamic_slice_in_dim(g, begin, block)
        piece = jnp.where(inside, piece, jnp.zeros((), dtype))
        group_sum = jnp.where(blocks.first[index], jnp.zeros((), wide), group_sum)
        group_sum = group_sum + matmul(lax.dynamic_slice_in_dim(x, begin, block), piece, (0, 0), wide)
        return lax.dynamic_update_index_in_dim(total, group_sum, group, 0), group_sum

    shape = x.shape[1], g.shape[1]
    start = _zeros(counts, 8, (len(counts), *shape, wide))[0], jnp.zeros(shape, wide)
    return _over_blocks(blocks, step, start)[0]


def _at(weights: Float[Array, "groups inner outer"], group: Int32[Array, ""]) -> Float[Array, "inner outer"]:
    return lax.dynamic_index_in_dim(weights, group, keepdims=False)


def _zeros(counts: Array, first: int, *kinds: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return zeros of each shape and dtype, the first of them called number `first`.

    XLA would make equal constants once and copy them, which takes twice as long. No count is negative, but XLA doesn't
    know.
    """
    numbers = ((counts[0] < -index).astype(dtype) for index, (*_, dtype) in enumerate(kinds, first))
    return tuple(jnp.broadcast_to(number, shape) for number, (*shape, _) in zip(numbers, kinds, strict=True))
