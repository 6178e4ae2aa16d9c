"""Drafts: what comes next, guessed cheaply, for the model to verify several tokens in one step.

A draft token is kept where the model chooses the same one, by the draw (or the maximum) that it would have made without
drafts. As a draft is certain of its token, that is the rule of speculative sampling (Leviathan et al. 2023): a token x
is kept with probability p(x), and another one is drawn from what is left of p. Answers don't change, seeds included.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from eqx_decoders.errors import check, check_integer
from eqx_decoders.inference.speculative import MTPDepthStates, draft_further
from eqx_decoders.inference.unstack import inference_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.kv_cache import is_memory
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.init import block_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Drafts are what followed the last tokens where these stand in the text before (Saxena 2023).

    **Arguments:**

    - `num_tokens`: drafts at each step, at most.
    - `longest`, `shortest`: of how many last tokens another place is looked for, the longest first.
    """

    num_tokens: int = 4
    longest: int = 3
    shortest: int = 2

    def __post_init__(self):
        for field in ("num_tokens", "longest", "shortest"):
            check_integer(f"PromptLookup.{field}", getattr(self, field))
        rule = f"PromptLookup.shortest={self.shortest} must be at most longest={self.longest}"
        check(self.shortest <= self.longest, f"{rule}.")

    def find(self, text: Sequence[int] | np.ndarray) -> list[int]:
        """The drafts after a text: what follows the latest such place."""
        text = np.asarray(text)
        for size in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            end = len(text) - size  # where the last tokens begin, and up to which other places may begin
            places = np.flatnonzero(text[:end] == text[end])
            for index in range(1, size):
                places = places[text[places + index] == text[end + index]]
            if len(places) > 0:
                begin = int(places[-1]) + size
                return text[begin : begin + self.num_tokens].tolist()
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPDrafter:
    """Drafts are those of the model's own multi-token prediction.

    **Arguments:**

    - `num_tokens`: drafts at each step: one for each of its first depths.
    """

    num_tokens: int = 1

    def __post_init__(self):
        check_integer("MTPDrafter.num_tokens", self.num_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Drafts are what a smaller model of the same vocabulary finds most likely.

    **Arguments:**

    - `model`: which.
    - `num_tokens`: drafts at each step.
    """

    model: Decoder
    num_tokens: int = 4

    def __post_init__(self):
        check_integer("DraftModel.num_tokens", self.num_tokens)


Drafts = PromptLookup | MTPDrafter | DraftModel


class DraftState(eqx.Module):
    """What drafting knows of every slot: memories, streams of the last tokens, and the drafts for the next step."""

    memories: Any
    last: tuple[Float[Array, "slots 1 embed"], ...]
    tokens: Int32[Array, "slots drafts"]


class VerifiedStep(NamedTuple):
    """What a step of all slots has verified.

    **Arguments:**

    - `tokens`, `positions`: of the tokens that count; others are at -1.
    - `hidden`: the model's stream at each.
    - `following`: the token that the model has chosen after each.
    - `begin`, `kept`: position of the first token, and how many count.
    """

    tokens: Int[Array, "slots columns"]
    positions: Int[Array, "slots columns"]
    hidden: Float[Array, "slots columns embed"]
    following: Int[Array, "slots columns"]
    begin: Int[Array, "slots"]
    kept: Int[Array, "slots"]


def check_drafts(drafts: Drafts | None, model: Decoder) -> None:
    """Raise ConfigError where a model can't be drafted for like this."""
    if isinstance(drafts, MTPDrafter):
        depths = 0 if model.config.mtp is None else model.config.mtp.num_depths
        rule = "must be at most the model's depths of multi-token prediction"
        check(drafts.num_tokens <= depths, f"FurtherPrediction.num_tokens={drafts.num_tokens} {rule}, {depths}.")
    if isinstance(drafts, DraftModel):
        sizes = drafts.model.config.vocab_size, model.config.vocab_size
        check(sizes[0] == sizes[1], f"SmallerModel.model has {sizes[0]} token ids, and the model {sizes[1]}: no match.")


class DeviceDrafting(abc.ABC):
    """Drafts that are made on the device, in the programs that feed the model: one of the two kinds below."""

    def __init__(self, count: int):
        self.count = count

    @abc.abstractmethod
    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        """Nothing known of any slot."""

    @abc.abstractmethod
    def chunk(
        self,
        models: tuple[Decoder, ...],
        state: DraftState,
        slot: Int[Array, ""],
        tokens: Int[Array, "1 length"],
        positions: Int[Array, "1 length"],
        hidden: Float[Array, "1 length embed"],
        following: Int[Array, "1 length"],
    ) -> DraftState:
        """After a chunk of a slot's prompt."""

    @abc.abstractmethod
    def step(self, models: tuple[Decoder, ...], state: DraftState, fed: VerifiedStep) -> DraftState:
        """After a step of all slots, with drafts for the next one."""


class ModelDrafting(DeviceDrafting):
    """By the second of the models."""

    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        cache = inference_cache(models[1], slots, length, dtype)
        return DraftState(memories=cache.segments, last=(), tokens=jnp.zeros((slots, self.count), jnp.int32))

    def chunk(self, models, state, slot, tokens, positions, hidden, following) -> DraftState:
        cache = _cache(state)
        _, proposal, _ = models[1].propose(tokens, positions, cache=cache.at_rows(slot[None]), keeps_all=True)
        cache = cache.commit_rows(slot[None], proposal.entries, proposal.positions)
        return dataclasses.replace(state, memories=cache.segments)

    def step(self, models, state, fed) -> DraftState:
        # what it drafts is never in its cache before it is verified: so any kind of memory will do
        small = models[1]
        _, proposal, _ = small.propose(fed.tokens, fed.positions, cache=_cache(state))
        cache = _cache(state).commit(proposal.entries, proposal.positions)
        index, rows = jnp.arange(self.count, dtype=jnp.int32)[None], fed.tokens.shape[0]
        last = jnp.take_along_axis(fed.following, jnp.maximum(fed.kept - 1, 0)[:, None], axis=1)
        begin = (fed.begin + fed.kept)[:, None]

        def further(place: Array, tokens: Array) -> Array:
            positions = jnp.where((index <= place) & (fed.kept[:, None] > 0), begin + index, -1)
            hidden, _, _ = small.propose(tokens[:, : self.count], positions, cache=cache)
            here = jax.lax.dynamic_slice_in_dim(hidden, place, 1, 1)
            found = jnp.argmax(small.logits(here)[:, 0], axis=-1).astype(jnp.int32)
            return jax.lax.dynamic_update_slice_in_dim(tokens, found[:, None], place + 1, 1)

        tokens = jnp.concatenate([last, jnp.zeros((rows, self.count), jnp.int32)], axis=1).astype(jnp.int32)
        tokens = jax.lax.fori_loop(0, self.count, further, tokens)
        return DraftState(memories=cache.segments, last=(), tokens=tokens[:, 1:])


class MTPDrafting(DeviceDrafting):
    """By the model's depths of multi-token prediction."""

    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        model = models[0]
        assert model.config.mtp is not None
        nothing = jnp.zeros((slots, 1, model.config.embed_dim), model.execution.precision.compute)
        memories = tuple(block_memory(model.config.mtp.block, 1, slots, length, dtype) for _ in range(self.count))
        tokens = jnp.zeros((slots, self.count), jnp.int32)
        return DraftState(memories=memories, last=(nothing,) * (self.count - 1), tokens=tokens)

    def chunk(self, models, state, slot, tokens, positions, hidden, following) -> DraftState:
        row = _over_memories(lambda each: each.row(slot), state.memories)
        last = tuple(jax.lax.dynamic_slice_in_dim(each, slot, 1, 0) for each in state.last)
        known = jnp.sum((positions >= 0).astype(jnp.int32), axis=1)
        found, drafts = draft_further(models[0], MTPDepthStates(row, last), hidden, following, positions[:, 0], known)
        memories = _over_memories(lambda each, new: each.with_row(slot, new), state.memories, found.memories)
        return DraftState(
            memories=memories,
            last=tuple(old.at[slot].set(new[0]) for old, new in zip(state.last, found.last, strict=True)),
            tokens=state.tokens.at[slot].set(drafts[0]),
        )

    def step(self, models, state, fed) -> DraftState:
        depths = MTPDepthStates(state.memories, state.last)
        found, drafts = draft_further(models[0], depths, fed.hidden, fed.following, fed.begin, fed.kept)
        fresh = (fed.kept > 0)[:, None]
        last = tuple(jnp.where(fresh[..., None], new, old) for old, new in zip(state.last, found.last, strict=True))
        return DraftState(memories=found.memories, last=last, tokens=jnp.where(fresh, drafts, state.tokens))


def device_drafting(drafts: Drafts | None) -> DeviceDrafting | None:
    """What makes such drafts on the device; None for none, and for those that the host looks up."""
    if isinstance(drafts, DraftModel):
        return ModelDrafting(drafts.num_tokens)
    return MTPDrafting(drafts.num_tokens) if isinstance(drafts, MTPDrafter) else None


def _cache(state: DraftState) -> Cache:
    """The memories of a model as its cache."""
    return Cache(segments=state.memories, length=jnp.zeros((state.tokens.shape[0],), jnp.int32))


def _over_memories(change: Any, *trees: Any) -> Any:
    return jax.tree.map(change, *trees, is_leaf=is_memory)
