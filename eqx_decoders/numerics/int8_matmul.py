"""Products in 8 bits for training: weights, activations and gradients are rounded where they are multiplied.

For `y = x w` each row of `x` and each column of `w` has a scale, its largest absolute value over the largest number of
the format (dynamic, so nothing is to be calibrated or kept), and with `X`, `W` the rounded numbers and `a`, `b` their
scales `y = a (X W) b`. The gradient is that of the product of the rounded numbers, as if rounding were the identity
(straight-through, Bengio et al. 2013); what comes back is rounded, too, and takes the other operand's scale with it:

    to x:  g' = g b, rounded by rows     c (G W^T)
    to w:  g' = a g, rounded by columns  (X^T G) c

Such scales stand outside of all sums, so the sums are of 8-bit numbers (AQT; qwix; Micikevicius et al. 2022 for FP8).
Model, optimizer and checkpoints know nothing of it: at the begin of a forward pass `round_weights` puts the named
weights into a `Rounded`, which `numerics.einsum` and grouped products know.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from eqx_decoders.errors import check, check_word
from eqx_decoders.numerics.quantized_weight import quantized_weights, widened
from eqx_decoders.sharding.axes import AXES, AnyArray, Axes, axes, matching, named_leaves, product_axes, replaced
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.rules import names_of


ModeName = Literal["int8", "w4a8", "fp8"]
WeightGradientName = Literal["same", "float"]
RoundingName = Literal["nearest", "stochastic"]

T = TypeVar("T")


class Format(NamedTuple):
    """Numbers of 8 bits: in which dtype they are kept, and the largest."""

    dtype: Any
    largest: float


_INT8, _INT4 = Format(jnp.int8, 127.0), Format(jnp.int8, 7.0)
_E4M3, _E5M2 = Format(jnp.float8_e4m3fn, 448.0), Format(jnp.float8_e5m2, 57344.0)


class Formats(NamedTuple):
    """Those of a mode."""

    activation: Format
    weight: Format
    gradient: Format


FORMATS: dict[str, Formats] = {
    "int8": Formats(_INT8, _INT8, _INT8),
    "w4a8": Formats(_INT8, _INT4, _INT8),
    "fp8": Formats(_E4M3, _E4M3, _E5M2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowPrecision:
    """Which products are of 8-bit numbers, and of which.

    **Arguments:**

    - `mode`: `"int8"`, whole numbers up to 127; `"w4a8"`, weights up to 7 and all else up to 127; `"fp8"`, weights and
        activations with 4 bits of exponent and 3 of mantissa (e4m3), gradients with 5 and 2 (e5m2).
    - `weights`: patterns of the weights' paths (`*` stands for anything). Of what they match, the matrices inside of
        blocks: no tables, heads, routers, norms, biases, low-rank pairs, and nothing that makes decays or one number
        per head.
    - `weight_gradient`: whether gradients of weights are such products, too (`"same"`), or of activations and
        gradients as they are (`"float"`): a third of the products, for which activations are kept as they are.
    - `gradient_rounding`: `"nearest"`, or `"stochastic"`: up with a probability by which the mean is exact, where a
        pass has a key, as `Trainer` then gives; for whole numbers.
    """

    mode: ModeName = "int8"
    weights: tuple[str, ...] = ("segments.*",)
    weight_gradient: WeightGradientName = "same"
    gradient_rounding: RoundingName = "nearest"

    def __post_init__(self):
        object.__setattr__(self, "weights", tuple(self.weights))
        check_word("LowPrecision.mode", self.mode, get_args(ModeName))
        check_word("LowPrecision.weight_gradient", self.weight_gradient, get_args(WeightGradientName))
        check_word("LowPrecision.gradient_rounding", self.gradient_rounding, get_args(RoundingName))
        check(len(self.weights) > 0, "LowPrecision.weights=() must name a weight, such as 'segments.*'.")
        check(
            self.mode != "fp8" or not self.draws,
            "LowPrecision.gradient_rounding='stochastic' is for whole numbers: fp8 rounds to nearest. Leave it out.",
        )

    @property
    def formats(self) -> Formats:
        """Those of activations, weights and gradients."""
        return FORMATS[self.mode]

    @property
    def format(self) -> str:
        """Of which numbers its products are: `"int8"` or `"fp8"`."""
        return "fp8" if self.mode == "fp8" else "int8"

    @property
    def draws(self) -> bool:
        """Whether a key changes anything."""
        return self.gradient_rounding == "stochastic"

    def chosen(self, words: Mapping[str, Axes]) -> list[str]:
        """The paths of the weights that it names; ConfigError for a pattern of none that can be."""
        found: dict[str, None] = {}
        for pattern in self.weights:
            matched = matching(words, (pattern,), "LowPrecision.weights")
            fitting = [path for path in words if path in matched and fits(path, words[path])]
            check(
                bool(fitting),
                f"LowPrecision.weights={pattern!r} matches {min(matched)}, which is no matrix of a block that is "
                "multiplied in 8 bits: tables, heads, routers, norms, biases and low-rank pairs aren't, nor is what "
                "makes decays or one number per head. Write another pattern.",
            )
            found |= dict.fromkeys(fitting)
        return list(found)


def fits(path: str, words: Axes) -> bool:
    split = product_axes(words)
    inside = path.startswith(("segments.", "mtp."))
    if split is None or not inside:
        return False
    # what makes decays, or one number per expert or head, is little work, and is computed in f32
    little = split[1] in (("experts",), ("heads",), ("key_heads",)) or {"rank", "gate_rank"} & set(words)
    return not little and not any(word.startswith("teacher") for word in words)


class Rounded(eqx.Module):
    """A weight whose products are of 8-bit numbers, wherever `einsum` takes a weight.

    **Arguments:**

    - `array`: the weight.
    - `seed`: for stochastic rounding, a whole number; as a float, since what goes where weights go has a gradient.
        None: all is rounded to the nearest.
    - `config`: how it is rounded.
    """

    array: Float[AnyArray, "..."]
    seed: Float[AnyArray, "..."] | None
    config: LowPrecision = eqx.field(static=True)

    @staticmethod
    def part_axes(words: Axes) -> dict[str, Axes]:
        """The words of both arrays, given those of the weight."""
        return {"array": words, "seed": ()}

    def values(self, *contracted: int) -> Float[Array, "..."]:
        """The rounded weight as an array, its products contracting these dimensions; gradients pass straight through.

        For what multiplies it in another way.
        """
        quantised, scale = quantise(self.array, contracted, self.config.formats.weight)
        wide = np.promote_types(self.array.dtype, np.float32)
        rounded = (quantised.astype(wide) * scale).astype(self.array.dtype)
        return self.array + lax.stop_gradient(rounded - self.array)


def round_weights(model: T, config: LowPrecision | None, *, below: str, key: PRNGKeyArray | None = None) -> T:
    """The model with every named weight below one of its fields in a `Rounded`.

    Stochastic rounding has a seed for each weight and layer, drawn by the key.
    """
    if config is None:
        return model
    words, leaves = axes(model), named_leaves(model)
    for path in quantized_weights(model):  # are in few bits already
        words = {name: here for name, here in words.items() if not name.startswith(f"{path}.")}
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
    """A weight, or one in parts, with `Rounded.values` in place of what is rounded; arrays for what is in few bits."""
    return jax.tree.map(
        lambda part: part.values(*contracted) if isinstance(part, Rounded) else part,
        widened(weight),
        is_leaf=lambda part: isinstance(part, Rounded),
    )


# --- rounding ---


def quantise(
    x: Float[Array, "..."], over: tuple[int, ...], form: Format, seed: Array | None = None
) -> tuple[Array, Float[Array, "..."]]:
    """`x / scale` rounded to a format, and the scale, in which the dimensions `over` that share one have size 1.

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
    """Numbers from 0 to below 1 by the seed and their places: the hash `lowbias32` (Wellons 2018).

    Where a mesh splits an array each device makes its own ones, and they cost a tenth of those of `jax.random`.
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
    """One for the gradient of the input, one for that of the weight."""
    return (None, None) if seed is None else (seed, seed + 2.0**24)


# --- the product ---


@dataclasses.dataclass(frozen=True)
class _Product:
    """One product: `left` times `right`, words of both operands, gives `out`.

    **Arguments:**

    - `dtype`: of the result.
    - `native`: whether the devices multiply 8-bit numbers. Else these are multiplied in f32: the numbers are the same,
        as far as f32 sums them without rounding.
    - `parts`: into how many parts a mesh splits a word. Sums over such a word are scaled and brought into the dtype of
        the result before the parts are added up, which costs as much communication as without rounding.
    - `places`: how the weight is split where it is multiplied, and where it is stored; None: that's left to XLA.
    """

    left: Axes
    right: Axes
    out: Axes
    config: LowPrecision
    dtype: np.dtype
    native: bool
    parts: tuple[tuple[str, int], ...] = ()
    places: tuple[NamedSharding, NamedSharding] | None = None

    @property
    def contracted(self) -> Axes:
        return tuple(word for word in self.left if word in self.right and word not in self.out)

    @property
    def made(self) -> Axes:
        return tuple(word for word in self.right if word not in self.left)

    @property
    def rows(self) -> Axes:
        return tuple(word for word in self.left if word not in self.right)

    def gather(self, quantised: Array) -> Array:
        """The quantised weight where it is multiplied: 8 bits of each number travel.

        As bytes. XLA would send parts of what is multiplied as it comes round in a ring, which is twice as much.
        """
        if self.places is None:
            return quantised
        whole, stored = self.places
        octets = lax.with_sharding_constraint(lax.bitcast_convert_type(quantised, jnp.uint8), stored)
        return lax.bitcast_convert_type(lax.with_sharding_constraint(octets, whole), quantised.dtype)

    def scatter(self, gradient: Array) -> Array:
        """The weight's gradient, split as the weight is."""
        return gradient if self.places is None else lax.with_sharding_constraint(gradient, self.places[1])


def rounded_product(
    words: tuple[Axes, Axes, Axes],
    x: Float[Array, "..."],
    weight: Rounded,
    *,
    dtype: DTypeLike,
    layout: Layout | None = None,
    gathers: bool = False,
) -> Float[Array, "..."]:
    """`x` times a weight in 8 bits; `words` are those of `x`, of the weight and of the result.

    `gathers`: whether the weight is brought whole to each device.
    """
    left, right, out = words
    platform = jax.default_backend() if layout is None else layout.platform
    parts, places = (), None
    if layout is not None and gathers:
        parts, places = (
            _parts(left, right, x.shape, weight.array.shape, layout),
            layout.gather_places(right, weight.array.shape),
        )
    how = _Product(left, right, out, weight.config, np.dtype(dtype), platform != "cpu", parts, places)
    return _product(how, x, weight.array, weight.seed)


def _parts(
    left: Axes, right: Axes, x: tuple[int, ...], weight: tuple[int, ...], layout: Layout
) -> tuple[tuple[str, int], ...]:
    """Into how many parts the mesh splits each word of a product with a gathered weight."""
    used = {word: names_of(group) for word, group in zip(right, layout.used_spec(right), strict=True)}
    taken = {name for names in used.values() for name in names}
    sizes = dict(zip(left, x, strict=True)) | dict(zip(right, weight, strict=True))
    known = tuple(word for word in left if word in AXES)
    spec = layout.activation_spec(known, tuple(sizes[word] for word in known))
    rows = {word: names_of(group) for word, group in zip(known, spec, strict=True) if word not in right}
    found = used | {word: tuple(name for name in names if name not in taken) for word, names in rows.items()}
    counts = {word: math.prod(layout.sizes[name] for name in names) for word, names in found.items()}
    return tuple((word, count) for word, count in counts.items() if count > 1 and sizes[word] % count == 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _Product, x: Array, weight: Array, seed: Array | None) -> Array:
    return _product_forward(how, x, weight, seed)[0]


def _product_forward(how: _Product, x: Array, weight: Array, seed: Array | None) -> tuple[Array, Any]:
    formats, keeps = how.config.formats, how.config.weight_gradient == "float"
    rounded, a = quantise(x, _places(how.contracted, how.left), formats.activation)
    kernel, b = quantise(weight, _places(how.contracted, how.right), formats.weight)
    kernel, b = checkpoint_name(how.gather(kernel), "quantization"), checkpoint_name(b, "quantization")
    scales = _aligned(a, how.left, how.out), _aligned(b, how.right, how.out)
    y = _dot(how, (rounded, how.left), (kernel, how.right), how.out, scales, how.dtype, how.dtype)
    # empty arrays carry the dtypes of the gradients
    likes = jnp.zeros((0,), x.dtype), jnp.zeros((0,), weight.dtype)
    return y, ((x if keeps else rounded), a, kernel, b, seed, likes)


def _product_backward(how: _Product, saved: Any, g: Array) -> tuple[Array, Array, Array | None]:
    x, a, kernel, b, seed, (like_x, like_w) = saved
    form, (first, second) = how.config.formats.gradient, seeds_of(seed)
    wide = g.astype(np.promote_types(g.dtype, np.float32))
    rounded, c = quantise(wide * _aligned(b, how.right, how.out), _places(how.made, how.out), form, first)
    scales = (_aligned(c, how.out, how.left),)
    to_x = _dot(how, (rounded, how.out), (kernel, how.right), how.left, scales, like_x.dtype, like_x.dtype)
    # what devices add up, they send in the dtype of activations
    sent = like_x.dtype if how.parts else like_w.dtype
    if how.config.weight_gradient == "float":
        gradient, scales = g.astype(x.dtype), ()
    else:
        scaled = wide * _aligned(a, how.left, how.out)
        gradient, c = quantise(scaled, _places(how.rows, how.out), form, second)
        scales = (_aligned(c, how.out, how.right),)
    to_weight = _dot(how, (x, how.left), (gradient, how.out), how.right, scales, sent, like_w.dtype)
    return to_x, how.scatter(to_weight), None if seed is None else jnp.zeros_like(seed)


_product.defvjp(_product_forward, _product_backward)


def _places(words: Axes, among: Axes) -> tuple[int, ...]:
    return tuple(among.index(word) for word in words)


def _aligned(scale: Array, words: Axes, out: Axes) -> Array:
    """A scale of an operand, of size 1 in words that the result lacks, with the dimensions of the result."""
    kept = [word for word in out if word in words]
    sizes = dict(zip(words, scale.shape, strict=True))
    order = [words.index(word) for word in kept] + [index for index, word in enumerate(words) if word not in out]
    return scale.transpose(order).reshape([sizes.get(word, 1) for word in out])


def _dot(
    how: _Product,
    a: tuple[Array, Axes],
    b: tuple[Array, Axes],
    out: Axes,
    scales: tuple[Array, ...],
    sent: np.dtype,
    dtype: np.dtype,
) -> Array:
    """The sum of products, times scales; where a mesh splits what is summed over, its parts are added up as `sent`."""
    (x, left), (y, right) = a, b
    parts = {w: count for w, count in how.parts if w in left and w in right and w not in out}
    for word, count in parts.items():
        x, left = _cut(x, left, word, count)
        y, right = _cut(y, right, word, count)
    ahead = tuple(f"{word} part" for word in parts)
    total = multiply(x, left, y, right, (*ahead, *out), native=how.native)
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
    """The product of two arrays by the words of their dimensions, in f32 (at least); of 8-bit ones as devices do it."""
    batch = [word for word in left if word in right and word in out]
    summed = [word for word in left if word in right and word not in out]
    numbers: Any = tuple(tuple(_places(tuple(words), side) for side in (left, right)) for words in (summed, batch))
    sums = jnp.result_type(jnp.float32)
    if x.dtype.itemsize == 1:
        sums = jnp.int32 if native and jnp.issubdtype(x.dtype, jnp.integer) else sums
        x, y = (x, y) if native else (x.astype(jnp.float32), y.astype(jnp.float32))
    else:
        sums = np.promote_types(x.dtype, np.float32)
    # products of few bits are exact, whatever a user may have set for all of JAX
    precision = lax.Precision.DEFAULT if x.dtype.itemsize < 4 else None
    found = lax.dot_general(x, y, numbers, precision=precision, preferred_element_type=np.dtype(sums))
    made = [*batch, *(word for word in left if word not in right), *(word for word in right if word not in left)]
    found = found.transpose([made.index(word) for word in out])
    return found.astype(jnp.float32) if sums == jnp.int32 else found
