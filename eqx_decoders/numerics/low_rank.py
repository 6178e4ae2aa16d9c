"""Low-rank updates of weights (LoRA; Hu et al. 2021)."""

import string
from functools import lru_cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.einsum import AbstractWeight, LowRankPair, ProductOptions, as_weight, contract
from eqx_decoders.numerics.product_plan import ProductPlan, product_plan
from eqx_decoders.sharding.axes import FROZEN, AnyArray, Axes, path_name, product_axes


class LowRank(AbstractWeight):
    """Weight with a low-rank update, `base + scale * lora_a lora_b`; the base is frozen (LoRA, Hu et al. 2021).

    It is never merged for a product: `x base + scale (x lora_a) lora_b`. No gradient reaches `base`.

    **Arguments:**

    - `base`: the weight, say `embed heads head_dim`, of any kind; it may be quantized (QLoRA, Dettmers et al. 2023).
    - `lora_a`: the axes that the weight contracts, then `rank`: `embed rank`.
    - `lora_b`: `rank`, then the weight's output axes: `rank heads head_dim`.
    - `scale`: multiplies the product of the two.
    """

    base: Float[AnyArray, "..."] | AbstractWeight = eqx.field(metadata=FROZEN)
    lora_a: Float[AnyArray, "..."]
    lora_b: Float[AnyArray, "..."]
    scale: float = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the base."""
        return as_weight(self.base).shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the base, or of the pair if the base has none of its own."""
        dtype = as_weight(self.base).dtype
        return self.lora_a.dtype if dtype is None else dtype

    def part_axes(self, words: Axes) -> dict[str, Axes]:
        """Return the axes of the three arrays, given the axes of the weight."""
        return {"base": words} | pair_axes(words)

    def array(self, *contracted: int) -> Float[Array, "..."]:
        """Merge base and pair into one array, computed in f32; its axes must be in the order of `part_axes`."""
        base = as_weight(self.base).array(*contracted)
        dtype = np.promote_types(base.dtype, np.float32)
        stacked = self.lora_a.ndim + self.lora_b.ndim - base.ndim - 2
        letters = string.ascii_letters[: base.ndim]
        stack, rows, columns = letters[:stacked], letters[: self.lora_a.ndim - 1], letters[self.lora_a.ndim - 1 :]
        pair = self.lora_a.astype(dtype), self.lora_b.astype(dtype)
        update = jnp.einsum(f"{rows}Z,{stack}Z{columns}->{letters}", *pair, precision=lax.Precision.HIGHEST)
        return (base.astype(dtype) + self.scale * update).astype(self.dtype)

    def contract(self, plan: ProductPlan, x: Array, options: ProductOptions) -> Array:
        """Multiply an activation by the base and by the pair, and add both products."""
        (base, pair), (into, out_of) = self.base_and_pair(), _pair_plans(plan)
        y = contract(plan, x, base, options)
        low = contract(into, x, pair.lora_a, options._replace(dtype=x.dtype))
        return y + contract(out_of, pair.scale * low, pair.lora_b, options)

    def base_and_pair(self) -> tuple[Array | AbstractWeight, LowRankPair]:
        """Return the base, which no gradient reaches, and the pair."""
        return lax.stop_gradient(self.base), LowRankPair(self.scale, self.lora_a, self.lora_b)


def pair_axes(words: Axes) -> dict[str, Axes]:
    """Return the axes of the two factors of a weight's low-rank pair, given the axes of the weight."""
    split = product_axes(words)
    if split is None:
        raise ConfigError(f"A weight with the axes {' '.join(words)!r} is no matrix: it takes no low-rank update.")
    contracted, outputs = split
    each = words[: words[:1] == ("experts",)]  # every expert has a pair of its own
    return {"lora_a": (*each, *contracted, "rank"), "lora_b": (*each, "rank", *outputs)}


@lru_cache(maxsize=512)
def _pair_plans(plan: ProductPlan) -> tuple[ProductPlan, ProductPlan]:
    """Split the product of a weight in two, for its low-rank pair: to `rank`, and from `rank` to the outputs."""
    rows = [word for word in plan.left if word in plan.out]
    batch = [word for word in plan.right if word in plan.left and word in plan.out]
    contracted = [word for word in plan.right if word not in plan.out]
    columns = [word for word in plan.right if word not in plan.left]
    low = " ".join([*rows, "rank"])
    return (
        product_plan(f"{' '.join(plan.left)}, {' '.join([*batch, *contracted, 'rank'])} -> {low}"),
        product_plan(f"{low}, {' '.join([*batch, 'rank', *columns])} -> {' '.join(plan.out)}"),
    )


def low_rank_weights(tree: PyTree) -> dict[str, LowRank]:
    """Return the weights of a tree that have a low-rank pair, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, LowRank))
    return {path_name(path): node for path, node in leaves if isinstance(node, LowRank)}
