"""Quantized weights: values of few bits, and a scale for each column, group of rows, or block.

    w = numbers(values) scale,   or   w = (numbers(values) - zero) scale

with one scale (and zero) for `rows` rows and `columns` columns of the matrix from the contracted to the output axes.
Activations are never rounded ("w8a16", "w4a16"): a weight is widened where it is multiplied, and a scale that stands
for whole columns multiplies the product instead, `(x numbers(values)) scale`.

Values are arrays shaped like the weight: so they are sliced by scans, split by meshes and saved like any weight. Four
bits take four bits on devices (the host's copies take eight). Scales of `uint8` are the bits of E8M0, powers of two.
A kind of quantized weight says what numbers its values are: `affine_weight.py`, `nf4_weight.py`.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.einsum import AbstractWeight, ProductOptions
from eqx_decoders.numerics.grouped_matmul import GroupedForm, grouped_arrays, grouped_frozen, grouped_scaled
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.sharding.axes import (
    FROZEN,
    AnyArray,
    Axes,
    axes,
    named_leaves,
    names_of,
    path_name,
    product_axes,
    replaced,
)


T = TypeVar("T")

# On a CPU, products of up to so many rows widen about so many numbers of the weight at a time, which then stay in its
# cache: 2048 x 8192 in int8 and one row in bfloat16 take 4 ms, 35 ms at once (and 40 ms with a weight in bfloat16).
_ROWS = 256
_WIDENED = 2**20

# Elsewhere a weight with several groups is not widened for so few rows: each group is multiplied for itself. Compiled
# for v5p, 16 rows with 1024 x 4096 in groups of 128: 3 us (int4; 8 in bfloat16) against 19 and an array in float32.
_FEW = 512


class AbstractQuantizedWeight(AbstractWeight):
    """Quantized weight, `(values - zeros) scales`. No gradient reaches it.

    **Arguments:**

    - `values`: shaped like the weight.
    - `scales`: one for each group of rows and each column; one for each block that spans several columns. Rows are
        counted through all contracted dimensions, columns through all output dimensions.
    - `zeros`: subtracted first, shaped like the scales; None for none.
    - `block`: rows and columns of a block; the last ones may be cut short. As many rows as there are, or more: each
        column has one scale.
    - `inner`, `outer`: numbers of contracted and of output dimensions. Others, in front, count layers and experts.
    """

    values: Shaped[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    scales: Shaped[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    zeros: Shaped[AnyArray, "..."] | None = eqx.field(metadata=FROZEN)
    block: tuple[int, int] = eqx.field(static=True)
    inner: int = eqx.field(static=True)
    outer: int = eqx.field(static=True)

    plain_product: ClassVar[bool] = True

    @property
    @abstractmethod
    def format(self) -> str:
        """Name of the format of its values."""

    @abstractmethod
    def numbers(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the values as floats, without scales."""

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of the three arrays, given the axes of the weight."""
        _, columns = matrix_axes(words)
        each = words[: words[:1] == ("experts",)]
        scales = (*each, "groups", *(columns if self.block[1] == 1 else ("blocks",)))
        return {"values": words, "scales": scales, "zeros": scales}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype | None:
        """None: numbers of few bits have no dtype of their own as an array."""
        return None

    @property
    def lead(self) -> int:
        """Number of dimensions that count layers and experts."""
        return self.values.ndim - self.inner - self.outer

    @property
    def rows(self) -> int:
        """Number of rows of the matrix."""
        return math.prod(self.shape[self.lead : self.lead + self.inner])

    @property
    def columns(self) -> int:
        """Number of columns of the matrix."""
        return math.prod(self.shape[self.lead + self.inner :])

    @property
    def by_column(self) -> bool:
        """True if each column has one scale and no zero, so that the scale can multiply the product."""
        return self.zeros is None and self.block[1] == 1 and self.scales.shape[self.lead] == 1

    @property
    def eight_bit(self) -> Array | None:
        """The values in the dtype of their numbers, where that has 8 bits: kernels for GPUs widen it. Else None."""
        return None

    def factors(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the scales as floats."""
        scales = lax.stop_gradient(self.scales)
        return _e8m0(scales).astype(dtype) if scales.dtype == jnp.uint8 else scales.astype(dtype)

    def dequantized(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Dequantize the weight to an array, computed in float32 (at least) and rounded once, to `dtype`."""
        wide = np.promote_types(np.float32, np.float32 if dtype is None else dtype)
        values, zeros = self.numbers(wide), lax.stop_gradient(self.zeros)
        values = values if zeros is None else values - self._spread(zeros.astype(wide))
        return (values * self._spread(self.factors(wide))).astype(wide if dtype is None else dtype)

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the weight as an array in float32."""
        return self.dequantized()

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the weight, widened; its columns' scales multiply the product."""
        rows, dtype = x.shape[: x.ndim - self.inner], options.dtype
        standard = plan.contracted == self.inner and not plan.transposed
        if options.flatten and standard and self.lead == 0:
            y: Any = matrix_product(dtype, x.reshape(math.prod(rows), self.rows), self.of_matrix())
            return y.reshape(*rows, *self.shape[self.inner :])
        weight = self._gathered(plan, x, options)
        if standard and not self.by_column and takes_groups(self, math.prod(rows)):
            return group_product(dtype, x, weight)
        _, right, out = plan.spelled(x.ndim)
        columns = [word for word in right if word in out]
        summed = right[self.lead :][: self.inner]
        whole = right == (*columns[: self.lead], *summed, *columns[self.lead :]) and not set(summed) & set(columns)
        if not (self.by_column and whole):  # other dimensions are contracted than scales are common to
            return jnp.einsum(plan.letters, x, weight.dequantized(x.dtype), preferred_element_type=dtype)
        wide = np.promote_types(dtype, np.float32)
        kernel, scales = weight.numbers(x.dtype), weight.factors(wide)
        scales = plan.spread_outputs(scales.squeeze(self.lead), x.ndim)
        return (jnp.einsum(plan.letters, x, kernel, preferred_element_type=wide) * scales).astype(dtype)

    def _gathered(self, plan: ProductPlan, x: Array, options: ProductOptions) -> "AbstractQuantizedWeight":
        """Return the weight where it is multiplied: few bits travel."""
        layout = options.layout
        if layout is None or not options.gathers(plan, self.values.size, x):
            return self
        shardings = layout.gather_places(plan.right, self.shape)
        if shardings is None:
            return self
        values = lax.with_sharding_constraint(lax.stop_gradient(self.values), shardings[0])
        return dataclasses.replace(self, values=values)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[AbstractQuantizedWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by the weights, each widened group by group."""
        if form.kind == "blocks":
            return tuple(grouped_frozen(form.block, x, lax.stop_gradient(weight), counts) for weight in weights)

        def one(weight: AbstractQuantizedWeight) -> Array:
            values = weight.eight_bit if form.kind == "triton" and weight.by_column else None
            if values is None:
                return grouped_arrays(x, (weight.dequantized(x.dtype),), counts, form)[0]
            scales = weight.factors(np.promote_types(x.dtype, np.float32)).reshape(len(values), -1)
            return grouped_scaled(form, x, values, scales, counts)

        return tuple(map(one, weights))

    def widened_at(self, index: Any, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight of one layer or expert as an array."""
        parts = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self)
        return parts.dequantized(dtype)

    def _spread(self, table: Array) -> Array:
        """Expand a table like `scales` to the elements of the weight, with size 1 where it is broadcast."""
        lead, shape = self.lead, self.shape
        inner = (1,) * self.inner
        if table.shape[lead] > 1:
            table = jnp.repeat(table, self.block[0], axis=lead)
            table, inner = lax.slice_in_dim(table, 0, self.rows, axis=lead), shape[lead : lead + self.inner]
        if self.block[1] > 1:
            table = lax.slice_in_dim(jnp.repeat(table, self.block[1], axis=-1), 0, self.columns, axis=-1)
        return table.reshape(*shape[:lead], *inner, *shape[lead + self.inner :])

    def _by_group(self, table: Array) -> Array:
        """Expand a table like `scales` to one number for each group and column, `groups outer...`, of one layer."""
        if self.block[1] > 1:
            table = lax.slice_in_dim(jnp.repeat(table, self.block[1], axis=-1), 0, self.columns, axis=-1)
        return table.reshape(len(table), *self.shape[self.inner :])

    def of_matrix(self) -> "AbstractQuantizedWeight":
        """Merge the contracted dimensions into one and the output dimensions into one."""
        lead = self.shape[: self.lead]

        def flat(table: Array | None) -> Any:
            return None if table is None else table.reshape(*lead, table.shape[self.lead], -1)

        values = self.values.reshape(*lead, self.rows, self.columns)
        return dataclasses.replace(
            self, values=values, scales=flat(self.scales), zeros=flat(self.zeros), inner=1, outer=1
        )

    def rows_at(self, begin: Any, count: int) -> "AbstractQuantizedWeight":
        """Return some rows of a matrix: whole groups of them."""
        values, group = lax.dynamic_slice_in_dim(self.values, begin, count), self.block[0]

        def part(table: Any) -> Any:
            if table is None or len(table) == 1:
                return table
            return lax.dynamic_slice_in_dim(table, begin // group, count // group)

        return dataclasses.replace(self, values=values, scales=part(self.scales), zeros=part(self.zeros))

    def specs(self, spec: PartitionSpec) -> "AbstractQuantizedWeight":
        """Return the `PartitionSpec` of each array, in a `jax.shard_map` whose values are split as `spec` says.

        Scales are split along columns where each belongs to one column, and never along rows.
        """
        lead, columns = spec[: self.lead], spec[self.lead + self.inner :]
        of_scales = PartitionSpec(*lead, None, *(columns if self.block[1] == 1 else (None,)))
        structure = jax.tree.structure(self)
        return jax.tree.unflatten(structure, [spec, of_scales, of_scales][: structure.num_leaves])

    def gathered(
        self, spec: PartitionSpec, gather: Callable[[Array, PartitionSpec], Array]
    ) -> "AbstractQuantizedWeight":
        """Gather what this device multiplies by, in a `jax.shard_map` with `specs`: its bits travel as they are."""
        weight, scale_spec = self._with_own_scales(spec)
        tables = weight.scales, weight.zeros
        scales, zeros = (None if table is None else gather(table, scale_spec) for table in tables)
        return dataclasses.replace(weight, values=gather(weight.values, spec), scales=scales, zeros=zeros)

    def _with_own_scales(self, spec: PartitionSpec) -> "tuple[AbstractQuantizedWeight, PartitionSpec]":
        """Select the scales of this device's rows and columns; return the weight with them, and their spec."""
        names, block = [names_of(group) for group in spec], self.block
        inner, outer = names[self.lead : self.lead + self.inner], names[self.lead + self.inner :]
        tables, grouped = (self.scales, self.zeros), self.scales.shape[self.lead] > 1
        if grouped and any(inner):
            tables, rows = _own_part(tables, block[0], self.lead, inner[0], self.rows)
            block = rows, block[1]
        if block[1] > 1 and any(outer):
            tables, columns = _own_part(tables, block[1], self.lead + 1, outer[0], self.columns)
            block = block[0], columns
        groups = inner[0] if grouped and any(inner) else ()
        outer_shape, last = self.shape[self.lead + self.inner :], outer[:1]
        if block[1] == 1:
            tables, last = (
                tuple(None if t is None else t.reshape(*t.shape[: self.lead + 1], *outer_shape) for t in tables),
                outer,
            )
        scale_spec = PartitionSpec(*(each or None for each in (*names[: self.lead], groups, *last)))
        scales, zeros = tables
        return dataclasses.replace(self, scales=scales, zeros=zeros, block=block), scale_spec


def _own_part(
    tables: tuple[Any, Any], each: int, axis: int, names: tuple[str, ...], size: int
) -> tuple[tuple[Any, Any], int]:
    """Select the scales of this device's `size` rows or columns; return them, and the new number of rows per scale."""
    begin = lax.axis_index(names) * size
    if size % each == 0:
        parts = [None if t is None else lax.dynamic_slice_in_dim(t, begin // each, size // each, axis) for t in tables]
    else:  # blocks lie across the devices' bounds: one scale for each row or column
        groups, each = (begin + jnp.arange(size, dtype=jnp.int32)) // each, 1
        parts = [None if t is None else jnp.take(t, groups, axis=axis, mode="clip") for t in tables]
    return (parts[0], parts[1]), each


class Quantization(NamedTuple):
    """How weights are rounded to few bits.

    **Arguments:**

    - `weight`: class of the weights.
    - `largest`: number to which the largest one of a block is scaled.
    - `encode`: rounds numbers up to `largest` to values.
    - `block`: rows and columns that share a scale; None: all rows of a column.
    - `groups`: rows of a column that share a scale instead: the first number that divides a weight's rows.
    """

    weight: type[AbstractQuantizedWeight]
    largest: float
    encode: Callable[[Array], Array]
    block: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()


def matrix_axes(words: Axes) -> tuple[Axes, Axes]:
    """Return the contracted and the output axes of a weight (`product_axes`), or of an output head, `embed vocab`."""
    inner = tuple(word for word in words if word != "layers")
    split = (inner[:1], inner[1:]) if inner == ("embed", "vocab") else product_axes(words)
    if split is None:
        raise ConfigError(f"A weight with the axes {' '.join(words)!r} is no matrix: it is not quantized.")
    return split


def whole_weights(tree: PyTree) -> tuple[dict[str, Axes], dict[str, Any]]:
    """Return `axes` and `named_leaves` of a tree, with each quantized weight as one leaf."""
    nodes = quantized_weights(tree)
    shapes = plain_shapes(tree)
    return axes(shapes), named_leaves(shapes) | nodes


def plain_shapes(tree: T) -> T:
    """Replace each quantized weight of a tree by the shape of the weight before quantization."""
    nodes = quantized_weights(tree)
    return replaced(tree, {path: jax.ShapeDtypeStruct(node.shape, np.float32) for path, node in nodes.items()})


def _e8m0(bits: Array) -> Float[Array, "..."]:
    """Decode E8M0 bits to `2^(bits - 127)`; 255 is NaN."""
    wide = bits.astype(jnp.int32)
    floats = lax.bitcast_convert_type(jnp.maximum(wide << 23, 2**22), jnp.float32)
    return jnp.where(wide == 255, jnp.float32(np.nan), floats)


def is_quantized(node: Any) -> bool:
    """Return whether a node of a tree is a quantized weight."""
    return isinstance(node, AbstractQuantizedWeight)


def quantized_weights(tree: PyTree) -> dict[str, AbstractQuantizedWeight]:
    """Return the quantized weights of a tree, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {path_name(path): node for path, node in leaves if is_quantized(node)}


def takes_groups(weight: AbstractQuantizedWeight, rows: int) -> bool:
    """Return whether `group_product` is the best form for a weight and so many rows of activations."""
    return weight.lead == 0 and weight.rows % weight.block[0] == 0 and rows <= _FEW


def group_product(dtype: np.dtype, x: Float[Array, "..."], weight: AbstractQuantizedWeight) -> Float[Array, "..."]:
    """Multiply by a weight with groups: `sum_g (x_g values_g - (sum of x_g) zeros_g) scales_g`, as `dtype`.

    The last dimensions of `x` are the contracted ones. Numbers are widened by the unit that multiplies them.
    """
    wide, count = np.promote_types(x.dtype, np.float32), len(weight.scales)
    rows, outer_shape = x.shape[: x.ndim - weight.inner], weight.shape[weight.inner :]
    left = x.reshape(*rows, count, -1)
    kernel = weight.numbers(x.dtype).reshape(count, -1, *outer_shape)
    numbers = ((left.ndim - 1,), (1,)), ((left.ndim - 2,), (0,))
    sums = lax.dot_general(left, kernel, numbers, preferred_element_type=wide)
    scales = weight._by_group(weight.factors(wide))
    total = jnp.sum(sums * scales.reshape(count, *(1,) * len(rows), *outer_shape), axis=0)
    if weight.zeros is not None:
        offsets = weight._by_group(lax.stop_gradient(weight.zeros).astype(wide)) * scales
        total -= jnp.tensordot(jnp.sum(left.astype(wide), axis=-1), offsets, axes=1)
    return total.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matrix_product(
    dtype: np.dtype, x: Float[Array, "rows inner"], weight: AbstractQuantizedWeight
) -> Float[Array, "rows outer"]:
    """Compute `x @ weight` of a matrix as `dtype`, in the form that a CPU runs fastest."""
    wide = np.promote_types(x.dtype, np.float32)
    step = _step(weight) if len(x) <= _ROWS else weight.rows
    by_column = weight.by_column

    def product(x: Array, part: AbstractQuantizedWeight) -> Array:
        kernel = part.numbers(x.dtype) if by_column else part.dequantized(x.dtype)
        return lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=wide)

    def add(index: Array, total: Array) -> Array:
        some = lax.dynamic_slice_in_dim(x, index * step, step, axis=1)
        return total + product(some, weight.rows_at(index * step, step))

    if step == weight.rows:
        total = product(x, weight)
    else:
        total = lax.fori_loop(0, weight.rows // step, add, jnp.zeros((len(x), weight.columns), wide))
    return (total * weight.factors(wide) if by_column else total).astype(dtype)


def _step(weight: AbstractQuantizedWeight) -> int:
    """Return the number of rows to widen at a time: whole groups, and a divisor of all rows."""
    rows, columns = weight.values.shape
    unit = 1 if len(weight.scales) == 1 else weight.block[0]
    most = max(unit, _WIDENED // max(1, columns))
    if rows % unit or rows <= most:
        return rows
    parts = rows // unit
    count = next(count for count in range(-(-rows // most), parts + 1) if parts % count == 0)
    return rows // count


def _forward(dtype, x, weight):
    return matrix_product(dtype, x, weight), (weight, jnp.zeros((0,), x.dtype))


def _backward(dtype, saved, gradient):
    weight, like = saved
    wide = np.promote_types(like.dtype, np.float32)
    if weight.by_column:
        gradient, kernel = gradient.astype(wide) * weight.factors(wide), weight.numbers(like.dtype)
    else:
        kernel = weight.dequantized(like.dtype)
    return lax.dot_general(
        gradient.astype(like.dtype), kernel, (((1,), (1,)), ((), ())), preferred_element_type=like.dtype
    ), None


matrix_product.defvjp(_forward, _backward)
