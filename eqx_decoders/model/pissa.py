"""Low-rank pairs that begin as the largest singular values of their weights (PiSSA; Meng et al. 2024)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqx_decoders.errors import check
from eqx_decoders.model.quantizations import check_rounds, rounded_like
from eqx_decoders.numerics.einsum import as_weight
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight
from eqx_decoders.sharding.axes import Axes, product_axes
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


def check_split(path: str, words: Axes, weight: Any, rank: int) -> None:
    """Raise ConfigError for a weight that has fewer singular values than `rank`, or that can't be rounded again."""
    sizes, split = dict(zip(words, weight.shape, strict=True)), product_axes(words)
    assert split is not None
    most = min(math.prod(sizes[word] for word in side) for side in split)
    check(rank <= most, f"LoRAConfig.rank={rank}: {path} has {most} singular values. Choose a smaller rank for it.")
    if isinstance(weight, AbstractQuantizedWeight):
        check_rounds(weight, f"LoRAConfig.init='pissa': {path}")


def taken_out(layout: Layout, node: LowRank, rank: int) -> LowRank:
    """Return a weight without the part that its pair begins with, and the pair: `base - scale a b`, a, b.

    `node` has shapes in place of the pair. The singular values are divided between both factors, as in PEFT. A
    quantized weight is widened, and what remains is rounded as the weight was.
    """

    def run(base: Any) -> LowRank:
        array = as_weight(base).array()
        wide = array.astype(np.promote_types(array.dtype, np.float32))
        inner = node.lora_a.ndim - 1
        stack = inner + node.lora_b.ndim - 1 - wide.ndim
        rows, columns = math.prod(wide.shape[stack:inner]), math.prod(wide.shape[inner:])
        pairs = lax.map(lambda each: _leading(each, rank, node.scale), wide.reshape(-1, rows, columns))
        a, b = (
            each.reshape(like.shape).astype(like.dtype)
            for each, like in zip(pairs, (node.lora_a, node.lora_b), strict=True)
        )
        rest = wide - LowRank(jnp.zeros_like(wide), a, b, node.scale).array()
        like = None if node.lora_magnitude is None else jnp.zeros(node.lora_magnitude.shape, node.lora_magnitude.dtype)
        base = rounded_like(rest, base) if isinstance(base, AbstractQuantizedWeight) else rest.astype(array.dtype)
        return LowRank(base, a, b, node.scale, like, a, b)

    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)  # noqa: E731
    target = jax.tree.map(shape, node)
    split = layout.automatically(run, lambda _: partitions(target))
    return jax.jit(split, out_shardings=out_shardings(target))(node.base)


def _leading(
    weight: Float[Array, "rows columns"], rank: int, scale: float
) -> tuple[Float[Array, "rows rank"], Float[Array, "rank columns"]]:
    """Return the pair whose product, times `scale`, is the part of a matrix with the largest singular values."""
    left, values, right = jnp.linalg.svd(weight, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scale)
    return left[:, :rank] * roots[None], roots[:, None] * right[:rank]
