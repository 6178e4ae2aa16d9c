"""Selections of keys that depend on data, and their bits in the tiles of kernels.

A mask says of each query and key whether it counts. A `Selection` has a bit for it, or one for each query and group of
keys (a block, say). The kernel for TPUs reads bits only, `chunked` those of a tile; others read the mask of all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from eqx_decoders.sharding.chips import LANES


WORD = 32
PACKED = WORD * LANES  # keys whose bits stand in one row of lanes: key s is bit s % PACKED // LANES of lane s % LANES


class Selection(NamedTuple):
    """Selection of groups of keys for each query, for all heads alike or for each head.

    **Arguments:**

    - `words`: bits of groups; group n is bit n % 32 of word n // 32.
    - `group`: the group of each key; a key with a number below 0 is in none. None: each key is a group of its own, and
        bits are packed by lanes, as `pack_lanes` does.
    """

    words: UInt32[Array, "batch selected_heads length words"]
    group: Int[Array, "batch kv_length"] | None = None

    def places(self, kv_length: int) -> Int[Array, "batch kv_length"]:
        """Return the number of each key's bit, as that of a group."""
        if self.group is not None:
            return self.group
        key = jnp.arange(kv_length, dtype=jnp.int32)
        place = (key // PACKED * LANES + key % LANES) * WORD + key % PACKED // LANES
        return jnp.broadcast_to(place, (self.words.shape[0], kv_length))

    def mask(self, kv_length: int) -> Bool[Array, "batch selected_heads length kv_length"]:
        """Return the mask of so many keys that it stands for."""
        return spread(self.words, self.places(kv_length))


Selected = Bool[Array, "batch selected_heads length kv_length"] | Selection


def spread(words: UInt32[Array, "batch *rows words"], places: Int[Array, "batch keys"]) -> Bool[Array, "..."]:
    """Return the bits at some places, `batch *rows keys`; False at places below 0."""

    def row(words: Array, places: Array) -> Array:
        place = jnp.maximum(places, 0).astype(jnp.uint32)
        shifts, real = (x.reshape((1,) * (words.ndim - 1) + (-1,)) for x in (place % WORD, places >= 0))
        return ((jnp.take(words, place // WORD, axis=-1) >> shifts) & 1 == 1) & real

    return jax.vmap(row)(words, places)


def pack_groups(chosen: Bool[Array, "*rows groups"]) -> UInt32[Array, "*rows words"]:
    """Pack bits into words."""
    chosen = jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, -chosen.shape[-1] % WORD)])
    bits = chosen.reshape(*chosen.shape[:-1], -1, WORD).astype(jnp.uint32)
    shifts = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * (bits.ndim - 1) + (WORD,))
    return jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)


def pack_lanes(mask: Bool[Array, "*rows keys"]) -> UInt32[Array, "*rows words"]:
    """Pack bits into words that stand as kernels for TPU spread them: lane by lane, see PACKED.

    By slices: a reshaped mask would be copied as integers, in 32 times the room of its bits.
    """
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % PACKED)])

    def row(start: Array) -> Array:
        bits = jax.lax.dynamic_slice_in_dim(mask, start, PACKED, mask.ndim - 1)
        parts = (bits[..., n * LANES : (n + 1) * LANES].astype(jnp.uint32) << n for n in range(WORD))
        return functools.reduce(jnp.bitwise_or, parts)

    rows = jax.lax.map(row, jnp.arange(0, mask.shape[-1], PACKED))
    return jnp.moveaxis(rows, 0, -2).reshape(*mask.shape[:-1], -1)


def as_mask(selected: Selected, kv_length: int) -> Bool[Array, "batch selected_heads length kv_length"]:
    """Return a selection of so many keys as a mask."""
    return selected.mask(kv_length) if isinstance(selected, Selection) else selected


def map_keys(function: Callable[[Array, int], Array], selected: Selected, kv_length: int) -> Any:
    """Apply `function(x, axis)`, which cuts or reorders keys along an axis; bits of single keys become a mask."""
    if isinstance(selected, Selection) and selected.group is not None:
        return selected._replace(group=function(selected.group, 1))
    return function(as_mask(selected, kv_length), 3)


def map_queries_and_heads(function: Callable[[Array], Array], selected: Selected) -> Any:
    """Apply a function that exchanges queries (axis 2) and heads (axis 1)."""
    if isinstance(selected, Selection):
        return selected._replace(words=function(selected.words))
    return function(selected)
