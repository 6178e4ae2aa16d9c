"""Types, score functions and products of tiles that attention kernels share, and the key heads of a device."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


EMPTY = -1e30  # lse of a query that sees nothing: finite, so that differences and gradients stay finite

Result = tuple[Float[Array, "batch length heads value_dim"], Float32[Array, "batch length heads"]]
Gradients = tuple[
    Float32[Array, "batch length heads head_dim"],
    Float32[Array, "batch kv_length kv_heads head_dim"],
    Float32[Array, "batch kv_length kv_heads value_dim"],
]


class Scales(NamedTuple):
    """Scales that multiply stored keys and values, one for each token and head, or for each token."""

    key: Float[Array, "batch kv_length scale_heads"]
    value: Float[Array, "batch kv_length scale_heads"]


class Cotangents(NamedTuple):
    """Cotangents of attention by query, from which each part of its keys has its gradients.

    With them a key's weight is P = exp(S - lse), and the gradient of its score dS = P * (dO V' - delta).

    **Arguments:**

    - `out_bar`: the gradient dO of its result.
    - `lse`: of the scores of all keys that it sees.
    - `delta`: sum(out * dO) - dlse, of the results over all keys.
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
    """Compute `cap * tanh(scores / cap)`; None leaves the scores."""
    return scores if soft_cap is None else jnp.tanh(scores / soft_cap) * soft_cap


def cap_slopes(
    slopes: Float[Array, "*shape"], scores: Float[Array, "*shape"], soft_cap: float | None
) -> Float[Array, "*shape"]:
    """Compute the gradient of scores from the gradient of capped ones, `scores`."""
    return slopes if soft_cap is None else slopes * (1 - jnp.square(scores / soft_cap))


def rows_of_key_heads(
    query: Float[Array, "batch length heads head_dim"], kv_heads: int, width: int
) -> Float[Array, "batch kv_heads rows width"]:
    """Arrange queries as rows of their key heads, the heads of a token in order, with zeros up to a width."""
    batch, length, heads, dim = query.shape
    query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, width - dim)))
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, width).swapaxes(1, 2)
    return query.reshape(batch, kv_heads, -1, width)


def heads_of_tokens(x: Array, length: int, heads: int) -> Array:
    """Undo `rows_of_key_heads` for results `batch kv_heads rows …`, of which the last rows may belong to no token."""
    batch, kv_heads, _, *more = x.shape
    groups = heads // kv_heads
    x = x[:, :, : length * groups].reshape(batch, kv_heads, length, groups, *more).swapaxes(1, 2)
    return x.reshape(batch, length, heads, *more)


def tile_product(left: Array, right: Array, left_axis: int, right_axis: int) -> Float32[Array, "rows columns"]:
    """Multiply two tiles in f32. Products of bfloat16 are exact, whatever precision is the default."""
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=jax.lax.Precision.DEFAULT if left.dtype == jnp.bfloat16 else None,
        preferred_element_type=jnp.float32,
    )


def used_heads(key: Array, axes: tuple[str, ...], own_heads: int, groups: int) -> Array:
    """Select the key heads that a device's `own_heads` use, out of heads that all devices of some mesh axes have.

    `groups` consecutive query heads share a key head.
    """
    size = math.gcd(own_heads, groups)  # so many of them surely share one
    first = jax.lax.axis_index(axes) * own_heads
    return jnp.take(key, (first + size * jnp.arange(own_heads // size)) // groups, axis=2)
