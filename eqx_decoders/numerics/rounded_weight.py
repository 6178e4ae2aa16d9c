"""Products with dynamically quantized weights and activations, plain and grouped (see `low_precision.py`)."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.numerics.einsum import AbstractArrayWeight, ProductOptions
from eqx_decoders.numerics.grouped_matmul import (
    GroupedForm,
    columns_times_rows,
    in_groups,
    of_rows,
    rows_times_groups,
)
from eqx_decoders.numerics.low_precision import MAX_SEED, LowPrecision, quantize_array, seeds_of
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import AXES, AnyArray, Axes, axes, named_leaves, names_of, replaced
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.layout import Layout


T = TypeVar("T")


class Rounded(AbstractArrayWeight):
    """Weight whose products are computed in 8 bits.

    **Arguments:**

    - `values`: the weight, in its ordinary dtype.
    - `seed`: integer for stochastic rounding, as a float array because all arrays of weights must be differentiable.
        None: round to nearest.
    - `config`: formats and rounding.
    """

    seed: Float[AnyArray, "..."] | None
    config: LowPrecision = eqx.field(static=True)

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of both arrays, by field."""
        return {"values": weight_axes, "seed": ()}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the weight quantized and dequantized, as products that contract these dimensions see it.

        The gradient is that of the weight without rounding (straight-through estimator).
        """
        quantized, scale = quantize_array(self.values, contracted, self.config.formats.weight)
        compute_dtype = np.promote_types(self.values.dtype, np.float32)
        rounded = (quantized.astype(compute_dtype) * scale).astype(self.values.dtype)
        return self.values + lax.stop_gradient(rounded - self.values)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the weight, both quantized."""
        layout = options.layout
        if not options.flatten or plan.contracted is None:
            operand_axes = plan.spelled(x.ndim)
            gathers = options.gathers(plan, self.values.size, x)
            sharding = _product_sharding(operand_axes, x.shape, self.values.shape, layout, gathers)
            return rounded_product(operand_axes, x, self, dtype=options.dtype, sharding=sharding)
        rows, matrix, shape = plan.flattened(x, self.values)
        matrix_axes = ("outer", "inner") if plan.transposed else ("inner", "outer")
        operand_axes = ("rows", "inner"), matrix_axes, ("rows", "outer")
        rounded = Rounded(matrix, self.seed, self.config)
        sharding = _product_sharding(operand_axes, rows.shape, matrix.shape, layout, gathers=False)
        return rounded_product(operand_axes, rows, rounded, dtype=options.dtype, sharding=sharding).reshape(shape)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[Rounded]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by the weights, both quantized.

        Each column of a group's weight has a scale. For the gradient of a weight, each column of the output gradient
        has one scale for all groups.
        """
        return tuple(_grouped_product(form, weight.config, x, weight.values, weight.seed, counts) for weight in weights)


def round_weights(model: T, config: LowPrecision | None, *, below: str, key: PRNGKeyArray | None = None) -> T:
    """Return the model with the selected weights wrapped in `Rounded`.

    **Arguments:**

    - `config`: selects the weights by path; None returns the model unchanged. Quantized weights are skipped.
    - `below`: only weights below this field of the model are wrapped.
    - `key`: randomness for stochastic rounding, which has a seed for each weight and layer.
    """
    if config is None:
        return model
    weight_axes = axes(model)
    leaves = named_leaves(model)
    for path in quantized_weights(model):
        weight_axes = {name: value for name, value in weight_axes.items() if not name.startswith(f"{path}.")}
    paths = [path for path in config.chosen(weight_axes) if path.startswith(f"{below}.")]
    seeds: dict[str, Any] = dict.fromkeys(paths)
    if config.draws and key is not None and paths:
        layer_shapes = [leaves[path].shape[: weight_axes[path].count("layers")] for path in paths]
        sizes = [math.prod(shape) for shape in layer_shapes]
        all_seeds = jax.random.randint(key, (sum(sizes),), 0, MAX_SEED).astype(jnp.float32)
        seeds_by_path = jnp.split(all_seeds, np.cumsum(sizes)[:-1])
        seeds = {
            path: path_seeds.reshape(shape)
            for path, path_seeds, shape in zip(paths, seeds_by_path, layer_shapes, strict=True)
        }
    nodes = {path: Rounded(leaves[path], seed=seeds[path], config=config) for path in paths}
    return replaced(model, nodes)


# --- the product ---


class WeightShardings(NamedTuple):
    """Shardings of a weight in a product, of the stored weight, and of its gradient."""

    gathered: NamedSharding
    stored: NamedSharding
    gradient: NamedSharding


class ProductSharding(NamedTuple):
    """Sharding of a low-precision product over a mesh.

    **Arguments:**

    - `native`: whether the devices multiply 8-bit integers. Otherwise quantized values are multiplied in float32, with
        the same results as long as float32 sums them exactly.
    - `parts`: name and number of shards of each axis that the mesh splits. If such an axis is contracted, each device
        scales its partial sum and casts it to the dtype of activations before the all-reduce. The all-reduce then sends
        as many bytes as for a product that is not quantized.
    - `weight`: shardings of the weight; None: XLA selects them.
    """

    native: bool
    parts: tuple[tuple[str, int], ...] = ()
    weight: WeightShardings | None = None


@dataclasses.dataclass(frozen=True)
class _Product:
    """Static description of a product.

    **Arguments:**

    - `left`, `right`, `out`: axes of x, of the weight and of the result.
    - `config`: formats and rounding.
    - `dtype`: dtype of the result.
    - `sharding`: placement on a mesh.
    """

    left: Axes
    right: Axes
    out: Axes
    config: LowPrecision
    dtype: np.dtype
    sharding: ProductSharding

    @property
    def contracted(self) -> Axes:
        return tuple(axis for axis in self.left if axis in self.right and axis not in self.out)

    @property
    def outputs(self) -> Axes:
        return tuple(axis for axis in self.right if axis not in self.left)

    @property
    def rows(self) -> Axes:
        return tuple(axis for axis in self.left if axis not in self.right)

    def gather(self, quantized: Array) -> Array:
        """All-gather the quantized weight.

        It is sent as uint8: for a product's operand, XLA would choose a ring of partial products, which sends twice as
        many bytes.
        """
        weight = self.sharding.weight
        if weight is None:
            return quantized
        octets = lax.with_sharding_constraint(lax.bitcast_convert_type(quantized, jnp.uint8), weight.stored)
        return lax.bitcast_convert_type(lax.with_sharding_constraint(octets, weight.gathered), quantized.dtype)

    def scatter(self, gradient: Array) -> Array:
        """Shard the gradient of the weight."""
        weight = self.sharding.weight
        return gradient if weight is None else lax.with_sharding_constraint(gradient, weight.gradient)


def rounded_product(
    operand_axes: tuple[Axes, Axes, Axes],
    x: Float[Array, "..."],
    weight: Rounded,
    *,
    dtype: DTypeLike,
    sharding: ProductSharding | None = None,
) -> Float[Array, "..."]:
    """Multiply `x` by a weight in 8 bits; `operand_axes` are the axes of `x`, of the weight and of the result."""
    sharding = ProductSharding(backend_of(jax.default_backend()).native_int8) if sharding is None else sharding
    plan = _Product(*operand_axes, weight.config, np.dtype(dtype), sharding)
    return _product(plan, x, weight.values, weight.seed)


def _product_sharding(
    operand_axes: tuple[Axes, Axes, Axes],
    x: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Layout | None,
    gathers: bool,
) -> ProductSharding | None:
    """Return the placement of a product, given the shapes of its operands; `gathers`: the weight is all-gathered."""
    if layout is None:
        return None
    native = layout.backend.native_int8
    if not gathers:
        return ProductSharding(native)
    left, right, _ = operand_axes
    shardings = layout.gather_shardings(right, weight)
    if shardings is not None:
        # with gradients_over_data, the gradient is split over more mesh axes than the stored weight
        stored = NamedSharding(layout.current_mesh, layout.weight_spec(right))
        shardings = WeightShardings(shardings[0], stored, shardings[1])
    return ProductSharding(native, _shard_counts(left, right, x, weight, layout), shardings)


def _shard_counts(
    left: Axes, right: Axes, x: tuple[int, ...], weight: tuple[int, ...], layout: Layout
) -> tuple[tuple[str, int], ...]:
    """Return the number of shards of each axis of a product with a gathered weight, for axes with several shards."""
    mesh_axes = {axis: names_of(names) for axis, names in zip(right, layout.gathered_spec(right), strict=True)}
    weight_mesh_axes = {name for names in mesh_axes.values() for name in names}
    sizes = dict(zip(left, x, strict=True)) | dict(zip(right, weight, strict=True))
    activation_axes = tuple(axis for axis in left if axis in AXES)
    spec = layout.activation_spec(activation_axes, tuple(sizes[axis] for axis in activation_axes))
    for axis, names in zip(activation_axes, spec, strict=True):
        if axis not in right:
            mesh_axes[axis] = tuple(name for name in names_of(names) if name not in weight_mesh_axes)
    counts = {axis: math.prod(layout.sizes[name] for name in names) for axis, names in mesh_axes.items()}
    return tuple((axis, count) for axis, count in counts.items() if count > 1 and sizes[axis] % count == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan: _Product, x: Array, weight: Array, seed: Array | None) -> Array:
    return _product_forward(plan, x, weight, seed)[0]


def _product_forward(plan: _Product, x: Array, weight: Array, seed: Array | None) -> tuple[Array, Any]:
    formats = plan.config.formats
    quantized_x, x_scale = quantize_array(x, _indices(plan.contracted, plan.left), formats.activation)
    kernel, weight_scale = quantize_array(weight, _indices(plan.contracted, plan.right), formats.weight)
    kernel = checkpoint_name(plan.gather(kernel), "quantization")
    weight_scale = checkpoint_name(weight_scale, "quantization")
    scales = _aligned(x_scale, plan.left, plan.out), _aligned(weight_scale, plan.right, plan.out)
    y = _dot(plan, (quantized_x, plan.left), (kernel, plan.right), plan.out, scales, plan.dtype, plan.dtype)
    # empty arrays carry the dtypes of the gradients
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    saved_x = x if plan.config.weight_gradient == "float" else quantized_x
    return y, (saved_x, x_scale, kernel, weight_scale, seed, likes)


def _product_backward(plan: _Product, residuals: Any, g: Array) -> tuple[Array, Array, Array | None]:
    x, x_scale, kernel, weight_scale, seed, (like_x, like_weight) = residuals
    form = plan.config.formats.gradient
    x_seed, weight_seed = seeds_of(seed)
    g_float = g.astype(np.promote_types(g.dtype, np.float32))
    scaled = g_float * _aligned(weight_scale, plan.right, plan.out)
    quantized_g, g_scale = quantize_array(scaled, _indices(plan.outputs, plan.out), form, x_seed)
    scales = (_aligned(g_scale, plan.out, plan.left),)
    operands = (quantized_g, plan.out), (kernel, plan.right)
    x_gradient = _dot(plan, *operands, plan.left, scales, like_x.dtype, like_x.dtype)
    # partial sums are all-reduced in the dtype of activations
    sent_dtype = like_x.dtype if plan.sharding.parts else like_weight.dtype
    if plan.config.weight_gradient == "float":
        gradient = g.astype(x.dtype)
        scales = ()
    else:
        scaled = g_float * _aligned(x_scale, plan.left, plan.out)
        gradient, g_scale = quantize_array(scaled, _indices(plan.rows, plan.out), form, weight_seed)
        scales = (_aligned(g_scale, plan.out, plan.right),)
    operands = (x, plan.left), (gradient, plan.out)
    weight_gradient = _dot(plan, *operands, plan.right, scales, sent_dtype, like_weight.dtype)
    return x_gradient, plan.scatter(weight_gradient), None if seed is None else jnp.zeros_like(seed)


_product.defvjp(_product_forward, _product_backward)


def _indices(axes: Axes, among: Axes) -> tuple[int, ...]:
    return tuple(among.index(axis) for axis in axes)


def _aligned(scale: Array, axes: Axes, out: Axes) -> Array:
    """Reshape the scale of an operand to the dimensions of the result, with size 1 for axes that the operand lacks."""
    shared = [axis for axis in out if axis in axes]
    sizes = dict(zip(axes, scale.shape, strict=True))
    order = [axes.index(axis) for axis in shared] + [index for index, axis in enumerate(axes) if axis not in out]
    return scale.transpose(order).reshape([sizes.get(axis, 1) for axis in out])


def _dot(
    plan: _Product,
    left_operand: tuple[Array, Axes],
    right_operand: tuple[Array, Axes],
    out: Axes,
    scales: tuple[Array, ...],
    sent_dtype: np.dtype,
    dtype: np.dtype,
) -> Array:
    """Return the product, multiplied by the scales, as `dtype`; each operand is an array with its axes.

    Partial sums over a contracted axis that the mesh splits are added in `sent_dtype`.
    """
    (x, left), (y, right) = left_operand, right_operand
    parts = {axis: count for axis, count in plan.sharding.parts if axis in left and axis in right and axis not in out}
    for axis, count in parts.items():
        x, left = _split_axis(x, left, axis, count)
        y, right = _split_axis(y, right, axis, count)
    part_axes = tuple(f"{axis} part" for axis in parts)
    total = multiply(x, left, y, right, (*part_axes, *out), native=plan.sharding.native)
    for scale in scales:
        total = total * scale.reshape((*(1,) * len(part_axes), *scale.shape))
    total = total.astype(sent_dtype if part_axes else dtype)
    if part_axes:
        # unlike `jnp.sum`, this sums in the dtype of its operand, which is what the all-reduce sends
        total = lax.reduce_sum(total, tuple(range(len(part_axes))))
    return total.astype(dtype)


def _split_axis(x: Array, axes: Axes, axis: str, count: int) -> tuple[Array, Axes]:
    """Split a dimension into `count` parts: a new dimension of this size, named "... part", before it."""
    index = axes.index(axis)
    shape = (*x.shape[:index], count, x.shape[index] // count, *x.shape[index + 1 :])
    return x.reshape(shape), (*axes[:index], f"{axis} part", *axes[index:])


def multiply(x: Array, left: Axes, y: Array, right: Axes, out: Axes, *, native: bool) -> Float[Array, "..."]:
    """Multiply two arrays by axis names, in float32 (at least); 8-bit values natively if `native`."""
    batch = tuple(axis for axis in left if axis in right and axis in out)
    contracted = tuple(axis for axis in left if axis in right and axis not in out)
    dimensions: Any = tuple(tuple(_indices(axes, side) for side in (left, right)) for axes in (contracted, batch))
    sum_dtype = jnp.result_type(jnp.float32)
    if x.dtype.itemsize == 1:
        sum_dtype = jnp.int32 if native and jnp.issubdtype(x.dtype, jnp.integer) else sum_dtype
        x, y = (x, y) if native else (x.astype(jnp.float32), y.astype(jnp.float32))
    else:
        sum_dtype = np.promote_types(x.dtype, np.float32)
    # products of 8-bit and 16-bit values are exact; ignore a precision that the user has set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None
    result = lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=np.dtype(sum_dtype))
    result_axes = [
        *batch,
        *(axis for axis in left if axis not in right),
        *(axis for axis in right if axis not in left),
    ]
    result = result.transpose([result_axes.index(axis) for axis in out])
    return result.astype(jnp.float32) if sum_dtype == jnp.int32 else result


# --- the grouped product ---


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_product(
    form: GroupedForm, config: LowPrecision, x: Array, weight: Array, seed: Array | None, counts: Array
) -> Array:
    return _grouped_product_forward(form, config, x, weight, seed, counts)[0]


def _grouped_product_forward(form, config, x, weight, seed, counts):
    x = jnp.where(in_groups(x, counts), x, jnp.zeros((), x.dtype))
    quantized_x, x_scale = quantize_array(x, (1,), config.formats.activation)
    kernel, weight_scale = quantize_array(weight, (1,), config.formats.weight)
    kernel = checkpoint_name(kernel, "quantization")
    weight_scale = checkpoint_name(weight_scale, "quantization")
    sums = rows_times_groups(form, quantized_x, kernel, counts, x.dtype)
    y = sums * x_scale * of_rows(weight_scale[:, 0], x, counts)
    # empty arrays carry the dtypes of the gradients
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    saved_x = x if config.weight_gradient == "float" else quantized_x
    return y.astype(x.dtype), (saved_x, x_scale, kernel, weight_scale, seed, counts, likes)


def _grouped_product_backward(form, config, residuals, g):
    x, x_scale, kernel, weight_scale, seed, counts, (like_x, like_weight) = residuals
    gradient_form = config.formats.gradient
    x_seed, weight_seed = seeds_of(seed)
    g = jnp.where(in_groups(g, counts), g, jnp.zeros((), g.dtype))
    g_float = g.astype(x_scale.dtype)
    scaled = g_float * of_rows(weight_scale[:, 0], g, counts)
    quantized_g, g_scale = quantize_array(scaled, (1,), gradient_form, x_seed)
    x_gradient = rows_times_groups(form, quantized_g, kernel, counts, like_x.dtype, transposed=True) * g_scale
    if config.weight_gradient == "float":
        weight_gradient = columns_times_rows(form, x, g, counts, x.dtype)
    else:
        quantized_g, g_scale = quantize_array(g_float * x_scale, (0,), gradient_form, weight_seed)
        weight_gradient = columns_times_rows(form, x, quantized_g, counts, like_x.dtype) * g_scale[None]
    seed_gradient = None if seed is None else jnp.zeros_like(seed)
    return x_gradient.astype(like_x.dtype), weight_gradient.astype(like_weight.dtype), seed_gradient, None


_grouped_product.defvjp(_grouped_product_forward, _grouped_product_backward)
