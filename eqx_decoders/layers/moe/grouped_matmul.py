"""Grouped products: sorted rows with a weight per group; the rows of one expert stand together, in order of experts.

On TPU this is `jax.lax.ragged_dot`, or a Pallas kernel where XLA has none for it. Elsewhere XLA multiplies every row by
every weight and drops most of it, so there a loop runs over blocks of rows of one group: its work grows with the rows,
not with the number of groups.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int32

from eqx_decoders.layers.moe.megablox import has_kernel, kernel_product
from eqx_decoders.numerics.low_precision import LowPrecision, Rounded, quantize_array, seeds_of
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.matmul import cast_in_loop, cast_weight, matmul, row_major_transpose
from eqx_decoders.numerics.quantized_weight import QuantizedWeight


def grouped_products(
    x: Float[Array, "rows inner"],
    weights: tuple[Array | LowRank | Rounded | QuantizedWeight, ...],
    counts: Int[Array, "groups"],
    *,
    block: int | None,
) -> tuple[Float[Array, "rows outer"], ...]:
    """Compute `x[r] @ weight[g]` for every row r of every group g, with each of some weights `groups inner outer`.

    Rows are sorted by group; `counts` has the number of rows of each. Rows beyond their sum may hold anything, and
    results and gradients do so there. Weights are cast to the dtype of `x` at their use; sums are accumulated in f32
    (at least).

    `block` is the number of rows multiplied at a time, and the last `block` rows must belong to no group. None is
    `jax.lax.ragged_dot` or a kernel in its place, which is what a TPU wants and needs no such rows. Each column of a
    group has a scale of its own if the weight is rounded; gradients have one for a column of all groups. A quantized
    weight is widened group by group.
    """
    bases = tuple(lax.stop_gradient(w.base) if isinstance(w, LowRank) else w for w in weights)
    plain = tuple(w for w in bases if not isinstance(w, Rounded | QuantizedWeight))
    floats = iter((_ragged(x, plain, counts) if block is None else _blocked(block, x, plain, counts)) if plain else ())
    outs: tuple[Any, ...] = tuple(_in_bits(block, x, w, counts, floats) for w in bases)
    return tuple(
        out + _low_rank_update(x, w, counts, block) if isinstance(w, LowRank) else out
        for out, w in zip(outs, weights, strict=True)
    )


def _in_bits(block: int | None, x: Array, weight: Any, counts: Array, floats: Iterator[Array]) -> Array:
    """Multiply by a rounded or quantized weight; for another one return the next of `floats`."""
    if isinstance(weight, Rounded):
        return _rounded(block, weight.config, x, weight.array, weight.seed, counts)
    if not isinstance(weight, QuantizedWeight):
        return next(floats)
    if block is None:
        return _ragged(x, (weight.dequantized(x.dtype),), counts)[0]
    return _quantized(block, x, lax.stop_gradient(weight), counts)


def block_rows(rows: int, groups: int) -> int:
    """Return the rows of a block: a quarter more than the mean group, so that most groups are one block.

    Where that is above 256, an equal part of it.
    """
    usual = -(-5 * rows // (4 * groups))
    parts = -(-usual // 256)
    return max(8, -(-usual // (8 * parts)) * 8)


def _low_rank_update(x: Array, weight: LowRank, counts: Array, block: int | None) -> Array:
    """Compute `scale (x lora_a) lora_b`."""
    (low,) = grouped_products(x, (weight.lora_a,), counts, block=block)
    return grouped_products(weight.scale * low, (weight.lora_b,), counts, block=block)[0]


def _ragged(x: Array, weights: tuple[Array, ...], counts: Array) -> tuple[Array, ...]:
    # on TPU rows beyond the groups may come out as anything, NaN too; masked on both sides they stay out of gradients
    inside = _inside(x, counts)
    x, sizes, zero = jnp.where(inside, x, jnp.zeros((), x.dtype)), counts.astype(jnp.int32), jnp.zeros((), x.dtype)
    # products of 16-bit numbers are exact, and TPU's kernel refuses "highest", which a user may have set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None

    def product(weight: Array) -> Array:
        if has_kernel(x.dtype):
            return kernel_product(False, x, weight, sizes)
        return lax.ragged_dot(x, weight, sizes, precision=precision, preferred_element_type=x.dtype)

    outs = (product(cast_in_loop(w, x.dtype)) for w in weights)
    return tuple(jnp.where(inside, out, zero) for out in outs)


def _inside(x: Array, counts: Array) -> Bool[Array, "rows 1"]:
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


def _blocked_forward(block, x, weights, counts):
    cast = tuple(cast_weight(w, x.dtype) for w in weights)
    # empty arrays carry the dtypes of the weights' gradients
    likes = tuple(jnp.zeros((0,), w.dtype) for w in weights)
    return _multiply_blocks(block, x, cast, counts, x.dtype), (x, cast, counts, likes)


def _multiply_blocks(
    block: int,
    x: Array,
    weights: tuple[Array | QuantizedWeight, ...],
    counts: Array,
    dtype: DTypeLike,
    transposed: bool = False,
) -> tuple[Array, ...]:
    """Multiply each row by its group's weight, or by its transpose."""
    blocks, inner, outer = _split_blocks(counts, block, x.shape[0]), *((1, 1) if transposed else (0, 2))

    def step(index, outs):
        begin, group = blocks.begin[index], blocks.group[index]
        piece = lax.dynamic_slice_in_dim(x, begin, block)
        news = (matmul(piece, _group_weight(w, group, x.dtype), (1, inner), dtype) for w in weights)
        # what a block writes beyond its group, the next one overwrites
        return tuple(lax.dynamic_update_slice_in_dim(o, new, begin, 0) for o, new in zip(outs, news, strict=True))

    start = _zeros(counts, 0, *((x.shape[0], w.shape[outer], dtype) for w in weights))
    return lax.fori_loop(0, blocks.number, step, start)


def _blocked_backward(block, saved, gradients):
    x, cast, counts, likes = saved
    wide, blocks = np.promote_types(x.dtype, np.float32), _split_blocks(counts, block, x.shape[0])

    def step(index, carry):
        to_x, to_weights, sums = carry
        begin, group = blocks.begin[index], blocks.group[index]
        inside = (jnp.arange(block, dtype=jnp.int32) < blocks.size[index])[:, None]
        pieces = [lax.dynamic_slice_in_dim(g, begin, block) for g in gradients]
        pieces = [jnp.where(inside, g, jnp.zeros((), g.dtype)) for g in pieces]
        parts = [matmul(g, _group_weight(w, group, x.dtype), (1, 1), wide) for g, w in zip(pieces, cast, strict=True)]
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
    to_x, to_weights, _ = lax.fori_loop(0, blocks.number, step, start)
    return to_x, to_weights, None


_blocked.defvjp(_blocked_forward, _blocked_backward)


# --- quantized weights (see `quantized_weight`) ---


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(block: int, x: Array, weight: QuantizedWeight, counts: Array) -> Array:
    return _multiply_blocks(block, x, (weight,), counts, x.dtype)[0]


def _quantized_backward(block, saved, g):
    weight, counts = saved
    g = jnp.where(_inside(g, counts), g, jnp.zeros((), g.dtype))
    return _multiply_blocks(block, g, (weight,), counts, g.dtype, transposed=True)[0], None, None


def _quantized_forward(block, x, weight, counts):
    return _quantized(block, x, weight, counts), (weight, counts)


_quantized.defvjp(_quantized_forward, _quantized_backward)


# --- in 8 bits (see `low_precision`) ---


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(
    block: int | None, config: LowPrecision, x: Array, weight: Array, seed: Array | None, counts: Array
) -> Array:
    return _rounded_forward(block, config, x, weight, seed, counts)[0]


def _rounded_forward(block, config, x, weight, seed, counts):
    x = jnp.where(_inside(x, counts), x, jnp.zeros((), x.dtype))
    rounded, a = quantize_array(x, (1,), config.formats.activation)
    kernel, b = (checkpoint_name(each, "quantization") for each in quantize_array(weight, (1,), config.formats.weight))
    y = _rows_times_groups(block, rounded, kernel, counts, x.dtype) * a * _of_rows(b[:, 0], x, counts)
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    keeps = config.weight_gradient == "float"
    return y.astype(x.dtype), ((x if keeps else rounded), a, kernel, b, seed, counts, likes)


def _rounded_backward(block, config, saved, g):
    x, a, kernel, b, seed, counts, (like_x, like_w) = saved
    form, (first, second) = config.formats.gradient, seeds_of(seed)
    g = jnp.where(_inside(g, counts), g, jnp.zeros((), g.dtype))
    wide = g.astype(a.dtype)
    rounded, c = quantize_array(wide * _of_rows(b[:, 0], g, counts), (1,), form, first)
    to_x = _rows_times_groups(block, rounded, kernel.transpose(0, 2, 1), counts, like_x.dtype) * c
    if config.weight_gradient == "float":
        to_weight = _columns_times_rows(block, x, g, counts, x.dtype)
    else:
        rounded, c = quantize_array(wide * a, (0,), form, second)
        to_weight = _columns_times_rows(block, x, rounded, counts, like_x.dtype) * c[None]
    to_seed = None if seed is None else jnp.zeros_like(seed)
    return to_x.astype(like_x.dtype), to_weight.astype(like_w.dtype), to_seed, None


_rounded.defvjp(_rounded_forward, _rounded_backward)


def _of_rows(table: Float[Array, "groups outer"], x: Array, counts: Array) -> Float[Array, "rows outer"]:
    """Return for each row the entry of a table for its group."""
    ends = jnp.cumsum(counts)
    owners = jnp.sum((ends[None] <= jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]), axis=1, dtype=jnp.int32)
    return table.at[owners].get(mode="clip")


def _sums(x: Array) -> np.dtype:
    """Return the dtype in which `jax.lax.ragged_dot` sums."""
    return np.dtype(np.int32 if x.dtype == np.int8 else np.promote_types(x.dtype, np.float32))


def _rows_times_groups(block: int | None, x: Array, weight: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Sum each row's products with its group's weight, in f32. Loops multiply 8-bit numbers as `dtype`, exactly."""
    if block is None:
        sizes, sums = counts.astype(jnp.int32), _sums(x)
        out = lax.ragged_dot(x, weight, sizes, preferred_element_type=sums, precision=lax.Precision.DEFAULT)
        return jnp.where(_inside(x, counts), out, jnp.zeros((), sums)).astype(jnp.float32)
    wide = np.promote_types(dtype, np.float32)
    return _multiply_blocks(block, x.astype(dtype), (weight.astype(dtype),), counts, wide)[0]


def _columns_times_rows(block: int | None, x: Array, g: Array, counts: Array, dtype: DTypeLike) -> Array:
    """Compute `x^T g` over the rows of each group, in f32; beyond the groups rows are zero."""
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
    return lax.fori_loop(0, blocks.number, step, start)[0]


def _group_weight(
    weights: Float[Array, "groups inner outer"] | QuantizedWeight, group: Int32[Array, ""], dtype: np.dtype
) -> Float[Array, "inner outer"]:
    if isinstance(weights, QuantizedWeight):
        return weights.at(group).dequantized(dtype)
    return lax.dynamic_index_in_dim(weights, group, keepdims=False)


def _zeros(counts: Array, first: int, *kinds: tuple[Any, ...]) -> tuple[Array, ...]:
    """Return zeros of each shape and dtype, the first of them called number `first`.

    XLA would make equal constants once and copy them, which takes twice as long. No count is negative, but XLA doesn't
    know.
    """
    numbers = ((counts[0] < -index).astype(dtype) for index, (*_, dtype) in enumerate(kinds, first))
    return tuple(jnp.broadcast_to(number, shape) for number, (*shape, _) in zip(numbers, kinds, strict=True))
