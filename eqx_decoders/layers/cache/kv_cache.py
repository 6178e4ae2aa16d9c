"""Keys and values of attention layers, one row of slots for each sequence."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import SCALE, CacheFormat, decode, encode
from eqx_decoders.layers.mask import Bidirectional, Mask, lookback


class NewKV(eqx.Module):
    """New keys and values of one attention layer, for the tokens of a call.

    `value` is None where keys stand for both: latent attention reads both out of one vector. With scales they are as a
    cache of some format stores them, which another of this format takes bit by bit.
    """

    key: Num[Array, "*layers batch length kv_heads head_dim"]
    value: Num[Array, "*layers batch length kv_heads head_dim"] | None
    key_scale: Float[Array, "*layers batch length scale_heads"] | None = None
    value_scale: Float[Array, "*layers batch length scale_heads"] | None = None

    def plain(self, dtype: DTypeLike = jnp.float32) -> "NewKV":
        """Decode to keys and values without scales."""
        value = None if self.value is None else decode(self.value, self.value_scale, dtype)
        return NewKV(key=decode(self.key, self.key_scale, dtype), value=value)


class CachedKV(eqx.Module):
    """Cached keys and values that one attention layer reads: its slice of a cache, with scales if there are any."""

    key: Num[Array, "batch kv_heads slots head_dim"]
    value: Num[Array, "batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "batch scale_heads slots"] | None = None
    value_scale: Float[Array, "batch scale_heads slots"] | None = None

    def keys(self, dtype: DTypeLike) -> Float[Array, "batch kv_heads slots head_dim"]:
        """Return keys times their scales."""
        return decode(self.key, self.key_scale, dtype)


class StackedCachedKV(eqx.Module):
    """Cached keys of all layers, and the number of one: for a layer that reads single slots.

    A layer's slice would be copied before slots are gathered from it, which costs more than reading it.
    """

    key: Num[Array, "layers batch kv_heads slots head_dim"]
    layer: Int[Array, ""]
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "layers batch scale_heads slots"] | None = None

    def whole(self) -> CachedKV:
        """Return the layer's slice."""

        def cut(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

        scale = None if self.key_scale is None else cut(self.key_scale)
        return CachedKV(key=cut(self.key), value=None, positions=self.positions, key_scale=scale)

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Return keys times their scales and positions of some slots; position -1 for a slot beyond the last."""
        last, rows = self.positions.shape[1] - 1, jnp.arange(slots.shape[0])[:, None]
        inside = jnp.minimum(slots, last)
        positions = self.positions.at[rows, inside].get(mode="promise_in_bounds")

        def taken(x: Array) -> Array:
            return x.at[self.layer, rows, :, inside].get(mode="promise_in_bounds")

        scale = None if self.key_scale is None else taken(self.key_scale)
        return decode(taken(self.key), scale, dtype), jnp.where(slots <= last, positions, -1)


class KVCache(LayerCache):
    """Key/value cache of equal layers.

    **Arguments:**

    - `key`, `value`: one row of slots for each layer and sequence; no values where keys stand for both.
    - `positions`: the position of each slot's token, -1 where there is none. Masks are computed from them alone.
    - `ring`: whether position p is stored in slot `p mod slots`; else in slot p, and later positions are dropped.
    - `by_slot`: whether layers read single slots, and so a `StackedCachedKV`.
    - `key_scale`, `value_scale`: multiply stored numbers; None where these are as they are.

    Heads stand before slots: a TPU's products then read a layer's slice in place, without a copy in another order.
    """

    key: Num[Array, "layers batch kv_heads slots head_dim"]
    value: Num[Array, "layers batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]
    ring: bool = eqx.field(static=True)
    by_slot: bool = eqx.field(static=True, default=False)
    key_scale: Float[Array, "layers batch scale_heads slots"] | None = None
    value_scale: Float[Array, "layers batch scale_heads slots"] | None = None

    def slices(self) -> Any:
        stored = self.key, self.value, self.key_scale, self.value_scale
        return jnp.arange(self.key.shape[0]) if self.by_slot else stored

    def past(self, slices: Any) -> CachedKV | StackedCachedKV:
        if self.by_slot:
            return StackedCachedKV(key=self.key, layer=slices, positions=self.positions, key_scale=self.key_scale)
        key, value, key_scale, value_scale = slices
        scales: Any = dict(key_scale=key_scale, value_scale=value_scale)
        return CachedKV(key=key, value=value, positions=self.positions, **scales)

    def stored(self, entries: NewKV) -> NewKV:
        """Encode entries in the format of the cache; entries in that format stay as they are."""
        return in_format(entries, self.key.dtype, self.key_scale)

    def commit(self, entries: NewKV, positions: Int[Array, "batch length"]) -> "KVCache":
        return self._written(jnp.arange(self.positions.shape[0])[:, None], entries, positions)

    def _written(self, rows: Int[Array, "rows 1"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        """Write entries into some rows."""
        layers, slots = jnp.arange(self.key.shape[0])[:, None, None], self.positions.shape[1]
        accepted = positions >= 0
        if self.ring:  # of the tokens that share a slot only the last may be written: the order of writes is undefined
            accepted &= positions > jnp.max(positions, axis=1, keepdims=True) - slots
        slot = jnp.where(accepted, positions % slots if self.ring else positions, slots)

        entries = self.stored(entries)

        def write(old: Any, new: Any) -> Any:
            if old is None:
                return None
            # NumPy's rule puts the indexed axes first: layers batch length kv_heads head_dim. A slice over layers would
            # do, too, but with one head a device a TPU's scatter then wants an order of axes that costs a second cache.
            # Of numbers smaller than 16 bits, and of scales, it wants that for several heads, too: each is an index.
            if old.ndim == 5 and old.dtype.itemsize > 1:
                return old.at[layers, rows, :, slot].set(new.astype(old.dtype), mode="drop")
            heads = jnp.arange(old.shape[2])
            return old.at[layers[..., None], rows[..., None], heads, slot[..., None]].set(new, mode="drop")

        return KVCache(
            key=write(self.key, entries.key),
            value=write(self.value, entries.value),
            positions=self.positions.at[rows, slot].set(positions, mode="drop"),
            ring=self.ring,
            by_slot=self.by_slot,
            key_scale=write(self.key_scale, entries.key_scale),
            value_scale=write(self.value_scale, entries.value_scale),
        )

    def slices_of_rows(self) -> Any:
        return jnp.arange(self.key.shape[0])

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> "CachedKVRows | StackedCachedKV":
        row_cache: Any = self.rows(rows) if self.by_slot else None
        return CachedKVRows(self, slices, rows) if row_cache is None else row_cache.past(slices)

    def commit_rows(self, rows: Int[Array, "rows"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        return self._written(rows[:, None], entries, positions)

    def empty_row(self, index: Int[Array, ""]) -> "KVCache":
        return dataclasses.replace(self, positions=self.positions.at[index].set(-1))

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        slots = self.positions.shape[1]
        slot = positions % slots if self.ring else jnp.clip(positions, 0, slots - 1)
        rows = index[None, None]

        def of_layer(*parts: Any) -> NewKV:
            taken: Any = (None if part is None else part[rows, :, slot] for part in parts)
            return NewKV(*taken)

        entries = jax.vmap(of_layer)(self.key, self.value, self.key_scale, self.value_scale)
        return entries, jnp.where(self.positions[rows, slot] == positions, positions, -1)

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "LayerCache":
        if isinstance(row, KVCache) and row._form == self._form:
            return super().with_row(index, row)
        # a cache of another length, format or kind: its tokens are written where they belong here
        empty = self.row(index).reset(jnp.ones((1,), bool))
        return super().with_row(index, empty.commit(row.entries(), row.positions))

    @property
    def _form(self) -> tuple[Any, ...]:
        """Form of a row: its slots, their order, and their format."""
        scales = None if self.key_scale is None else self.key_scale.shape[2]
        return self.positions.shape[1], self.ring, self.key.dtype, scales

    def entries(self) -> NewKV:
        """Return all slots in the form of proposed entries."""

        def slots_first(x: Any) -> Any:
            return None if x is None else x.swapaxes(2, 3)

        return NewKV(*map(slots_first, (self.key, self.value, self.key_scale, self.value_scale)))


class CachedKVRows(eqx.Module):
    """Cached keys and values of some rows as one attention layer reads them: the whole cache, a layer and rows.

    A slice of one row is made on its way to the product that reads it; a slice of a layer, or of several rows, would be
    copied before.
    """

    cache: KVCache
    layer: Int[Array, ""]
    rows: Int[Array, "rows"]

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.rows.shape[0]

    def whole(self) -> CachedKV:
        """Copy the rows."""
        if self.count == 1:
            return self.row(jnp.int32(0), self.cache.positions.shape[1])
        cache = self.cache

        def part(leaf: Any) -> Any:
            return None if leaf is None else leaf.at[self.layer, self.rows].get(unique_indices=True, mode="clip")

        return _past(cache, part, rows_of(cache.positions, self.rows))

    def row(self, index: Int[Array, ""], reach: int) -> CachedKV:
        """Return the first slots of one of the rows."""
        row = self.rows[index]
        layer, zero = self.layer.astype(row.dtype), jnp.zeros_like(row)

        def part(leaf: Any) -> Any:
            if leaf is None:
                return None
            sizes = 1, 1, leaf.shape[2], reach, *leaf.shape[4:]
            return jax.lax.dynamic_slice(leaf, (layer, row, zero, zero, zero)[: leaf.ndim], sizes)[0]

        return _past(self.cache, part, jax.lax.dynamic_slice(self.cache.positions, (row, zero), (1, reach)))


def _past(cache: KVCache, part: Any, positions: Int[Array, "rows slots"]) -> CachedKV:
    """Collect what `part` takes out of each array."""
    scales: Any = dict(key_scale=part(cache.key_scale), value_scale=part(cache.value_scale))
    return CachedKV(key=part(cache.key), value=part(cache.value), positions=positions, **scales)


def in_format(entries: NewKV, dtype: DTypeLike, scale: Float[Array, "layers _ scale_heads _"] | None) -> NewKV:
    """Encode entries as a cache with such numbers and scales stores them; entries in that format stay as they are."""
    if scale is None:
        return entries if entries.key_scale is None else entries.plain()
    if entries.key_scale is not None:
        if entries.key.dtype == dtype and entries.key_scale.shape[-1] == scale.shape[2]:
            return entries
        entries = entries.plain()
    key, key_scale = encode(entries.key, dtype, scale.shape[2])
    value, value_scale = (None, None) if entries.value is None else encode(entries.value, dtype, scale.shape[2])
    return NewKV(key=key, value=value, key_scale=key_scale, value_scale=value_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of one attention layer's cache, in slots, heads and features.

    `values`: whether it has values; `by_slot`: whether single slots are read (then it has none).
    """

    slots: int
    kv_heads: int
    head_dim: int
    ring: bool
    values: bool = True
    by_slot: bool = False

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> KVCache:
        """Return an empty cache for `layers` equal layers."""
        kind = CacheFormat.of(dtype)
        shape = (layers, batch_size, self.kv_heads, self.slots, self.head_dim)
        scales = (layers, batch_size, kind.scale_heads(self.kv_heads), self.slots)
        key, scale = jnp.zeros(shape, kind.dtype), None if kind.bound is None else jnp.zeros(scales, SCALE)
        return KVCache(
            key=key,
            value=jnp.zeros_like(key) if self.values else None,
            positions=jnp.full((batch_size, self.slots), -1, jnp.int32),
            ring=self.ring,
            by_slot=self.by_slot,
            key_scale=scale,
            value_scale=None if scale is None or not self.values else jnp.zeros_like(scale),
        )


def kv_shape(mask: Mask, max_length: int, *, kv_heads: int, head_dim: int, values: bool = True) -> KVShape:
    """Return the shape of a cache: a ring of `size` slots for a window or chunk, else a slot for each position."""
    check(
        not isinstance(mask, Bidirectional),
        "A bidirectional attention layer has no cache: its past would change with every token.",
    )
    slots = min(lookback(mask) or max_length, max_length)
    return KVShape(slots=slots, kv_heads=kv_heads, head_dim=head_dim, ring=slots < max_length, values=values)
