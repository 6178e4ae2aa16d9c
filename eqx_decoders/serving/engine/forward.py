"""Forward passes of the engine: a decoding step of some slots, a prefill chunk of one slot, and a first token.

`ModelRunner` compiles each of these functions for a few shapes. The results of a slot depend on no other slot.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from eqx_decoders.context import Promises
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.sampler import (
    BatchSamplingParams,
    Scores,
    TokenHistory,
    adjust_logits,
    sample_tokens,
    score_tokens,
)
from eqx_decoders.serving.engine.slot_state import DraftState, EngineState
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed


NEXT_TOKEN, ALL_SCORES = 1, 2  # flags of a prefill chunk: compute the last logits, score every token


class VerifiedStep(NamedTuple):
    """Verified tokens of a step of all slots.

    **Arguments:**

    - `tokens`, `positions`: fed tokens; rejected ones are at position -1.
    - `hidden`: the model's hidden state at each.
    - `following`: the token that the model has sampled after each.
    - `begin`, `num_accepted`: position of the first token, and the number of accepted ones.
    """

    tokens: Int[Array, "slots columns"]
    positions: Int[Array, "slots columns"]
    hidden: Float[Array, "slots columns embed"]
    following: Int[Array, "slots columns"]
    begin: Int[Array, "slots"]
    num_accepted: Int[Array, "slots"]


class DeviceDrafting(abc.ABC):
    """Drafting on the device, within the programs of the model (see `drafters`)."""

    def __init__(self, count: int):
        self.count = count

    @abc.abstractmethod
    def empty(self, models: tuple[Decoder, ...], slots: int, length: int, dtype: Any) -> DraftState:
        """Create the state of empty slots."""

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
        """Update the state of a slot after a prefill chunk."""

    @abc.abstractmethod
    def step(self, models: tuple[Decoder, ...], state: DraftState, verified: VerifiedStep) -> DraftState:
        """Update the state after a decoding step of all slots, and draft tokens for the next one."""


class Models(eqx.Module):
    """The served model, an optional smaller draft model, and the drafting that runs on the device."""

    model: Decoder
    draft_model: Decoder | None
    drafting: DeviceDrafting | None = eqx.field(static=True)

    @property
    def execution(self) -> Any:
        """Execution options of both models."""
        return self.model.execution

    @property
    def decoders(self) -> tuple[Decoder, ...]:
        """Both models, in the order of `DeviceDrafting`."""
        return (self.model,) if self.draft_model is None else (self.model, self.draft_model)


class SamplingBatch(NamedTuple):
    """Sampling inputs of a batch of rows.

    **Arguments:**

    - `sampling`: sampling parameters by row.
    - `count`: tokens that each answer has already.
    - `prompt_length`: tokens before the answer.
    - `allowed`, `masked`: where a row is masked, only tokens whose bit is set can be sampled.
    - `wants_scores`: whether any row needs log-probabilities.
    """

    sampling: BatchSamplingParams
    count: Int[AnyArray, "rows"]
    prompt_length: Int[AnyArray, "rows"]
    allowed: Int32[AnyArray, "rows words"]
    masked: Bool[AnyArray, "rows"]
    wants_scores: Bool[AnyArray, ""]

    @classmethod
    def greedy(cls, rows: int, words: int, max_biases: int) -> "SamplingBatch":
        """Create rows on the host that sample greedily, with masks of `words` 32-bit words."""
        return cls(
            sampling=BatchSamplingParams.empty(rows, max_biases),
            count=np.zeros(rows, np.int32),
            prompt_length=np.zeros(rows, np.int32),
            allowed=np.full((rows, words), -1, np.int32),
            masked=np.zeros(rows, bool),
            wants_scores=np.asarray(False),
        )

    def of(self, rows: Sequence[int], wants_scores: bool) -> "SamplingBatch":
        """Copy some rows: on CPU, JAX may read an argument after the call has returned."""
        part = np.asarray(rows)
        return SamplingBatch(
            sampling=self.sampling.of(part),
            count=self.count[part],
            prompt_length=self.prompt_length[part],
            allowed=self.allowed[part],
            masked=self.masked[part],
            wants_scores=np.asarray(wants_scores),
        )


class SampledTokens(NamedTuple):
    """Tokens that a step has sampled, by rows and columns; the first `num_accepted` of each row are valid."""

    tokens: Int32[Array, "rows columns"]
    num_accepted: Int32[Array, "rows"]
    scores: Scores


class ChunkResult(NamedTuple):
    """Result of a prefill chunk: the logits after its last token, and the scores of the tokens that follow its own."""

    logits: Float32[Array, "1 vocab"]
    scores: Scores


def sample_rows(
    logits: Array, batch: SamplingBatch, history: TokenHistory, columns: int, num_top: int
) -> tuple[Array, Scores]:
    """Sample and score a token for each row of logits; each row of `batch` has `columns` of them."""
    sampling = batch.sampling.repeated(columns)
    allowed, masked = (jnp.repeat(jnp.asarray(x), columns, axis=0) for x in (batch.allowed, batch.masked))
    flat = logits.reshape(-1, logits.shape[-1])
    index = (jnp.asarray(batch.count)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
    tokens = sample_tokens(adjust_logits(flat, sampling, history, allowed, masked), sampling, index)
    return tokens, score_tokens(flat, tokens, num_top, jnp.asarray(batch.wants_scores))


@typed
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
    """Feed each row its last token and its drafts, verify the drafts, and sample the next tokens.

    A draft of -1 stands for the one that was made on the device. A draft is accepted where the model samples the same
    token, by the draw that it would have made without drafts. Rows at position -1 are idle. Drafts need a step of all
    slots, in order.
    """
    model, (rows, columns) = models.model, tokens.shape
    all_slots = rows == state.tokens.shape[0]
    row_cache = state.cache if all_slots and not model.execution.layout.backend.few_rows else state.cache.at_rows(slots)
    if state.drafts is not None and columns > 1:
        tokens = jnp.where(tokens < 0, jnp.pad(state.drafts.tokens, ((0, 0), (1, 0))), tokens)
    hidden, proposal, _ = model.forward_uncommitted(tokens, positions, cache=row_cache)
    slots = jnp.arange(rows) if all_slots else slots
    targets = jnp.where(positions < 0, state.tokens.shape[1], positions)
    ids = state.tokens.at[slots[:, None], targets].set(tokens, mode="drop")
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    lengths = (positions[:, :1] + 1 + column).reshape(-1)
    prompts = jnp.repeat(jnp.asarray(batch.prompt_length), columns, axis=0)
    history = TokenHistory(jnp.repeat(ids if all_slots else ids[slots], columns, axis=0), prompts, lengths)
    sampled, token_scores = sample_rows(model.logits(hidden), batch, history, columns, num_top)
    sampled = sampled.reshape(rows, columns)
    same = (sampled[:, :-1] == tokens[:, 1:]) & (positions[:, 1:] >= 0)
    num_correct = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    num_accepted = jnp.where(positions[:, 0] >= 0, 1 + num_correct, 0)
    accepted = jnp.where(column < num_accepted[:, None], proposal.positions, -1)
    new = proposal.entries, accepted, proposal.rope_offset
    cache = state.cache.commit(*new) if all_slots else state.cache.commit_rows(slots, *new)
    drafts = state.drafts
    if models.drafting is not None and drafts is not None:
        first = jnp.maximum(positions[:, 0], 0)
        verified = VerifiedStep(tokens, accepted, hidden, sampled, first, num_accepted)
        drafts = models.drafting.step(models.decoders, drafts, verified)
    result = SampledTokens(tokens=sampled, num_accepted=num_accepted, scores=token_scores)
    result = jax.tree.map(model.execution.layout.replicate, result)
    return EngineState(cache=cache, tokens=ids, drafts=drafts), result


@typed
def prefill(
    models: Models,
    state: EngineState,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 length"],
    positions: Int[Array, "1 length"],
    following: Int[Array, "1 length"],
    wanted: Int[Array, ""],
    batch: SamplingBatch,
    *,
    num_top: int,
) -> tuple[EngineState, ChunkResult]:
    """Prefill one chunk of a slot's prompt, and compute the results whose flags are in `wanted`.

    `following` has the next token of each; positions are -1 after the last token.
    """
    model = models.model
    hidden, proposal, _ = model.forward_uncommitted(
        tokens, positions, cache=state.cache.at_rows(slot[None]), promises=Promises(accept_all=True)
    )
    targets = jnp.where(positions[0] < 0, state.tokens.shape[1], positions[0])
    ids = state.tokens.at[slot, targets].set(tokens[0], mode="drop")
    last = jnp.argmax(positions, axis=1)
    length, vocab = jnp.max(positions, axis=1) + 1, model.config.vocab_size
    history = TokenHistory(ids[slot][None], jnp.asarray(batch.prompt_length), length)

    def last_logits() -> Array:
        return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]

    def no_scores(rows: int) -> Scores:
        logits, chosen = jnp.zeros((rows, vocab), jnp.float32), jnp.zeros((rows,), jnp.int32)
        return score_tokens(logits, chosen, num_top, jnp.asarray(False))

    def all_scores() -> Scores:
        return score_tokens(model.logits(hidden)[0], following[0], num_top, jnp.asarray(True))

    logits = jax.lax.cond((wanted & NEXT_TOKEN) > 0, last_logits, lambda: jnp.zeros((1, vocab), jnp.float32))
    prompt_scores = jax.lax.cond((wanted & ALL_SCORES) > 0, all_scores, lambda: no_scores(tokens.shape[1]))
    cache = state.cache.commit_rows(slot[None], proposal.entries, proposal.positions, proposal.rope_offset)
    drafts = state.drafts
    if models.drafting is not None and drafts is not None:
        token, _ = sample_rows(logits, batch, history, 1, num_top)
        ends = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ((wanted & NEXT_TOKEN) > 0)
        next_tokens = jnp.where(ends, token[:, None], following)
        drafts = models.drafting.chunk(models.decoders, drafts, slot, tokens, proposal.positions, hidden, next_tokens)
    result = jax.tree.map(model.execution.layout.replicate, ChunkResult(logits, prompt_scores))
    return EngineState(cache=cache, tokens=ids, drafts=drafts), result


def first_token(
    state: EngineState, logits: Array, batch: SamplingBatch, history: TokenHistory, *, num_top: int
) -> SampledTokens:
    """Sample the first token of an answer from the logits after its prompt."""
    tokens, token_scores = sample_rows(logits, batch, history, 1, num_top)
    return SampledTokens(tokens=tokens[:, None], num_accepted=jnp.ones((1,), jnp.int32), scores=token_scores)
