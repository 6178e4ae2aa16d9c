"""`EngineState`: the device state of all slots, and the functions that read and update it. `ModelRunner` compiles them.

The first functions empty, save and restore slots. `sample` samples tokens. The functions at the end are the forward
passes, which also read the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int16

from eqx_decoders.context import Promises
from eqx_decoders.inference.decode_step import decode_step
from eqx_decoders.inference.draft_state import DraftState, VerifiedStep
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.serving.engine.adapters import with_row_adapters
from eqx_decoders.serving.engine.engine_weights import Models
from eqx_decoders.serving.engine.sampler import (
    SampledTokens,
    SamplingBatch,
    SamplingVariant,
    Scores,
    TokenHistory,
    sample_rows,
    score_tokens,
)
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import run_with_auto_axes


T = TypeVar("T")


class EngineState(eqx.Module):
    """Device state of all slots.

    **Arguments:**

    - `cache`: cache of the model with one row per slot.
    - `tokens`: token ids by slot and position, including the sampled token that is fed next.
    - `drafts`: state of a drafter that runs on the device. None: no such drafter.
    - `experts`: experts that the tokens were routed to. None: not stored.
    """

    cache: Cache
    tokens: Int[Array, "slots length"]
    drafts: DraftState | None = None
    experts: Int16[Array, "slots length layers choices"] | None = None

    @property
    def layer_caches(self) -> Any:
        """The layer caches of the model and its drafter."""
        return self.cache.layer_caches, None if self.drafts is None else self.drafts.layer_caches

    def with_layer_caches(self, layer_caches: Any) -> "EngineState":
        """Return the state with these layer caches."""
        model_caches, draft_caches = layer_caches
        drafts = None if self.drafts is None else dataclasses.replace(self.drafts, layer_caches=draft_caches)
        cache = dataclasses.replace(self.cache, layer_caches=model_caches)
        return dataclasses.replace(self, cache=cache, drafts=drafts)

    def with_experts(self, slots: Array, positions: Array, chosen: Array | None) -> "EngineState":
        """Return the state with the experts of tokens. `chosen`: shape `[layers, slots, tokens, choices]`."""
        if self.experts is None or chosen is None:
            return self
        new = jnp.transpose(chosen, (1, 2, 0, 3)).astype(self.experts.dtype)
        return dataclasses.replace(self, experts=self.experts.at[slots[:, None], positions].set(new, mode="drop"))


class CacheSnapshot(eqx.Module):
    """Copy of the cache entries of consecutive tokens of one slot.

    **Arguments:**

    - `entries`: entries and positions of each layer cache. None for layers without an entry per token.
    - `tokens`: the token ids.
    - `experts`: experts that the tokens were routed to. None: not stored.
    """

    entries: Any
    tokens: Int[AnyArray, "1 length"]
    experts: Int16[AnyArray, "1 length layers choices"] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def empty_slots(state: EngineState, slots: Int[Array, "rows"]) -> EngineState:
    """Empty slots for new requests (see `Cache.empty_rows`). Slot indices beyond the last slot are ignored."""
    drafts = None if state.drafts is None else state.drafts.empty_rows(slots)
    return dataclasses.replace(state, cache=state.cache.empty_rows(slots), drafts=drafts)


def save(
    state: EngineState, slot: Int[Array, ""], begin: Int[Array, ""], *, length: int, pages: bool = True
) -> CacheSnapshot:
    """Copy the cache entries of the tokens `begin:begin + length` of a slot. `pages=False`: without paged layers."""
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
    """Copy the recurrent and convolution states of a slot."""
    no_positions = jnp.full((1, 1), -1, jnp.int32)

    def copy_row(layer_cache: Any) -> Any:
        has_entries_per_token = layer_cache.row_tokens(slot, no_positions) is not None
        return None if has_entries_per_token else layer_cache.row(slot)

    states = jax.tree.map(copy_row, state.layer_caches, is_leaf=is_layer_cache)
    offset = state.cache.rope_offset
    return states, None if offset is None else offset[slot]


def restore(
    state: EngineState, slots: Int[Array, "rows"], begin: Int[Array, ""], end: Int[Array, ""], snapshot: CacheSnapshot
) -> EngineState:
    """Write a snapshot into slots, starting at position `begin`, and set their lengths to `end` tokens.

    Slot indices beyond the last slot are ignored.
    """
    rows = len(slots)

    def write_tokens(layer_cache: Any, saved: Any) -> Any:
        if saved is None:
            return layer_cache
        entries, positions = saved  # entries: [layers, 1, …], positions: [1, length]
        entries = jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=1), entries)
        return layer_cache.commit_rows(slots, entries, jnp.repeat(positions, rows, axis=0))

    caches = jax.tree.map(write_tokens, state.layer_caches, snapshot.entries, is_leaf=is_layer_cache)
    state = state.with_layer_caches(caches)
    positions = begin + jnp.arange(snapshot.tokens.shape[1])
    ids = state.tokens.at[slots[:, None], positions].set(snapshot.tokens, mode="drop")
    experts = state.experts
    if experts is not None and snapshot.experts is not None:
        experts = experts.at[slots[:, None], positions].set(snapshot.experts, mode="drop")
    cache = dataclasses.replace(state.cache, length=state.cache.length.at[slots].set(end, mode="drop"))
    return dataclasses.replace(state, cache=cache, tokens=ids, experts=experts)


def restore_state(state: EngineState, slot: Int[Array, ""], saved: Any) -> EngineState:
    """Write the result of `save_state` into a slot."""
    rows, offset = saved

    def write_row(layer_cache: Any, row: Any) -> Any:
        return layer_cache if row is None else layer_cache.with_row(slot, row)

    state = state.with_layer_caches(jax.tree.map(write_row, state.layer_caches, rows, is_leaf=is_layer_cache))
    offsets = state.cache.rope_offset
    if offset is not None and offsets is not None:
        offsets = offsets.at[slot].set(offset)
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, rope_offset=offsets))


def set_page_tables(state: EngineState, tables: dict[int, Array], lengths: Int[Array, "slots"]) -> EngineState:
    """Set the page tables and lengths of all slots."""
    return dataclasses.replace(state, cache=state.cache.with_tables(tables, lengths))


def insert_cache(state: EngineState, slot: Int[Array, ""], cache: Cache, tokens: Int[Array, "1 length"]) -> EngineState:
    """Write the cache (with one row) of a separately prefilled prompt into a slot."""
    cache = state.cache.with_row(slot, cache)
    return dataclasses.replace(state, cache=cache, tokens=state.tokens.at[slot].set(tokens[0]))


def sample(
    ids: Int[Array, "slots length"],
    slots: Int[Array, "rows"],
    positions: Int[Array, "rows"],
    logits: Float32[Array, "#rows vocab"],
    batch: SamplingBatch,
    *,
    num_top: int,
    variant: SamplingVariant | None,
) -> tuple[Int[Array, "slots length"], SampledTokens]:
    """Sample the token after each position and write it into the tokens of its slot.

    Rows with position -1 are idle. A single row of logits is used for all rows.
    """
    length, logits = positions + 1, jnp.broadcast_to(logits, (len(positions), logits.shape[1]))
    history = TokenHistory(ids[slots], jnp.asarray(batch.prompt_length), length)
    new, scores = sample_rows(logits, batch, history, 1, num_top, variant)
    active = positions >= 0
    ends = jnp.where(active, length, ids.shape[1])
    ids = ids.at[slots, ends].set(new, mode="drop")
    return ids, SampledTokens(tokens=new[:, None], num_accepted=active.astype(jnp.int32), scores=scores)


def without_aliases(state: EngineState) -> EngineState:
    """Copy arrays that occur twice in the state, because a buffer can be donated only once."""
    seen: set[int] = set()

    def copy_repeated(leaf: Array) -> Array:
        repeated = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.copy() if repeated else leaf

    return jax.tree.map(copy_repeated, state)


# --- forward passes; the results of a slot do not depend on other slots ---


def _feed(
    models: Models,
    state: EngineState,
    slots: Int[Array, "rows"],
    tokens: Int[Array, "rows columns"],
    positions: Int[Array, "rows columns"],
    adapter: Int[Array, "rows"],
    choose: Callable[[Array, Array], tuple[Array, T]],
) -> tuple[EngineState, VerifiedStep, T]:
    """Feed tokens and commit the accepted ones.

    `choose(logits, token ids of the slots)` returns the token that follows each fed token, and any further result. A
    fed draft is accepted if it equals the token chosen before it.
    """
    model, rows = with_row_adapters(models.model, adapter), len(slots)
    all_slots = rows == state.tokens.shape[0]
    read_rows = None if all_slots and not model.execution.layout.backend.active_rows_only else slots
    slots = jnp.arange(rows) if all_slots else slots
    last = state.tokens[slots, jnp.maximum(positions[:, 0], 0)]
    tokens = tokens.at[:, 0].set(jnp.where(tokens[:, 0] < 0, last, tokens[:, 0]))
    targets = jnp.where(positions < 0, state.tokens.shape[1], positions)
    ids = state.tokens.at[slots[:, None], targets].set(tokens, mode="drop")

    def choose_from(logits: Array) -> tuple[Array, T]:
        return choose(logits, ids if all_slots else ids[slots])

    cache, verified, result = decode_step(model, state.cache, tokens, positions, choose_from, rows=read_rows)
    state = dataclasses.replace(state, cache=cache, tokens=ids)
    return state.with_experts(slots, targets, verified.experts), verified, result


@run_with_auto_axes
def forward(
    models: Models,
    state: EngineState,
    slots: Int[Array, "rows"],
    tokens: Int[Array, "rows 1"],
    positions: Int[Array, "rows 1"],
    adapter: Int[Array, "rows"],
) -> tuple[EngineState, Float32[Array, "rows vocab"]]:
    """Feed the last token of each row, and return the logits after it.

    Token -1 stands for the token in the state that was sampled last. Rows with position -1 are idle.
    """
    no_choice = jnp.zeros(tokens.shape, jnp.int32)  # one token per row: there are no drafts to verify
    inputs = slots, tokens, positions, adapter
    state, _, logits = _feed(models, state, *inputs, lambda logits, _: (no_choice, logits[:, 0]))
    return state, logits


@run_with_auto_axes
def decode(
    models: Models,
    state: EngineState,
    slots: Int[Array, "rows"],
    tokens: Int[Array, "rows columns"],
    positions: Int[Array, "rows columns"],
    batch: SamplingBatch,
    *,
    num_top: int,
) -> tuple[EngineState, SampledTokens]:
    """Feed the last token and the drafts of each row, verify the drafts, and sample the next tokens.

    -1 as last token stands for the token in the state that was sampled last, -1 as draft for the draft in the state.
    Rows with position -1 are idle. With drafts in the state, `slots` must be all slots in order.
    """
    rows, columns = tokens.shape
    if state.drafts is not None and columns > 1:
        tokens = jnp.where(tokens < 0, jnp.pad(state.drafts.tokens, ((0, 0), (1, 0))), tokens)

    def choose(logits: Array, ids: Array) -> tuple[Array, Scores]:
        lengths = (positions[:, :1] + 1 + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
        prompts = jnp.repeat(jnp.asarray(batch.prompt_length), columns, axis=0)
        history = TokenHistory(jnp.repeat(ids, columns, axis=0), prompts, lengths)
        sampled, scores = sample_rows(logits, batch, history, columns, num_top)
        return sampled.reshape(rows, columns), scores

    state, verified, scores = _feed(models, state, slots, tokens, positions, jnp.asarray(batch.adapter), choose)
    drafts = state.drafts
    if models.drafter is not None and drafts is not None:
        drafts = models.drafter.step(with_row_adapters(models.model, batch.adapter), drafts, verified)
    result = SampledTokens(tokens=verified.following, num_accepted=verified.num_accepted, scores=scores)
    result = jax.tree.map(models.execution.layout.replicate, result)
    ends = jnp.where(result.num_accepted > 0, positions[:, 0] + result.num_accepted, state.tokens.shape[1])
    last = jnp.take_along_axis(result.tokens, jnp.maximum(result.num_accepted - 1, 0)[:, None], axis=1)[:, 0]
    ids = state.tokens.at[slots, ends].set(last, mode="drop")
    return dataclasses.replace(state, tokens=ids, drafts=drafts), result


@run_with_auto_axes
def prefill(
    models: Models,
    state: EngineState,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 length"],
    positions: Int[Array, "1 length"],
    following: Int[Array, "1 length"],
    ends: Bool[Array, ""],
    batch: SamplingBatch,
) -> tuple[EngineState, tuple[Float[Array, "1 length embed"], Float[Array, "1 1 embed"]]]:
    """Prefill one chunk of the prompt of a slot, and return the hidden states of all its tokens and of the last token.

    **Arguments:**

    - `positions`: positions of the tokens. -1: padding.
    - `following`: the next token after each token.
    - `ends`: whether the prompt ends with this chunk. A drafter then also reads the first output token.
    """
    model = with_row_adapters(models.model, batch.adapter)
    hidden, proposal, stats = model.forward_uncommitted(
        tokens, positions, cache=state.cache.at_rows(slot[None]), promises=Promises(accept_all=True)
    )
    targets = jnp.where(positions[0] < 0, state.tokens.shape[1], positions[0])
    ids = state.tokens.at[slot, targets].set(tokens[0], mode="drop")
    last = jnp.argmax(positions, axis=1)
    at_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
    cache = state.cache.commit_rows(slot[None], proposal.entries, proposal.positions, proposal.rope_offset)
    drafts = state.drafts
    if models.drafter is not None and drafts is not None:
        no_logits = jnp.zeros((1, model.config.vocab_size), jnp.float32)
        logits = jax.lax.cond(ends, lambda: model.logits(at_last)[:, 0], lambda: no_logits)
        history = TokenHistory(ids[slot][None], jnp.asarray(batch.prompt_length), jnp.max(positions, axis=1) + 1)
        token, _ = sample_rows(logits, batch, history, 1, 0)
        is_end = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ends
        next_tokens = jnp.where(is_end, token[:, None], following)
        count = jnp.sum((positions >= 0).astype(jnp.int32), axis=1)
        read = VerifiedStep(tokens, proposal.positions, hidden, next_tokens, positions[:, 0], count)
        drafts = models.drafter.prefill(model, drafts, slot, read)
    result = jax.tree.map(model.execution.layout.replicate, (hidden, at_last))
    state = dataclasses.replace(state, cache=cache, tokens=ids, drafts=drafts)
    return state.with_experts(slot[None], targets[None], stats.choices), result


@run_with_auto_axes
def next_logits(models: Models, hidden: Float[Array, "1 1 embed"]) -> Float32[Array, "1 vocab"]:
    """Return the logits after a prompt, given the hidden state of its last token."""
    return models.execution.layout.replicate(models.model.logits(hidden)[:, 0])


@run_with_auto_axes
def prompt_scores(
    models: Models, hidden: Float[Array, "1 length embed"], following: Int[Array, "1 length"], *, num_top: int
) -> Scores:
    """Return the log-probabilities of the next token after each token of a chunk, given the chunk's hidden states."""
    scores = score_tokens(models.model.logits(hidden)[0], following[0], num_top, True)
    return jax.tree.map(models.execution.layout.replicate, scores)
