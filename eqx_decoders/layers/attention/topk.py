"""The best of each row of scores, and scores of some queries at a time: what choices of keys are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt32


TILE = 2**24  # scores of one row that exist at a time


def best_of_each(scores: Float32[Array, "*rows keys"], count: int) -> Bool[Array, "*rows keys"]:
    """Which scores are among the best `count` of their row; of equals those that come first.

    The last of them is found bit by bit, as the largest number that `count` scores reach: a TPU would sort a row in
    many more passes, and what a mesh splits stays where it is.
    """
    if count >= scores.shape[-1]:
        return jnp.ones(scores.shape, bool)
    ordered = _ordered_bits(jax.lax.stop_gradient(scores))

    def narrow(i, last):
        higher = last | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(ordered >= higher, axis=-1, keepdims=True) >= count, higher, last)

    last = jax.lax.fori_loop(0, 32, narrow, jnp.zeros((*scores.shape[:-1], 1), jnp.uint32))
    above, equal = ordered > last, ordered == last
    left = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= left))


def _ordered_bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Integers in the order of the numbers, both zeros being one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def map_queries(function: Callable[[Any], Any], queries: Any, length: int, heads: int) -> Any:
    """`function` of some of the queries at a time, so that no more than TILE scores of `heads` heads exist at once.

    `queries` are arrays `batch length …`; where there are too few for the last time, padding at position -1 fills up.
    Results have a leading axis of these times.
    """
    count = max(1, min(length, -(-length * length * heads // TILE)))
    if count == 1:
        return jax.tree.map(lambda x: x[None], function(queries))
    size = -(-length // count)

    def cut(x: Array) -> Array:
        nothing = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2), constant_values=nothing)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.lax.map(function, jax.tree.map(cut, queries))
