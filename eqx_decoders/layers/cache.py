"""Caches: a layer proposes entries for its tokens, and `commit` writes those of all layers at once.

Every slot stores the absolute position of its token (-1: empty), and masks are computed from positions alone. So a
sliding window is a ring of `window` slots, rows may have different lengths, and a rejected token leaves no trace.
"""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eqx_decoders.errors import check
from eqx_decoders.layers.mask import Bidirectional, Mask, lookback


class Entries(eqx.Module):
    """What one attention layer proposes to store: keys and values of the tokens of this call.

    `value` is None where keys are all that there is: latent attention reads both out of one vector.
    """

    key: Float[Array, "batch length kv_heads head_dim"]
    value: Float[Array, "batch length kv_heads head_dim"] | None


class Past(eqx.Module):
    """What one attention layer reads: its slice of a cache."""

    key: Float[Array, "batch kv_heads slots head_dim"]
    value: Float[Array, "batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]


class KVCache(eqx.Module):
    """Keys and values of equal layers.

    **Arguments:**

    - `key`, `value`: one row of slots for each layer and sequence; no values where keys are all that there is.
    - `positions`: the position of each slot's token, -1 where there is none.
    - `ring`: whether position p is stored in slot `p mod slots`; else in slot p, and later positions are dropped.

    Heads stand before slots: a TPU's products then read a layer's slice in place, without a copy in another order.
    """

    key: Float[Array, "layers batch kv_heads slots head_dim"]
    value: Float[Array, "layers batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]
    ring: bool = eqx.field(static=True)

    def commit(self, entries: Entries, positions: Int[Array, "batch length"]) -> "KVCache":
        """Write entries (stacked over layers) at `positions`; those below 0 are left out."""
        layers, slots = jnp.arange(self.key.shape[0])[:, None, None], self.positions.shape[1]
        rows = jnp.arange(self.positions.shape[0])[:, None]
        kept = positions >= 0
        if self.ring:  # of the tokens that share a slot only the last may be written: the order of writes is undefined
            kept &= positions > jnp.max(positions, axis=1, keepdims=True) - slots
        slot = jnp.where(kept, positions % slots if self.ring else positions, slots)

        def write(old, new):
            # NumPy's rule puts the indexed axes first: layers batch length kv_heads head_dim. A slice over layers would
            # do, too, but with one head a device a TPU's scatter then wants an order of axes that costs a second cache.
            return old.at[layers, rows, :, slot].set(new.astype(old.dtype), mode="drop")

        return KVCache(
            key=write(self.key, entries.key),
            value=None if self.value is None else write(self.value, entries.value),
            positions=self.positions.at[rows, slot].set(positions, mode="drop"),
            ring=self.ring,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """How large the cache of one attention layer is, in slots, heads and features; `values`: whether it has values."""

    slots: int
    kv_heads: int
    head_dim: int
    ring: bool
    values: bool = True

    def build(self, layers: int, batch_size: int, dtype: jnp.dtype) -> KVCache:
        """An empty cache for `layers` equal layers."""
        shape = (layers, batch_size, self.kv_heads, self.slots, self.head_dim)
        return KVCache(
            key=jnp.zeros(shape, dtype),
            value=jnp.zeros(shape, dtype) if self.values else None,
            positions=jnp.full((batch_size, self.slots), -1, jnp.int32),
            ring=self.ring,
        )


def cache_shape(mask: Mask, max_length: int, *, kv_heads: int, head_dim: int, values: bool = True) -> CacheShape:
    """A ring of `size` slots for a window or chunk, else a slot for each position."""
    check(
        not isinstance(mask, Bidirectional),
        "A bidirectional attention layer has no cache: its past would change with every token.",
    )
    slots = min(lookback(mask) or max_length, max_length)
    return CacheShape(slots=slots, kv_heads=kv_heads, head_dim=head_dim, ring=slots < max_length, values=values)
