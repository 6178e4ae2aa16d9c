"""Slots: what a model remembers of the requests that it works on, and the few programs that change it.

Each program is compiled once, at the start, for one shape, and owns the state that it is given: a decoding step of all
slots, a chunk of one slot's prompt in each of a few lengths, and what empties, keeps and restores a slot. A slot's
results depend on nothing in other slots.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32

from eqx_decoders.inference.unstack import inference_cache, unstack_layers
from eqx_decoders.layers.attention.cached import by_rows
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.kv_cache import is_memory
from eqx_decoders.layers.cache.paged import PageConfig, PagedKVCache
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.block_manager import windows_of
from eqx_decoders.serving.engine.drafters import DeviceDrafting, DraftState, VerifiedStep
from eqx_decoders.serving.engine.sampler import BatchSamplingParams, Scores, TokenHistory, adjusted, choose, scores
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.explicit import typed, untyped, with_auto_axes


NEXT_TOKEN, ALL_SCORES = 1, 2  # what a chunk of a prompt may be asked for, beside what it leaves in the cache


class EngineState(eqx.Module):
    """What is known of every slot: the cache, which token stands at which position, and what drafting knows."""

    cache: Cache
    tokens: Int[Array, "slots length"]
    drafts: DraftState | None = None

    @property
    def memories(self) -> Any:
        """All of them, as a tree."""
        return self.cache.segments, None if self.drafts is None else self.drafts.memories

    def with_memories(self, memories: Any) -> "EngineState":
        """The state with others."""
        segments, drafting = memories
        drafts = None if self.drafts is None else dataclasses.replace(self.drafts, memories=drafting)
        return EngineState(dataclasses.replace(self.cache, segments=segments), self.tokens, drafts)


class Models(eqx.Module):
    """The model, perhaps a smaller one that drafts for it, and how it is drafted for on the device."""

    model: Decoder
    small: Decoder | None
    drafting: DeviceDrafting | None = eqx.field(static=True)

    @property
    def execution(self) -> Any:
        """How all runs: as the model does."""
        return self.model.execution

    @property
    def both(self) -> tuple[Decoder, ...]:
        """As `DeviceDrafting` takes them."""
        return (self.model,) if self.small is None else (self.model, self.small)


class SamplingBatch(NamedTuple):
    """How the next tokens of rows are chosen.

    **Arguments:**

    - `sampling`: their numbers.
    - `count`: tokens that each answer has already.
    - `prompt_length`: tokens before the answer.
    - `allowed`, `masked`: where a row is masked, only tokens whose bit is set can be chosen.
    - `wants_scores`: whether anybody asks for log-probabilities.
    """

    sampling: BatchSamplingParams
    count: Int[AnyArray, "rows"]
    prompt_length: Int[AnyArray, "rows"]
    allowed: Int32[AnyArray, "rows words"]
    masked: Bool[AnyArray, "rows"]
    wants_scores: Bool[AnyArray, ""]

    def of(self, rows: Sequence[int], wants_scores: bool) -> "SamplingBatch":
        """A copy of some rows: on CPU, JAX may read an array after the call that was given it has returned."""
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
    """The tokens that a step has chosen, by rows and columns; of each row as many as `kept` says are true."""

    tokens: Int32[Array, "rows columns"]
    kept: Int32[Array, "rows"]
    scores: Scores


class ChunkResult(NamedTuple):
    """What a chunk of a prompt gives: the logits behind it, and the scores of the tokens that follow its own."""

    logits: Float32[Array, "1 vocab"]
    scores: Scores


class CacheSnapshot(eqx.Module):
    """A part of a slot, out of it: what is remembered of some tokens, and what of all up to here.

    **Arguments:**

    - `entries`: what memories hold of single tokens, and where these stand; None for those that hold nothing of them.
    - `tokens`: their ids.
    """

    entries: Any
    tokens: Int[AnyArray, "1 length"]

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def _chosen(
    logits: Array, asked: SamplingBatch, written: TokenHistory, columns: int, count: int
) -> tuple[Array, Scores]:
    """Tokens and scores of rows of logits, `columns` for each row of `asked`."""
    sampling = asked.sampling.repeated(columns)
    allowed, masked = (jnp.repeat(jnp.asarray(x), columns, axis=0) for x in (asked.allowed, asked.masked))
    flat = logits.reshape(-1, logits.shape[-1])
    index = (jnp.asarray(asked.count)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]).reshape(-1)
    tokens = choose(adjusted(flat, sampling, written, allowed, masked), sampling, index)
    return tokens, scores(flat, tokens, count, jnp.asarray(asked.wants_scores))


@typed
def _decode(
    models: Models,
    state: EngineState,
    slots: Int[Array, "rows"],
    tokens: Int[Array, "rows columns"],
    positions: Int[Array, "rows columns"],
    asked: SamplingBatch,
    *,
    top: int,
) -> tuple[EngineState, SampledTokens]:
    """One step of some slots: feed each row's tokens, those after the first are drafts, choose the next ones.

    A draft of -1 is the one that was made on the device. A draft is kept where the model chooses the same token, by the
    draw that it would have made without drafts. Rows at position -1 rest. Drafts are for steps of all slots, in order.
    """
    model, (rows, columns) = models.model, tokens.shape
    every = rows == state.tokens.shape[0]
    known = state.cache if every and not by_rows(model.execution) else state.cache.at_rows(slots)
    if state.drafts is not None and columns > 1:
        tokens = jnp.where(tokens < 0, jnp.pad(state.drafts.tokens, ((0, 0), (1, 0))), tokens)
    hidden, proposal, _ = model.propose(tokens, positions, cache=known)
    slots = jnp.arange(rows) if every else slots
    places = jnp.where(positions < 0, state.tokens.shape[1], positions)
    ids = state.tokens.at[slots[:, None], places].set(tokens, mode="drop")
    column = jnp.arange(columns, dtype=jnp.int32)[None]
    lengths = (positions[:, :1] + 1 + column).reshape(-1)
    prompts = jnp.repeat(jnp.asarray(asked.prompt_length), columns, axis=0)
    written = TokenHistory(jnp.repeat(ids if every else ids[slots], columns, axis=0), prompts, lengths)
    chosen, found = _chosen(model.logits(hidden), asked, written, columns, top)
    chosen = chosen.reshape(rows, columns)
    same = (chosen[:, :-1] == tokens[:, 1:]) & (positions[:, 1:] >= 0)
    right = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    kept = jnp.where(positions[:, 0] >= 0, 1 + right, 0)
    true = jnp.where(column < kept[:, None], proposal.positions, -1)
    new = proposal.entries, true, proposal.rope_offset
    cache = state.cache.commit(*new) if every else state.cache.commit_rows(slots, *new)
    drafts = state.drafts
    if models.drafting is not None and drafts is not None:
        fed = VerifiedStep(tokens, true, hidden, chosen, jnp.maximum(positions[:, 0], 0), kept)
        drafts = models.drafting.step(models.both, drafts, fed)
    result = jax.tree.map(model.execution.layout.replicate, SampledTokens(tokens=chosen, kept=kept, scores=found))
    return EngineState(cache=cache, tokens=ids, drafts=drafts), result


@typed
def _prefill(
    models: Models,
    state: EngineState,
    slot: Int[Array, ""],
    tokens: Int[Array, "1 length"],
    positions: Int[Array, "1 length"],
    following: Int[Array, "1 length"],
    wanted: Int[Array, ""],
    asked: SamplingBatch,
    *,
    top: int,
) -> tuple[EngineState, ChunkResult]:
    """One chunk of a slot's prompt; what of its results is `wanted` is computed.

    `following` has the token after each, as far as it is known; positions are -1 behind the last.
    """
    model = models.model
    known = state.cache.at_rows(slot[None])
    hidden, proposal, _ = model.propose(tokens, positions, cache=known, keeps_all=True)
    place = jnp.where(positions[0] < 0, state.tokens.shape[1], positions[0])
    ids = state.tokens.at[slot, place].set(tokens[0], mode="drop")
    last = jnp.argmax(positions, axis=1)
    length, vocab = jnp.max(positions, axis=1) + 1, model.config.vocab_size
    written = TokenHistory(ids[slot][None], jnp.asarray(asked.prompt_length), length)

    def behind() -> Array:
        return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]

    def no_scores(rows: int) -> Scores:
        return scores(jnp.zeros((rows, vocab), jnp.float32), jnp.zeros((rows,), jnp.int32), top, jnp.asarray(False))

    def all_scores() -> Scores:
        return scores(model.logits(hidden)[0], following[0], top, jnp.asarray(True))

    logits = jax.lax.cond((wanted & NEXT_TOKEN) > 0, behind, lambda: jnp.zeros((1, vocab), jnp.float32))
    every = jax.lax.cond((wanted & ALL_SCORES) > 0, all_scores, lambda: no_scores(tokens.shape[1]))
    cache = state.cache.commit_rows(slot[None], proposal.entries, proposal.positions, proposal.rope_offset)
    drafts = state.drafts
    if models.drafting is not None and drafts is not None:
        token, _ = _chosen(logits, asked, written, 1, top)
        ends = (jnp.arange(tokens.shape[1])[None] == last[:, None]) & ((wanted & NEXT_TOKEN) > 0)
        after = jnp.where(ends, token[:, None], following)
        drafts = models.drafting.chunk(models.both, drafts, slot, tokens, proposal.positions, hidden, after)
    result = jax.tree.map(model.execution.layout.replicate, ChunkResult(logits, every))
    return EngineState(cache=cache, tokens=ids, drafts=drafts), result


def _empty(state: EngineState, slot: Int[Array, ""]) -> EngineState:
    """Nothing in a slot."""
    emptied = jax.tree.map(lambda each: each.empty_row(slot), state.memories[1], is_leaf=is_memory)
    state = dataclasses.replace(state, cache=state.cache.empty_row(slot))
    return state.with_memories((state.cache.segments, emptied))


def _keep(
    state: EngineState, slot: Int[Array, ""], begin: Int[Array, ""], *, length: int, pages: bool = True
) -> CacheSnapshot:
    """What a slot remembers of `length` tokens from `begin` on; without `pages`, of what is not in pages."""
    positions = (begin + jnp.arange(length, dtype=jnp.int32))[None]
    positions = jnp.where(positions < state.cache.length[slot], positions, -1)

    def taken(memory: Any) -> Any:
        return memory.row_tokens(slot, positions) if pages or not isinstance(memory, PagedKVCache) else None

    entries = jax.tree.map(taken, state.memories, is_leaf=is_memory)
    ids = state.tokens.at[slot, jnp.maximum(positions, 0)].get(mode="clip")
    return CacheSnapshot(entries=entries, tokens=ids)


def _keep_rest(state: EngineState, slot: Int[Array, ""]) -> Any:
    """What a slot remembers of all its tokens together: states, and the last inputs of streams."""
    nothing = jnp.full((1, 1), -1, jnp.int32)

    def taken(memory: Any) -> Any:
        return memory.row(slot) if memory.row_tokens(slot, nothing) is None else None

    rest = jax.tree.map(taken, state.memories, is_leaf=is_memory)
    offset = state.cache.rope_offset
    return rest, None if offset is None else offset[slot]


def _set_tables(state: EngineState, tables: dict[int, Array], lengths: Int[Array, "slots"]) -> EngineState:
    """Slots with these pages, and so many tokens in them."""
    return dataclasses.replace(state, cache=state.cache.with_tables(tables, lengths))


def _restore(state: EngineState, slot: Int[Array, ""], begin: Int[Array, ""], kept: CacheSnapshot) -> EngineState:
    """A slot with what it once remembered of some tokens."""

    def put(memory: Any, part: Any) -> Any:
        return memory if part is None else memory.commit_rows(slot[None], *part)

    state = state.with_memories(jax.tree.map(put, state.memories, kept.entries, is_leaf=is_memory))
    places = begin + jnp.arange(kept.tokens.shape[1])
    ids = state.tokens.at[slot, places].set(kept.tokens[0], mode="drop")
    return dataclasses.replace(state, tokens=ids)


def _restore_rest(state: EngineState, slot: Int[Array, ""], length: Int[Array, ""], rest: Any) -> EngineState:
    """A slot with what it once remembered of all its tokens, of which there were so many."""
    parts, offset = rest

    def put(memory: Any, part: Any) -> Any:
        return memory if part is None else memory.with_row(slot, part)

    state = state.with_memories(jax.tree.map(put, state.memories, parts, is_leaf=is_memory))
    offsets = state.cache.rope_offset
    if offset is not None and offsets is not None:
        offsets = offsets.at[slot].set(offset)
    length = state.cache.length.at[slot].set(length)
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, length=length, rope_offset=offsets))


def _in_auto_mode(model: Decoder) -> Decoder:
    """The same weights on a mesh of Auto axes: nobody looks at the types of what is in here."""
    layout = model.execution.layout
    if not layout.explicit:
        return model
    model = jax.tree.map(lambda leaf: untyped(leaf) if eqx.is_array(leaf) else leaf, model)
    return model.replace(layout=dataclasses.replace(layout, mesh=with_auto_axes(layout.mesh)))


def _each_once(state: EngineState) -> EngineState:
    """The state with copies of arrays that stand in it twice: all of them are given away, which goes once."""
    seen: set[int] = set()

    def once(leaf: Array) -> Array:
        again = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.copy() if again else leaf

    return jax.tree.map(once, state)


class ModelRunner:
    """The state of all slots on the device, and the compiled programs that change it."""

    def __init__(
        self,
        model: Decoder,
        *,
        count: int,
        length: int,
        chunks: tuple[int, ...],
        rows: Sequence[int],
        columns: Sequence[int],
        biases: int,
        top: int,
        kind: CacheFormat,
        pages: PageConfig | None = None,
        small: Decoder | None = None,
        drafting: DeviceDrafting | None = None,
    ):
        model = unstack_layers(_in_auto_mode(model))
        small = None if small is None else unstack_layers(_in_auto_mode(small))
        layout = model.execution.layout
        cache = inference_cache(model, count, length, kind, pages=pages)
        models = Models(model, small, drafting)
        self.model = model
        self.count, self.length, self.chunks, self.block = count, length, chunks, chunks[-1]
        self.rows, self.columns, self.kind = rows, columns, kind
        self.words = -(-model.config.vocab_size // 32)
        self._biases, self._top = biases, top
        tokens = jnp.zeros((count, length), jnp.int32)
        drafts = None if drafting is None else drafting.empty(models.both, count, length, kind)
        state = EngineState(cache=cache, tokens=jax.device_put(tokens, layout.replicated()), drafts=drafts)
        self._state = _each_once(state)
        arrays, self._static = eqx.partition(models, eqx.is_array)
        self._weights, self._weights_tree = jax.tree.flatten(arrays)
        self._everywhere = layout.replicated()
        self._steps = [(count, width) for count in rows for width in columns]
        self._programs: dict[Any, Any] = {}

    @property
    def windows(self) -> dict[int, tuple[int, int]]:
        """As `windows_of` says; empty without pages."""
        return windows_of(self._state.cache)

    @cached_property
    def keeps_rest(self) -> bool:
        """Whether layers remember what cannot be cut by tokens."""
        return len(jax.tree.leaves(jax.eval_shape(_keep_rest, self._state, np.int32(0)))) > 0

    def compile(self) -> None:
        """Compile all programs; what is called later needs no others."""
        slot, at = np.int32(0), np.int32(0)
        for shape in self._steps:
            self._compile(("decode", *shape), partial(_decode, top=self._top), *self._decode_inputs(shape))
        for length in self.chunks:
            self._compile(("prefill", length), partial(_prefill, top=self._top), *self._prefill_inputs(length))
        keep = partial(_keep, length=self.block)
        logits = jax.ShapeDtypeStruct((1, self.model.config.vocab_size), jnp.float32, sharding=self._everywhere)
        first = partial(_first_token, top=self._top)
        self._compile("first token", first, logits, self.asked(1), self._written(np.zeros(1, np.int32)), donates=False)
        self._compile("empty", _empty, slot)
        self._compile("keep", keep, slot, at, donates=False)
        self._compile("restore", _restore, slot, at, jax.eval_shape(keep, self._state, slot, at))
        if self.windows:
            beside = partial(_keep, length=self.block, pages=False)
            self._compile("keep beside", beside, slot, at, donates=False)
            self._compile("restore beside", _restore, slot, at, jax.eval_shape(beside, self._state, slot, at))
            tables = {window: np.zeros((self.count, places), np.int32) for window, (_, places) in self.windows.items()}
            self._compile("tables", _set_tables, tables, np.zeros(self.count, np.int32))
        if self.model.config.media is not None:
            row = jax.eval_shape(lambda: inference_cache(self.model, 1, self.length, self.kind))
            self._compile("take whole", _with_row, slot, row, np.zeros((1, self.length), np.int32))
        self._compile("keep rest", _keep_rest, slot, donates=False)
        self._compile("restore rest", _restore_rest, slot, at, jax.eval_shape(_keep_rest, self._state, slot))

    # --- what the engine asks for ---

    def decode(
        self, slots: Sequence[int], tokens: np.ndarray, positions: np.ndarray, asked: SamplingBatch
    ) -> SampledTokens:
        """One step of some slots, or of all in their order; rows at position -1 rest."""
        rows = np.asarray(slots, np.int32)
        self._state, chosen = self._run(("decode", *tokens.shape), rows, tokens, positions, asked)
        return chosen

    def prefill(
        self, slot: int, tokens: np.ndarray, begin: int, following: np.ndarray, wanted: int, asked: SamplingBatch
    ) -> ChunkResult:
        """One chunk of a slot's prompt, from position `begin` on."""
        length = next(size for size in self.chunks if size >= len(tokens))
        ids, after = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        ids[0, : len(tokens)], after[0, : len(following)] = tokens, following
        index = np.arange(length, dtype=np.int32)[None]
        positions = np.where(index < len(tokens), begin + index, -1).astype(np.int32)
        inputs = np.int32(slot), ids, positions, after, np.int32(wanted), asked
        self._state, result = self._run(("prefill", length), *inputs)
        return result

    def empty(self, slot: int) -> None:
        """Forget what a slot remembers."""
        self._state = self._run("empty", np.int32(slot))

    def keep(self, slot: int, begin: int, *, pages: bool = True) -> CacheSnapshot:
        """What a slot remembers of a block of tokens; without `pages`, of what is not in pages."""
        return self._run("keep" if pages or not self.windows else "keep beside", np.int32(slot), np.int32(begin))

    def keep_rest(self, slot: int) -> Any:
        """What a slot remembers of all its tokens together."""
        return self._run("keep rest", np.int32(slot))

    def kept_bytes(self, tokens: int) -> int:
        """Memory that all takes which is kept of a slot with so many tokens."""
        block, rest = self._kept_sizes
        return -(-tokens // self.block) * block + rest

    @cached_property
    def _kept_sizes(self) -> tuple[int, int]:
        slot = np.int32(0)
        kept = jax.eval_shape(partial(_keep, length=self.block), self._state, slot, slot)
        return _nbytes(kept), _nbytes(jax.eval_shape(_keep_rest, self._state, slot))

    def restore(self, slot: int, begin: int, kept: CacheSnapshot, *, pages: bool = True) -> None:
        """Put back what `keep` gave."""
        name = "restore" if pages or not self.windows else "restore beside"
        self._state = self._run(name, np.int32(slot), np.int32(begin), kept)

    def set_tables(self, tables: dict[int, np.ndarray], lengths: np.ndarray) -> None:
        """Give slots these pages, and say how many tokens they have."""
        self._state = self._run(
            "tables", *jax.tree.map(np.array, (tables, lengths))
        )  # copies, as in `SamplingBatch.of`

    def restore_rest(self, slot: int, length: int, rest: Any) -> None:
        """Put back what `keep_rest` gave, behind so many tokens; None where there is nothing of it."""
        rest = self._no_rest if rest is None else rest
        self._state = self._run("restore rest", np.int32(slot), np.int32(length), rest)

    def first_token(self, logits: Array, prompt: np.ndarray, asked: SamplingBatch) -> SampledTokens:
        """The first token of an answer, from the logits behind its prompt."""
        return self._run("first token", jax.device_put(logits, self._everywhere), asked, self._written(prompt))

    def _written(self, prompt: np.ndarray) -> TokenHistory:
        length, ids = np.asarray([len(prompt)], np.int32), np.zeros((1, self.length), np.int32)
        ids[0, : len(prompt)] = prompt
        return TokenHistory(ids, length, length)

    def take_whole(self, slot: int, cache: Cache, tokens: np.ndarray) -> None:
        """Put a cache of one row, made elsewhere, into a slot, with the tokens that it has seen."""
        ids = np.zeros((1, self.length), np.int32)
        ids[0, : len(tokens)] = tokens
        places = self._programs["take whole"].input_shardings[0][3]
        self._state = self._run("take whole", np.int32(slot), jax.device_put(cache, places), ids)

    # --- programs ---

    @property
    def _no_rest(self) -> Any:
        return jax.tree.map(lambda _: None, self._state.memories, is_leaf=is_memory), None

    def asked(self, rows: int) -> SamplingBatch:
        """Greedy rows, on the host."""
        return SamplingBatch(
            sampling=BatchSamplingParams.empty(rows, self._biases),
            count=np.zeros(rows, np.int32),
            prompt_length=np.zeros(rows, np.int32),
            allowed=np.full((rows, self.words), -1, np.int32),
            masked=np.zeros(rows, bool),
            wants_scores=np.asarray(False),
        )

    def _decode_inputs(self, shape: tuple[int, int]) -> tuple[Any, ...]:
        rows, tokens, positions = (
            np.arange(shape[0], dtype=np.int32),
            np.zeros(shape, np.int32),
            np.full(shape, -1, np.int32),
        )
        return rows, tokens, positions, self.asked(shape[0])

    def _prefill_inputs(self, length: int) -> tuple[Any, ...]:
        ids = np.zeros((1, length), np.int32)
        return np.int32(0), ids, ids, ids, np.int32(0), self.asked(1)

    def _compile(self, name: Any, function: Callable[..., Any], *inputs: Any, donates: bool = True) -> None:
        moves = isinstance(name, str)  # what only moves things needs no weights

        def run(weights: list[Array], state: EngineState, *inputs: Any) -> Any:
            if moves:
                return function(state, *inputs)
            models = eqx.combine(jax.tree.unflatten(self._weights_tree, weights), self._static)
            return function(models, state, *inputs)

        places: Any = None
        if donates:  # the state stays where it is
            kept = jax.tree.map(lambda leaf: leaf.sharding, self._state)
            places = kept if moves else (kept, None)
        jitted = jax.jit(run, donate_argnums=(1,) if donates else (), out_shardings=places)
        given = [] if moves else self._weights
        self._programs[name] = jitted.lower(given, self._state, *inputs).compile()

    def _run(self, name: Any, *inputs: Any) -> Any:
        return self._programs[name]([] if isinstance(name, str) else self._weights, self._state, *inputs)


def _nbytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _first_token(
    state: EngineState, logits: Array, asked: SamplingBatch, written: TokenHistory, *, top: int
) -> SampledTokens:
    """The token behind a prompt."""
    tokens, found = _chosen(logits, asked, written, 1, top)
    return SampledTokens(tokens=tokens[:, None], kept=jnp.ones((1,), jnp.int32), scores=found)


def _with_row(state: EngineState, slot: Int[Array, ""], cache: Cache, tokens: Int[Array, "1 length"]) -> EngineState:
    """A slot with a prompt that was read elsewhere."""
    cache = state.cache.with_row(slot, cache)
    return dataclasses.replace(state, cache=cache, tokens=state.tokens.at[slot].set(tokens[0]))
