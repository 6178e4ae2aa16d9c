"""Grouped products: sorted rows with a weight per group; the rows of one expert stand together, in order of experts.

On TPU this is `jax.lax.ragged_dot`, or a Pallas kernel where XLA has none for it. Elsewhere XLA multiplies every row by
every weight and drops most of it, so there a loop runs over blocks of rows of one group: its work grows with the rows,
not with the number of groups.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32

from eqx_decoders.numerics.matmul import cast_in_loop, cast_weight, matmul, row_major_transpose
from eqx_decoders.numerics.megablox import has_kernel, kernel_columns, kernel_product


BLOCKS = "grouped_blocks"  # name in programs of the loop over blocks: its trips are as many as the rows need


def grouped_arrays(x: Array, weights: tuple[Array, ...], counts: Array, block: int | None) -> tuple[Array, ...]:
    """Multiply sorted rows by several arrays `groups inner outer` at once (`grouped_products`)."""
    return _ragged(x, weights, counts) if block is None else _blocked(block, x, weights, counts)


def block_rows(rows: int, groups: int) -> int:
    """Return the rows of a block: a quarter more than the mean group, so that most groups are one block.

    Where that is above 256, an equal part of it.
    """
    usual = -(-5 * rows // (4 * groups))
    parts = -(-usual // 256)
    return max(8, -(-usual // (8 * parts)) * 8)


def _ragged(x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    # on TPU rows beyond the groups may come out as anything, NaN too; masked on both sides they stay out of gradients
    inside = in_groups(x, counts)
    x, sizes, zero = jnp.where(inside, x, jnp.zeros((), x.dtype)), counts.astype(jnp.int32), jnp.zeros((), x.dtype)
    # products of 16-bit numbers are exact, and TPU's kernel refuses "highest", which a user may have set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None

    def product(weight: Array) -> Array:
        if has_kernel(x.dtype):
            return kernel_product(False, x, weight, sizes)
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


# --- parts of products in 8 bits, and of gradients ---


def of_rows(table: Float[Array, "groups outer"], x: Array, counts: Array) -> Float[Array, "rows outer"]:
    """Return for each row the entry of a table for its group."""
    ends = jnp.cumsum(counts)
    owners = jnp.sum((ends[None] <= jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]), axis=1, dtype=jnp.int32)
    return table.at[owners].get(mode="clip")


def _sums(x: Array) -> np.dtype:
    """Return the dtype in which `jax.lax.ragged_dot` sums."""
    return np.dtype(np.int32 if x.dtype == np.int8 else np.promote_types(x.dtype, np.float32))


def rows_times_groups(block: int | None, x: Array, weight: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Sum each row's products with its group's weight, in f32. Loops multiply 8-bit numbers as `dtype`, exactly."""
    if block is None:
        sizes, sums = counts.astype(jnp.int32), _sums(x)
        out = lax.ragged_dot(x, weight, sizes, preferred_element_type=sums, precision=lax.Precision.DEFAULT)
        return jnp.where(in_groups(x, counts), out, jnp.zeros((), sums)).astype(jnp.float32)
    wide = np.promote_types(dtype, np.float32)
    return _multiply_blocks(block, x.astype(dtype), (weight.astype(dtype),), counts, wide)[0]


def columns_times_rows(block: int | None, x: Array, g: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Compute `x^T g` over the rows of each group, in f32; beyond the groups rows are zero."""
    if block is None and has_kernel(x.dtype):
        return kernel_columns(False, x, g, counts.astype(jnp.int32), jnp.float32)
    if block is None:
        numbers = lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
        )
        sizes, sums = counts.astype(jnp.int32), _sums(x)
        out = lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=sums, precision=lax.Precision.DEFAULT)
        return out.astype(jnp.float32)
    wide, blocks = np.promote_types(dtype, np.float32), _split_blocks(counts, block, x.shape[0])
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
