"""Weight-only quantization ("w8a16", "w4a16"): 4-bit or 8-bit values, with scales per column, group or 2-D block.

    w = decode(values) * scale,   or   w = (decode(values) - zero) * scale

The weight is seen as a matrix from its contracted axes (rows) to its output axes (columns). A quantization block of
`block = (rows, columns)` elements shares a scale (and a zero point); a block of one column is a quantization group.
Activations are not quantized: weights are dequantized when they are multiplied. A scale of a complete column multiplies
the product instead, `(x decode(values)) scale`.

Values have the shape of the weight, so scans slice them, meshes shard them and checkpoints save them like any weight.
4-bit values take 4 bits on devices, but 8 bits on the host. Scales of dtype `uint8` are the bits of E8M0 (powers of 2).
Subclasses decode the values: `affine_weight.py`, `nf4_weight.py`.
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

# On a CPU, products of up to _MAX_CHUNKED_ROWS rows dequantize about _CHUNK_ELEMENTS elements of the weight at a time,
# which stay in the cache: one bfloat16 row times an int8 weight of 2048 x 8192 takes 4 ms instead of 35 ms.
_MAX_CHUNKED_ROWS = 256
_CHUNK_ELEMENTS = 2**20

# On other devices, a weight with several quantization groups is multiplied group by group, without dequantizing it, for
# up to this number of rows. On v5p, 16 rows times 1024 x 4096 in groups of 128 take 3 us (int4) instead of 19 us.
_MAX_GROUP_PRODUCT_ROWS = 512


class AbstractQuantizedWeight(AbstractWeight):
    """Quantized weight, `(decode(values) - zeros) * scales`. It has no gradient.

    **Arguments:**

    - `values`: quantized values, with the shape of the weight.
    - `scales`: one per quantization block: `[..., row blocks, output dimensions]` for blocks of one column, `[..., row
        blocks, column blocks]` otherwise. Row and column indices are flat over the contracted and output dimensions.
    - `zeros`: zero points, with the shape of the scales; None for symmetric quantization.
    - `block`: rows and columns of a quantization block; the last blocks may be smaller. With at least as many rows as
        the weight has, each column has one scale.
    - `inner`, `outer`: number of contracted and of output dimensions. Dimensions before them are layers and experts.
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
        """Name of the format of the values."""

    @abstractmethod
    def decode(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the values as floats, without zero points and scales."""

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of the three arrays, by field."""
        _, columns = matrix_axes(weight_axes)
        experts = weight_axes[: weight_axes[:1] == ("experts",)]
        scales = (*experts, "groups", *(columns if self.block[1] == 1 else ("blocks",)))
        return {"values": weight_axes, "scales": scales, "zeros": scales}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype | None:
        """None: a quantized weight can be dequantized to any dtype."""
        return None

    @property
    def lead(self) -> int:
        """Number of leading dimensions: layers and experts."""
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
    def has_column_scales(self) -> bool:
        """Whether each column has one scale and no zero point, so that the scale can multiply the product."""
        return self.zeros is None and self.block[1] == 1 and self.scales.shape[self.lead] == 1

    @property
    def eight_bit(self) -> Array | None:
        """The values in an 8-bit dtype (int8 or E4M3), which the GPU kernels read; None for other formats."""
        return None

    def float_scales(self, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the scales as floats."""
        scales = lax.stop_gradient(self.scales)
        return _decode_e8m0(scales).astype(dtype) if scales.dtype == jnp.uint8 else scales.astype(dtype)

    def dequantized(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Return the weight as an array, computed in float32 (at least) and rounded once, to `dtype`."""
        compute_dtype = np.promote_types(np.float32, np.float32 if dtype is None else dtype)
        values = self.decode(compute_dtype)
        zeros = lax.stop_gradient(self.zeros)
        values = values if zeros is None else values - self._expand(zeros.astype(compute_dtype))
        array = values * self._expand(self.float_scales(compute_dtype))
        return array.astype(compute_dtype if dtype is None else dtype)

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the weight as an array in float32."""
        return self.dequantized()

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the dequantized weight; scales of complete columns multiply the product instead."""
        rows = x.shape[: x.ndim - self.inner]
        dtype = options.dtype
        contracts_rows = plan.contracted == self.inner and not plan.transposed
        if options.flatten and contracts_rows and self.lead == 0:
            y: Any = matrix_product(dtype, x.reshape(math.prod(rows), self.rows), self.as_matrix())
            return y.reshape(*rows, *self.shape[self.inner :])
        weight = self._gather(plan, x, options)
        if contracts_rows and not self.has_column_scales and uses_group_product(self, math.prod(rows)):
            return group_product(dtype, x, weight)
        _, right, out = plan.spelled(x.ndim)
        output_axes = [axis for axis in right if axis in out]
        row_axes = right[self.lead :][: self.inner]
        sums_columns = right == (*output_axes[: self.lead], *row_axes, *output_axes[self.lead :])
        sums_columns = sums_columns and not set(row_axes) & set(output_axes)
        if not (self.has_column_scales and sums_columns):
            return jnp.einsum(plan.letters, x, weight.dequantized(x.dtype), preferred_element_type=dtype)
        sum_dtype = np.promote_types(dtype, np.float32)
        kernel = weight.decode(x.dtype)
        scales = plan.spread_outputs(weight.float_scales(sum_dtype).squeeze(self.lead), x.ndim)
        return (jnp.einsum(plan.letters, x, kernel, preferred_element_type=sum_dtype) * scales).astype(dtype)

    def _gather(self, plan: ProductPlan, x: Array, options: ProductOptions) -> "AbstractQuantizedWeight":
        """All-gather the quantized values, if the weight is gathered for its product."""
        layout = options.layout
        if layout is None or not options.gathers(plan, self.values.size, x):
            return self
        shardings = layout.gather_shardings(plan.right, self.shape)
        if shardings is None:
            return self
        values = lax.with_sharding_constraint(lax.stop_gradient(self.values), shardings[0])
        return dataclasses.replace(self, values=values)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[AbstractQuantizedWeight]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by the weights, which are dequantized group by group if possible."""
        if form.kind == "blocks":
            return tuple(grouped_frozen(form.block, x, lax.stop_gradient(weight), counts) for weight in weights)

        def multiply(weight: AbstractQuantizedWeight) -> Array:
            values = weight.eight_bit if form.kind == "triton" and weight.has_column_scales else None
            if values is None:
                return grouped_arrays(x, (weight.dequantized(x.dtype),), counts, form)[0]
            scales = weight.float_scales(np.promote_types(x.dtype, np.float32)).reshape(len(values), -1)
            return grouped_scaled(form, x, values, scales, counts)

        return tuple(map(multiply, weights))

    def dequantized_at(self, index: Any, dtype: DTypeLike) -> Float[Array, "..."]:
        """Return the weight of one layer or expert as an array."""
        weight = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self)
        return weight.dequantized(dtype)

    def _expand(self, table: Array) -> Array:
        """Expand a table of one value per quantization block to the shape of the weight, or to size 1 to broadcast."""
        lead = self.lead
        shape = self.shape
        inner = (1,) * self.inner
        if table.shape[lead] > 1:
            table = jnp.repeat(table, self.block[0], axis=lead)
            table = lax.slice_in_dim(table, 0, self.rows, axis=lead)
            inner = shape[lead : lead + self.inner]
        if self.block[1] > 1:
            table = lax.slice_in_dim(jnp.repeat(table, self.block[1], axis=-1), 0, self.columns, axis=-1)
        return table.reshape(*shape[:lead], *inner, *shape[lead + self.inner :])

    def _expand_columns(self, table: Array) -> Array:
        """Expand a table of one value per block to `[row blocks, output dimensions]`, for a weight without layers."""
        if self.block[1] > 1:
            table = lax.slice_in_dim(jnp.repeat(table, self.block[1], axis=-1), 0, self.columns, axis=-1)
        return table.reshape(len(table), *self.shape[self.inner :])

    def as_matrix(self) -> "AbstractQuantizedWeight":
        """Return the weight with one contracted and one output dimension."""
        lead = self.shape[: self.lead]

        def flat(table: Array | None) -> Any:
            return None if table is None else table.reshape(*lead, table.shape[self.lead], -1)

        values = self.values.reshape(*lead, self.rows, self.columns)
        return dataclasses.replace(
            self, values=values, scales=flat(self.scales), zeros=flat(self.zeros), inner=1, outer=1
        )

    def slice_rows(self, start: Any, count: int) -> "AbstractQuantizedWeight":
        """Return `count` rows of a matrix; they must be complete quantization groups."""
        group_rows = self.block[0]

        def slice_table(table: Any) -> Any:
            if table is None or len(table) == 1:
                return table
            return lax.dynamic_slice_in_dim(table, start // group_rows, count // group_rows)

        values = lax.dynamic_slice_in_dim(self.values, start, count)
        return dataclasses.replace(self, values=values, scales=slice_table(self.scales), zeros=slice_table(self.zeros))

    def specs(self, spec: PartitionSpec) -> "AbstractQuantizedWeight":
        """Return the `PartitionSpec`s of the arrays in a `jax.shard_map`, given the spec of the values.

        Scales are never split along rows, and along columns only if a quantization block has one column.
        """
        lead = spec[: self.lead]
        columns = spec[self.lead + self.inner :]
        scale_spec = PartitionSpec(*lead, None, *(columns if self.block[1] == 1 else (None,)))
        structure = jax.tree.structure(self)
        return jax.tree.unflatten(structure, [spec, scale_spec, scale_spec][: structure.num_leaves])

    def gathered(
        self, spec: PartitionSpec, gather: Callable[[Array, PartitionSpec], Array]
    ) -> "AbstractQuantizedWeight":
        """Gather the weight in a `jax.shard_map` with `specs`; quantized values are sent, not dequantized ones.

        `gather(array, spec)` all-gathers an array along those of the mesh axes in its spec that it needs to.
        """
        weight, scale_spec = self._with_local_scales(spec)
        tables = weight.scales, weight.zeros
        scales, zeros = (None if table is None else gather(table, scale_spec) for table in tables)
        return dataclasses.replace(weight, values=gather(weight.values, spec), scales=scales, zeros=zeros)

    def _with_local_scales(self, spec: PartitionSpec) -> "tuple[AbstractQuantizedWeight, PartitionSpec]":
        """Return the weight with the scales of this device's rows and columns only, and the spec of these scales."""
        mesh_axes = [names_of(names) for names in spec]
        inner = mesh_axes[self.lead : self.lead + self.inner]
        outer = mesh_axes[self.lead + self.inner :]
        block = self.block
        tables = (self.scales, self.zeros)
        splits_row_blocks = self.scales.shape[self.lead] > 1 and any(inner)
        if splits_row_blocks:
            tables, block_rows = _local_tables(tables, block[0], self.lead, inner[0], self.rows)
            block = block_rows, block[1]
        if block[1] > 1 and any(outer):
            tables, block_columns = _local_tables(tables, block[1], self.lead + 1, outer[0], self.columns)
            block = block[0], block_columns
        row_axes = inner[0] if splits_row_blocks else ()
        column_axes = outer[:1]
        if block[1] == 1:
            outer_shape = self.shape[self.lead + self.inner :]
            tables = tuple(None if t is None else t.reshape(*t.shape[: self.lead + 1], *outer_shape) for t in tables)
            column_axes = outer
        scale_spec = PartitionSpec(*(names or None for names in (*mesh_axes[: self.lead], row_axes, *column_axes)))
        scales, zeros = tables
        return dataclasses.replace(self, scales=scales, zeros=zeros, block=block), scale_spec


def _local_tables(
    tables: tuple[Any, Any], block_size: int, axis: int, names: tuple[str, ...], size: int
) -> tuple[tuple[Any, Any], int]:
    """Return the scales and zero points of this device's `size` rows or columns, and their new block size."""
    start = lax.axis_index(names) * size
    if size % block_size == 0:
        first = start // block_size
        count = size // block_size
        local = [None if table is None else lax.dynamic_slice_in_dim(table, first, count, axis) for table in tables]
    else:  # a block is split between devices: use one scale for each row or column
        index = (start + jnp.arange(size, dtype=jnp.int32)) // block_size
        block_size = 1
        local = [None if table is None else jnp.take(table, index, axis=axis, mode="clip") for table in tables]
    return (local[0], local[1]), block_size


class Quantization(NamedTuple):
    """Method of quantizing weights.

    **Arguments:**

    - `weight`: class of the quantized weights.
    - `largest`: absolute value to which the largest value of a quantization block is scaled.
    - `encode`: function that rounds scaled weights (up to `largest`) to stored values.
    - `block`: rows and columns of a quantization block; None: one scale per column.
    - `groups`: candidates for the size of a quantization group (rows of one column), in place of `block`; the first one
        that divides the rows of the weight is used.
    """

    weight: type[AbstractQuantizedWeight]
    largest: float
    encode: Callable[[Array], Array]
    block: tuple[int, int] | None = None
    groups: tuple[int, ...] = ()


def matrix_axes(weight_axes: Axes) -> tuple[Axes, Axes]:
    """Return the contracted and the output axes of a weight, as `product_axes`, or of an output head, `embed vocab`."""
    layer_axes = tuple(axis for axis in weight_axes if axis != "layers")
    split = (layer_axes[:1], layer_axes[1:]) if layer_axes == ("embed", "vocab") else product_axes(weight_axes)
    if split is None:
        raise ConfigError(
            f"A weight with the axes {' '.join(weight_axes)!r} is not a matrix and cannot be quantized. Select other "
            "weights."
        )
    return split


def whole_weights(tree: PyTree) -> tuple[dict[str, Axes], dict[str, Any]]:
    """Return `axes(tree)` and `named_leaves(tree)`, with each quantized weight as a single leaf."""
    nodes = quantized_weights(tree)
    shapes = plain_shapes(tree)
    return axes(shapes), named_leaves(shapes) | nodes


def plain_shapes(tree: T) -> T:
    """Replace each quantized weight of a tree by a float32 `ShapeDtypeStruct` with the shape of the weight."""
    nodes = quantized_weights(tree)
    return replaced(tree, {path: jax.ShapeDtypeStruct(node.shape, np.float32) for path, node in nodes.items()})


def _decode_e8m0(bits: Array) -> Float[Array, "..."]:
    """Return `2^(bits - 127)`; 255 is NaN."""
    exponent = bits.astype(jnp.int32)
    floats = lax.bitcast_convert_type(jnp.maximum(exponent << 23, 2**22), jnp.float32)
    return jnp.where(exponent == 255, jnp.float32(np.nan), floats)


def is_quantized(node: Any) -> bool:
    """Return whether a node of a tree is a quantized weight."""
    return isinstance(node, AbstractQuantizedWeight)


def quantized_weights(tree: PyTree) -> dict[str, AbstractQuantizedWeight]:
    """Return the quantized weights of a tree, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_quantized)
    return {path_name(path): node for path, node in leaves if is_quantized(node)}


def uses_group_product(weight: AbstractQuantizedWeight, rows: int) -> bool:
    """Return whether to use `group_product` for a weight and `rows` rows of activations."""
    return weight.lead == 0 and weight.rows % weight.block[0] == 0 and rows <= _MAX_GROUP_PRODUCT_ROWS


def group_product(dtype: np.dtype, x: Float[Array, "..."], weight: AbstractQuantizedWeight) -> Float[Array, "..."]:
    """Multiply by a weight group by group: `sum_g (x_g values_g - (sum of x_g) zeros_g) scales_g`, as `dtype`.

    The last dimensions of `x` are contracted. There is no array of the dequantized weight: values are converted to the
    dtype of `x` only, which XLA fuses into the product.
    """
    sum_dtype = np.promote_types(x.dtype, np.float32)
    num_groups = len(weight.scales)
    rows = x.shape[: x.ndim - weight.inner]
    outer_shape = weight.shape[weight.inner :]
    groups = x.reshape(*rows, num_groups, -1)
    kernel = weight.decode(x.dtype).reshape(num_groups, -1, *outer_shape)
    dimensions = ((groups.ndim - 1,), (1,)), ((groups.ndim - 2,), (0,))
    sums = lax.dot_general(groups, kernel, dimensions, preferred_element_type=sum_dtype)
    scales = weight._expand_columns(weight.float_scales(sum_dtype))
    total = jnp.sum(sums * scales.reshape(num_groups, *(1,) * len(rows), *outer_shape), axis=0)
    if weight.zeros is not None:
        offsets = weight._expand_columns(lax.stop_gradient(weight.zeros).astype(sum_dtype)) * scales
        total -= jnp.tensordot(jnp.sum(groups.astype(sum_dtype), axis=-1), offsets, axes=1)
    return total.astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def matrix_product(
    dtype: np.dtype, x: Float[Array, "rows inner"], weight: AbstractQuantizedWeight
) -> Float[Array, "rows outer"]:
    """Return `x @ weight` as `dtype`, in the form that is fastest on a CPU; `weight` must be a matrix."""
    sum_dtype = np.promote_types(x.dtype, np.float32)
    chunk_rows = _chunk_rows(weight) if len(x) <= _MAX_CHUNKED_ROWS else weight.rows
    has_column_scales = weight.has_column_scales

    def product(x: Array, chunk: AbstractQuantizedWeight) -> Array:
        kernel = chunk.decode(x.dtype) if has_column_scales else chunk.dequantized(x.dtype)
        return lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), preferred_element_type=sum_dtype)

    def add(index: Array, total: Array) -> Array:
        start = index * chunk_rows
        x_chunk = lax.dynamic_slice_in_dim(x, start, chunk_rows, axis=1)
        return total + product(x_chunk, weight.slice_rows(start, chunk_rows))

    if chunk_rows == weight.rows:
        total = product(x, weight)
    else:
        total = lax.fori_loop(0, weight.rows // chunk_rows, add, jnp.zeros((len(x), weight.columns), sum_dtype))
    return (total * weight.float_scales(sum_dtype) if has_column_scales else total).astype(dtype)


def _chunk_rows(weight: AbstractQuantizedWeight) -> int:
    """Return the number of rows to dequantize at a time: complete groups, and a divisor of the rows of the weight."""
    rows, columns = weight.values.shape
    unit = 1 if len(weight.scales) == 1 else weight.block[0]
    max_rows = max(unit, _CHUNK_ELEMENTS // max(1, columns))
    if rows % unit or rows <= max_rows:
        return rows
    num_units = rows // unit
    num_chunks = next(count for count in range(-(-rows // max_rows), num_units + 1) if num_units % count == 0)
    return rows // num_chunks


def _forward(dtype, x, weight):
    return matrix_product(dtype, x, weight), (weight, jnp.zeros((0,), x.dtype))


def _backward(dtype, residuals, gradient):
    weight, like = residuals
    sum_dtype = np.promote_types(like.dtype, np.float32)
    if weight.has_column_scales:
        gradient = gradient.astype(sum_dtype) * weight.float_scales(sum_dtype)
        kernel = weight.decode(like.dtype)
    else:
        kernel = weight.dequantized(like.dtype)
    return lax.dot_general(
        gradient.astype(like.dtype), kernel, (((1,), (1,)), ((), ())), preferred_element_type=like.dtype
    ), None


matrix_product.defvjp(_forward, _backward)
