"""Weights whose inputs and outputs are clipped (Gemma 4's encoders)."""

from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.einsum import AbstractWeight, ProductOptions, as_weight, contract
from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.sharding.axes import FROZEN, AnyArray, Axes, axes, named_leaves, product_axes, replaced


T = TypeVar("T")


class ClippedWeight(AbstractWeight):
    """Weight whose input and output are clipped: `clip(clip(x) w)` (Gemma 4's encoders).

    Gradients pass where the value lies within the bounds, bounds included. The bounds have no gradient: they are
    measured, not trained.

    **Arguments:**

    - `weight`: an array, or another kind of weight.
    - `input_min`, `input_max`: bounds of x, scalars per layer; infinite bounds do not clip.
    - `output_min`, `output_max`: bounds of the output.
    """

    weight: Float[AnyArray, "..."] | Any
    input_min: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    input_max: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    output_min: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)
    output_max: Float[AnyArray, "..."] = eqx.field(metadata=FROZEN)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return as_weight(self.weight).shape

    @property
    def dtype(self) -> np.dtype | None:
        """Dtype of the weight."""
        return as_weight(self.weight).dtype

    def part_axes(self, weight_axes: Axes) -> dict[str, Axes]:
        """Return the axes of the five arrays, by field."""
        return {"weight": weight_axes, "input_min": (), "input_max": (), "output_min": (), "output_max": ()}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Raise ConfigError: clipping is not linear, so no array is equivalent to a `ClippedWeight`."""
        raise ConfigError("ClippedWeight cannot be converted to an array, because it clips activations. Use einsum.")

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply the clipped activation by the weight, and clip the output."""
        x = _clip_between(x, self.input_min, self.input_max)
        return _clip_between(contract(plan, x, self.weight, options), self.output_min, self.output_max)


def with_clipping(tree: T) -> T:
    """Return a tree of modules with each matrix in a `ClippedWeight` with infinite bounds."""
    leaves = named_leaves(tree)
    nodes = {}
    for path, weight_axes in axes(tree).items():
        if product_axes(weight_axes) is not None:
            layers = leaves[path].shape[: weight_axes.count("layers")]
            low = jnp.full(layers, -jnp.inf)
            high = jnp.full(layers, jnp.inf)
            nodes[path] = ClippedWeight(leaves[path], input_min=low, input_max=high, output_min=low, output_max=high)
    return replaced(tree, nodes)


def _clip_between(x: Array, low: Array, high: Array) -> Array:
    """Clip `x` to `[low, high]`. At the bounds the full gradient passes; `jnp.clip` would pass half of it."""
    low, high = lax.stop_gradient((low.astype(x.dtype), high.astype(x.dtype)))
    return jnp.where((x >= low) & (x <= high), x, jnp.clip(x, low, high))
