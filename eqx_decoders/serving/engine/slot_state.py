"""The state of all slots on the device, and the functions that empty, save and restore one slot.

`ModelRunner` compiles each of these functions once. None of them needs the weights: they move data, and draw the first
token of an answer.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int16

from eqx_decoders.inference.draft_state import DraftState
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.serving.engine.sampler import SampledTokens, SamplingBatch, TokenHistory, sample_rows
from eqx_decoders.sharding.axes import AnyArray


class EngineState(eqx.Module):
    """Device state of all slots.

    **Arguments:**

    - `cache`: the model's cache, a row for each slot.
    - `tokens`: token ids by slot and position, with the one that is read next, if a program here sampled it.
    - `drafts`: state of a drafter that runs on the device, if there is one.
    - `experts`: the experts that each of these tokens was sent to, if they are asked for.
    """

    cache: Cache
    tokens: Int[Array, "slots length"]
    drafts: DraftState | None = None
    experts: Int16[Array, "slots length layers choices"] | None = None

    @property
    def layer_caches(self) -> Any:
        """The layer caches of the model and of its drafter, as a tree."""
        return self.cache.segments, None if self.drafts is None else self.drafts.layer_caches

    def with_layer_caches(self, layer_caches: Any) -> "EngineState":
        """Return the state with other layer caches."""
        segments, drafting = layer_caches
        drafts = None if self.drafts is None else dataclasses.replace(self.drafts, layer_caches=drafting)
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, segments=segments), drafts=drafts)

    def with_experts(self, slots: Array, positions: Array, chosen: Array | None) -> "EngineState":
        """Write the experts of tokens of some slots, `[layers, slots, tokens, choices]`, at their positions."""
        if self.experts is None or chosen is None:
            return self
        new = jnp.transpose(chosen, (1, 2, 0, 3)).astype(self.experts.dtype)
        return dataclasses.replace(self, experts=self.experts.at[slots[:, None], positions].set(new, mode="drop"))


class CacheSnapshot(eqx.Module):
    """Copy of the cache entries of some tokens of one slot.

    **Arguments:**

    - `entries`: per layer cache its entries and their positions; None for layers without an entry per token.
    - `tokens`: the token ids.
    - `experts`: the experts that they were sent to, if the engine's state has them.
    """

    entries: Any
    tokens: Int[AnyArray, "1 length"]
    experts: Int16[AnyArray, "1 length layers choices"] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def empty_slot(state: EngineState, slot: Int[Array, ""]) -> EngineState:
    """Clear a slot."""
    draft_caches = jax.tree.map(lambda each: each.empty_row(slot), state.layer_caches[1], is_leaf=is_layer_cache)
    state = dataclasses.replace(state, cache=state.cache.empty_row(slot))
    return state.with_layer_caches((state.cache.segments, draft_caches))


def save(
    state: EngineState, slot: Int[Array, ""], begin: Int[Array, ""], *, length: int, pages: bool = True
) -> CacheSnapshot:
    """Copy the cache entries of `length` tokens of a slot from `begin` on; without `pages`, skip paged layers."""
    positions = (begin + jnp.arange(length, dtype=jnp.int32))[None]
    positions = jnp.where(positions < state.cache.length[slot], positions, -1)

    def copy_tokens(layer_cache: Any) -> Any:
        return layer_cache.row_tokens(slot, positions) if pages or not layer_cache.page_pools else None

    entries = jax.tree.map(copy_tokens, state.layer_caches, is_leaf=is_layer_cache)
    ids, experts = (
        None if array is None else array.at[slot, jnp.maximum(positions, 0)].get(mode="clip")
        for array in (state.tokens, state.experts)
    )
    return CacheSnapshot(entries=entries, tokens=ids, experts=experts)


def save_state(state: EngineState, slot: Int[Array, ""]) -> Any:
    """Copy the recurrent and convolution states of a slot, which have no entry per token."""
    nothing = jnp.full((1, 1), -1, jnp.int32)

    def copy_row(layer_cache: Any) -> Any:
        return layer_cache.row(slot) if layer_cache.row_tokens(slot, nothing) is None else None

    states = jax.tree.map(copy_row, state.layer_caches, is_leaf=is_layer_cache)
    offset = state.cache.rope_offset
    return states, None if offset is None else offset[slot]


def restore(state: EngineState, slot: Int[Array, ""], begin: Int[Array, ""], snapshot: CacheSnapshot) -> EngineState:
    """Write the entries of a snapshot into a slot, from position `begin` on."""

    def write_tokens(layer_cache: Any, entries: Any) -> Any:
        return layer_cache if entries is None else layer_cache.commit_rows(slot[None], *entries)

    caches = jax.tree.map(write_tokens, state.layer_caches, snapshot.entries, is_leaf=is_layer_cache)
    state = state.with_layer_caches(caches)
    positions = begin + jnp.arange(snapshot.tokens.shape[1])
    ids = state.tokens.at[slot, positions].set(snapshot.tokens[0], mode="drop")
    experts = state.experts
    if experts is not None and snapshot.experts is not None:
        experts = experts.at[slot, positions].set(snapshot.experts[0], mode="drop")
    return dataclasses.replace(state, tokens=ids, experts=experts)


def restore_state(state: EngineState, slot: Int[Array, ""], length: Int[Array, ""], saved: Any) -> EngineState:
    """Write the states that `save_state` copied into a slot, and set its length."""
    rows, offset = saved

    def write_row(layer_cache: Any, row: Any) -> Any:
        return layer_cache if row is None else layer_cache.with_row(slot, row)

    state = state.with_layer_caches(jax.tree.map(write_row, state.layer_caches, rows, is_leaf=is_layer_cache))
    offsets = state.cache.rope_offset
    if offset is not None and offsets is not None:
        offsets = offsets.at[slot].set(offset)
    length = state.cache.length.at[slot].set(length)
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, length=length, rope_offset=offsets))


def set_page_tables(state: EngineState, tables: dict[int, Array], lengths: Int[Array, "slots"]) -> EngineState:
    """Set the page tables and lengths of all slots."""
    return dataclasses.replace(state, cache=state.cache.with_tables(tables, lengths))


def insert_cache(state: EngineState, slot: Int[Array, ""], cache: Cache, tokens: Int[Array, "1 length"]) -> EngineState:
    """Write a cache of one row, prefilled outside the engine state, into a slot."""
    cache = state.cache.with_row(slot, cache)
    return dataclasses.replace(state, cache=cache, tokens=state.tokens.at[slot].set(tokens[0]))


def first_token(
    state: EngineState, slot: Int[Array, ""], logits: Array, batch: SamplingBatch, *, num_top: int
) -> tuple[EngineState, SampledTokens]:
    """Sample the first token of an answer from the logits after its prompt, and write it after the prompt."""
    length = jnp.asarray(batch.prompt_length)
    history = TokenHistory(state.tokens[slot][None], length, length)
    tokens, scores = sample_rows(logits, batch, history, 1, num_top)
    ids = state.tokens.at[slot, length].set(tokens, mode="drop")
    sampled = SampledTokens(tokens=tokens[:, None], num_accepted=jnp.ones((1,), jnp.int32), scores=scores)
    return dataclasses.replace(state, tokens=ids), sampled


def without_aliases(state: EngineState) -> EngineState:
    """Copy arrays that occur twice in the state: it is donated, and a buffer can be donated only once."""
    seen: set[int] = set()

    def copy_repeated(leaf: Array) -> Array:
        repeated = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.copy() if repeated else leaf

    return jax.tree.map(copy_repeated, state)
