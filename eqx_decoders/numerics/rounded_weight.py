"""Weights that are multiplied in 8 bits: one at a time, and by groups of rows (see `low_precision.py`)."""

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
from eqx_decoders.numerics.low_precision import LowPrecision, quantize_array, seeds_of
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.numerics.quantized_weight import quantized_weights
from eqx_decoders.sharding.axes import AXES, AnyArray, Axes, axes, named_leaves, names_of, replaced
from eqx_decoders.sharding.backend import backend_of
from eqx_decoders.sharding.layout import Layout


T = TypeVar("T")


class Rounded(AbstractArrayWeight):
    """Weight whose products are of 8-bit numbers.

    **Arguments:**

    - `values`: the weight.
    - `seed`: for stochastic rounding, a whole number; as a float, since what goes where weights go has a gradient.
        None: all is rounded to the nearest.
    - `config`: formats and rounding.
    """

    seed: Float[AnyArray, "..."] | None
    config: LowPrecision = eqx.field(static=True)

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of both arrays, given the axes of the weight."""
        return {"values": words, "seed": ()}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Return the rounded weight as an array, for products that contract these dimensions.

        Gradients pass straight through.
        """
        quantized, scale = quantize_array(self.values, contracted, self.config.formats.weight)
        wide = np.promote_types(self.values.dtype, np.float32)
        rounded = (quantized.astype(wide) * scale).astype(self.values.dtype)
        return self.values + lax.stop_gradient(rounded - self.values)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the weight, both rounded."""
        layout = options.layout
        if not options.flatten or plan.contracted is None:
            words = plan.spelled(x.ndim)
            gathers = options.gathers(plan, self.values.size, x)
            sharding = _product_sharding(words, x.shape, self.values.shape, layout, gathers)
            return rounded_product(words, x, self, dtype=options.dtype, sharding=sharding)
        flat, matrix, shape = plan.flattened(x, self.values)
        words = ("rows", "inner"), ("outer", "inner") if plan.transposed else ("inner", "outer"), ("rows", "outer")
        rounded = Rounded(matrix, self.seed, self.config)
        sharding = _product_sharding(words, flat.shape, matrix.shape, layout, gathers=False)
        return rounded_product(words, flat, rounded, dtype=options.dtype, sharding=sharding).reshape(shape)

    @classmethod
    def contract_groups(
        cls, x: Array, weights: "Sequence[Rounded]", counts: Array, form: GroupedForm
    ) -> tuple[Array, ...]:
        """Multiply sorted rows by the weights, rounded: each column of a group has a scale.

        Gradients have one for a column of all groups.
        """
        return tuple(_by_groups(form, weight.config, x, weight.values, weight.seed, counts) for weight in weights)


def round_weights(model: T, config: LowPrecision | None, *, below: str, key: PRNGKeyArray | None = None) -> T:
    """Return the model with every named weight below one of its fields in a `Rounded`.

    Stochastic rounding has a seed for each weight and layer, drawn by the key.
    """
    if config is None:
        return model
    words, leaves = axes(model), named_leaves(model)
    for path in quantized_weights(model):  # are in few bits already
        words = {name: axes_of_leaf for name, axes_of_leaf in words.items() if not name.startswith(f"{path}.")}
    paths = [path for path in config.chosen(words) if path.startswith(f"{below}.")]
    seeds: dict[str, Any] = dict.fromkeys(paths)
    if config.draws and key is not None and paths:
        counts = [leaves[path].shape[: words[path].count("layers")] for path in paths]
        draws = jax.random.randint(key, (sum(map(math.prod, counts)),), 0, 2**24).astype(jnp.float32)
        ends = np.cumsum([math.prod(count) for count in counts])
        pieces = jnp.split(draws, ends[:-1])
        seeds = {path: piece.reshape(count) for path, piece, count in zip(paths, pieces, counts, strict=True)}
    nodes = {path: Rounded(leaves[path], seed=seeds[path], config=config) for path in paths}
    return replaced(model, nodes)


# --- the product ---


class ProductSharding(NamedTuple):
    """Placement of one product on a mesh.

    **Arguments:**

    - `native`: whether the devices multiply 8-bit numbers. Else these are multiplied in f32: the numbers are the same,
        as far as f32 sums them without rounding.
    - `parts`: number of parts into which the mesh splits an axis. Sums over such an axis are scaled and brought into
        the dtype of the result before the parts are added up, which costs as much communication as without rounding.
    - `weight`: shardings of the weight where it is multiplied, and where it is stored; None leaves both to XLA.
    """

    native: bool
    parts: tuple[tuple[str, int], ...] = ()
    weight: tuple[NamedSharding, NamedSharding] | None = None


@dataclasses.dataclass(frozen=True)
class _Product:
    """Static description of one product: `left` times `right`, axes of both operands, gives `out`.

    **Arguments:**

    - `dtype`: of the result.
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
        return tuple(word for word in self.left if word in self.right and word not in self.out)

    @property
    def outputs(self) -> Axes:
        return tuple(word for word in self.right if word not in self.left)

    @property
    def rows(self) -> Axes:
        return tuple(word for word in self.left if word not in self.right)

    def gather(self, quantized: Array) -> Array:
        """Bring the quantized weight to the devices that multiply it: 8 bits of each number travel.

        They travel as bytes. XLA would send parts of what is multiplied as it comes round in a ring: twice as much.
        """
        if self.sharding.weight is None:
            return quantized
        whole, stored = self.sharding.weight
        octets = lax.with_sharding_constraint(lax.bitcast_convert_type(quantized, jnp.uint8), stored)
        return lax.bitcast_convert_type(lax.with_sharding_constraint(octets, whole), quantized.dtype)

    def scatter(self, gradient: Array) -> Array:
        """Split the weight's gradient as the weight is split."""
        weight = self.sharding.weight
        return gradient if weight is None else lax.with_sharding_constraint(gradient, weight[1])


def rounded_product(
    words: tuple[Axes, Axes, Axes],
    x: Float[Array, "..."],
    weight: Rounded,
    *,
    dtype: DTypeLike,
    sharding: ProductSharding | None = None,
) -> Float[Array, "..."]:
    """Multiply `x` by a weight in 8 bits; `words` are the axes of `x`, of the weight and of the result."""
    sharding = ProductSharding(backend_of(jax.default_backend()).native_int8) if sharding is None else sharding
    plan = _Product(*words, weight.config, np.dtype(dtype), sharding)
    return _product(plan, x, weight.values, weight.seed)


def _product_sharding(
    words: tuple[Axes, Axes, Axes], x: tuple[int, ...], weight: tuple[int, ...], layout: Layout | None, gathers: bool
) -> ProductSharding | None:
    """Return the placement of a product in 8 bits; `gathers` says that each device gets the whole weight."""
    if layout is None:
        return None
    native = layout.backend.native_int8
    if not gathers:
        return ProductSharding(native)
    left, right, _ = words
    return ProductSharding(native, _parts(left, right, x, weight, layout), layout.gather_places(right, weight))


def _parts(
    left: Axes, right: Axes, x: tuple[int, ...], weight: tuple[int, ...], layout: Layout
) -> tuple[tuple[str, int], ...]:
    """Count the parts into which the mesh splits each axis of a product with a gathered weight."""
    used = {word: names_of(group) for word, group in zip(right, layout.used_spec(right), strict=True)}
    taken = {name for names in used.values() for name in names}
    sizes = dict(zip(left, x, strict=True)) | dict(zip(right, weight, strict=True))
    known = tuple(word for word in left if word in AXES)
    spec = layout.activation_spec(known, tuple(sizes[word] for word in known))
    rows = {word: names_of(group) for word, group in zip(known, spec, strict=True) if word not in right}
    names_by_axis = used | {word: tuple(name for name in names if name not in taken) for word, names in rows.items()}
    counts = {word: math.prod(layout.sizes[name] for name in names) for word, names in names_by_axis.items()}
    return tuple((word, count) for word, count in counts.items() if count > 1 and sizes[word] % count == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan: _Product, x: Array, weight: Array, seed: Array | None) -> Array:
    return _product_forward(plan, x, weight, seed)[0]


def _product_forward(plan: _Product, x: Array, weight: Array, seed: Array | None) -> tuple[Array, Any]:
    formats, keeps = plan.config.formats, plan.config.weight_gradient == "float"
    rounded, a = quantize_array(x, _indices(plan.contracted, plan.left), formats.activation)
    kernel, b = quantize_array(weight, _indices(plan.contracted, plan.right), formats.weight)
    kernel, b = checkpoint_name(plan.gather(kernel), "quantization"), checkpoint_name(b, "quantization")
    scales = _aligned(a, plan.left, plan.out), _aligned(b, plan.right, plan.out)
    y = _dot(plan, (rounded, plan.left), (kernel, plan.right), plan.out, scales, plan.dtype, plan.dtype)
    # empty arrays carry the dtypes of the gradients
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    return y, ((x if keeps else rounded), a, kernel, b, seed, likes)


def _product_backward(plan: _Product, saved: Any, g: Array) -> tuple[Array, Array, Array | None]:
    x, a, kernel, b, seed, (like_x, like_w) = saved
    form, (first, second) = plan.config.formats.gradient, seeds_of(seed)
    wide = g.astype(np.promote_types(g.dtype, np.float32))
    rounded, c = quantize_array(wide * _aligned(b, plan.right, plan.out), _indices(plan.outputs, plan.out), form, first)
    scales = (_aligned(c, plan.out, plan.left),)
    to_x = _dot(plan, (rounded, plan.out), (kernel, plan.right), plan.left, scales, like_x.dtype, like_x.dtype)
    # what devices add up, they send in the dtype of activations
    sent = like_x.dtype if plan.sharding.parts else like_w.dtype
    if plan.config.weight_gradient == "float":
        gradient, scales = g.astype(x.dtype), ()
    else:
        scaled = wide * _aligned(a, plan.left, plan.out)
        gradient, c = quantize_array(scaled, _indices(plan.rows, plan.out), form, second)
        scales = (_aligned(c, plan.out, plan.right),)
    to_weight = _dot(plan, (x, plan.left), (gradient, plan.out), plan.right, scales, sent, like_w.dtype)
    return to_x, plan.scatter(to_weight), None if seed is None else jnp.zeros_like(seed)


_product.defvjp(_product_forward, _product_backward)


def _indices(words: Axes, among: Axes) -> tuple[int, ...]:
    return tuple(among.index(word) for word in words)


def _aligned(scale: Array, words: Axes, out: Axes) -> Array:
    """Reshape a scale of an operand to the dimensions of the result, with size 1 for axes that the operand lacks."""
    shared = [word for word in out if word in words]
    sizes = dict(zip(words, scale.shape, strict=True))
    order = [words.index(word) for word in shared] + [index for index, word in enumerate(words) if word not in out]
    return scale.transpose(order).reshape([sizes.get(word, 1) for word in out])


def _dot(
    plan: _Product,
    a: tuple[Array, Axes],
    b: tuple[Array, Axes],
    out: Axes,
    scales: tuple[Array, ...],
    sent: np.dtype,
    dtype: np.dtype,
) -> Array:
    """Sum the products and multiply by the scales; sums over an axis that a mesh splits are added up as `sent`."""
    (x, left), (y, right) = a, b
    parts = {w: count for w, count in plan.sharding.parts if w in left and w in right and w not in out}
    for word, count in parts.items():
        x, left = _cut(x, left, word, count)
        y, right = _cut(y, right, word, count)
    ahead = tuple(f"{word} part" for word in parts)
    total = multiply(x, left, y, right, (*ahead, *out), native=plan.sharding.native)
    for scale in scales:
        total = total * scale.reshape((*(1,) * len(ahead), *scale.shape))
    total = total.astype(sent if ahead else dtype)
    # unlike `jnp.sum`, in the dtype in which it is sent
    return (lax.reduce_sum(total, tuple(range(len(ahead)))) if ahead else total).astype(dtype)


def _cut(x: Array, words: Axes, word: str, count: int) -> tuple[Array, Axes]:
    place = words.index(word)
    shape = (*x.shape[:place], count, x.shape[place] // count, *x.shape[place + 1 :])
    return x.reshape(shape), (*words[:place], f"{word} part", *words[place:])


def multiply(x: Array, left: Axes, y: Array, right: Axes, out: Axes, *, native: bool) -> Float[Array, "..."]:
    """Multiply two arrays by the names of their axes, in f32 (at least); 8-bit ones as the devices do it."""
    batch = [word for word in left if word in right and word in out]
    summed = [word for word in left if word in right and word not in out]
    numbers: Any = tuple(tuple(_indices(tuple(words), side) for side in (left, right)) for words in (summed, batch))
    sums = jnp.result_type(jnp.float32)
    if x.dtype.itemsize == 1:
        sums = jnp.int32 if native and jnp.issubdtype(x.dtype, jnp.integer) else sums
        x, y = (x, y) if native else (x.astype(jnp.float32), y.astype(jnp.float32))
    else:
        sums = np.promote_types(x.dtype, np.float32)
    # products of few bits are exact, whatever a user may have set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None
    result = lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=np.dtype(sums))
    axes_of_result = [
        *batch,
        *(word for word in left if word not in right),
        *(word for word in right if word not in left),
    ]
    result = result.transpose([axes_of_result.index(word) for word in out])
    return result.astype(jnp.float32) if sums == jnp.int32 else result


# --- the product by groups ---


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_groups(
    form: GroupedForm, config: LowPrecision, x: Array, weight: Array, seed: Array | None, counts: Array
) -> Array:
    return _by_groups_forward(form, config, x, weight, seed, counts)[0]


def _by_groups_forward(form, config, x, weight, seed, counts):
    x = jnp.where(in_groups(x, counts), x, jnp.zeros((), x.dtype))
    rounded, a = quantize_array(x, (1,), config.formats.activation)
    kernel, b = (checkpoint_name(each, "quantization") for each in quantize_array(weight, (1,), config.formats.weight))
    y = rows_times_groups(form, rounded, kernel, counts, x.dtype) * a * of_rows(b[:, 0], x, counts)
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    keeps = config.weight_gradient == "float"
    return y.astype(x.dtype), ((x if keeps else rounded), a, kernel, b, seed, counts, likes)


def _by_groups_backward(form, config, saved, g):
    x, a, kernel, b, seed, counts, (like_x, like_w) = saved
    bars, (first, second) = config.formats.gradient, seeds_of(seed)
    g = jnp.where(in_groups(g, counts), g, jnp.zeros((), g.dtype))
    wide = g.astype(a.dtype)
    rounded, c = quantize_array(wide * of_rows(b[:, 0], g, counts), (1,), bars, first)
    to_x = rows_times_groups(form, rounded, kernel, counts, like_x.dtype, transposed=True) * c
    if config.weight_gradient == "float":
        to_weight = columns_times_rows(form, x, g, counts, x.dtype)
    else:
        rounded, c = quantize_array(wide * a, (0,), bars, second)
        to_weight = columns_times_rows(form, x, rounded, counts, like_x.dtype) * c[None]
    to_seed = None if seed is None else jnp.zeros_like(seed)
    return to_x.astype(like_x.dtype), to_weight.astype(like_w.dtype), to_seed, None


_by_groups.defvjp(_by_groups_forward, _by_groups_backward)
