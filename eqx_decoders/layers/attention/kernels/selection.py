"""Selections of keys that depend on data, and their bits in the tiles of kernels.

A mask says of each query and key whether it counts. A `Selection` says it of each query and of a group of keys (a
block, say): a bit for each. Kernels read bits only: those of a mask are packed by lanes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from eqx_decoders.core.chips import LANES


WORD = 32
PACKED = WORD * LANES  # keys whose bits stand in one row of lanes: key s is bit s % PACKED // LANES of lane s % LANES


class Selection(NamedTuple):
    """Selection of groups of keys for each query, for all heads alike or for each head.

    **Arguments:**

    - `words`: bits of groups; group n is bit n % 32 of word n // 32.
    - `group`: the group of each key; a key with a number below 0 is in none.
    """

    words: UInt32[Array, "batch selected_heads length words"]
    group: Int[Array, "batch kv_length"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the mask that it stands for."""
        return (*self.words.shape[:3], self.group.shape[1])

    @classmethod
    def create(cls, chosen: Bool[Array, "batch selected_heads length groups"], group: Array) -> "Selection":
        """Pack a choice of groups."""
        return cls(pack_groups(chosen), group)


Selected = Bool[Array, "batch selected_heads length kv_length"] | Selection


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


def as_mask(selected: Selected) -> Bool[Array, "batch selected_heads length kv_length"]:
    """Return the mask that a selection stands for."""
    if not isinstance(selected, Selection):
        return selected
    words, group = selected
    place = jnp.maximum(group, 0).astype(jnp.uint32)
    taken = jax.vmap(lambda words, place: jnp.take(words, place // WORD, axis=-1))(words, place)
    bits = (taken >> (place % WORD)[:, None, None]) & 1
    return (bits == 1) & (group >= 0)[:, None, None]


def map_keys(function: Callable[[Array, int], Array], selected: Selected) -> Selected:
    """Apply `function(x, axis)`, which cuts or reorders keys along an axis."""
    if isinstance(selected, Selection):
        return selected._replace(group=function(selected.group, 1))
    return function(selected, 3)


def map_queries_and_heads(function: Callable[[Array], Array], selected: Selected) -> Selected:
    """Apply a function that exchanges queries (axis 2) and heads (axis 1)."""
    if isinstance(selected, Selection):
        return selected._replace(words=function(selected.words))
    return function(selected)
