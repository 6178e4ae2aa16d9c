"""Choices of keys: top-k of rows of scores, and maps over some queries at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32

from eqx_decoders.layers.attention.kernels.selection import Selected, Selection


TILE = 2**24  # scores of one row that exist at a time


class KeyChoice(NamedTuple):
    """Keys of a call (`present`) and of a past that a layer chooses for each query; None: all that the mask allows.

    Those of a past are chosen by a mask over its slots (`past`), or by their numbers (`slots`), as in `Queries`.
    """

    present: Selected | None = None
    past: Bool[Array, "batch selected_heads length slots"] | None = None
    slots: Int[Array, "batch length chosen"] | None = None

    def repeated(self, count: int) -> "KeyChoice":
        """Return the choice of each selected head for so many heads."""
        if count == 1:
            return self
        present, past = self.present, self.past
        if isinstance(present, Selection):
            present = present._replace(words=jnp.repeat(present.words, count, axis=1))
        elif present is not None:
            present = jnp.repeat(present, count, axis=1)
        return self._replace(present=present, past=None if past is None else jnp.repeat(past, count, axis=1))


def top_k_mask(scores: Float32[Array, "*rows keys"], count: int) -> Bool[Array, "*rows keys"]:
    """Return which scores are among the best `count` of their row; the earlier ones of equals.

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
    """Return integers in the order of the numbers, both zeros being one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def map_queries(function: Callable[[Any], Any], queries: Any, candidates: int, heads: int) -> Any:
    """Map `function` over some of the queries at a time, so that at most TILE scores of `heads` heads exist at once.

    `queries` are arrays `batch length …`; each has a score for each candidate and head. The last group is padded with
    positions -1. Results have a leading axis of groups.
    """
    length = jax.tree.leaves(queries)[0].shape[1]
    count = max(1, min(length, -(-length * candidates * heads // TILE)))
    if count == 1:
        return jax.tree.map(lambda x: x[None], function(queries))
    size = -(-length // count)

    def cut(x: Array) -> Array:
        nothing = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2), constant_values=nothing)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.lax.map(function, jax.tree.map(cut, queries))
