"""`ModelRunner`: the device state of an engine, and the few compiled programs that read and change it.

Each program is compiled once, at the start, for one shape: decoding steps of a few batch sizes, prefill chunks of a
few lengths, and what empties, saves and restores a slot. Programs that change the state get it donated.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from eqx_decoders.inference.drafters import Drafter, with_models
from eqx_decoders.inference.unstack import inference_cache, prepare_for_engine
from eqx_decoders.layers.cache.cache import Cache
from eqx_decoders.layers.cache.format import CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.expert_choices import choices_shape
from eqx_decoders.serving.engine import programs
from eqx_decoders.serving.engine.adapters import EngineAdapters
from eqx_decoders.serving.engine.engine_weights import EngineWeights, Models
from eqx_decoders.serving.engine.page_pool import windows_of
from eqx_decoders.serving.engine.programs import CacheSnapshot, EngineState
from eqx_decoders.serving.engine.sampler import (
    SAMPLING_FORMS,
    SampledTokens,
    SamplingBatch,
    SamplingForm,
    SamplingTable,
    Scores,
)


StatePart = Literal["all", "tokens", "none"]  # of an `EngineState`, that a program reads

MOST_COMPILERS = 8  # programs that are compiled at a time: each takes memory of the host


class ChunkResult(NamedTuple):
    """Result of a prefill chunk: the logits after its last token, and the scores of the tokens that follow its own.

    None where they were not asked for.
    """

    logits: Float32[Array, "1 vocab"] | None
    scores: Scores | None


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
        models = Models(
            prepare_for_engine(model), None if drafter is None else with_models(prepare_for_engine, drafter)
        )
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
            experts = jnp.zeros((slots, length, *choices_shape(model.config)), jnp.int16)
        tokens, experts = jax.device_put((tokens, experts), layout.replicated())
        state = EngineState(cache=cache, tokens=tokens, drafts=drafts, experts=experts)
        self._leaves, self._tree = jax.tree.flatten(programs.without_aliases(state))
        place = next(index for index, leaf in enumerate(jax.tree.leaves(state)) if leaf is tokens)
        self._parts = {"all": slice(None), "tokens": slice(place, place + 1), "none": slice(0)}
        self.model = self.weights.model
        sizes = config.max_adapters, config.max_adapter_rank, config.adapter_targets
        self.adapters = EngineAdapters(self.model, *sizes)
        self._replicated = layout.replicated()
        self.slots_per_call = min(slots, layout.backend.slots_per_call)
        self._to_empty: list[int] = []  # slots, before the next program that reads them
        self._programs: dict[Any, Any] = {}
        self._reads: dict[Any, _Reads] = {}
        self._logits_shardings: dict[int, jax.sharding.Sharding] = {}  # of those to sample from, by their number
        self._drafts = models.drafter is not None
        self._forms = (*SAMPLING_FORMS, None) if layout.backend.branches_block_host else (None,)

    def load(self, model: Decoder) -> None:
        """Take the weights of a model like the first (see `EngineWeights.load`)."""
        self.weights.load(prepare_for_engine(model))

    @property
    def _state(self) -> EngineState:
        return jax.tree.unflatten(self._tree, self._leaves)

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """Pages by attention window, as `windows_of` returns them; empty without a paged cache."""
        return windows_of(self._state.cache)

    @cached_property
    def has_state(self) -> bool:
        """True where layers have a state that cannot be cut by tokens, such as a recurrent state."""
        return len(jax.tree.leaves(jax.eval_shape(programs.save_state, self._state, np.int32(0)))) > 0

    @cached_property
    def _is_packed(self) -> bool:
        """True with arrays of 4 bits, which XLA's programs for CPUs take by ordinary calls, compiled at the first."""
        return any(str(leaf.dtype).endswith("int4") for leaf in jax.tree.leaves(self._state))

    # --- programs ---

    def compile(self) -> None:
        """Compile all programs, some at a time; later calls need no others."""
        self.adapters.compile()
        with concurrent.futures.ThreadPoolExecutor(min(MOST_COMPILERS, os.cpu_count() or 1)) as self._compilers:
            self._compile_all()
        self._programs = {name: program.result() for name, program in self._programs.items()}

    def _compile_all(self) -> None:
        config, slot, begin = self.config, np.int32(0), np.int32(0)
        some = np.zeros(self.slots_per_call, np.int32)
        scored = dict(num_top=config.max_logprobs)
        for rows in config.batch_sizes:
            if not self._drafts:
                *inputs, batch = self._decode_inputs(rows, 1)
                self._compile(("forward", rows), programs.forward, *inputs, batch.adapter, weights=True)
            for columns in config.columns if self._drafts else ():
                inputs = self._decode_inputs(rows, columns)
                self._compile(("decode", rows, columns), partial(programs.decode, **scored), *inputs, weights=True)
        self._compile("empty", programs.empty_slots, some)
        decoded = () if self._drafts else zip(config.batch_sizes, config.batch_sizes, strict=True)
        for rows, logits in {(len(some), 1), *decoded}:  # first tokens after one prompt, and tokens of a step
            for form in self._forms:
                if logits > 1 or form is None or form.scores:  # scores of few rows take no time
                    self._compile_sample(rows, logits, form)
        for length in config.chunk_sizes:
            self._compile(("prefill", length), programs.prefill, *self._prefill_inputs(length), weights=True)
            inputs = self._hidden(length), np.zeros((1, length), np.int32)
            scores = partial(programs.prompt_scores, **scored)
            self._compile(("scores", length), scores, *inputs, weights=True, state="none")
        self._compile("logits", programs.next_logits, self._hidden(1), weights=True, state="none")
        save = partial(programs.save, length=self.block_size)
        for pages in {True, not self.windows}:
            self._compile(("save", pages), partial(save, pages=pages), slot, begin, donates=False)
            snapshot = jax.eval_shape(partial(save, pages=pages), self._state, slot, begin)
            snapshot = self._placed_as(("save", pages), snapshot)
            for slots in {1: some[:1], len(some): some}.values():
                self._compile(("restore", pages, len(slots)), programs.restore, slots, begin, begin, snapshot)
        if self.windows:
            tables = {
                window: np.zeros((self.num_slots, pages), np.int32) for window, (_, pages) in self.windows.items()
            }
            self._compile("page tables", programs.set_page_tables, tables, np.zeros(self.num_slots, np.int32))
        if self.model.config.media is not None:
            row = jax.eval_shape(lambda: inference_cache(self.model, 1, self.length, config.cache_format))
            self._compile("insert cache", programs.insert_cache, slot, row, np.zeros((1, self.length), np.int32))
        if config.expert_choices:
            self._compile("experts", lambda state, slot: state.experts[slot], slot, donates=False)
        if self.has_state:
            self._compile("save state", programs.save_state, slot, donates=False)
            saved = self._placed_as("save state", jax.eval_shape(programs.save_state, self._state, slot))
            self._compile("restore state", programs.restore_state, slot, saved)

    # --- forward passes ---

    def decode(
        self,
        slots: Sequence[int],
        tokens: np.ndarray,
        positions: np.ndarray,
        batch: SamplingBatch,
        form: SamplingForm | None,
    ) -> SampledTokens:
        """Run one decoding step of some slots, or of all in their order; rows at position -1 are idle.

        A first token of -1 stands for the one that the last program of its slot has sampled.
        """
        rows = np.asarray(slots, np.int32)
        if self._drafts:
            return self._run(("decode", *tokens.shape), rows, tokens, positions, batch)
        logits = self._run(("forward", len(rows)), rows, tokens, positions, batch.adapter)
        return self._sample(rows, positions[:, 0], logits, batch, form)

    def prefill(
        self,
        slot: int,
        tokens: np.ndarray,
        begin: int,
        following: np.ndarray,
        batch: SamplingBatch,
        *,
        next_token: bool,
        scores: bool,
    ) -> ChunkResult:
        """Prefill one chunk of a slot's prompt, from position `begin` on.

        **Arguments:**

        - `following`: the token after each.
        - `next_token`: return the logits after the last one.
        - `scores`: return the scores of those in `following`.
        """
        length = next(size for size in self.config.chunk_sizes if size >= len(tokens))
        ids, next_ids = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
        ids[0, : len(tokens)], next_ids[0, : len(following)] = tokens, following
        index = np.arange(length, dtype=np.int32)[None]
        positions = np.where(index < len(tokens), begin + index, -1).astype(np.int32)
        inputs = np.int32(slot), ids, positions, next_ids, np.asarray(next_token), batch
        hidden, last = self._run(("prefill", length), *inputs)
        logits = self._run("logits", last) if next_token else None
        return ChunkResult(logits, self._run(("scores", length), hidden, next_ids) if scores else None)

    def first_tokens(
        self, slots: np.ndarray, prompt_length: int, logits: Array, batch: SamplingBatch, form: SamplingForm | None
    ) -> SampledTokens:
        """Sample the first tokens of answers from the logits after their prompt, which is in the slots.

        Slots are a group of `together`.
        """
        logits = jax.device_put(logits, self._logits_shardings[1])  # they may be those of another program
        ends = np.where(slots < self.num_slots, prompt_length - 1, -1).astype(np.int32)
        return self._sample(slots, ends, logits, batch, form)

    def _sample(
        self, slots: np.ndarray, positions: np.ndarray, logits: Array, batch: SamplingBatch, form: SamplingForm | None
    ) -> SampledTokens:
        if form is not None and len(logits) == 1:
            form = form._replace(scores=True)
        name = "sample", len(slots), len(logits), form if form in self._forms else None
        return self._run(name, slots, positions, logits, batch)

    # --- slots ---

    def empty(self, slot: int) -> None:
        """Clear a slot, together with others that are cleared before a program reads any."""
        self._to_empty.append(slot)

    def save(self, slot: int, begin: int, *, pages: bool = True) -> CacheSnapshot:
        """Copy the cache entries of a block of tokens of a slot; without `pages`, skip paged layers."""
        return self._run(("save", pages or not self.windows), np.int32(slot), np.int32(begin))

    def experts(self, slot: int) -> Array:
        """Return the experts of the tokens of a slot, `[length, layers, choices]`."""
        return self._run("experts", np.int32(slot))

    def save_state(self, slot: int) -> Any:
        """Copy the recurrent and convolution states of a slot; None for models without such states."""
        return self._run("save state", np.int32(slot)) if self.has_state else None

    def saved_bytes(self, tokens: int) -> int:
        """Return the memory that a saved slot with so many tokens takes."""
        block, state = self._saved_sizes
        return -(-tokens // self.block_size) * block + state

    @cached_property
    def _saved_sizes(self) -> tuple[int, int]:
        slot = np.int32(0)
        block = jax.eval_shape(partial(programs.save, length=self.block_size), self._state, slot, slot)
        return _nbytes(block), _nbytes(jax.eval_shape(programs.save_state, self._state, slot))

    def restore(
        self, slots: Sequence[int], begin: int, end: int, snapshot: CacheSnapshot, *, pages: bool = True
    ) -> None:
        """Write back what `save` returned into each of some slots, which then have `end` tokens."""
        for group in self.together(slots) if len(slots) > 1 else [np.asarray(slots, np.int32)]:
            name = "restore", pages or not self.windows, len(group)
            self._run(name, group, np.int32(begin), np.int32(end), snapshot)

    def together(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Split slots into groups of `slots_per_call`, for one call each; `num_slots` stands for none."""
        size = self.slots_per_call
        return list(np.asarray([*slots, *[self.num_slots] * (-len(slots) % size)], np.int32).reshape(-1, size))

    def restore_state(self, slot: int, saved: Any) -> None:
        """Write back what `save_state` returned."""
        if self.has_state:
            self._run("restore state", np.int32(slot), saved)

    def set_page_tables(self, tables: dict[int, np.ndarray], lengths: np.ndarray) -> None:
        """Set the page tables and lengths of all slots."""
        inputs = jax.tree.map(np.array, (tables, lengths))  # copies, as in `SamplingBatch.of`
        self._run("page tables", *inputs)

    def insert_cache(self, slot: int, cache: Cache, tokens: np.ndarray) -> None:
        """Write a cache of one row, prefilled outside the engine state, into a slot, with its tokens."""
        ids = np.zeros((1, self.length), np.int32)
        ids[0, : len(tokens)] = tokens
        if not self._is_packed:  # a compiled program takes arguments only where it has placed them
            cache = jax.device_put(cache, self._programs["insert cache"].input_shardings[0][3])
        self._run("insert cache", np.int32(slot), cache, ids)

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
        return np.int32(0), ids, ids, ids, np.asarray(False), self.sampling_table(1).of([0], False)

    def _hidden(self, length: int) -> jax.ShapeDtypeStruct:
        """Return the shape of hidden states of a prompt's tokens."""
        shape = 1, length, self.model.config.hidden_features
        return jax.ShapeDtypeStruct(shape, self.model.execution.precision.compute, sharding=self._replicated)

    def _compile_sample(self, rows: int, num_logits: int, form: SamplingForm | None) -> None:
        """Compile `programs.sample`; it reads logits where the forward pass leaves them."""
        outputs = self._output_shardings(("forward", num_logits))
        sharding = self._replicated if outputs is None else outputs[1]
        self._logits_shardings[num_logits] = sharding
        logits = jax.ShapeDtypeStruct((num_logits, self.model.config.vocab_size), jnp.float32, sharding=sharding)
        slots = np.arange(rows, dtype=np.int32)
        inputs = slots, slots, logits, self.sampling_table(rows).of(slots, False)
        sample = partial(programs.sample, num_top=self.config.max_logprobs, form=form)
        self._compile(("sample", rows, num_logits, form), sample, *inputs, state="tokens", reports=self._replicated)

    def _compile(
        self,
        name: Any,
        function: Callable[..., Any],
        *inputs: Any,
        weights: bool = False,
        state: StatePart = "all",
        donates: bool = True,
        reports: Any = None,
    ) -> None:
        """Start to compile a function of the models and of the state, as far as it reads them, and of inputs.

        What reads the state changes it and gets it donated, if it `donates`: it returns it. What reads weights as well
        returns something else beside it, and so does what `reports`, with this sharding.
        """

        def run(arrays: Any, leaves: list[Array], *inputs: Any) -> Any:
            read: list[Any] = []
            if weights:
                models = self.weights.combined(arrays[0])
                read.append(Models(self.adapters.with_pairs(models.model, arrays[1]), models.drafter))
            if state != "none":
                read.append(leaves[0] if state == "tokens" else jax.tree.unflatten(self._tree, leaves))
            result = function(*read, *inputs)
            if not donates:
                return result
            new, report = result if reports_more else (result, None)
            return jax.tree.leaves(new), report

        donates, reports_more = donates and state != "none", weights or reports is not None
        self._reads[name] = _Reads(weights, self._parts[state], donates)
        shardings: Any = None
        if donates:  # the state stays where it is
            shardings = [leaf.sharding for leaf in self._arrays_of(name)[1]], reports
        jitted = jax.jit(run, donate_argnums=(1,) if donates else (), out_shardings=shardings)
        compiled = (lambda: jitted) if self._is_packed else jitted.lower(*self._arrays_of(name), *inputs).compile
        self._programs[name] = self._compilers.submit(compiled)

    def _output_shardings(self, name: Any) -> Any:
        """Return where a program leaves its results on a mesh; None on one device, and without such a program."""
        if len(self._replicated.device_set) == 1 or self._is_packed or name not in self._programs:
            return None
        return self._programs[name].result().output_shardings

    def _placed_as(self, name: Any, shapes: Any) -> Any:
        """Add to the shapes of a program's results where it leaves them."""
        outputs = self._output_shardings(name)
        if outputs is None:
            return shapes
        return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, outputs)

    def _arrays_of(self, name: Any) -> tuple[Any, list[Array]]:
        reads = self._reads[name]
        arrays = (self.weights.arrays, self.adapters.arrays) if reads.weights else None
        return arrays, self._leaves[reads.part]

    def _run(self, name: Any, *inputs: Any) -> Any:
        """Run a program, put what it changes in place of the state, and return what it returns besides."""
        reads = self._reads[name]
        if self._to_empty and reads.part == self._parts["all"]:
            slots, self._to_empty = self._to_empty, []
            for group in self.together(slots):
                self._run("empty", group)
        result = self._programs[name](*self._arrays_of(name), *inputs)
        if reads.donates:
            self._leaves[reads.part], result = result
        return result


class _Reads(NamedTuple):
    """What a program reads besides its inputs: weights, and a part of the state, which it changes if it `donates`."""

    weights: bool
    part: slice
    donates: bool


def _nbytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
