"""Top-k selection of keys: the selection itself, exact top-k masks, and a map over tiles of queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, UInt32

from eqx_decoders.layers.attention.kernels.selection import Selected, Selection


TILE = 2**24  # maximum number of scores per sequence that `map_queries` computes at a time


class SelectedKeys(NamedTuple):
    """Keys that a layer selects for each query; None: all keys that the mask allows.

    **Arguments:**

    - `new`: selection among the tokens of this call.
    - `cached`: selection among the cache's slots, as a mask.
    - `cached_slots`: selection among the cache's slots, as indices (see `Queries.slots`); replaces `cached`.
    """

    new: Selected | None = None
    cached: Bool[Array, "batch selected_heads length slots"] | None = None
    cached_slots: Int[Array, "batch length chosen"] | None = None

    def repeated(self, count: int) -> "SelectedKeys":
        """Repeat the selection of each head for `count` consecutive heads."""
        if count == 1:
            return self
        new = self.new
        cached = self.cached
        if isinstance(new, Selection):
            new = new._replace(words=jnp.repeat(new.words, count, axis=1))
        elif new is not None:
            new = jnp.repeat(new, count, axis=1)
        return self._replace(new=new, cached=None if cached is None else jnp.repeat(cached, count, axis=1))


def top_k_mask(scores: Float32[Array, "*rows keys"], count: int) -> Bool[Array, "*rows keys"]:
    """Return a mask of the `count` largest scores of each row. Among equal scores the earlier ones are selected.

    A bitwise binary search finds the `count`-th largest score: on TPU, sorting a row takes many more passes. On a mesh
    the search does not move scores between devices.
    """
    if count >= scores.shape[-1]:
        return jnp.ones(scores.shape, bool)
    ordered = _ordered_bits(jax.lax.stop_gradient(scores))

    def set_next_bit(i, threshold):
        higher = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(jnp.sum(ordered >= higher, axis=-1, keepdims=True) >= count, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, set_next_bit, jnp.zeros((*scores.shape[:-1], 1), jnp.uint32))
    above = ordered > threshold
    equal = ordered == threshold
    num_equal = count - jnp.sum(above, axis=-1, keepdims=True)
    return above | (equal & (jnp.cumsum(equal, axis=-1) <= num_equal))


def _ordered_bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Map float32 values to integers in the same order; -0.0 and 0.0 map to the same integer."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def map_queries(function: Callable[[Any], Any], queries: Any, candidates: int, heads: int) -> Any:
    """Map `function` over tiles of queries, so that a sequence has at most TILE scores at a time.

    **Arguments:**

    - `queries`: tree of arrays `[batch, length, ...]`. The last tile is padded: integers (positions) with -1, floats
        with 0.
    - `candidates`, `heads`: a query has one score for each candidate and head.

    **Returns:**

    The results, stacked along a new first axis of tiles.
    """
    length = jax.tree.leaves(queries)[0].shape[1]
    num_tiles = max(1, min(length, -(-length * candidates * heads // TILE)))
    if num_tiles == 1:
        return jax.tree.map(lambda x: x[None], function(queries))
    tile_size = -(-length // num_tiles)

    def split_into_tiles(x: Array) -> Array:
        padding_value = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        padding = [(0, 0), (0, -length % tile_size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding, constant_values=padding_value)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, tile_size, *x.shape[2:]), 1, 0)

    return jax.lax.map(function, jax.tree.map(split_into_tiles, queries))
