"""Data-dependent selection of keys (sparse attention), as boolean masks or packed bits.

A selection is a boolean mask over queries and keys, or a `Selection`: packed bits with one bit per query and key, or
one bit per query and key group (for example a block of consecutive keys). The TPU flash kernel reads packed bits,
`chunked` unpacks the bits of one tile at a time, and the other kernels use the full mask.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from eqx_decoders.sharding.chips import LANES


WORD = 32  # bits of a word
# Keys whose bits fill one row of lanes: key s is bit (s % KEYS_PER_ROW) // LANES of lane s % LANES.
KEYS_PER_ROW = WORD * LANES


class Selection(NamedTuple):
    """Packed bits that select key groups, or single keys, for each query, per head or for all heads.

    **Arguments:**

    - `words`: bits of key groups; group n is bit n % 32 of word n // 32.
    - `group`: group of each key; a key with a negative number is in no group. None: there is one bit per key, and bits
        are packed by lanes, see `pack_lanes`.
    """

    words: UInt32[Array, "batch selected_heads length words"]
    group: Int[Array, "batch kv_length"] | None = None

    def bit_indices(self, kv_length: int) -> Int[Array, "batch kv_length"]:
        """Return the index of each key's bit: bit i is bit i % 32 of word i // 32."""
        if self.group is not None:
            return self.group
        key = jnp.arange(kv_length, dtype=jnp.int32)
        index = (key // KEYS_PER_ROW * LANES + key % LANES) * WORD + key % KEYS_PER_ROW // LANES
        return jnp.broadcast_to(index, (self.words.shape[0], kv_length))

    def mask(self, kv_length: int) -> Bool[Array, "batch selected_heads length kv_length"]:
        """Return the selection as a boolean mask over `kv_length` keys."""
        return unpack_bits(self.words, self.bit_indices(kv_length))


Selected = Bool[Array, "batch selected_heads length kv_length"] | Selection


def unpack_bits(words: UInt32[Array, "batch *rows words"], indices: Int[Array, "batch keys"]) -> Bool[Array, "..."]:
    """Return the bits with the given indices, [batch, *rows, keys]; False for negative indices."""

    def unpack_sequence(words: Array, indices: Array) -> Array:
        index = jnp.maximum(indices, 0).astype(jnp.uint32)
        shifts, valid = (x.reshape((1,) * (words.ndim - 1) + (-1,)) for x in (index % WORD, indices >= 0))
        return ((jnp.take(words, index // WORD, axis=-1) >> shifts) & 1 == 1) & valid

    return jax.vmap(unpack_sequence)(words, indices)


def pack_groups(selected: Bool[Array, "*rows groups"]) -> UInt32[Array, "*rows words"]:
    """Pack one bit per key group into words; the result is the field `words` of a `Selection` with key groups."""
    selected = jnp.pad(selected, [(0, 0)] * (selected.ndim - 1) + [(0, -selected.shape[-1] % WORD)])
    bits = selected.reshape(*selected.shape[:-1], -1, WORD).astype(jnp.uint32)
    shifts = jnp.arange(WORD, dtype=jnp.uint32).reshape((1,) * (bits.ndim - 1) + (WORD,))
    return jnp.sum(bits << shifts, axis=-1, dtype=jnp.uint32)


def pack_lanes(mask: Bool[Array, "*rows keys"]) -> UInt32[Array, "*rows words"]:
    """Pack one bit per key into words in the order in which the TPU kernel unpacks them; see KEYS_PER_ROW.

    The result is the field `words` of a `Selection` without key groups. The mask is sliced instead of reshaped, because
    a reshaped mask would be copied as integers, which take 32 times the memory of the bits.
    """
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % KEYS_PER_ROW)])

    def pack_row(start: Array) -> Array:
        bits = jax.lax.dynamic_slice_in_dim(mask, start, KEYS_PER_ROW, mask.ndim - 1)
        parts = (bits[..., n * LANES : (n + 1) * LANES].astype(jnp.uint32) << n for n in range(WORD))
        return functools.reduce(jnp.bitwise_or, parts)

    rows = jax.lax.map(pack_row, jnp.arange(0, mask.shape[-1], KEYS_PER_ROW))
    return jnp.moveaxis(rows, 0, -2).reshape(*mask.shape[:-1], -1)


def as_mask(selected: Selected, kv_length: int) -> Bool[Array, "batch selected_heads length kv_length"]:
    """Return a selection as a boolean mask over `kv_length` keys."""
    return selected.mask(kv_length) if isinstance(selected, Selection) else selected


def map_keys(function: Callable[[Array, int], Array], selected: Selected, kv_length: int) -> Any:
    """Apply `function(x, axis)`, which slices or reorders keys along an axis, to a selection.

    A `Selection` with one bit per key is converted to a mask first.
    """
    if isinstance(selected, Selection) and selected.group is not None:
        return selected._replace(group=function(selected.group, 1))
    return function(as_mask(selected, kv_length), 3)


def map_queries_and_heads(function: Callable[[Array], Array], selected: Selected) -> Any:
    """Apply a function that redistributes queries (axis 2) and heads (axis 1) over devices to a selection."""
    if isinstance(selected, Selection):
        return selected._replace(words=function(selected.words))
    return function(selected)
