"""What layers remember of the tokens they have seen: kinds of memory with one protocol.

A layer never writes. It reads its slice of a memory and proposes entries for its tokens; `commit` writes those of all
equal layers at once, at the positions of the tokens. A token at a position below 0 (padding, or rejected) leaves no
trace. So training, prefill and decoding are one function, rows may have different lengths, and speculation costs
nothing but what it proposes.

What a layer remembers is a tree of memories, such as `{"state": StateCache, "tail": TailCache}`; what it reads and what
it proposes have the same tree. Arrays are annotated with words, so a layout splits them like activations.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from eqx_decoders.axes import axes, named_leaves, replaced
from eqx_decoders.errors import check
from eqx_decoders.layers.mask import Bidirectional, Mask, lookback


# --- the protocol ---


class Memory(eqx.Module):
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

    def commit(self, entries: Any, positions: Int[Array, "batch length"]) -> "Memory":
        """The memory with entries (stacked over layers) at `positions`; those below 0 are left out."""
        raise TypeError(f"{type(self).__name__} is no kind of memory.")

    def reset(self, rows: Bool[Array, "batch"]) -> "Memory":
        """The memory with nothing in these rows."""

        def emptied(leaf: Array, axis: int) -> Array:
            wanted = rows.reshape((1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1))
            return jnp.where(wanted, _nothing(leaf.dtype), leaf)

        return _over_rows(emptied, self)

    def row(self, index: int | Int[Array, ""]) -> "Memory":
        """One row, as a memory of one sequence."""
        return _over_rows(lambda leaf, axis: jax.lax.dynamic_slice_in_dim(leaf, index, 1, axis), self)

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "Memory":
        """The memory with `row`, a memory of one sequence, in the place of another."""

        def write(leaf: Array, axis: int, new: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), index, axis)

        return _over_rows(write, self, row)


def _nothing(dtype: Any) -> Array:
    """What stands where nothing is remembered: no position, no token, or zero."""
    return jnp.asarray(-1 if jnp.issubdtype(dtype, jnp.integer) else 0, dtype)


def _over_rows(change: Any, memory: Memory, *others: Memory) -> Any:
    """Apply `change(leaf, axis of rows, ...)` to every array."""
    words, further = axes(memory), [named_leaves(other) for other in others]
    new = {
        name: change(leaf, words[name].index("batch"), *(leaves[name] for leaves in further))
        for name, leaf in named_leaves(memory).items()
    }
    return replaced(memory, new)


def is_memory(node: Any) -> bool:
    """Whether a node of a tree is a memory."""
    return isinstance(node, Memory)


def slices(memories: Any) -> Any:
    """`Memory.slices` of each memory in a tree."""
    return jax.tree.map(lambda memory: memory.slices(), memories, is_leaf=is_memory)


def pasts(memories: Any, cut: Any) -> Any:
    """`Memory.past` of each memory in a tree, from one layer's part of `slices(memories)`."""
    return jax.tree.map(lambda memory, part: memory.past(part), memories, cut, is_leaf=is_memory)


def commit(memories: Any, entries: Any, positions: Int[Array, "batch length"]) -> Any:
    """`Memory.commit` of each memory in a tree."""
    return jax.tree.map(lambda memory, new: memory.commit(new, positions), memories, entries, is_leaf=is_memory)


# --- keys and values ---


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


class StackedPast(eqx.Module):
    """What one attention layer reads that looks for single slots: the cache of all layers, and which of them it is.

    A layer's slice would be copied before slots are gathered from it, which costs more than reading it.
    """

    key: Float[Array, "layers batch kv_heads slots head_dim"]
    layer: Int[Array, ""]
    positions: Int[Array, "batch slots"]

    def whole(self) -> Past:
        """The layer's slice."""
        key = jax.lax.dynamic_index_in_dim(self.key, self.layer, keepdims=False)
        return Past(key=key, value=None, positions=self.positions)

    def at(
        self, slots: Int[Array, "batch chosen"]
    ) -> tuple[Float[Array, "batch chosen kv_heads head_dim"], Int[Array, "batch chosen"]]:
        """Keys and positions of some slots; position -1 for a slot beyond the last."""
        last, rows = self.positions.shape[1] - 1, jnp.arange(slots.shape[0])[:, None]
        inside = jnp.minimum(slots, last)
        places = self.positions.at[rows, inside].get(mode="promise_in_bounds")
        key = self.key.at[self.layer, rows, :, inside].get(mode="promise_in_bounds")
        return key, jnp.where(slots <= last, places, -1)


class KVCache(Memory):
    """Keys and values of equal layers.

    **Arguments:**

    - `key`, `value`: one row of slots for each layer and sequence; no values where keys are all that there is.
    - `positions`: the position of each slot's token, -1 where there is none. Masks are computed from them alone.
    - `ring`: whether position p is stored in slot `p mod slots`; else in slot p, and later positions are dropped.
    - `by_slot`: whether layers look for single slots, and so read a `StackedPast`.

    Heads stand before slots: a TPU's products then read a layer's slice in place, without a copy in another order.
    """

    key: Float[Array, "layers batch kv_heads slots head_dim"]
    value: Float[Array, "layers batch kv_heads slots head_dim"] | None
    positions: Int[Array, "batch slots"]
    ring: bool = eqx.field(static=True)
    by_slot: bool = eqx.field(static=True, default=False)

    def slices(self) -> Any:
        return jnp.arange(self.key.shape[0]) if self.by_slot else (self.key, self.value)

    def past(self, slices: Any) -> Past | StackedPast:
        if self.by_slot:
            return StackedPast(key=self.key, layer=slices, positions=self.positions)
        return Past(*slices, positions=self.positions)

    def commit(self, entries: Entries, positions: Int[Array, "batch length"]) -> "KVCache":
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
            by_slot=self.by_slot,
        )

    def with_row(self, index: int | Int[Array, ""], row: Any) -> "Memory":
        if row.positions.shape[1] == self.positions.shape[1] and row.ring == self.ring:
            return super().with_row(index, row)
        # a memory of another length: its tokens are written where they belong here
        turned = jax.vmap(_entries)(row.key, row.value)
        empty = self.row(index).reset(jnp.ones((1,), bool))
        return super().with_row(index, empty.commit(turned, row.positions))


def _entries(key: Array, value: Array | None) -> Entries:
    """What one layer's slice would have been proposed as."""
    return Entries(key=key.swapaxes(1, 2), value=None if value is None else value.swapaxes(1, 2))


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

    def build(self, layers: int, batch_size: int, dtype: Any) -> KVCache:
        """An empty cache for `layers` equal layers."""
        shape = (layers, batch_size, self.kv_heads, self.slots, self.head_dim)
        return KVCache(
            key=jnp.zeros(shape, dtype),
            value=jnp.zeros(shape, dtype) if self.values else None,
            positions=jnp.full((batch_size, self.slots), -1, jnp.int32),
            ring=self.ring,
            by_slot=self.by_slot,
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


class StateWrites(eqx.Module):
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


class StateCache(Memory):
    """The states of equal recurrent layers, in float32; zero before the first token."""

    state: Float32[Array, "layers batch heads key_dim value_dim"]

    def slices(self) -> Any:
        return self.state

    def commit(self, entries: StateWrites | NewState, positions: Int[Array, "batch length"]) -> "StateCache":
        if isinstance(entries, NewState):
            return StateCache(state=entries.state)
        kept = (positions >= 0)[None, :, :, None, None]
        # e^-100 is 0 in float32; far below it, differences of sums would lose what is small
        decay = jnp.where(kept, jnp.maximum(entries.log_decay, -100.0), 0.0)
        key = jnp.where(kept, entries.key.astype(jnp.float32), 0.0)
        value = entries.value.astype(jnp.float32)
        sums = jnp.flip(jnp.cumsum(jnp.flip(decay, 2), axis=2), 2)  # of a token and all that follow
        key = key * jnp.exp(jnp.pad(sums[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))))
        state = jnp.exp(sums[:, :, 0])[..., None] * self.state
        if key.shape[2] > 8:
            return StateCache(state=state + jnp.einsum("nblhk,nblhv->nbhkv", key, value))
        for token in range(key.shape[2]):  # written out, it is one pass over the state, in place
            state += key[:, :, token, :, :, None] * value[:, :, token, :, None, :]
        return StateCache(state=state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateShape:
    """How large the state of one recurrent layer is: for each head a matrix from keys to values, in float32."""

    heads: int
    key_dim: int
    value_dim: int

    def build(self, layers: int, batch_size: int, dtype: Any) -> StateCache:
        """Empty states for `layers` equal layers."""
        shape = (layers, batch_size, self.heads, self.key_dim, self.value_dim)
        return StateCache(state=jnp.zeros(shape, jnp.float32))

    def proposes_writes(self, length: int, keeps_all: bool) -> bool:
        """Whether a call of so many tokens proposes what it writes, or (where all are kept) the state, if less."""
        return not keeps_all or length * (self.key_dim + self.value_dim) < self.key_dim * self.value_dim


# --- the last inputs of a stream ---


class TailInputs(eqx.Module):
    """What a layer proposes that looks a few tokens back: its inputs."""

    inputs: Shaped[Array, "batch length channels"]


class NewTail(eqx.Module):
    """The last inputs after all tokens of a call of which none will be rejected."""

    tail: Shaped[Array, "batch taps channels"]


class TailCache(Memory):
    """The last inputs of a stream, oldest first: what a convolution, or n-grams, see of the past.

    Before the first token there are zeros; in a stream of token ids -1.
    """

    tail: Shaped[Array, "layers batch taps channels"]

    def slices(self) -> Any:
        return self.tail

    def commit(self, entries: TailInputs | NewTail, positions: Int[Array, "batch length"]) -> "TailCache":
        if isinstance(entries, NewTail):
            return TailCache(tail=entries.tail.astype(self.tail.dtype))
        return TailCache(tail=jax.vmap(last_inputs, in_axes=(0, 0, None))(self.tail, entries.inputs, positions))


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
class TailShape:
    """How much of a stream a layer remembers: inputs and their features; `dtype`: None for the cache's own."""

    taps: int
    channels: int
    dtype: str | None = None

    def build(self, layers: int, batch_size: int, dtype: Any) -> TailCache:
        """An empty tail for `layers` equal layers."""
        kind = jnp.dtype(self.dtype or dtype)
        return TailCache(tail=jnp.full((layers, batch_size, self.taps, self.channels), _nothing(kind), kind))
