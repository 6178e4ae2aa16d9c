"""`ModelRunner`: the device state of an engine, and the few compiled programs that read and change it.

Each program is compiled once, at the start, for one shape: decoding steps of a few batch sizes, prefill chunks of a
few lengths, and what empties, saves and restores a slot. Programs that change the state get it donated.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from eqx_decoders.context import Promises
from eqx_decoders.inference.decode_step import decode_step
from eqx_decoders.inference.draft_state import VerifiedStep
from eqx_decoders.inference.drafters import Drafter, with_models
from eqx_decoders.inference.unstack import inference_cache, unstack_layers
from eqx_decoders.layers.cache.base import is_layer_cache
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import choices_of
from eqx_decoders.serving.engine import slot_state
from eqx_decoders.serving.engine.adapters import EngineAdapters, of_rows
from eqx_decoders.serving.engine.engine_weights import EngineWeights, Models
from eqx_decoders.serving.engine.page_pool import windows_of
from eqx_decoders.serving.engine.sampler import (
    SampledTokens,
    SamplingBatch,
    SamplingTable,
    Scores,
    TokenHistory,
    sample_rows,
    score_tokens,
)
from eqx_decoders.serving.engine.slot_state import CacheSnapshot, EngineState
from eqx_decoders.sharding.explicit import typed, untyped, with_auto_axes


NEXT_TOKEN, ALL_SCORES = 1, 2  # flags of a prefill chunk: compute the last logits, score every token


class ChunkResult(NamedTuple):
    """Result of a prefill chunk: the logits after its last token, and the scores of the tokens that follow its own."""

    logits: Float32[Array, "1 vocab"]
    scores: Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Sizes of the device state and of the compiled programs.

    **Arguments:**

    - `num_slots`: sequences that can be computed at once.
    - `length`: tokens that one slot can hold.
    - `chunk_sizes`: lengths of prefill chunks, in increasing order; the last is the block size of the prefix cache.
    - `batch_sizes`: numbers of slots that one decoding step computes.
    - `columns`: tokens that one decoding step feeds for each slot: 1, and 1 plus the drafts.
    - `max_biases`: logit biases of one request.
    - `max_logprobs`: most likely tokens that are reported for each token.
    - `cache_format`: dtype or quantization of keys and values.
    - `pages`: layout of a paged cache; None: each slot has its own contiguous rows.
    - `expert_choices`: whether the state has the experts that tokens were sent to.
    - `max_adapters`, `max_adapter_rank`, `adapter_targets`: see `EngineAdapters`.
    """

    num_slots: int
    length: int
    chunk_sizes: tuple[int, ...]
    batch_sizes: Sequence[int]
    columns: Sequence[int]
    max_biases: int
    max_logprobs: int
    cache_format: CacheFormat
    pages: PageConfig | None = None
    expert_choices: bool = False
    max_adapters: int = 0
    max_adapter_rank: int = 1
    adapter_targets: tuple[str, ...] = ("*",)


class ModelRunner:
    """The state of all slots on the device, and the compiled programs that change it."""

    def __init__(self, model: Decoder, config: RunnerConfig, drafter: Drafter | None = None):
        model = model.replace(expert_choices=config.expert_choices)
        models = Models(placed(model), None if drafter is None else with_models(placed, drafter))
        model, self.weights = models.model, EngineWeights(models)
        layout, slots, length = model.execution.layout, config.num_slots, config.length
        cache = inference_cache(model, slots, length, config.cache_format, pages=config.pages)
        self.config = config
        self.num_slots, self.length, self.block_size = slots, length, config.chunk_sizes[-1]
        self._mask_words = -(-model.config.vocab_size // 32)
        tokens = jnp.zeros((slots, length), jnp.int32)
        drafts = None
        if models.drafter is not None:
            drafts = models.drafter.empty(model, slots, length, config.cache_format)
        experts = None
        if config.expert_choices:
            experts = jnp.zeros((slots, length, *choices_of(model.config)), jnp.int16)
        tokens, experts = jax.device_put((tokens, experts), layout.replicated())
        state = EngineState(cache=cache, tokens=tokens, drafts=drafts, experts=experts)
        self._state = slot_state.without_aliases(state)
        self.model = self.weights.model
        sizes = config.max_adapters, config.max_adapter_rank, config.adapter_targets
        self.adapters = EngineAdapters(self.model, *sizes)
        self._replicated = layout.replicated()
        self._programs: dict[Any, Any] = {}

    def load(self, model: Decoder) -> None:
        """Take the weights of a model like the first (see `EngineWeights.load`)."""
        self.weights.load(placed(model))

    @property
    def windows(self) -> dict[int, tuple[int, int]]:
        """Pages by attention window, as `windows_of` returns them; empty without a paged cache."""
        return windows_of(self._state.cache)

    @cached_property
    def has_state(self) -> bool:
        """True where layers have a state that cannot be cut by tokens, such as a recurrent state."""
        return len(jax.tree.leaves(jax.eval_shape(slot_state.save_state, self._state, np.int32(0)))) > 0

    @cached_property
    def _is_packed(self) -> bool:
        """True with arrays of 4 bits: XLA's programs for CPUs take these by ordinary calls, compiled at the first."""
        return any(str(leaf.dtype).endswith("int4") for leaf in jax.tree.leaves(self._state))

    # --- programs ---

    def compile(self) -> None:
        """Compile all programs; later calls need no others."""
        self.adapters.compile()
        slot, begin, num_top = np.int32(0), np.int32(0), self.config.max_logprobs
        for rows in self.config.batch_sizes:
            for columns in self.config.columns:
                inputs = self._decode_inputs(rows, columns)
                self._compile(("decode", rows, columns), partial(decode, num_top=num_top), *inputs)
        for length in self.config.chunk_sizes:
            inputs = self._prefill_inputs(length)
            self._compile(("prefill", length), partial(prefill, num_top=num_top), *inputs)
        save = partial(slot_state.save, length=self.block_size)
        logits = jax.ShapeDtypeStruct((1, self.model.config.vocab_size), jnp.float32, sharding=self._replicated)
        inputs = slot, logits, self.sampling_table(1).of([0], False)
        self._compile("first token", partial(slot_state.first_token, num_top=num_top), *inputs, reports=True)
        self._compile("empty", slot_state.empty_slot, slot)
        self._compile("save", save, slot, begin, donates=False)
        self._compile("restore", slot_state.restore, slot, begin, jax.eval_shape(save, self._state, slot, begin))
        if self.windows:
            unpaged = partial(slot_state.save, length=self.block_size, pages=False)
            snapshot = jax.eval_shape(unpaged, self._state, slot, begin)
            self._compile("save unpaged", unpaged, slot, begin, donates=False)
            self._compile("restore unpaged", slot_state.restore, slot, begin, snapshot)
            tables = {
                window: np.zeros((self.num_slots, pages), np.int32) for window, (_, pages) in self.windows.items()
            }
            self._compile("page tables", slot_state.set_page_tables, tables, np.zeros(self.num_slots, np.int32))
        if self.model.config.media is not None:
            row = jax.eval_shape(lambda: inference_cache(self.model, 1, self.length, self.config.cache_format))
            self._compile("insert cache", slot_state.insert_cache, slot, row, np.zeros((1, self.length), np.int32))
        self._compile("save state", slot_state.save_state, slot, donates=False)
        if self.config.expert_choices:
            self._compile("experts", lambda state, slot: state.experts[slot], slot, donates=False)
        saved = jax.eval_shape(slot_state.save_state, self._state, slot)
        self._compile("restore state", slot_state.restore_state, slot, begin, saved)

    # --- forward passes ---

    def decode(
        self, slots: Sequence[int], tokens: np.ndarray, positions: np.ndarray, batch: SamplingBatch
    ) -> SampledTokens:
        """Run one decoding step of some slots, or of all in their order; rows at position -1 are idle.

        A first token of -1 stands for the one that the last program of its slot has sampled.
        """
        rows = np.asarray(slots, np.int32)
        self._state, sampled = self._run(("decode", *tokens.shape), rows, tokens, positions, batch)
        return sampled

    def prefill(
        self, slot: int, tokens: np.ndarray, begin: int, following: np.ndarray, wanted: int, batch: SamplingBatch
    ) -> ChunkResult:
        """Prefill one chunk of a slot's prompt, from position `begin` on."""
        length = next(size for size in self.config.chunk_sizes if size >= len(tokens))
        ids, next_ids = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        ids[0, : len(tokens)], next_ids[0, : len(following)] = tokens, following
        index = np.arange(length, dtype=np.int32)[None]
        positions = np.where(index < len(tokens), begin + index, -1).astype(np.int32)
        inputs = np.int32(slot), ids, positions, next_ids, np.int32(wanted), batch
        self._state, result = self._run(("prefill", length), *inputs)
        return result

    def first_token(self, slot: int, logits: Array, batch: SamplingBatch) -> SampledTokens:
        """Sample the first token of an answer from the logits after its prompt, which is in the slot."""
        inputs = np.int32(slot), jax.device_put(logits, self._replicated), batch
        self._state, sampled = self._run("first token", *inputs)
        return sampled

    # --- slots ---

    def empty(self, slot: int) -> None:
        """Clear a slot."""
        self._state = self._run("empty", np.int32(slot))

    def save(self, slot: int, begin: int, *, pages: bool = True) -> CacheSnapshot:
        """Copy the cache entries of a block of tokens of a slot; without `pages`, skip paged layers."""
        return self._run("save" if pages or not self.windows else "save unpaged", np.int32(slot), np.int32(begin))

    def experts(self, slot: int) -> Array:
        """Return the experts of the tokens of a slot, `[length, layers, choices]`."""
        return self._run("experts", np.int32(slot))

    def save_state(self, slot: int) -> Any:
        """Copy the recurrent and convolution states of a slot."""
        return self._run("save state", np.int32(slot))

    def saved_bytes(self, tokens: int) -> int:
        """Return the memory that a saved slot with so many tokens takes."""
        block, state = self._saved_sizes
        return -(-tokens // self.block_size) * block + state

    @cached_property
    def _saved_sizes(self) -> tuple[int, int]:
        slot = np.int32(0)
        block = jax.eval_shape(partial(slot_state.save, length=self.block_size), self._state, slot, slot)
        return _nbytes(block), _nbytes(jax.eval_shape(slot_state.save_state, self._state, slot))

    def restore(self, slot: int, begin: int, snapshot: CacheSnapshot, *, pages: bool = True) -> None:
        """Write back what `save` returned."""
        name = "restore" if pages or not self.windows else "restore unpaged"
        self._state = self._run(name, np.int32(slot), np.int32(begin), snapshot)

    def restore_state(self, slot: int, length: int, saved: Any) -> None:
        """Write back what `save_state` returned, after so many tokens; None for models without such states."""
        saved = self._no_state if saved is None else saved
        self._state = self._run("restore state", np.int32(slot), np.int32(length), saved)

    @property
    def _no_state(self) -> Any:
        return jax.tree.map(lambda _: None, self._state.layer_caches, is_leaf=is_layer_cache), None

    def set_page_tables(self, tables: dict[int, np.ndarray], lengths: np.ndarray) -> None:
        """Set the page tables and lengths of all slots."""
        inputs = jax.tree.map(np.array, (tables, lengths))  # copies, as in `SamplingBatch.of`
        self._state = self._run("page tables", *inputs)

    def insert_cache(self, slot: int, cache: Cache, tokens: np.ndarray) -> None:
        """Write a cache of one row, prefilled outside the engine state, into a slot, with its tokens."""
        ids = np.zeros((1, self.length), np.int32)
        ids[0, : len(tokens)] = tokens
        if not self._is_packed:  # a compiled program takes arguments only where it has placed them
            cache = jax.device_put(cache, self._programs["insert cache"].input_shardings[0][3])
        self._state = self._run("insert cache", np.int32(slot), cache, ids)

    # --- calls of programs ---

    def sampling_table(self, rows: int) -> SamplingTable:
        """Create sampling inputs of rows that sample greedily, to be filled by `set`."""

        def place(array: np.ndarray) -> Array:
            return jax.make_array_from_callback(array.shape, self._replicated, lambda part: array[part])

        return SamplingTable(SamplingBatch.greedy(rows, self._mask_words, self.config.max_biases), place)

    def _decode_inputs(self, rows: int, columns: int) -> tuple[Any, ...]:
        slots, shape = np.arange(rows, dtype=np.int32), (rows, columns)
        return (
            slots,
            np.zeros(shape, np.int32),
            np.full(shape, -1, np.int32),
            self.sampling_table(rows).of(slots, False),
        )

    def _prefill_inputs(self, length: int) -> tuple[Any, ...]:
        ids = np.zeros((1, length), np.int32)
        return np.int32(0), ids, ids, ids, np.int32(0), self.sampling_table(1).of([0], False)

    def _compile(
        self, name: Any, function: Callable[..., Any], *inputs: Any, donates: bool = True, reports: bool = False
    ) -> None:
        weightless = isinstance(name, str)

        def run(weights: Any, state: EngineState, *inputs: Any) -> Any:
            if weightless:
                return function(state, *inputs)
            arrays, pairs = weights
            models = self.weights.combined(arrays)
            return function(Models(self.adapters.with_pairs(models.model, pairs), models.drafter), state, *inputs)

        shardings: Any = None
        if donates:  # the state stays where it is
            state = jax.tree.map(lambda leaf: leaf.sharding, self._state)
            shardings = state if weightless and not reports else (state, None)
        jitted = jax.jit(run, donate_argnums=(1,) if donates else (), out_shardings=shardings)
        weights = None if weightless else (self.weights.arrays, self.adapters.arrays)
        self._programs[name] = jitted if self._is_packed else jitted.lower(weights, self._state, *inputs).compile()

    def _run(self, name: Any, *inputs: Any) -> Any:
        weights = None if isinstance(name, str) else (self.weights.arrays, self.adapters.arrays)
        return self._programs[name](weights, self._state, *inputs)


def batch_sizes(slots: int) -> tuple[int, ...]:
    """List the batch sizes to compile, 1, 2, 4 ... and all slots: a few answers don't cost the rows of many."""
    sizes = [1]
    while sizes[-1] < slots:
        sizes.append(min(2 * sizes[-1], slots))
    return tuple(sizes)


def padded_slots(slots: Collection[int], sizes: Sequence[int]) -> list[int]:
    """Return these slots in order, padded with idle ones to the smallest batch size that holds them."""
    rows = next(size for size in sizes if size >= len(slots))
    idle = (slot for slot in range(sizes[-1]) if slot not in slots)
    return sorted([*slots, *(slot for slot, _ in zip(idle, range(rows - len(slots)), strict=False))])


def placed(model: Decoder) -> Decoder:
    """Return a model as its programs read it."""
    return unstack_layers(_with_auto_mesh(model))


def _with_auto_mesh(model: Decoder) -> Decoder:
    """Move the weights to a mesh of Auto axes: nothing in the engine reads the types of arrays."""
    layout = model.execution.layout
    if not layout.explicit:
        return model
    model = jax.tree.map(lambda leaf: untyped(leaf) if eqx.is_array(leaf) else leaf, model)
    return model.replace(layout=dataclasses.replace(layout, mesh=with_auto_axes(layout.mesh)))


def _nbytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


# --- forward passes of the programs: the results of a slot depend on no other slot ---


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

    A last token of -1 stands for the one in the state, where every step writes the token that it samples last; a draft
    of -1 for the one that was made on the device. Rows at position -1 are idle. Drafts need a step of all slots, in
    order.
    """
    model, (rows, columns) = of_rows(models.model, batch.adapter), tokens.shape
    all_slots = rows == state.tokens.shape[0]
    if state.drafts is not None and columns > 1:
        tokens = jnp.where(tokens < 0, jnp.pad(state.drafts.tokens, ((0, 0), (1, 0))), tokens)
    read_rows = None if all_slots and not model.execution.layout.backend.few_rows else slots
    slots = jnp.arange(rows) if all_slots else slots
    last = state.tokens[slots, jnp.maximum(positions[:, 0], 0)]
    tokens = tokens.at[:, 0].set(jnp.where(tokens[:, 0] < 0, last, tokens[:, 0]))
    targets = jnp.where(positions < 0, state.tokens.shape[1], positions)
    ids = state.tokens.at[slots[:, None], targets].set(tokens, mode="drop")

    def choose(logits: Array) -> tuple[Array, Scores]:
        lengths = (positions[:, :1] + 1 + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
        prompts = jnp.repeat(jnp.asarray(batch.prompt_length), columns, axis=0)
        history = TokenHistory(jnp.repeat(ids if all_slots else ids[slots], columns, axis=0), prompts, lengths)
        sampled, scores = sample_rows(logits, batch, history, columns, num_top)
        return sampled.reshape(rows, columns), scores

    cache, verified, scores = decode_step(model, state.cache, tokens, positions, choose, rows=read_rows)
    drafts = state.drafts
    if models.drafter is not None and drafts is not None:
        drafts = models.drafter.step(model, drafts, verified)
    result = SampledTokens(tokens=verified.following, num_accepted=verified.num_accepted, scores=scores)
    result = jax.tree.map(model.execution.layout.replicate, result)
    ends = jnp.where(result.num_accepted > 0, positions[:, 0] + result.num_accepted, state.tokens.shape[1])
    last = jnp.take_along_axis(result.tokens, jnp.maximum(result.num_accepted - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(state, cache=cache, tokens=ids.at[slots, ends].set(last, mode="drop"), drafts=drafts)
    return state.with_experts(slots, targets, verified.experts), result


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
    model = of_rows(models.model, batch.adapter)
    hidden, proposal, stats = model.forward_uncommitted(
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
    if models.drafter is not None and drafts is not None:
        token, _ = sample_rows(logits, batch, history, 1, num_top)
        ends = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ((wanted & NEXT_TOKEN) > 0)
        next_tokens = jnp.where(ends, token[:, None], following)
        count = jnp.sum((positions >= 0).astype(jnp.int32), axis=1)
        read = VerifiedStep(tokens, proposal.positions, hidden, next_tokens, positions[:, 0], count)
        drafts = models.drafter.prefill(model, drafts, slot, read)
    result = jax.tree.map(model.execution.layout.replicate, ChunkResult(logits, prompt_scores))
    state = dataclasses.replace(state, cache=cache, tokens=ids, drafts=drafts)
    return state.with_experts(slot[None], targets[None], stats.choices), result
