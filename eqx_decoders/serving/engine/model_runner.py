"""`ModelRunner`: the device state of an engine, and the compiled programs that read and update it.

All programs are compiled once, at the start: decoding steps for a few batch sizes, prefill chunks of a few lengths, and
programs that empty, save and restore a slot. Programs that update the state have it as a donated argument.
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
    SAMPLING_VARIANTS,
    SampledTokens,
    SamplingBatch,
    SamplingTable,
    SamplingVariant,
    Scores,
)


StatePart = Literal["all", "tokens", "none"]  # the part of `EngineState` that a program reads

MAX_COMPILERS = 8  # number of parallel compilations, which is limited because each takes host memory


class ChunkResult(NamedTuple):
    """Result of a prefill chunk: logits after its last token, and scores of the next token at each position.

    None: not requested.
    """

    logits: Float32[Array, "1 vocab"] | None
    scores: Scores | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Sizes of the device state and of the compiled programs.

    **Arguments:**

    - `num_slots`: number of slots.
    - `length`: maximum number of tokens per slot.
    - `chunk_sizes`: lengths of prefill chunks in increasing order. The last one is the block size of the prefix cache.
    - `batch_sizes`: numbers of slots that a decoding step can compute.
    - `columns`: numbers of tokens that a decoding step can feed per slot: 1, and 1 plus the number of drafts.
    - `max_biases`: maximum number of logit biases per request.
    - `max_logprobs`: maximum number of most likely tokens to report.
    - `cache_format`: dtype or quantization of keys and values.
    - `pages`: configuration of a paged cache. None: the cache is contiguous.
    - `expert_choices`: whether to store the experts that tokens were routed to.
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
    """Device state of all slots, and the compiled programs that read and update it."""

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
        index = next(index for index, leaf in enumerate(jax.tree.leaves(state)) if leaf is tokens)
        self._parts = {"all": slice(None), "tokens": slice(index, index + 1), "none": slice(0)}
        self.model = self.weights.model
        self.adapters = EngineAdapters(self.model, config.max_adapters, config.max_adapter_rank, config.adapter_targets)
        self._replicated = layout.replicated()
        self.slots_per_call = min(slots, layout.backend.slots_per_call)
        self._slots_to_empty: list[int] = []  # emptied together before the next program that reads the cache
        self._programs: dict[Any, Any] = {}
        self._inputs: dict[Any, _ProgramInputs] = {}
        self._logits_shardings: dict[int, jax.sharding.Sharding] = {}  # by the number of rows of logits
        self._drafts = models.drafter is not None
        self._variants = (*SAMPLING_VARIANTS, None) if layout.backend.branches_block_host else (None,)

    def load(self, model: Decoder) -> None:
        """Replace the weights (see `EngineWeights.load`)."""
        self.weights.load(prepare_for_engine(model))

    @property
    def _state(self) -> EngineState:
        return jax.tree.unflatten(self._tree, self._leaves)

    @cached_property
    def windows(self) -> dict[int, tuple[int, int]]:
        """Result of `windows_of`. Empty: the cache is not paged."""
        return windows_of(self._state.cache)

    @cached_property
    def has_state(self) -> bool:
        """True if layers have a state without an entry per token, such as a recurrent state."""
        return len(jax.tree.leaves(jax.eval_shape(programs.save_state, self._state, np.int32(0)))) > 0

    @cached_property
    def _is_packed(self) -> bool:
        """True with int4 arrays.

        XLA:CPU supports them only in calls of jitted functions, which compile at the first call.
        """
        return any(str(leaf.dtype).endswith("int4") for leaf in jax.tree.leaves(self._state))

    # --- programs ---

    def compile(self) -> None:
        """Compile all programs in parallel."""
        self.adapters.compile()
        with concurrent.futures.ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1)) as self._compilers:
            self._compile_all()
        self._programs = {name: program.result() for name, program in self._programs.items()}

    def _compile_all(self) -> None:
        config, slot, begin = self.config, np.int32(0), np.int32(0)
        slot_group = np.zeros(self.slots_per_call, np.int32)
        decode = partial(programs.decode, num_top=config.max_logprobs)
        scores = partial(programs.prompt_scores, num_top=config.max_logprobs)
        for rows in config.batch_sizes:
            if not self._drafts:
                *inputs, batch = self._decode_inputs(rows, 1)
                self._compile(("forward", rows), programs.forward, *inputs, batch.adapter, weights=True)
            for columns in config.columns if self._drafts else ():
                inputs = self._decode_inputs(rows, columns)
                self._compile(("decode", rows, columns), decode, *inputs, weights=True)
        self._compile("empty", programs.empty_slots, slot_group)
        # pairs of rows to sample and rows of logits: first tokens after one prompt, and tokens of a decoding step
        decoded = () if self._drafts else zip(config.batch_sizes, config.batch_sizes, strict=True)
        for rows, logits in {(len(slot_group), 1), *decoded}:
            for variant in self._variants:
                if logits > 1 or variant is None or variant.scores:  # one row always computes scores: they cost little
                    self._compile_sample(rows, logits, variant)
        for length in config.chunk_sizes:
            self._compile(("prefill", length), programs.prefill, *self._prefill_inputs(length), weights=True)
            inputs = self._hidden(length), np.zeros((1, length), np.int32)
            self._compile(("scores", length), scores, *inputs, weights=True, state="none")
        self._compile("logits", programs.next_logits, self._hidden(1), weights=True, state="none")
        save = partial(programs.save, length=self.block_size)
        for pages in {True, not self.windows}:
            self._compile(("save", pages), partial(save, pages=pages), slot, begin, donates=False)
            snapshot = jax.eval_shape(partial(save, pages=pages), self._state, slot, begin)
            snapshot = self._placed_as(("save", pages), snapshot)
            for slots in {1: slot_group[:1], len(slot_group): slot_group}.values():
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
        variant: SamplingVariant | None,
    ) -> SampledTokens:
        """Run one decoding step.

        **Arguments:**

        - `slots`: slot of each row: a subset of the slots, or all slots in order.
        - `tokens`: input tokens of each row. -1 in the first column: the token that was sampled last in this slot.
        - `positions`: positions of the tokens. -1: the row is idle.
        - `batch`, `variant`: sampling inputs.
        """
        rows = np.asarray(slots, np.int32)
        if self._drafts:
            return self._run(("decode", *tokens.shape), rows, tokens, positions, batch)
        logits = self._run(("forward", len(rows)), rows, tokens, positions, batch.adapter)
        return self._sample(rows, positions[:, 0], logits, batch, variant)

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
        """Prefill one chunk of the prompt of a slot, starting at position `begin`.

        **Arguments:**

        - `following`: the next token after each token of the chunk.
        - `next_token`: whether to return the logits after the last token.
        - `scores`: whether to return the scores of the tokens in `following`.
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
        self,
        slots: np.ndarray,
        prompt_length: int,
        logits: Array,
        batch: SamplingBatch,
        variant: SamplingVariant | None,
    ) -> SampledTokens:
        """Sample the first output tokens of slots with the same prompt. `slots`: one of the `slot_groups`."""
        logits = jax.device_put(logits, self._logits_shardings[1])  # different programs return different shardings
        ends = np.where(slots < self.num_slots, prompt_length - 1, -1).astype(np.int32)
        return self._sample(slots, ends, logits, batch, variant)

    def _sample(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        logits: Array,
        batch: SamplingBatch,
        variant: SamplingVariant | None,
    ) -> SampledTokens:
        if variant is not None and len(logits) == 1:
            variant = variant._replace(scores=True)
        name = "sample", len(slots), len(logits), variant if variant in self._variants else None
        return self._run(name, slots, positions, logits, batch)

    # --- slots ---

    def empty(self, slot: int) -> None:
        """Empty a slot. Slots are emptied together, before the next program that reads the cache."""
        self._slots_to_empty.append(slot)

    def save(self, slot: int, begin: int, *, pages: bool = True) -> CacheSnapshot:
        """Copy the keys and values of one block of tokens of a slot. `pages=False`: without paged layers."""
        return self._run(("save", pages or not self.windows), np.int32(slot), np.int32(begin))

    def experts(self, slot: int) -> Array:
        """Return the experts of the tokens of a slot, of shape `[length, layers, choices]`."""
        return self._run("experts", np.int32(slot))

    def save_state(self, slot: int) -> Any:
        """Copy the recurrent and convolution states of a slot. None: the model has no such states."""
        return self._run("save state", np.int32(slot)) if self.has_state else None

    def saved_bytes(self, num_tokens: int) -> int:
        """Return the memory in bytes of a saved slot with `num_tokens` tokens."""
        block, state = self._saved_sizes
        return -(-num_tokens // self.block_size) * block + state

    @cached_property
    def _saved_sizes(self) -> tuple[int, int]:
        slot = np.int32(0)
        block = jax.eval_shape(partial(programs.save, length=self.block_size), self._state, slot, slot)
        return _nbytes(block), _nbytes(jax.eval_shape(programs.save_state, self._state, slot))

    def restore(
        self, slots: Sequence[int], begin: int, end: int, snapshot: CacheSnapshot, *, pages: bool = True
    ) -> None:
        """Write the result of `save` into slots, and set their lengths to `end` tokens."""
        for group in self.slot_groups(slots) if len(slots) > 1 else [np.asarray(slots, np.int32)]:
            name = "restore", pages or not self.windows, len(group)
            self._run(name, group, np.int32(begin), np.int32(end), snapshot)

    def slot_groups(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Split slots into groups of size `slots_per_call`, each for one call.

        Padded with `num_slots`, which is ignored.
        """
        size = self.slots_per_call
        return list(np.asarray([*slots, *[self.num_slots] * (-len(slots) % size)], np.int32).reshape(-1, size))

    def restore_state(self, slot: int, saved: Any) -> None:
        """Write the result of `save_state` into a slot."""
        if self.has_state:
            self._run("restore state", np.int32(slot), saved)

    def set_page_tables(self, tables: dict[int, np.ndarray], lengths: np.ndarray) -> None:
        """Set the page tables and lengths of all slots."""
        inputs = jax.tree.map(np.array, (tables, lengths))  # copies, as in `SamplingBatch.select`
        self._run("page tables", *inputs)

    def insert_cache(self, slot: int, cache: Cache, tokens: np.ndarray) -> None:
        """Write the cache (with one row) and the tokens of a separately prefilled prompt into a slot."""
        ids = np.zeros((1, self.length), np.int32)
        ids[0, : len(tokens)] = tokens
        if not self._is_packed:  # compiled programs require the shardings that they were compiled for
            cache = jax.device_put(cache, self._programs["insert cache"].input_shardings[0][3])
        self._run("insert cache", np.int32(slot), cache, ids)

    # --- calls of programs ---

    def sampling_table(self, rows: int) -> SamplingTable:
        """Return a table of sampling inputs for greedy decoding, to be filled by `set`."""

        def put(array: np.ndarray) -> Array:
            return jax.make_array_from_callback(array.shape, self._replicated, lambda index: array[index])

        return SamplingTable(SamplingBatch.greedy(rows, self._mask_words, self.config.max_biases), put)

    def _decode_inputs(self, rows: int, columns: int) -> tuple[Any, ...]:
        slots, shape = np.arange(rows, dtype=np.int32), (rows, columns)
        return (
            slots,
            np.zeros(shape, np.int32),
            np.full(shape, -1, np.int32),
            self.sampling_table(rows).batch_of(slots, False),
        )

    def _prefill_inputs(self, length: int) -> tuple[Any, ...]:
        ids = np.zeros((1, length), np.int32)
        return np.int32(0), ids, ids, ids, np.asarray(False), self.sampling_table(1).batch_of([0], False)

    def _hidden(self, length: int) -> jax.ShapeDtypeStruct:
        """Return the shape of the hidden states of `length` tokens."""
        shape = 1, length, self.model.config.hidden_features
        return jax.ShapeDtypeStruct(shape, self.model.execution.precision.compute, sharding=self._replicated)

    def _compile_sample(self, rows: int, num_logits: int, variant: SamplingVariant | None) -> None:
        """Compile `programs.sample` for logits with the sharding that the forward pass returns."""
        outputs = self._output_shardings(("forward", num_logits))
        sharding = self._replicated if outputs is None else outputs[1]
        self._logits_shardings[num_logits] = sharding
        logits = jax.ShapeDtypeStruct((num_logits, self.model.config.vocab_size), jnp.float32, sharding=sharding)
        slots = np.arange(rows, dtype=np.int32)
        inputs = slots, slots, logits, self.sampling_table(rows).batch_of(slots, False)
        sample = partial(programs.sample, num_top=self.config.max_logprobs, variant=variant)
        self._compile(
            ("sample", rows, num_logits, variant), sample, *inputs, state="tokens", result_sharding=self._replicated
        )

    def _compile(
        self,
        name: Any,
        function: Callable[..., Any],
        *inputs: Any,
        weights: bool = False,
        state: StatePart = "all",
        donates: bool = True,
        result_sharding: Any = None,
    ) -> None:
        """Start to compile `function`, whose arguments are the models and the state (if it reads them) and `inputs`.

        **Arguments:**

        - `weights`: whether the function reads the models.
        - `state`: the part of the state that it reads.
        - `donates`: whether it updates that part, which is then donated, and returned first. A function that also reads
            the models, or has a `result_sharding`, returns a pair of the new state and a result.
        - `result_sharding`: sharding of the result.
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
            new, result = result if has_result else (result, None)
            return jax.tree.leaves(new), result

        donates = donates and state != "none"
        has_result = weights or result_sharding is not None
        self._inputs[name] = _ProgramInputs(weights, self._parts[state], donates)
        shardings: Any = None
        if donates:  # the state keeps its shardings
            shardings = [leaf.sharding for leaf in self._arrays_of(name)[1]], result_sharding
        jitted = jax.jit(run, donate_argnums=(1,) if donates else (), out_shardings=shardings)
        compiled = (lambda: jitted) if self._is_packed else jitted.lower(*self._arrays_of(name), *inputs).compile
        self._programs[name] = self._compilers.submit(compiled)

    def _output_shardings(self, name: Any) -> Any:
        """Return the shardings of a program's results. None: on one device, or if the program does not exist."""
        if len(self._replicated.device_set) == 1 or self._is_packed or name not in self._programs:
            return None
        return self._programs[name].result().output_shardings

    def _placed_as(self, name: Any, shapes: Any) -> Any:
        """Return the shapes of a program's results with their shardings."""
        outputs = self._output_shardings(name)
        if outputs is None:
            return shapes
        return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, outputs)

    def _arrays_of(self, name: Any) -> tuple[Any, list[Array]]:
        program_inputs = self._inputs[name]
        arrays = (self.weights.arrays, self.adapters.arrays) if program_inputs.weights else None
        return arrays, self._leaves[program_inputs.state]

    def _run(self, name: Any, *inputs: Any) -> Any:
        """Run a program, update the state, and return the program's other result."""
        program_inputs = self._inputs[name]
        if self._slots_to_empty and program_inputs.state == self._parts["all"]:
            slots, self._slots_to_empty = self._slots_to_empty, []
            for group in self.slot_groups(slots):
                self._run("empty", group)
        result = self._programs[name](*self._arrays_of(name), *inputs)
        if program_inputs.donates:
            self._leaves[program_inputs.state], result = result
        return result


class _ProgramInputs(NamedTuple):
    """Inputs of a program besides its arguments.

    `weights`: whether it reads the models; `state`: slice of the state's leaves that it reads; `donates`: whether it
    updates them.
    """

    weights: bool
    state: slice
    donates: bool


def _nbytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
