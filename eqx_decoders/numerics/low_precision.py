"""Matrix products in 8 bits for training: weights, activations and gradients are rounded where they are multiplied.

For `y = x w` each row of `x` and each column of `w` has a scale, its largest absolute value over the largest number of
the format (dynamic: nothing is calibrated or stored), and with `X`, `W` the rounded numbers and `a`, `b` their
scales `y = a (X W) b`. The gradient is the gradient of the product of the rounded numbers, as if rounding were the
identity (straight-through, Bengio et al. 2013); it is rounded, too, and takes the other operand's scale with it:

    to x:  g' = g b, rounded by rows     c (G W^T)
    to w:  g' = a g, rounded by columns  (X^T G) c

Such scales stand outside of all sums, so the sums are of 8-bit numbers (AQT; qwix; Micikevicius et al. 2022 for FP8).
Model, optimizer and checkpoints are unaware of it: at the begin of a forward pass `round_weights` puts the named
weights into a `Rounded`, which `einsum` and grouped products accept.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from eqx_decoders.errors import CheckedFields, check
from eqx_decoders.numerics.quantized_weight import dequantized, quantized_weights
from eqx_decoders.sharding.axes import AnyArray, Axes, axes, matching, named_leaves, product_axes, replaced


ModeName = Literal["int8", "w4a8", "fp8"]
WeightGradientName = Literal["same", "float"]
RoundingName = Literal["nearest", "stochastic"]

T = TypeVar("T")


class Format(NamedTuple):
    """Format of 8-bit numbers: the dtype that stores them, and the largest number."""

    dtype: Any
    largest: float


_INT8, _INT4 = Format(jnp.int8, 127.0), Format(jnp.int8, 7.0)
_E4M3, _E5M2 = Format(jnp.float8_e4m3fn, 448.0), Format(jnp.float8_e5m2, 57344.0)


class Formats(NamedTuple):
    """Formats of activations, weights and gradients."""

    activation: Format
    weight: Format
    gradient: Format


FORMATS: dict[str, Formats] = {
    "int8": Formats(_INT8, _INT8, _INT8),
    "w4a8": Formats(_INT8, _INT4, _INT8),
    "fp8": Formats(_E4M3, _E4M3, _E5M2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowPrecisionConfig(CheckedFields):
    """Settings of products in 8 bits, and their formats; without `mode` there are none.

    **Arguments:**

    - `mode`: `"int8"`, whole numbers up to 127; `"w4a8"`, weights up to 7 and all else up to 127; `"fp8"`, weights and
        activations with 4 bits of exponent and 3 of mantissa (e4m3), gradients with 5 and 2 (e5m2).
    - `weights`: patterns of the weights' paths (`*` stands for anything). Only matrices inside of blocks are taken:
        no tables, heads, routers, norms, biases, low-rank pairs, and nothing that makes decays or one number per head.
    - `weight_gradient`: `"same"`: gradients of weights are such products, too; `"float"`: they are products of
        activations and gradients without rounding, a third of all products, for which whole activations are saved.
    - `gradient_rounding`: `"nearest"`, or `"stochastic"`: up with a probability by which the mean is exact, where a
        pass has a key, as `Trainer` then gives; for whole numbers.
    """

    checked_name = "LowPrecision."
    mode: ModeName | None = None
    weights: tuple[str, ...] = ("segments.*",)
    weight_gradient: WeightGradientName = "same"
    gradient_rounding: RoundingName = "nearest"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "weights", tuple(self.weights))
        check(len(self.weights) > 0, "LowPrecision.weights=() must name a weight, such as 'segments.*'.")
        check(
            self.mode != "fp8" or not self.draws,
            "LowPrecision.gradient_rounding='stochastic' is for whole numbers: fp8 rounds to nearest. Leave it out.",
        )

    @property
    def draws(self) -> bool:
        """True if rounding draws random numbers."""
        return self.gradient_rounding == "stochastic"

    def products(self) -> "LowPrecision | None":
        """Return the configuration of the products; None for none."""
        return None if self.mode is None else LowPrecision(**vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowPrecision(LowPrecisionConfig):
    """Configuration of 8-bit training: the products, and their formats, with the settings of `LowPrecisionConfig`."""

    mode: ModeName = "int8"

    @property
    def formats(self) -> Formats:
        """Formats of activations, weights and gradients."""
        return FORMATS[self.mode]

    @property
    def format(self) -> str:
        """Format of its products: `"int8"` or `"fp8"`."""
        return "fp8" if self.mode == "fp8" else "int8"

    def chosen(self, words: Mapping[str, Axes]) -> list[str]:
        """Return the paths of the weights that the patterns match.

        Raises ConfigError for a pattern that matches no weight of 8-bit products.
        """
        chosen: dict[str, None] = {}
        for pattern in self.weights:
            matched = matching(words, (pattern,), "LowPrecision.weights")
            fitting = [path for path in words if path in matched and fits(path, words[path])]
            check(
                bool(fitting),
                f"LowPrecision.weights={pattern!r} matches {min(matched)}, which is no matrix of a block that is "
                "multiplied in 8 bits: tables, heads, routers, norms, biases and low-rank pairs aren't, nor is what "
                "makes decays or one number per head. Write another pattern.",
            )
            chosen |= dict.fromkeys(fitting)
        return list(chosen)


def fits(path: str, words: Axes) -> bool:
    split = product_axes(words)
    inside = path.startswith(("segments.", "mtp."))
    if split is None or not inside:
        return False
    # what makes decays, or one number per expert or head, is little work, and is computed in f32
    little = split[1] in (("experts",), ("heads",), ("key_heads",)) or {"rank", "gate_rank"} & set(words)
    return not little and not any(word.startswith("teacher") for word in words)


class Rounded(eqx.Module):
    """Weight whose products are of 8-bit numbers, wherever `einsum` takes a weight.

    **Arguments:**

    - `array`: the weight.
    - `seed`: for stochastic rounding, a whole number; as a float, since what goes where weights go has a gradient.
        None: all is rounded to the nearest.
    - `config`: formats and rounding.
    """

    array: Float[AnyArray, "..."]
    seed: Float[AnyArray, "..."] | None
    config: LowPrecision = eqx.field(static=True)

    @staticmethod
    def part_axes(words: Axes) -> dict[str, Axes]:
        """Return the axes of both arrays, given the axes of the weight."""
        return {"array": words, "seed": ()}

    def values(self, *contracted: int) -> Float[Array, "..."]:
        """Return the rounded weight as an array, for products that contract these dimensions.

        Gradients pass straight through.
        """
        quantized, scale = quantize_array(self.array, contracted, self.config.formats.weight)
        wide = np.promote_types(self.array.dtype, np.float32)
        rounded = (quantized.astype(wide) * scale).astype(self.array.dtype)
        return self.array + lax.stop_gradient(rounded - self.array)


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
    nodes = {path: Rounded(array=leaves[path], seed=seeds[path], config=config) for path in paths}
    return replaced(model, nodes)


def unrounded(weight: PyTree, *contracted: int) -> PyTree:
    """Replace each `Rounded` in a weight by its `values`, and each `QuantizedWeight` by an array."""
    return jax.tree.map(
        lambda part: part.values(*contracted) if isinstance(part, Rounded) else part,
        dequantized(weight),
        is_leaf=lambda part: isinstance(part, Rounded),
    )


# --- rounding ---


def quantize_array(
    x: Float[Array, "..."], over: tuple[int, ...], form: Format, seed: Array | None = None
) -> tuple[Array, Float[Array, "..."]]:
    """Round `x / scale` to a format; return it and the scale, whose dimensions `over` have size 1.

    Zeros have a scale, too. What is not finite makes its scale so, and with it all that is multiplied by it.
    """
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    largest = jnp.max(jnp.abs(wide), axis=over, keepdims=True, initial=0.0)
    # so large that neither the scale nor its inverse leaves the range of normal numbers
    scale = jnp.maximum(largest, form.largest * 2.0**-100) / form.largest
    ratio = wide * (1.0 / scale)
    if jnp.issubdtype(form.dtype, jnp.integer):
        ratio = jnp.round(ratio) if seed is None else jnp.floor(ratio + _uniform(seed, ratio.shape).astype(wide.dtype))
    return jnp.clip(ratio, -form.largest, form.largest).astype(form.dtype), scale


def _uniform(seed: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draw numbers in [0, 1) from a seed and their index: the hash `lowbias32` (Wellons 2018).

    Where a mesh splits an array each device makes its own ones, and they cost a tenth of numbers of `jax.random`.
    """
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mixed(place ^ _mixed(seed.astype(jnp.uint32)))
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _mixed(bits: Array) -> Array:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def seeds_of(seed: Array | None) -> tuple[Array | None, Array | None]:
    """Return one seed for the gradient of the input and one for the gradient of the weight."""
    return (None, None) if seed is None else (seed, seed + 2.0**24)


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
    sharding = ProductSharding(jax.default_backend() != "cpu") if sharding is None else sharding
    plan = _Product(*words, weight.config, np.dtype(dtype), sharding)
    return _product(plan, x, weight.array, weight.seed)


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
