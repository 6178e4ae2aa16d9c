"""Matrix products in 8 bits for training: weights, activations and gradients are rounded where they are multiplied.

For `y = x w` each row of `x` and each column of `w` has a scale, its largest absolute value over the largest number of
the format (dynamic: nothing is calibrated or stored), and with `X`, `W` the rounded numbers and `a`, `b` their
scales `y = a (X W) b`. The gradient is the gradient of the product of the rounded numbers, as if rounding were the
identity (straight-through, Bengio et al. 2013); it is rounded, too, and takes the other operand's scale with it:

    to x:  g' = g b, rounded by rows     c (G W^T)
    to w:  g' = a g, rounded by columns  (X^T G) c

Such scales stand outside of all sums, so the sums are of 8-bit numbers (AQT; qwix; Micikevicius et al. 2022 for FP8).
Model, optimizer and checkpoints are unaware of it: at the begin of a forward pass `round_weights` puts the named
weights into a `Rounded` (`rounded_weight.py`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqx_decoders.errors import CheckedFields, check
from eqx_decoders.sharding.axes import Axes, matching, product_axes


ModeName = Literal["int8", "w4a8", "fp8"]
WeightGradientName = Literal["same", "float"]
RoundingName = Literal["nearest", "stochastic"]


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
    weights: tuple[str, ...] = ("scanned_layers.*",)
    weight_gradient: WeightGradientName = "same"
    gradient_rounding: RoundingName = "nearest"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "weights", tuple(self.weights))
        check(len(self.weights) > 0, "LowPrecision.weights=() must name a weight, such as 'scanned_layers.*'.")
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
    inside = path.startswith(("scanned_layers.", "mtp."))
    if split is None or not inside:
        return False
    # what makes decays, or one number per expert or head, is little work, and is computed in f32
    little = split[1] in (("experts",), ("heads",), ("key_heads",)) or {"rank", "gate_rank", "scan_inputs"} & set(words)
    return not little and not any(word.startswith("teacher") for word in words)


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
