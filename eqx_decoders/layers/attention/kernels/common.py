"""Types, score functions and tile products shared by the attention kernels, and helpers for grouped-query heads."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


EMPTY = -1e30  # lse of a query that sees no key; finite, so that differences and gradients stay finite

Result = tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]
Gradients = tuple[
    Float32[Array, "batch length heads head_dim"],
    Float32[Array, "batch kv_length kv_heads head_dim"],
    Float32[Array, "batch kv_length kv_heads value_dim"],
]


class Scales(NamedTuple):
    """Scales of a quantized cache that multiply stored keys and values: one per token and head, or one per token."""

    key: Float[Array, "batch kv_length scale_heads"]
    value: Float[Array, "batch kv_length scale_heads"]


class Cotangents(NamedTuple):
    """Quantities per query from which the gradients of any part of its keys can be computed.

    The attention weights are P = exp(S - lse), and the gradient of the scores is dS = P * (dO V' - delta).

    **Arguments:**

    - `out_bar`: gradient dO of the attention output.
    - `lse`: log-sum-exp of the scores of all keys that the query sees.
    - `delta`: sum(out * dO) - dlse, for the results over all keys.
    """

    out_bar: Float[Array, "batch length heads value_dim"]
    lse: Float32[Array, "batch length heads"]
    delta: Float32[Array, "batch length heads"]


def make_cotangents(results: Result, bars: Result) -> Cotangents:
    """Compute the cotangents from `attend`'s results and their gradients."""
    (out, lse), (out_bar, lse_bar) = results, bars
    delta = (out.astype(jnp.float32) * out_bar.astype(jnp.float32)).sum(-1) - lse_bar
    return Cotangents(out_bar.astype(out.dtype), lse, delta)


def cap_scores(scores: Float[Array, "*shape"], soft_cap: float | None) -> Float[Array, "*shape"]:
    """Compute the soft cap `cap * tanh(scores / cap)`; return the scores if `soft_cap` is None."""
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def cap_gradient(
    gradient: Float[Array, "*shape"], capped_scores: Float[Array, "*shape"], soft_cap: float | None
) -> Float[Array, "*shape"]:
    """Return the gradient with respect to the scores, given the gradient with respect to the capped scores."""
    return gradient if soft_cap is None else gradient * (1 - jnp.square(capped_scores / soft_cap))


def group_by_kv_head(
    query: Float[Array, "batch length heads head_dim"], kv_heads: int, width: int
) -> Float[Array, "batch kv_heads rows width"]:
    """Arrange queries by KV head, and pad features with zeros to `width`.

    Rows are ordered by token; the query heads of a token that share a KV head are consecutive rows.
    """
    batch, length, heads, dim = query.shape
    query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, width - dim)))
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, width).swapaxes(1, 2)
    return query.reshape(batch, kv_heads, -1, width)


def ungroup_kv_heads(x: Array, length: int, heads: int) -> Array:
    """Undo `group_by_kv_head`: [batch, kv_heads, rows, …] -> [batch, length, heads, …]; drop padding rows."""
    batch, kv_heads, _, *features = x.shape
    queries_per_kv = heads // kv_heads
    x = x[:, :, : length * queries_per_kv].reshape(batch, kv_heads, length, queries_per_kv, *features).swapaxes(1, 2)
    return x.reshape(batch, length, heads, *features)


def tile_product(left: Array, right: Array, left_axis: int, right_axis: int) -> Float32[Array, "rows columns"]:
    """Multiply two tiles, contracting the given axes, and accumulate in float32.

    For bfloat16 the default precision is exact, so `jax_default_matmul_precision` is ignored.
    """
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None,
        preferred_element_type=jnp.float32,
    )


def select_kv_heads(key: Array, axes: tuple[str, ...], own_heads: int, queries_per_kv: int) -> Array:
    """Select the key heads that the query heads of this device use. Call this under `shard_map`.

    Query heads are sharded over the mesh axes `axes`, `own_heads` on each device, while key heads are replicated over
    these axes. `queries_per_kv` consecutive query heads share a key head.
    """
    size = math.gcd(own_heads, queries_per_kv)  # runs of this many query heads always share a key head
    first = jax.lax.axis_index(axes) * own_heads
    return jnp.take(key, (first + size * jnp.arange(own_heads // size)) // queries_per_kv, axis=2)
