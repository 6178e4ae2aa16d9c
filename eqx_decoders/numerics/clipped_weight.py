"""Weights whose products are clipped on both sides (Gemma 4's encoders)."""

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
    """Weight whose product is clipped on both sides: `clip(clip(x) w)` (Gemma 4's encoders).

    Gradients pass to what lies within its bounds, ends included. None reaches the bounds, which are measured and not
    trained.

    **Arguments:**

    - `weight`: an array, or a weight of another kind.
    - `input_min`, `input_max`: bounds of x, one number for each layer; infinite ones clip nothing.
    - `output_min`, `output_max`: bounds of the product.
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

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of the five arrays, given the axes of the weight."""
        return {"weight": words, "input_min": (), "input_max": (), "output_min": (), "output_max": ()}

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Raise ConfigError: no array stands for what a `ClippedWeight` computes."""
        raise ConfigError("ClippedWeight clips what it multiplies: no array stands for it. Multiply by einsum.")

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply the clipped activation by the weight, and clip the product."""
        x = _clip_between(x, self.input_min, self.input_max)
        return _clip_between(contract(plan, x, self.weight, options), self.output_min, self.output_max)


def with_clipping(tree: T) -> T:
    """Return a tree of modules with each matrix in a `ClippedWeight` whose bounds clip nothing."""
    leaves, nodes = named_leaves(tree), {}
    for path, words in axes(tree).items():
        if product_axes(words) is not None:
            stack = leaves[path].shape[: words.count("layers")]
            low, high = jnp.full(stack, -jnp.inf), jnp.full(stack, jnp.inf)
            nodes[path] = ClippedWeight(leaves[path], input_min=low, input_max=high, output_min=low, output_max=high)
    return replaced(tree, nodes)


def _clip_between(x: Array, low: Array, high: Array) -> Array:
    """Clip `x` between two numbers; with `jnp.clip` alone half of a gradient would be lost at the ends."""
    low, high = lax.stop_gradient((low.astype(x.dtype), high.astype(x.dtype)))
    return jnp.where((x >= low) & (x <= high), x, jnp.clip(x, low, high))
