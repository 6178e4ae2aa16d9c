"""What layers remember of the tokens they have seen: kinds of memory with one protocol.

A layer never writes. It reads its slice of a memory and proposes entries for its tokens; `commit` writes those of all
equal layers at once, at the positions of the tokens. A token at a position below 0 (padding, or rejected) leaves no
trace. So training, prefill and decoding are one function, rows may have different lengths, and speculation costs
nothing but what it proposes.

What a layer remembers is a tree of caches, such as `{"state": RecurrentState, "tail": ConvState}`; what it reads and
what it proposes have the same tree. Arrays are annotated with words, so a layout splits them like activations.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int, Num, Shaped

from eqx_decoders.errors import check
from eqx_decoders.layers.cache.format import SCALE, CacheFormat, decode, encode
from eqx_decoders.layers.mask import Bidirectional, Mask, lookback
from eqx_decoders.sharding.axes import axes, named_leaves, replaced


# --- the protocol ---


class LayerCache(eqx.Module):
    """What equal layers remember, a row of it for each sequence.

    A kind has `slices`, arrays that a scan over the layers cuts; `past`, what a layer reads, from its slices; and
    `commit`. Fields whose words have no `layers` are shared by all layers.
    """

    def slices(self) -> Any:
        """Arrays with a leading `layers` axis."""
        raise TypeError(f"{type(self).__name__} is no kind of memory.")

    def past(self, slices: Any) -> Any:
        """What one layer reads, given its part of `slices`."""
        return slices

    def commit(self, entries: Any, positions: Int[Array, "batch length"]) -> "LayerCache":
        """The memory with entries (stacked over layers) at `positions`; those below 0 are left out."""
        raise TypeError(f"{type(self).__name__} is no kind of memory.")

    def reset(self, rows: Bool[Array, "batch"]) -> "LayerCache":
        """The memory with nothing in these rows."""

        def emptied(leaf: Array, axis: int) -> Array:
            wanted = rows.reshape((1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1))
            return jnp.where(wanted, _nothing(leaf.dtype), leaf)

        return _over_rows(emptied, self)

    def row(self, index: int | Int[Array, ""]) -> "LayerCache":
        """One row, as a memory of one sequence."""
        return self.rows(jnp.asarray(index)[None])

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "LayerCache":
        """The memory with `row`, a memory of one sequence, in the place of another."""
        return self._with_rows(jnp.asarray(index)[None], row)

    # for engines, whose rows are of different requests: some rows of many, in place; none of them twice

    def rows(self, rows: Int[Array, "rows"]) -> "LayerCache":
        """Some rows, as a memory of their own."""
        return _over_rows(lambda leaf, axis: rows_of(leaf, rows, axis), self)

    def _with_rows(self, rows: Int[Array, "rows"], others: Any) -> "LayerCache":
        """The memory with others in the place of some rows."""

        def write(leaf: Array, axis: int, new: Array) -> Array:
            new = new.astype(leaf.dtype)
            if rows.shape[0] == 1:
                return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0], axis)
            return leaf.at[(slice(None),) * axis + (rows,)].set(new, unique_indices=True)

        return _over_rows(write, self, others)

    def slices_of_rows(self) -> Any:
        """`slices`, for `past_of_rows`."""
        return self.slices()

    def past_of_rows(self, slices: Any, rows: Int[Array, "rows"]) -> Any:
        """What one layer reads of some rows, given its part of `slices_of_rows`."""
        return jax.tree.map(lambda leaf: rows_of(leaf, rows), self.past(slices))

    def commit_rows(self, rows: Int[Array, "rows"], entries: Any, positions: Int[Array, "rows length"]) -> "LayerCache":
        """`commit` of entries of some rows."""
        return self._with_rows(rows, self.rows(rows).commit(entries, positions))

    def empty_row(self, index: Int[Array, ""]) -> "LayerCache":
        """The memory with nothing in one row."""
        return self.with_row(index, self.row(index).reset(jnp.ones((1,), bool)))

    def row_tokens(
        self, index: Int[Array, ""], positions: Int[Array, "1 length"]
    ) -> tuple[Any, Int[Array, "1 length"]] | None:
        """What is remembered of single tokens of a row: entries as `commit_rows` takes them, and the positions, -1
        where a token is forgotten. None where nothing is remembered by token: then only the whole row can be kept.
        """
        return None


def _nothing(dtype: Any) -> Array:
    """What stands where nothing is remembered: no position, no token, or zero."""
    return jnp.asarray(-1 if dtype == jnp.int32 else 0, dtype)


def rows_of(leaf: Array, rows: Int[Array, "rows"], axis: int = 0) -> Array:
    """Some rows of an array; a single one as a slice, which is read in place."""
    if rows.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(leaf, rows[0], 1, axis)
    return jnp.take(leaf, rows, axis, unique_indices=True, mode="clip")


def _over_rows(change: Any, memory: LayerCache, *others: LayerCache) -> Any:
    """Apply `change(leaf, axis of rows, ...)` to every array."""
    words, further = axes(memory), [named_leaves(other) for other in others]
    new = {
        name: change(leaf, words[name].index("batch"), *(leaves[name] for leaves in further))
        for name, leaf in named_leaves(memory).items()
    }
    return replaced(memory, new)


def is_memory(node: Any) -> bool:
    """Whether a node of a tree is a memory."""
    return isinstance(node, LayerCache)


def slices(memories: Any) -> Any:
    """`LayerCache.slices` of each memory in a tree."""
    return jax.tree.map(lambda memory: memory.slices(), memories, is_leaf=is_memory)


def pasts(memories: Any, cut: Any) -> Any:
    """`LayerCache.past` of each memory in a tree, from one layer's part of `slices(memories)`."""
    return jax.tree.map(lambda memory, part: memory.past(part), memories, cut, is_leaf=is_memory)


def commit(memories: Any, entries: Any, positions: Int[Array, "batch length"]) -> Any:
    """`LayerCache.commit` of each memory in a tree."""
    return jax.tree.map(lambda memory, new: memory.commit(new, positions), memories, entries, is_leaf=is_memory)


class LayerCacheRows(LayerCache):
    """Some rows of a memory, to be read where they stand."""

    whole: LayerCache
    which: Int[Array, "rows"]

    def slices(self) -> Any:
        return self.whole.slices_of_rows()

    def past(self, slices: Any) -> Any:
        return self.whole.past_of_rows(slices, self.which)


# --- keys and values ---


class NewKV(eqx.Module):
    """What one attention layer proposes to store: keys and values of the tokens of this call.

    `value` is None where keys are all that there is: latent attention reads both out of one vector. With scales they
    are as a cache of some format stores them, which another of this format takes bit by bit.
    """

    key: Num[Array, "*layers batch length kv_heads head_dim"]
    value: Num[Array, "*layers batch length kv_heads head_dim"] | None
    key_scale: Float[Array, "*layers batch length scale_heads"] | None = None
    value_scale: Float[Array, "*layers batch length scale_heads"] | None = None

    def plain(self, dtype: DTypeLike = jnp.float32) -> "NewKV":
        """Without scales."""
        value = None if self.value is None else decode(self.value, self.value_scale, dtype)
        return NewKV(key=decode(self.key, self.key_scale, dtype), value=value)


class CachedKV(eqx.Module):
    """What one attention layer reads: its slice of a cache. What is stored counts times its scale, if there are any."""

    key: Num[Array, "batch kv_heads slots head_dim"]
    value: Num[Array, "batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "batch scale_heads slots"] | None = None
    value_scale: Float[Array, "batch scale_heads slots"] | None = None

    def keys(self, dtype: DTypeLike) -> Float[Array, "batch kv_heads slots head_dim"]:
        """Keys times their scales."""
        return decode(self.key, self.key_scale, dtype)


class StackedCachedKV(eqx.Module):
    """What one attention layer reads that looks for single slots: the cache of all layers, and which of them it is.

    A layer's slice would be copied before slots are gathered from it, which costs more than reading it.
    """

    key: Num[Array, "layers batch kv_heads slots head_dim"]
    layer: Int[Array, ""]
    positions: Int[Array, "batch slots"]
    key_scale: Float[Array, "layers batch scale_heads slots"] | None = None

    def whole(self) -> CachedKV:
        """The layer's slice."""

        def cut(x: Array) -> Array:
            return jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)

        scale = None if self.key_scale is None else cut(self.key_scale)
        return CachedKV(key=cut(self.key), value=None, positions=self.positions, key_scale=scale)

    def at(
        self, slots: Int[Array, "batch chosen"], dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Keys times their scales and positions of some slots; position -1 for a slot beyond the last."""
        last, rows = self.positions.shape[1] - 1, jnp.arange(slots.shape[0])[:, None]
        inside = jnp.minimum(slots, last)
        places = self.positions.at[rows, inside].get(mode="promise_in_bounds")

        def taken(x: Array) -> Array:
            return x.at[self.layer, rows, :, inside].get(mode="promise_in_bounds")

        scale = None if self.key_scale is None else taken(self.key_scale)
        return decode(taken(self.key), scale, dtype), jnp.where(slots <= last, places, -1)


class KVCache(LayerCache):
    """Keys and values of equal layers.

    **Arguments:**

    - `key`, `value`: one row of slots for each layer and sequence; no values where keys are all that there is.
    - `positions`: the position of each slot's token, -1 where there is none. Masks are computed from them alone.
    - `ring`: whether position p is stored in slot `p mod slots`; else in slot p, and later positions are dropped.
    - `by_slot`: whether layers look for single slots, and so read a `StackedCachedKV`.
    - `key_scale`, `value_scale`: by which stored numbers are multiplied; None where they are as they are.

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
        """Entries in the format of the cache; those that are in it already stay as they are."""
        return in_format(entries, self.key.dtype, self.key_scale)

    def commit(self, entries: NewKV, positions: Int[Array, "batch length"]) -> "KVCache":
        return self._written(jnp.arange(self.positions.shape[0])[:, None], entries, positions)

    def _written(self, rows: Int[Array, "rows 1"], entries: NewKV, positions: Int[Array, "rows length"]) -> "KVCache":
        """The cache with entries in some of its rows."""
        layers, slots = jnp.arange(self.key.shape[0])[:, None, None], self.positions.shape[1]
        kept = positions >= 0
        if self.ring:  # of the tokens that share a slot only the last may be written: the order of writes is undefined
            kept &= positions > jnp.max(positions, axis=1, keepdims=True) - slots
        slot = jnp.where(kept, positions % slots if self.ring else positions, slots)

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
        own: Any = self.rows(rows) if self.by_slot else None
        return CachedKVRows(self, slices, rows) if own is None else own.past(slices)

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
        # a memory of another length, format or kind: its tokens are written where they belong here
        empty = self.row(index).reset(jnp.ones((1,), bool))
        return super().with_row(index, empty.commit(row.entries(), row.positions))

    @property
    def _form(self) -> tuple[Any, ...]:
        """How a row is stored: slots, their order, and their format."""
        scales = None if self.key_scale is None else self.key_scale.shape[2]
        return self.positions.shape[1], self.ring, self.key.dtype, scales

    def entries(self) -> NewKV:
        """What all slots would have been proposed as."""

        def turned(x: Any) -> Any:
            return None if x is None else x.swapaxes(2, 3)

        return NewKV(*map(turned, (self.key, self.value, self.key_scale, self.value_scale)))


class CachedKVRows(eqx.Module):
    """What one attention layer reads of some rows: the cache of all layers, which of them it is, and the rows.

    A slice of one row is made on its way to the product that reads it; one of a layer, or of several rows, would be
    copied before.
    """

    cache: KVCache
    layer: Int[Array, ""]
    rows: Int[Array, "rows"]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.rows.shape[0]

    def whole(self) -> CachedKV:
        """A copy of the rows."""
        if self.count == 1:
            return self.row(jnp.int32(0), self.cache.positions.shape[1])
        cache = self.cache

        def part(leaf: Any) -> Any:
            return None if leaf is None else leaf.at[self.layer, self.rows].get(unique_indices=True, mode="clip")

        return _past(cache, part, rows_of(cache.positions, self.rows))

    def row(self, index: Int[Array, ""], reach: int) -> CachedKV:
        """The first slots of one of the rows."""
        row = self.rows[index]
        layer, zero = self.layer.astype(row.dtype), jnp.zeros_like(row)

        def part(leaf: Any) -> Any:
            if leaf is None:
                return None
            sizes = 1, 1, leaf.shape[2], reach, *leaf.shape[4:]
            return jax.lax.dynamic_slice(leaf, (layer, row, zero, zero, zero)[: leaf.ndim], sizes)[0]

        return _past(self.cache, part, jax.lax.dynamic_slice(self.cache.positions, (row, zero), (1, reach)))


def _past(cache: KVCache, part: Any, positions: Int[Array, "rows slots"]) -> CachedKV:
    """What `part` takes out of each array."""
    scales: Any = dict(key_scale=part(cache.key_scale), value_scale=part(cache.value_scale))
    return CachedKV(key=part(cache.key), value=part(cache.value), positions=positions, **scales)


def in_format(entries: NewKV, dtype: DTypeLike, scale: Float[Array, "layers _ scale_heads _"] | None) -> NewKV:
    """Entries as a cache with such numbers and scales stores them; those that are in its format stay as they are."""
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
    """How large the cache of one attention layer is, in slots, heads and features.

    `values`: whether it has values; `by_slot`: whether single slots are looked for (then it has none).
    """

    slots: int
    kv_heads: int
    head_dim: int
    ring: bool
    values: bool = True
    by_slot: bool = False

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> KVCache:
        """An empty cache for `layers` equal layers."""
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
    """A ring of `size` slots for a window or chunk, else a slot for each position."""
    check(
        not isinstance(mask, Bidirectional),
        "A bidirectional attention layer has no cache: its past would change with every token.",
    )
    slots = min(lookback(mask) or max_length, max_length)
    return KVShape(slots=slots, kv_heads=kv_heads, head_dim=head_dim, ring=slots < max_length, values=values)


# --- the state of a linear recurrence ---


class StateUpdate(eqx.Module):
    """What one recurrent layer proposes, token by token: `S <- exp(log_decay) S + key value^T`.

    `value` is what is really written; it does not depend on later tokens. So the state after those that are kept
    follows from these alone, and rejecting the others costs nothing. A decay is one number or one of each key feature.
    """

    log_decay: Float32[Array, "batch length heads decay_dim"]
    key: Float[Array, "batch length heads key_dim"]
    value: Float[Array, "batch length heads value_dim"]


class NewState(eqx.Module):
    """The state after all tokens of a call of which none will be rejected: nothing per token of a long prompt."""

    state: Float32[Array, "batch heads key_dim value_dim"]


class RecurrentState(LayerCache):
    """The states of equal recurrent layers, in float32; zero before the first token."""

    state: Float32[Array, "layers batch heads key_dim value_dim"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: StateUpdate | NewState, positions: Int[Array, "batch length"]) -> "RecurrentState":
        if isinstance(entries, NewState):
            return RecurrentState(state=entries.state)
        kept = (positions >= 0)[None, :, :, None, None]
        # e^-100 is 0 in float32; far below it, differences of sums would lose what is small
        decay = jnp.where(kept, jnp.maximum(entries.log_decay, -100.0), 0.0)
        key = jnp.where(kept, entries.key.astype(jnp.float32), 0.0)
        value = entries.value.astype(jnp.float32)
        sums = jnp.flip(jnp.cumsum(jnp.flip(decay, 2), axis=2), 2)  # of a token and all that follow
        key = key * jnp.exp(jnp.pad(sums[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))))
        state = jnp.exp(sums[:, :, 0])[..., None] * self.state
        if key.shape[2] > 8:
            return RecurrentState(state=state + jnp.einsum("nblhk,nblhv->nbhkv", key, value))
        for token in range(key.shape[2]):  # written out, it is one pass over the state, in place
            state += key[:, :, token, :, :, None] * value[:, :, token, :, None, :]
        return RecurrentState(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
    """How large the state of one recurrent layer is: for each head a matrix from keys to values, in float32."""

    heads: int
    key_dim: int
    value_dim: int

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> RecurrentState:
        """Empty states for `layers` equal layers."""
        shape = (layers, batch_size, self.heads, self.key_dim, self.value_dim)
        return RecurrentState(state=jnp.zeros(shape, jnp.float32))

    def proposes_writes(self, length: int, keeps_all: bool) -> bool:
        """Whether a call of so many tokens proposes what it writes, or (where all are kept) the state, if less."""
        return not keeps_all or length * (self.key_dim + self.value_dim) < self.key_dim * self.value_dim


# --- the last inputs of a stream ---


class ConvInputs(eqx.Module):
    """What a layer proposes that looks a few tokens back: its inputs."""

    inputs: Shaped[Array, "batch length channels"]


class NewConvInputs(eqx.Module):
    """The last inputs after all tokens of a call of which none will be rejected."""

    tail: Shaped[Array, "batch taps channels"]


class ConvState(LayerCache):
    """The last inputs of a stream, oldest first: what a convolution, or n-grams, see of the past.

    Before the first token there are zeros; in a stream of token ids -1.
    """

    tail: Shaped[Array, "layers batch taps channels"]

    def slices(self) -> Any:
        return self.tail

    def commit(self, entries: ConvInputs | NewConvInputs, positions: Int[Array, "batch length"]) -> "ConvState":
        if isinstance(entries, NewConvInputs):
            return ConvState(tail=entries.tail.astype(self.tail.dtype))
        return ConvState(tail=jax.vmap(last_inputs, in_axes=(0, 0, None))(self.tail, entries.inputs, positions))


def last_inputs(
    tail: Shaped[Array, "batch taps channels"],
    inputs: Shaped[Array, "batch length channels"],
    positions: Int[Array, "batch length"],
) -> Shaped[Array, "batch taps channels"]:
    """The tail after more inputs, of which those at positions below 0 are left out."""
    taps = tail.shape[1]
    real = jnp.pad(positions >= 0, ((0, 0), (taps, 0)), constant_values=True)
    order = jnp.argsort(real, axis=1, stable=True)[:, -taps:]  # those that are left out first
    joined = jnp.concatenate([tail, inputs.astype(tail.dtype)], axis=1)
    return jnp.take_along_axis(joined, order[:, :, None], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvShape:
    """How much of a stream a layer remembers: inputs and their features; `dtype`: None for the cache's own."""

    taps: int
    channels: int
    dtype: str | None = None

    def build(self, layers: int, batch_size: int, dtype: DTypeLike | CacheFormat) -> ConvState:
        """An empty tail for `layers` equal layers."""
        kind = jnp.dtype(self.dtype or CacheFormat.of(dtype).beside)
        return ConvState(tail=jnp.full((layers, batch_size, self.taps, self.channels), _nothing(kind), kind))
