"""Keys and values of attention layers, one row of slots for each sequence."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.context_parallel import attend_on_mesh
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result, Scales
from eqx_decoders.layers.attention.kernels.registry import merge, with_sink
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import SCALE, CacheFormat, decode, encode
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Mask, Spans, lookback


LEAST_REACH, MOST_REACHES = 128, 6  # how far rows are read: the fewest slots, and how many choices there are
CLEARED_SLOTS = 128  # slots per row that one loop iteration of `KVCache.empty_rows` overwrites


class NewKV(eqx.Module):
    """New keys and values of one attention layer, for the tokens of a call.

    `value` is None where keys stand for both: latent attention reads both out of one vector. With scales they are as a
    cache of some format stores them, which another of this format takes bit by bit.
    """

    key: Num[Array, "*layers batch length kv_heads head_dim"]
    value: Num[Array, "*layers batch length kv_heads value_dim"] | None
    key_scale: Float[Array, "*layers batch length scale_heads"] | None = None
    value_scale: Float[Array, "*layers batch length scale_heads"] | None = None

    def plain(self, dtype: DTypeLike = jnp.float32) -> "NewKV":
        """Decode to keys and values without scales."""
        value = None if self.value is None else decode(self.value, self.value_scale, dtype)
        return NewKV(key=decode(self.key, self.key_scale, dtype), value=value)


class Queries(NamedTuple):
    """Queries of one call of attention to a past, and what each of them sees of it besides the mask.

    **Arguments:**

    - `query`, `positions`: scaled queries, and their positions.
    - `spans`: spans of queries, if they see more than what came before.
    - `selected`: slots that count for each query, for all heads alike or for each; None: all.
    - `slots`: the only slots that each query reads, in any order; an index beyond the last is none. None: all.
    """

    query: Float[Array, "batch length heads head_dim"]
    positions: Int[Array, "batch length"]
    spans: Spans | None = None
    selected: Bool[Array, "batch selected_heads length slots"] | None = None
    slots: Int[Array, "batch length chosen"] | None = None


class Past(eqx.Module):
    """Cached keys and values as one attention layer reads them. A row is one document: there are no segments.

    A subclass has `whole`; `at` if layers read single slots of it; `attend` where the whole need not be copied; and
    `attend_with` where the attention is its own.
    """

    def whole(self) -> "CachedKV":
        """Return all slots."""
        raise TypeError(f"{type(self).__name__} is no kind of past.")

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Return keys times their scales and positions of some slots; position -1 for a slot without a token."""
        raise TypeError(f"{type(self).__name__} reads no single slots.")

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend to all slots, or to those selected; where there are no values, keys stand for them."""
        return self.whole().attend(queries, options, execution)

    def attend_with(
        self,
        present: Callable[[], Result],
        entries: Any,
        queries: Queries,
        options: AttentionOptions,
        execution: Execution,
        sink: Float[Array, "heads"] | None = None,
    ) -> tuple[Float[Array, "batch length heads value_dim"], Any]:
        """Attend to the past and to the tokens of the call, merged by their log-sum-exp.

        **Arguments:**

        - `present`: computes the result for the tokens of the call.
        - `entries`: keys and values of these tokens, of this layer or of an earlier one.
        - `options`: `mask`, `soft_cap` and `alibi`.

        **Returns:**

        The result, and the entries to be committed.
        """
        of_call = present()
        earlier = (self.attend if queries.slots is None else self._attend_slots)(queries, options, execution)
        out, lse = merge([of_call, earlier])
        return (out if sink is None else with_sink(out, lse, sink)), entries

    def _attend_slots(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend with each query to some slots; nothing else is read. Keys stand for values."""
        assert queries.slots is not None
        batch, length, count = queries.slots.shape
        keys, key_positions = self.at(queries.slots.reshape(batch, -1), queries.query.dtype)

        def alone(x: Array) -> Array:  # each query in a row of its own, with the keys that it chose
            return x.reshape(batch * length, -1, *x.shape[2:])

        keys = keys.reshape(batch * length, count, 1, -1)
        positions = AttentionPositions(alone(queries.positions), key_positions.reshape(batch * length, count))
        inputs = AttentionInputs(alone(queries.query), keys, keys, positions)
        out, lse = attend_on_mesh(inputs, options, execution, key_axis="slots")
        return out.reshape(batch, length, *out.shape[2:]), lse.reshape(batch, length, -1)


class CachedKV(Past):
    """Cached keys and values of one layer, its slice of a cache, with scales if there are any."""

    key: Num[Array, "batch kv_heads slots head_dim"]
    value: Num[Array, "batch kv_heads slots value_dim"] | None
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "batch scale_heads slots"] | None = None
    value_scale: Float[Array, "batch scale_heads slots"] | None = None

    def keys(self, dtype: DTypeLike) -> Float[Array, "batch kv_heads slots head_dim"]:
        """Return keys times their scales."""
        return decode(self.key, self.key_scale, dtype)

    def whole(self) -> "CachedKV":
        return self

    def without_blocks(self, dtype: DTypeLike) -> "CachedKV":
        """Return keys and values times their scales if there are several for a head; else they stay as they are."""
        if self.key_scale is None or self.key_scale.shape[1] <= self.key.shape[1]:
            return self
        value = None if self.value is None else decode(self.value, self.value_scale, dtype)
        return CachedKV(self.keys(dtype), value, self.positions)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        wide = _is_narrow(queries.query, execution)
        past = self.without_blocks(jnp.float32 if wide else queries.query.dtype)
        query, positions, spans, selected, _ = queries
        positions = AttentionPositions(positions, past.positions, query_spans=spans)
        scales, dtype, out_dtype = None, past.key.dtype, query.dtype
        if past.key_scale is not None:
            key_scale = jnp.swapaxes(past.key_scale, 1, 2)
            scales = Scales(key_scale, key_scale if past.value_scale is None else jnp.swapaxes(past.value_scale, 1, 2))
        else:
            # else all of a float32 cache would be cast, not a few queries
            dtype = dtype if dtype == jnp.float32 and wide else out_dtype
            query = query.astype(dtype)
        keys = past.key.astype(dtype).transpose(0, 2, 1, 3)
        values = keys if past.value is None else past.value.astype(dtype).transpose(0, 2, 1, 3)
        inputs = AttentionInputs(query, keys, values, positions, selected, scales)
        out, lse = attend_on_mesh(inputs, options, execution, key_axis="slots")
        return out.astype(out_dtype), lse


def _is_narrow(query: Array, execution: Execution) -> bool:
    """Return whether queries are few and of 16 bits, where the machine multiplies these in float32 anyway."""
    return query.dtype.itemsize == 2 and execution.layout.backend.widens_half and query.shape[1] < 32


class KVCache(LayerCache):
    """Key/value cache of equal layers.

    **Arguments:**

    - `key`, `value`: one row of slots for each layer and sequence; no values where keys stand for both.
    - `positions`: the position of each slot's token, -1 where there is none. Masks are computed from them alone.
    - `ring`: whether position p is stored in slot `p mod slots`; else in slot p, and later positions are dropped.
    - `by_slot`: whether layers read single slots, where they stand.
    - `key_scale`, `value_scale`: multiply stored numbers; None where these are as they are.

    Heads stand before slots: a TPU's products then read a layer's slice in place, without a copy in another order.
    """

    key: Num[Array, "layers batch kv_heads slots head_dim"]
    value: Num[Array, "layers batch kv_heads slots value_dim"] | None
    positions: Int[Array, "batch slots"]
    ring: bool = eqx.field(static=True)
    by_slot: bool = eqx.field(static=True, default=False)
    key_scale: Float[Array, "layers batch scale_heads slots"] | None = None
    value_scale: Float[Array, "layers batch scale_heads slots"] | None = None

    @property
    def arrays(self) -> tuple[Array, Array | None, Array | None, Array | None]:
        """Keys, values, and the scales of both."""
        return self.key, self.value, self.key_scale, self.value_scale

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0]) if self.by_slot else self.arrays

    def past(self, slices: Any) -> Past:
        if self.by_slot:
            return KVCacheView(self, slices)
        key, value, *scales = slices
        return CachedKV(key, value, self.positions, *scales)

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

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> "KVCacheView":
        return KVCacheView(self, slices, rows)

    def commit_rows(self, rows: Int[Array, "rows"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        return self._written(rows[:, None], entries, positions)

    def empty_rows(self, rows: Int[Array, "rows"]) -> "KVCache":
        # Empty slots have attention weight 0, but 0 * NaN is NaN. So stored values are overwritten with zeros, up to
        # the last slot in use. TPUs execute the scatter in `_written` in place.
        slots = self.positions.shape[1]
        size, index = min(slots, CLEARED_SLOTS), jnp.arange(slots, dtype=jnp.int32)
        in_use = self.positions.at[rows].get(mode="fill", fill_value=-1) >= 0
        count = jnp.max(jnp.where(in_use, index + 1, 0))

        def zeros(x: Any) -> Any:
            return (
                None if x is None else jnp.zeros((x.shape[0], rows.shape[0], size, x.shape[2], *x.shape[4:]), x.dtype)
            )

        nothing = NewKV(*map(zeros, self.arrays))

        def clear(block: Array, cache: KVCache) -> KVCache:
            slot = block * size + jnp.arange(size, dtype=jnp.int32)
            slot = jnp.where(slot < slots, slot, -1)
            return cache._written(rows[:, None], nothing, jnp.broadcast_to(slot, (rows.shape[0], size)))

        cleared = jax.lax.fori_loop(0, (count + size - 1) // size, clear, self)
        return dataclasses.replace(cleared, positions=cleared.positions.at[rows].set(-1, mode="drop"))

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        slots = self.positions.shape[1]
        slot = positions % slots if self.ring else jnp.clip(positions, 0, slots - 1)
        rows = index[None, None]

        def of_layer(*parts: Any) -> NewKV:
            taken: Any = (None if part is None else part[rows, :, slot] for part in parts)
            return NewKV(*taken)

        entries = jax.vmap(of_layer)(*self.arrays)
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

        return NewKV(*map(slots_first, self.arrays))


class KVCacheView(Past):
    """Keys and values of one layer read where they stand: the whole cache, a layer, and some rows (None: all).

    A slice of one row, or of single slots, is made on its way to the product that reads it; a slice of a layer, or of
    several rows, would be copied before, which costs more than reading it.
    """

    cache: KVCache
    layer: Int[Array, ""]
    rows: Int[Array, "rows"] | None = None

    def whole(self) -> CachedKV:
        if self.rows is not None and self.rows.shape[0] == 1:
            return self._row(jnp.int32(0), self.cache.positions.shape[1])
        layer, rows = self.layer, self.rows
        if rows is None:
            return self._part(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), self.cache.positions
            )
        positions = rows_of(self.cache.positions, rows)
        return self._part(lambda leaf: leaf.at[layer, rows].get(unique_indices=True, mode="clip"), positions)

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        last = self.cache.positions.shape[1] - 1
        rows = (jnp.arange(slots.shape[0]) if self.rows is None else self.rows)[:, None]
        inside = jnp.minimum(slots, last)
        positions = self.cache.positions.at[rows, inside].get(mode="promise_in_bounds")

        def taken(x: Array) -> Array:
            return x.at[self.layer, rows, :, inside].get(mode="promise_in_bounds")

        scale = None if self.cache.key_scale is None else taken(self.cache.key_scale)
        return decode(taken(self.cache.key), scale, dtype), jnp.where(slots <= last, positions, -1)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend row by row where there are few: a few queries' products are no faster for several rows at once."""
        rows = self.rows
        if rows is None or not execution.layout.backend.few_rows:
            return super().attend(queries, options, execution)
        if rows.shape[0] == 1:
            return self._attend_row(jnp.int32(0), queries, options, execution)

        def one(row: Any) -> Any:
            index, queries = jax.tree.map(lambda leaf: leaf[None], row)
            return jax.tree.map(lambda leaf: leaf[0], self._attend_row(index[0], queries, options, execution))

        return jax.lax.map(one, (jnp.arange(rows.shape[0], dtype=jnp.int32), queries))

    def _attend_row(
        self, index: Int[Array, ""], queries: Queries, options: AttentionOptions, execution: Execution
    ) -> Result:
        """Attend to the slots of one row, only as far as it is filled."""
        reaches = [self.cache.positions.shape[1]]
        while len(reaches) < MOST_REACHES and reaches[0] >= 2 * LEAST_REACH:
            reaches.insert(0, -(-reaches[0] // 2))

        def within(reach: int) -> Any:
            def attend() -> Result:
                chosen = None if queries.selected is None else queries.selected[..., :reach]
                return self._row(index, reach).attend(queries._replace(selected=chosen), options, execution)

            return attend

        # what is stored is before the queries: slots from their last position on are empty (rings that are full are
        # read whole, since that position is beyond them)
        branch = sum((jnp.max(queries.positions) > reach).astype(jnp.int32) for reach in reaches[:-1])
        return jax.lax.switch(branch, [within(reach) for reach in reaches])

    def _row(self, index: Int[Array, ""], reach: int) -> CachedKV:
        """Return the first slots of one of the rows."""
        assert self.rows is not None
        row = self.rows[index]
        layer, zero = self.layer.astype(row.dtype), jnp.zeros_like(row)

        def part(leaf: Array) -> Array:
            sizes = 1, 1, leaf.shape[2], reach, *leaf.shape[4:]
            return jax.lax.dynamic_slice(leaf, (layer, row, zero, zero, zero)[: leaf.ndim], sizes)[0]

        return self._part(part, jax.lax.dynamic_slice(self.cache.positions, (row, zero), (1, reach)))

    def _part(self, part: Callable[[Array], Array], positions: Int[Array, "rows slots"]) -> CachedKV:
        """Collect what `part` takes out of each array."""
        key, value, *scales = (None if leaf is None else part(leaf) for leaf in self.cache.arrays)
        assert key is not None
        return CachedKV(key, value, positions, *scales)


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

    `by_token`: whether tokens have keys and values of their own, which pages and other engines can hold; `values`:
    whether it has values; `value_dim`: their features, None for those of keys; `by_slot`: whether single slots are read
    (then it has none).
    """

    by_token: ClassVar[bool] = True
    slots: int
    kv_heads: int
    head_dim: int
    ring: bool
    values: bool = True
    value_dim: int | None = None
    by_slot: bool = False

    def check_format(self, kind: CacheFormat) -> None:
        """Raise ConfigError for scales of parts of a head where keys and values have different numbers of these."""
        alike = self.value_dim in (None, self.head_dim)
        rule = f"needs values that are as wide as keys, not {self.value_dim} and {self.head_dim} features"
        check(alike or kind.scale_block is None, f"CacheFormat.scale_block={kind.scale_block} {rule}.")

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> KVCache:
        """Return an empty cache for `layers` equal layers."""
        kind = CacheFormat.of(dtype)
        self.check_format(kind)
        shape = (layers, batch_size, self.kv_heads, self.slots, self.head_dim)
        scales = (layers, batch_size, kind.scale_heads(self.kv_heads, self.head_dim), self.slots)
        key, scale = jnp.zeros(shape, kind.dtype), None if kind.bound is None else jnp.zeros(scales, SCALE)
        return KVCache(
            key=key,
            value=jnp.zeros((*shape[:-1], self.value_dim or self.head_dim), kind.dtype) if self.values else None,
            positions=jnp.full((batch_size, self.slots), -1, jnp.int32),
            ring=self.ring,
            by_slot=self.by_slot,
            key_scale=scale,
            value_scale=None if scale is None or not self.values else jnp.zeros_like(scale),
        )


def kv_shape(mask: Mask, max_length: int, *, kv_heads: int, head_dim: int, **options: Any) -> KVShape:
    """Return the shape of a cache: a ring of `size` slots for a window or chunk, else a slot for each position."""
    check(
        not isinstance(mask, Bidirectional),
        "A bidirectional attention layer has no cache: its past would change with every token.",
    )
    slots = min(lookback(mask) or max_length, max_length)
    return KVShape(slots=slots, kv_heads=kv_heads, head_dim=head_dim, ring=slots < max_length, **options)
