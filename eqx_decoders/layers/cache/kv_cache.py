"""Contiguous key/value caches of attention layers: a row of slots for each sequence."""

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
from eqx_decoders.layers.attention.attend import run_attention
from eqx_decoders.layers.attention.kernels.call import AttentionInputs, AttentionOptions
from eqx_decoders.layers.attention.kernels.common import Result, Scales
from eqx_decoders.layers.attention.kernels.quantized_kv import SCALE, dequantize, quantize
from eqx_decoders.layers.attention.kernels.registry import merge, with_sink
from eqx_decoders.layers.cache.base import LayerCache, rows_of
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.mask import AttentionPositions, Bidirectional, Mask, Spans, lookback


# A sequence is read up to one of at most MAX_READ_LENGTHS compiled lengths; the shortest has at least MIN_READ_LENGTH
# slots (see `KVCacheView._attend_row`).
MIN_READ_LENGTH = 128
MAX_READ_LENGTHS = 6
CLEARED_SLOTS = 128  # slots per row that one loop iteration of `KVCache.empty_rows` overwrites


class NewKV(eqx.Module):
    """Keys and values of the tokens of a call, which an attention layer adds to its cache.

    **Arguments:**

    - `key`, `value`: new keys and values; `value` is None if the keys are also the values, as in latent attention.
    - `key_scale`, `value_scale`: scales of keys and values that are copied from a quantized cache. None: they are not
        quantized yet.
    """

    key: Num[Array, "*layers batch length kv_heads head_dim"]
    value: Num[Array, "*layers batch length kv_heads value_dim"] | None
    key_scale: Float[Array, "*layers batch length scale_heads"] | None = None
    value_scale: Float[Array, "*layers batch length scale_heads"] | None = None

    def plain(self, dtype: DTypeLike = jnp.float32) -> "NewKV":
        """Return dequantized keys and values."""
        value = None if self.value is None else dequantize(self.value, self.value_scale, dtype)
        return NewKV(key=dequantize(self.key, self.key_scale, dtype), value=value)


class Queries(NamedTuple):
    """Queries of an attention layer to its cache, and restrictions besides the mask.

    **Arguments:**

    - `query`, `positions`: scaled queries, and their positions.
    - `spans`: spans with bidirectional attention; None for causal attention only.
    - `selected`: mask of the slots that each query attends to, for all heads or for each head; None: all slots.
    - `slots`: indices of the only slots that each query reads, in any order; out-of-range indices are ignored. None:
        all slots.
    """

    query: Float[Array, "batch length heads head_dim"]
    positions: Int[Array, "batch length"]
    spans: Spans | None = None
    selected: Bool[Array, "batch selected_heads length slots"] | None = None
    slots: Int[Array, "batch length chosen"] | None = None


class Past(eqx.Module):
    """Cached keys and values that one attention layer reads. Each batch row is one document, without segment ids.

    Subclasses implement `whole`. They also implement `at` if layers read individual slots; `attend` if attention does
    not need a copy of all slots; and `attend_with` if they replace the attention of the layer.
    """

    def whole(self) -> "CachedKV":
        """Return the keys and values of all slots."""
        raise TypeError(f"{type(self).__name__} must implement Past.whole.")

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Return the dequantized keys and the positions of some slots; the position of an empty slot is -1."""
        raise TypeError(f"{type(self).__name__} does not support reading individual slots.")

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend to all slots, or to `queries.selected`. Keys are used as values if there are no values."""
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
        """Attend to the cached tokens and to the tokens of the call; merge both results by their log-sum-exp.

        **Arguments:**

        - `present`: computes the attention result for the tokens of the call.
        - `entries`: keys and values of the tokens of the call, computed by this layer or shared by an earlier layer.
        - `options`: `mask`, `soft_cap` and `alibi`.
        - `sink`: logits of attention sinks; None for no sinks.

        **Returns:**

        The attention output, and the entries that the caller commits.
        """
        present_result = present()
        attend = self.attend if queries.slots is None else self._attend_slots
        cached_result = attend(queries, options, execution)
        out, lse = merge([present_result, cached_result])
        return (out if sink is None else with_sink(out, lse, sink)), entries

    def _attend_slots(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend with each query only to its slots in `queries.slots`, which are gathered. Keys are used as values."""
        assert queries.slots is not None
        batch, length, count = queries.slots.shape
        keys, key_positions = self.at(queries.slots.reshape(batch, -1), queries.query.dtype)

        def one_query_per_row(x: Array) -> Array:
            return x.reshape(batch * length, -1, *x.shape[2:])

        # a batch of batch * length rows: each row has a single query and the keys of its slots
        keys = keys.reshape(batch * length, count, 1, -1)
        positions = AttentionPositions(
            one_query_per_row(queries.positions), key_positions.reshape(batch * length, count)
        )
        inputs = AttentionInputs(one_query_per_row(queries.query), keys, keys, positions)
        out, lse = run_attention(inputs, options, execution, key_axis="slots")
        return out.reshape(batch, length, *out.shape[2:]), lse.reshape(batch, length, -1)


class CachedKV(Past):
    """Cached keys and values of one layer (a slice of a `KVCache`), with scales if the cache is quantized."""

    key: Num[Array, "batch kv_heads slots head_dim"]
    value: Num[Array, "batch kv_heads slots value_dim"] | None
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "batch scale_heads slots"] | None = None
    value_scale: Float[Array, "batch scale_heads slots"] | None = None

    def keys(self, dtype: DTypeLike) -> Float[Array, "batch kv_heads slots head_dim"]:
        """Return the dequantized keys."""
        return dequantize(self.key, self.key_scale, dtype)

    def whole(self) -> "CachedKV":
        return self

    def dequantize_scale_blocks(self, dtype: DTypeLike) -> "CachedKV":
        """Return dequantized keys and values if a head has several scales (`scale_block`); otherwise return `self`.

        Attention kernels support at most one scale per head.
        """
        if self.key_scale is None or self.key_scale.shape[1] <= self.key.shape[1]:
            return self
        value = None if self.value is None else dequantize(self.value, self.value_scale, dtype)
        return CachedKV(self.keys(dtype), value, self.positions)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        use_float32 = _multiply_in_float32(queries.query, execution)
        past = self.dequantize_scale_blocks(jnp.float32 if use_float32 else queries.query.dtype)
        query, positions, spans, selected, _ = queries
        positions = AttentionPositions(positions, past.positions, query_spans=spans)
        scales = None
        dtype = past.key.dtype
        out_dtype = query.dtype
        if past.key_scale is not None:
            key_scale = jnp.swapaxes(past.key_scale, 1, 2)
            scales = Scales(key_scale, key_scale if past.value_scale is None else jnp.swapaxes(past.value_scale, 1, 2))
        else:
            # with a float32 cache cast the few queries, not all cached keys and values
            dtype = dtype if dtype == jnp.float32 and use_float32 else out_dtype
            query = query.astype(dtype)
        keys = past.key.astype(dtype).transpose(0, 2, 1, 3)
        values = keys if past.value is None else past.value.astype(dtype).transpose(0, 2, 1, 3)
        inputs = AttentionInputs(query, keys, values, positions, selected, scales)
        out, lse = run_attention(inputs, options, execution, key_axis="slots")
        return out.astype(out_dtype), lse


def _multiply_in_float32(query: Array, execution: Execution) -> bool:
    """Return whether there are few 16-bit queries, on a backend that upcasts 16-bit operands to float32 anyway."""
    return query.dtype.itemsize == 2 and execution.layout.backend.upcasts_16_bit and query.shape[1] < 32


class KVCache(LayerCache):
    """Contiguous key/value cache of equal layers.

    The heads axis precedes the slots axis, so that products on TPU read a layer's slice in place, without a transposed
    copy.

    **Arguments:**

    - `key`, `value`: slots for each layer and sequence; `value` is None if the keys are also the values.
    - `positions`: position of the token in each slot, -1 for an empty slot. Masks are computed only from positions.
    - `rolling`: a rolling cache stores position p in slot `p mod slots`. Otherwise position p is stored in slot p, and
        positions beyond the last slot are not stored.
    - `by_slot`: whether layers read individual slots in place (`Past.at`).
    - `key_scale`, `value_scale`: scales of quantized keys and values; None for unquantized keys and values.
    """

    key: Num[Array, "layers batch kv_heads slots head_dim"]
    value: Num[Array, "layers batch kv_heads slots value_dim"] | None
    positions: Int[Array, "batch slots"]
    rolling: bool = eqx.field(static=True)
    by_slot: bool = eqx.field(static=True, default=False)
    key_scale: Float[Array, "layers batch scale_heads slots"] | None = None
    value_scale: Float[Array, "layers batch scale_heads slots"] | None = None

    @property
    def arrays(self) -> tuple[Array, Array | None, Array | None, Array | None]:
        """Keys, values, key scales and value scales."""
        return self.key, self.value, self.key_scale, self.value_scale

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0]) if self.by_slot else self.arrays

    def past(self, slices: Any) -> Past:
        if self.by_slot:
            return KVCacheView(self, slices)
        key, value, *scales = slices
        return CachedKV(key, value, self.positions, *scales)

    def to_format(self, entries: NewKV) -> NewKV:
        """Convert new keys and values to the format of the cache."""
        return in_format(entries, self.key.dtype, self.key_scale)

    def commit(self, entries: NewKV, positions: Int[Array, "batch length"]) -> "KVCache":
        return self._write(jnp.arange(self.positions.shape[0])[:, None], entries, positions)

    def _write(self, rows: Int[Array, "rows 1"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        """Write new keys and values to the batch rows with these indices."""
        layers = jnp.arange(self.key.shape[0])[:, None, None]
        slots = self.positions.shape[1]
        accepted = positions >= 0
        if self.rolling:  # write only the last of the tokens that share a slot, as the order of writes is undefined
            accepted &= positions > jnp.max(positions, axis=1, keepdims=True) - slots
        slot = jnp.where(accepted, positions % slots if self.rolling else positions, slots)

        entries = self.to_format(entries)

        def write(old: Any, new: Any) -> Any:
            if old is None:
                return None
            # NumPy's indexing rules put the indexed axes first: layers batch length kv_heads head_dim. Layers are an
            # index, not a slice: with a slice and one head per device, TPU scatters require another order of axes,
            # which needs a second copy of the cache. For values of less than 16 bits and for scales, the same happens
            # with several heads, so heads are an index, too.
            if old.ndim == 5 and old.dtype.itemsize > 1:
                return old.at[layers, rows, :, slot].set(new.astype(old.dtype), mode="drop")
            heads = jnp.arange(old.shape[2])
            return old.at[layers[..., None], rows[..., None], heads, slot[..., None]].set(new, mode="drop")

        return KVCache(
            key=write(self.key, entries.key),
            value=write(self.value, entries.value),
            positions=self.positions.at[rows, slot].set(positions, mode="drop"),
            rolling=self.rolling,
            by_slot=self.by_slot,
            key_scale=write(self.key_scale, entries.key_scale),
            value_scale=write(self.value_scale, entries.value_scale),
        )

    def slices_of_rows(self) -> Any:
        return jnp.arange(self.key.shape[0])

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> "KVCacheView":
        return KVCacheView(self, slices, rows)

    def commit_rows(self, rows: Int[Array, "rows"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        return self._write(rows[:, None], entries, positions)

    def empty_rows(self, rows: Int[Array, "rows"]) -> "KVCache":
        # Empty slots have attention weight 0, but 0 * NaN is NaN. So stored values are overwritten with zeros, up to
        # the last slot in use. TPUs execute the scatter in `_write` in place.
        slots = self.positions.shape[1]
        size = min(slots, CLEARED_SLOTS)
        index = jnp.arange(slots, dtype=jnp.int32)
        in_use = self.positions.at[rows].get(mode="fill", fill_value=-1) >= 0
        count = jnp.max(jnp.where(in_use, index + 1, 0))

        def zeros(x: Any) -> Any:
            return (
                None if x is None else jnp.zeros((x.shape[0], rows.shape[0], size, x.shape[2], *x.shape[4:]), x.dtype)
            )

        zero_kv = NewKV(*map(zeros, self.arrays))

        def clear(iteration: Array, cache: KVCache) -> KVCache:
            slot = iteration * size + jnp.arange(size, dtype=jnp.int32)
            slot = jnp.where(slot < slots, slot, -1)
            return cache._write(rows[:, None], zero_kv, jnp.broadcast_to(slot, (rows.shape[0], size)))

        cleared = jax.lax.fori_loop(0, (count + size - 1) // size, clear, self)
        return dataclasses.replace(cleared, positions=cleared.positions.at[rows].set(-1, mode="drop"))

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[NewKV, Int[Array, "1 length"]]:
        slots = self.positions.shape[1]
        slot = positions % slots if self.rolling else jnp.clip(positions, 0, slots - 1)
        rows = index[None, None]

        def read_layer(*arrays: Any) -> NewKV:
            tokens: Any = (None if array is None else array[rows, :, slot] for array in arrays)
            return NewKV(*tokens)

        entries = jax.vmap(read_layer)(*self.arrays)
        return entries, jnp.where(self.positions[rows, slot] == positions, positions, -1)

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "LayerCache":
        if isinstance(row, KVCache) and row._row_format == self._row_format:
            return super().with_row(index, row)
        # caches of another length, format or class: write the tokens one by one at their positions
        empty = self.row(index).empty_rows(jnp.zeros((1,), jnp.int32))
        return super().with_row(index, empty.commit(row.entries(), row.positions))

    @property
    def _row_format(self) -> tuple[Any, ...]:
        """Number of slots, their order, dtype and number of scales: rows of equal format can be copied as arrays."""
        scales = None if self.key_scale is None else self.key_scale.shape[2]
        return self.positions.shape[1], self.rolling, self.key.dtype, scales

    def entries(self) -> NewKV:
        """Return the keys and values of all slots in the form that `commit` accepts."""

        def slots_before_heads(x: Any) -> Any:
            return None if x is None else x.swapaxes(2, 3)

        return NewKV(*map(slots_before_heads, self.arrays))


class KVCacheView(Past):
    """View of one layer of a `KVCache`, and optionally of some of its batch rows (None: all rows).

    XLA fuses a slice of one row, or of individual slots, into the product that reads it. A slice of a layer or of
    several rows would first be copied, which costs more than reading it.
    """

    cache: KVCache
    layer: Int[Array, ""]
    rows: Int[Array, "rows"] | None = None

    def whole(self) -> CachedKV:
        if self.rows is not None and self.rows.shape[0] == 1:
            return self._row(jnp.int32(0), self.cache.positions.shape[1])
        layer = self.layer
        rows = self.rows
        if rows is None:
            return self._read(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), self.cache.positions
            )
        positions = rows_of(self.cache.positions, rows)
        return self._read(lambda leaf: leaf.at[layer, rows].get(unique_indices=True, mode="clip"), positions)

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        last = self.cache.positions.shape[1] - 1
        rows = (jnp.arange(slots.shape[0]) if self.rows is None else self.rows)[:, None]
        inside = jnp.minimum(slots, last)
        positions = self.cache.positions.at[rows, inside].get(mode="promise_in_bounds")

        def gather(x: Array) -> Array:
            return x.at[self.layer, rows, :, inside].get(mode="promise_in_bounds")

        scale = None if self.cache.key_scale is None else gather(self.cache.key_scale)
        return dequantize(gather(self.cache.key), scale, dtype), jnp.where(slots <= last, positions, -1)

    def attend(self, queries: Queries, options: AttentionOptions, execution: Execution) -> Result:
        """Attend to one sequence at a time on backends with `active_rows_only`.

        There, products of a few queries are not faster for several sequences at once, and each sequence is read only as
        far as it is filled.
        """
        rows = self.rows
        if rows is None or not execution.layout.backend.active_rows_only:
            return super().attend(queries, options, execution)
        if rows.shape[0] == 1:
            return self._attend_row(jnp.int32(0), queries, options, execution)

        def attend_row(index_and_queries: Any) -> Any:
            index, row_queries = jax.tree.map(lambda leaf: leaf[None], index_and_queries)
            return jax.tree.map(lambda leaf: leaf[0], self._attend_row(index[0], row_queries, options, execution))

        return jax.lax.map(attend_row, (jnp.arange(rows.shape[0], dtype=jnp.int32), queries))

    def _attend_row(
        self, index: Int[Array, ""], queries: Queries, options: AttentionOptions, execution: Execution
    ) -> Result:
        """Attend to the slots of one batch row up to a compiled read length that covers its tokens."""
        read_lengths = [self.cache.positions.shape[1]]
        while len(read_lengths) < MAX_READ_LENGTHS and read_lengths[0] >= 2 * MIN_READ_LENGTH:
            read_lengths.insert(0, -(-read_lengths[0] // 2))

        def attend_within(read_length: int) -> Any:
            def attend() -> Result:
                selected = None if queries.selected is None else queries.selected[..., :read_length]
                row = self._row(index, read_length)
                return row.attend(queries._replace(selected=selected), options, execution)

            return attend

        # Cached tokens precede the queries, so slots from the last query's position on are empty. In a full rolling
        # cache this position is larger than the number of slots, so all slots are read.
        branch = sum((jnp.max(queries.positions) > length).astype(jnp.int32) for length in read_lengths[:-1])
        return jax.lax.switch(branch, [attend_within(length) for length in read_lengths])

    def _row(self, index: Int[Array, ""], read_length: int) -> CachedKV:
        """Return the first `read_length` slots of the batch row `self.rows[index]`."""
        assert self.rows is not None
        row = self.rows[index]
        layer = self.layer.astype(row.dtype)
        zero = jnp.zeros_like(row)

        def read(leaf: Array) -> Array:
            sizes = 1, 1, leaf.shape[2], read_length, *leaf.shape[4:]
            return jax.lax.dynamic_slice(leaf, (layer, row, zero, zero, zero)[: leaf.ndim], sizes)[0]

        return self._read(read, jax.lax.dynamic_slice(self.cache.positions, (row, zero), (1, read_length)))

    def _read(self, read: Callable[[Array], Array], positions: Int[Array, "rows slots"]) -> CachedKV:
        """Apply `read` to keys, values and scales."""
        key, value, *scales = (None if leaf is None else read(leaf) for leaf in self.cache.arrays)
        assert key is not None
        return CachedKV(key, value, positions, *scales)


def in_format(entries: NewKV, dtype: DTypeLike, scale: Float[Array, "layers _ scale_heads _"] | None) -> NewKV:
    """Convert new keys and values to the format of a cache with this dtype and these scales (None: unquantized).

    Quantized entries of the same format are returned unchanged.
    """
    if scale is None:
        return entries if entries.key_scale is None else entries.plain()
    if entries.key_scale is not None:
        if entries.key.dtype == dtype and entries.key_scale.shape[-1] == scale.shape[2]:
            return entries
        entries = entries.plain()
    key, key_scale = quantize(entries.key, dtype, scale.shape[2])
    if entries.value is None:
        return NewKV(key=key, value=None, key_scale=key_scale)
    value, value_scale = quantize(entries.value, dtype, scale.shape[2])
    return NewKV(key=key, value=value, key_scale=key_scale, value_scale=value_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVShape:
    """Shape of one attention layer's key/value cache.

    **Arguments:**

    - `by_token`: whether the cache stores one entry per token, so that it can be paged or owned by an external engine.
    - `slots`, `kv_heads`, `head_dim`: number of slots, key/value heads, and features of a key.
    - `rolling`: see `KVCache`.
    - `values`: whether the cache has values; otherwise the keys are also the values.
    - `value_dim`: features of a value; None: `head_dim`.
    - `by_slot`: whether layers read individual slots; such a cache has no values.
    """

    by_token: ClassVar[bool] = True
    slots: int
    kv_heads: int
    head_dim: int
    rolling: bool
    values: bool = True
    value_dim: int | None = None
    by_slot: bool = False

    def check_format(self, cache_format: CacheFormat) -> None:
        """Raise ConfigError for `scale_block` if keys and values have different numbers of features."""
        same_features = self.value_dim in (None, self.head_dim)
        check(
            same_features or cache_format.scale_block is None,
            f"CacheFormat.scale_block={cache_format.scale_block} needs keys and values with equal numbers of features, "
            f"but values have {self.value_dim} and keys {self.head_dim}. Set scale_block=None.",
        )

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> KVCache:
        """Return an empty cache for `layers` equal layers."""
        cache_format = CacheFormat.of(dtype)
        self.check_format(cache_format)
        shape = (layers, batch_size, self.kv_heads, self.slots, self.head_dim)
        value_shape = (*shape[:-1], self.value_dim or self.head_dim)
        scale_shape = (layers, batch_size, cache_format.scale_heads(self.kv_heads, self.head_dim), self.slots)
        scale = None if cache_format.bound is None else jnp.zeros(scale_shape, SCALE)
        return KVCache(
            key=jnp.zeros(shape, cache_format.dtype),
            value=jnp.zeros(value_shape, cache_format.dtype) if self.values else None,
            positions=jnp.full((batch_size, self.slots), -1, jnp.int32),
            rolling=self.rolling,
            by_slot=self.by_slot,
            key_scale=scale,
            value_scale=None if scale is None or not self.values else jnp.zeros_like(scale),
        )


def kv_shape(mask: Mask, max_length: int, *, kv_heads: int, head_dim: int, **options: Any) -> KVShape:
    """Return the shape of a layer's cache for sequences of `max_length` tokens.

    Sliding-window and chunked attention use a rolling cache with as many slots as a query looks back; other masks use
    one slot for each position. `options` are further fields of `KVShape`.
    """
    check(
        not isinstance(mask, Bidirectional),
        "A bidirectional attention layer cannot use a cache: every new token would change the keys and values of "
        "earlier tokens. Call the model without a cache.",
    )
    slots = min(lookback(mask) or max_length, max_length)
    return KVShape(slots=slots, kv_heads=kv_heads, head_dim=head_dim, rolling=slots < max_length, **options)
