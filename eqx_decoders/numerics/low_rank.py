"""Low-rank updates of weights (LoRA; Hu et al. 2021)."""

import string

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from eqx_decoders.errors import ConfigError
from eqx_decoders.numerics.quantized_weight import QuantizedWeight
from eqx_decoders.sharding.axes import FROZEN, AnyArray, Axes, path_name, product_axes


class LowRank(eqx.Module):
    """Weight with a low-rank update, `base + scale * lora_a lora_b`; the base is frozen (LoRA, Hu et al. 2021).

    It stands wherever `einsum` takes a weight. No gradient reaches `base`.

    **Arguments:**

    - `base`: the weight, say `embed heads head_dim`; it may be quantized (QLoRA, Dettmers et al. 2023).
    - `lora_a`: the axes that the weight contracts, then `rank`: `embed rank`.
    - `lora_b`: `rank`, then the weight's output axes: `rank heads head_dim`.
    - `scale`: multiplies the product of the two.
    """

    base: Float[AnyArray, "..."] | QuantizedWeight = eqx.field(metadata=FROZEN)
    lora_a: Float[AnyArray, "..."]
    lora_b: Float[AnyArray, "..."]
    scale: float = eqx.field(static=True)

    @staticmethod
    def part_axes(words: Axes) -> dict[str, Axes]:
        """Return the axes of the three arrays, given the axes of the weight."""
        split = product_axes(words)
        if split is None:
            raise ConfigError(f"A weight with the axes {' '.join(words)!r} is no matrix: it takes no low-rank update.")
        contracted, outputs = split
        each = words[: words[:1] == ("experts",)]  # every expert has a pair of its own
        return {"base": words, "lora_a": (*each, *contracted, "rank"), "lora_b": (*each, "rank", *outputs)}

    def merged(self) -> Float[Array, "..."]:
        """Merge base and pair into one array in the dtype of the base, computed in f32.

        Its axes must be in the order of `part_axes`. With a quantized base it is a plain array in the dtype of the
        pair.
        """
        if isinstance(self.base, QuantizedWeight):
            return (
                LowRank(self.base.dequantized(), self.lora_a, self.lora_b, self.scale)
                .merged()
                .astype(self.lora_a.dtype)
            )
        dtype = np.promote_types(self.base.dtype, np.float32)
        stacked = self.lora_a.ndim + self.lora_b.ndim - self.base.ndim - 2
        letters = string.ascii_letters[: self.base.ndim]
        stack, rows, columns = letters[:stacked], letters[: self.lora_a.ndim - 1], letters[self.lora_a.ndim - 1 :]
        pair = self.lora_a.astype(dtype), self.lora_b.astype(dtype)
        update = jnp.einsum(f"{rows}Z,{stack}Z{columns}->{letters}", *pair, precision=lax.Precision.HIGHEST)
        return (self.base.astype(dtype) + self.scale * update).astype(self.base.dtype)


def low_rank_weights(tree: PyTree) -> dict[str, LowRank]:
    """Return the weights of a tree that have a low-rank pair, by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, LowRank))
    return {path_name(path): node for path, node in leaves if isinstance(node, LowRank)}
