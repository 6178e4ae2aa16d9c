"""Low-precision training: matrix products whose operands are dynamically quantized to int8 or FP8.

For `y = x w`, each row of `x` and each column of `w` has a scale: its largest absolute value divided by the largest
value of the format. Scales are dynamic; nothing is calibrated or stored. With quantized values `X`, `W` and scales
`a`, `b`, the product is `y = a (X W) b`. Gradients treat rounding as the identity (straight-through estimator, Bengio
et al. 2013). The output gradient `g` is multiplied by the scale of the other operand and quantized, too, to `G` with
scale `c`:

    gradient of x:  g b is quantized by rows,     c (G W^T)
    gradient of w:  a g is quantized by columns,  (X^T G) c

No scale is inside of a sum, so all sums are over products of 8-bit values (AQT; qwix; Micikevicius et al. 2022 for
FP8). Model, optimizer and checkpoints contain ordinary weights: at the start of a forward pass, `round_weights` wraps
the selected weights in `Rounded` (`rounded_weight.py`).
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
    """Quantization format: dtype of the values, and their largest absolute value."""

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
    """Settings of low-precision training; without `mode` it is off.

    **Arguments:**

    - `mode`: `"int8"`, integers up to 127; `"w4a8"`, weights up to 7, activations and gradients up to 127; `"fp8"`,
        E4M3 weights and activations, E5M2 gradients.
    - `weights`: patterns of weight paths (`*` matches anything). Only matrices inside of blocks are quantized: no
        embedding tables, heads, routers, norms, biases, low-rank pairs, and no projections to decays or to one value
        per head.
    - `weight_gradient`: `"same"`: products for gradients of weights are quantized, too; `"float"`: they are not, which
        is a third of all products, and unquantized activations are saved for them.
    - `gradient_rounding`: `"nearest"`, or `"stochastic"` rounding (unbiased), for integer modes. It needs a key in the
        forward pass, which `Trainer` passes; without a key values are rounded to nearest.
    """

    checked_name = "LowPrecision."
    mode: ModeName | None = None
    weights: tuple[str, ...] = ("scanned_layers.*",)
    weight_gradient: WeightGradientName = "same"
    gradient_rounding: RoundingName = "nearest"

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "weights", tuple(self.weights))
        check(
            len(self.weights) > 0, "LowPrecision.weights=() must have at least one pattern, such as 'scanned_layers.*'."
        )
        check(
            self.mode != "fp8" or not self.draws,
            "LowPrecision.gradient_rounding='stochastic' is not supported with mode='fp8', which rounds to nearest. "
            "Leave it out.",
        )

    @property
    def draws(self) -> bool:
        """Whether rounding uses random numbers."""
        return self.gradient_rounding == "stochastic"

    def products(self) -> "LowPrecision | None":
        """Return the configuration of the products; None if `mode` is None."""
        return None if self.mode is None else LowPrecision(**vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowPrecision(LowPrecisionConfig):
    """Configuration of low-precision training; the fields are those of `LowPrecisionConfig`, with a mode."""

    mode: ModeName = "int8"

    @property
    def formats(self) -> Formats:
        """Formats of activations, weights and gradients."""
        return FORMATS[self.mode]

    @property
    def format(self) -> str:
        """Format of the products: `"int8"` or `"fp8"`."""
        return "fp8" if self.mode == "fp8" else "int8"

    def chosen(self, weight_axes: Mapping[str, Axes]) -> list[str]:
        """Return the paths of the weights that the patterns match, given the axes of all weights by path.

        Raises ConfigError for a pattern that matches no weight that can be quantized.
        """
        selected: dict[str, None] = {}
        for pattern in self.weights:
            matched = matching(weight_axes, (pattern,), "LowPrecision.weights")
            fitting = [path for path in weight_axes if path in matched and fits(path, weight_axes[path])]
            check(
                bool(fitting),
                f"LowPrecision.weights={pattern!r} matches no weight that can be quantized, only weights such as "
                f"{min(matched)}. Embedding tables, heads, routers, norms, biases, low-rank pairs, and projections to "
                "decays or to one value per head are not quantized. Use a pattern that matches other matrices of "
                "blocks.",
            )
            selected |= dict.fromkeys(fitting)
        return list(selected)


def fits(path: str, axes: Axes) -> bool:
    """Return whether a weight is a matrix of a block that can be quantized."""
    split = product_axes(axes)
    is_in_block = path.startswith(("scanned_layers.", "mtp."))
    if split is None or not is_in_block:
        return False
    # projections to decays, or to one value per expert or head, are a small part of the work and stay in float32
    _, output_axes = split
    is_small = output_axes in (("experts",), ("heads",), ("key_heads",))
    is_small = is_small or bool({"rank", "gate_rank", "scan_inputs"} & set(axes))
    return not is_small and not any(axis.startswith("teacher") for axis in axes)


def quantize_array(
    x: Float[Array, "..."], axes: tuple[int, ...], form: Format, seed: Array | None = None
) -> tuple[Array, Float[Array, "..."]]:
    """Quantize `x`; return the values `x / scale` in the format, and the scale, which has size 1 along `axes`.

    With a seed, integers are rounded stochastically. A value that is not finite makes its scale not finite, and so all
    results that use this scale.
    """
    x = x.astype(np.promote_types(x.dtype, np.float32))
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    # the lower bound, also for zeros, keeps the scale and its inverse in the range of normal floats
    scale = jnp.maximum(largest, form.largest * 2.0**-100) / form.largest
    values = x * (1.0 / scale)
    if jnp.issubdtype(form.dtype, jnp.integer):
        values = jnp.round(values) if seed is None else jnp.floor(values + _uniform(seed, values.shape).astype(x.dtype))
    return jnp.clip(values, -form.largest, form.largest).astype(form.dtype), scale


def _uniform(seed: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return uniform random values in [0, 1): the hash `lowbias32` (Wellons 2018) of the seed and the flat index.

    It is ten times faster than `jax.random`, and on a mesh each device computes the values of its shard only.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _lowbias32(index ^ _lowbias32(seed.astype(jnp.uint32)))
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _lowbias32(bits: Array) -> Array:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


MAX_SEED = 2**23  # exclusive bound of seeds for stochastic rounding


def seeds_of(seed: Array | None) -> tuple[Array | None, Array | None]:
    """Return two different seeds: for the gradient of the input, and for the gradient of the weight.

    `seed` is an integer below `MAX_SEED`; twice that is still exact in float32.
    """
    return (None, None) if seed is None else (seed, seed + MAX_SEED)
