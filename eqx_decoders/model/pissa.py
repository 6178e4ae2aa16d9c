"""PiSSA (Meng et al. 2024): initialize low-rank adapters from the largest singular values of the weights."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from eqx_decoders.errors import check
from eqx_decoders.model.quantizations import check_requantizable, rounded_like
from eqx_decoders.numerics.einsum import as_weight
from eqx_decoders.numerics.low_rank import LowRank
from eqx_decoders.numerics.quantized_weight import AbstractQuantizedWeight
from eqx_decoders.sharding.axes import Axes, product_axes
from eqx_decoders.sharding.layout import Layout, out_shardings, partitions


def check_split(path: str, axis_names: Axes, weight: Any, rank: int) -> None:
    """Raise ConfigError for a weight with fewer singular values than `rank`, or whose quantization cannot be repeated.

    `axis_names` are the names of the weight's axes.
    """
    sizes = dict(zip(axis_names, weight.shape, strict=True))
    matrix_sides = product_axes(axis_names)
    assert matrix_sides is not None
    max_rank = min(math.prod(sizes[axis] for axis in side) for side in matrix_sides)
    check(
        rank <= max_rank,
        f"LoRAConfig.rank={rank} exceeds the {max_rank} singular values of {path}. Choose a smaller rank for it.",
    )
    if isinstance(weight, AbstractQuantizedWeight):
        check_requantizable(weight, f"LoRAConfig.init='pissa': {path}")


def init_pissa(layout: Layout, node: LowRank, rank: int) -> LowRank:
    """Return `node` with its low-rank pair a, b set to the leading singular vectors, and the base `base - scale a b`.

    The pair of `node` has shapes in place of arrays. Each factor gets the square root of the singular values, as in
    PEFT. A quantized base is dequantized for this, and the new base is quantized to the same format.
    """

    def run(base: Any) -> LowRank:
        array = as_weight(base).array()
        upcast = array.astype(np.promote_types(array.dtype, np.float32))
        inner = node.lora_a.ndim - 1
        stack = inner + node.lora_b.ndim - 1 - upcast.ndim
        rows = math.prod(upcast.shape[stack:inner])
        columns = math.prod(upcast.shape[inner:])
        a, b = lax.map(lambda matrix: _leading(matrix, rank, node.scale), upcast.reshape(-1, rows, columns))
        a = a.reshape(node.lora_a.shape).astype(node.lora_a.dtype)
        b = b.reshape(node.lora_b.shape).astype(node.lora_b.dtype)
        remainder = upcast - LowRank(jnp.zeros_like(upcast), a, b, node.scale).array()
        magnitude = node.lora_magnitude
        magnitude = None if magnitude is None else jnp.zeros(magnitude.shape, magnitude.dtype)
        quantized = isinstance(base, AbstractQuantizedWeight)
        base = rounded_like(remainder, base) if quantized else remainder.astype(array.dtype)
        return LowRank(base, a, b, node.scale, magnitude, a, b)

    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), node)
    split = layout.automatically(run, lambda _: partitions(target))
    return jax.jit(split, out_shardings=out_shardings(target))(node.base)


def _leading(
    weight: Float[Array, "rows columns"], rank: int, scale: float
) -> tuple[Float[Array, "rows rank"], Float[Array, "rank columns"]]:
    """Return a, b such that `scale a b` is the best approximation of the matrix with this rank."""
    left, values, right = jnp.linalg.svd(weight, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scale)
    return left[:, :rank] * roots[None], roots[:, None] * right[:rank]
