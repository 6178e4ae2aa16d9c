"""`Engine`: continuous batching of many requests. `Scheduler` plans each step, and `ModelRunner` computes it."""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array

from eqx_decoders.errors import check, check_option
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.adapters import AdapterPairs, adapter_pairs
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.multimodal_prefill import (
    MultimodalPrefill,
    error_message,
    features_bytes,
    wait_for_any,
)
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput
from eqx_decoders.serving.engine.scheduler import Scheduler
from eqx_decoders.serving.engine.sequence import SequenceState, SharedPrompt, SharedPromptCache
from eqx_decoders.serving.engine.slot_manager import SlotManager, padded_slots
from eqx_decoders.serving.engine.step_results import PromptChunk, ResultReader, StepResults


class Engine:
    """Continuous batching engine. Each request gets the same tokens as if it were the only request.

    Requests can be submitted and cancelled between steps. A step decodes the next token of every running request and
    prefills chunks of prompts within `token_budget`, round-robin. A step is dispatched before the results of the
    previous step are read, so that the device computes while the host schedules; drafts and constraints need the
    results first. `warm_up` (or the first step) compiles all programs except those for images, videos and audio, whose
    shapes vary: background threads compile these. In idle steps, finished conversations are prefilled for the prefix
    cache. All methods must be called from one thread.

        engine = Engine(model, EngineConfig(max_batch_size=4))
        request_id = engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=20))
        while engine.has_work:
            for output in engine.step():
                ...
    """

    def __init__(self, model: Decoder, config: EngineConfig = EngineConfig()):
        config.check_model(model)
        self.model = model
        self.config = config
        self.version = 0
        self._slot_manager = SlotManager.create(model, config)
        self._runner = self._slot_manager.runner
        self._multimodal = None
        if model.config.media is not None:
            cache_format = self._runner.config.cache_format
            self._multimodal = MultimodalPrefill(self._runner.weights.loaded.model, config.max_length, cache_format)
        self._scheduler = Scheduler(self._slot_manager, config, self._drain)
        self._shared_prompts = SharedPromptCache()
        self._reader = ResultReader(
            release=self._scheduler.release,
            charge=self._scheduler.queue.charge,
            on_finished=self._scheduler.prefix_warmup.add,
            read_experts=self._runner.experts if config.expert_choices else None,
        )
        self._in_flight: list[StepResults] = []  # dispatched steps with unread results, the oldest one first
        self._last_submitted: Any = lambda: None  # weak reference to the last submitted sequence
        self._ids = itertools.count()
        self._is_compiled = False

    # --- public methods ---

    def warm_up(self) -> None:
        """Compile all programs."""
        if not self._is_compiled:
            self._runner.compile()
            self._is_compiled = True

    def load(
        self, model: Decoder, *, version: int | None = None, running: Literal["refuse", "keep", "recompute"] = "refuse"
    ) -> None:
        """Replace the weights by those of another model with the same configuration.

        Nothing is recompiled. Arrays are copied only if their dtype or sharding differs from the first model. The
        prefix cache is cleared.

        **Arguments:**

        - `version`: version of the new weights, reported as `RequestOutput.version`. None: the previous version + 1.
        - `running`: what happens to unfinished requests. "refuse": raise ConfigError; "keep": continue with the keys
            and values that the previous weights computed; "recompute": compute them again with the new weights. Tokens
            that were generated stay in all cases.

        Raises ConfigError for a model with other parameters, or for unfinished requests with `running="refuse"`.
        """
        check_option("running", running, ("refuse", "keep", "recompute"))
        self._runner.adapters.check_new_weights()
        self._drain()
        self.clear_prefix_cache()
        check(
            running != "refuse" or not self._reader.unfinished,
            f"Engine.load: {len(self._reader.unfinished)} requests are unfinished: call step until has_work is False, "
            f"cancel them, or pass running='keep' or running='recompute'.",
        )
        self._runner.load(model)
        if self._multimodal is not None:
            self._multimodal.load(self._runner.weights.loaded.model)
        self._slot_manager.prefix_cache.renew()
        self._scheduler.renew(recompute=running == "recompute")
        self._shared_prompts = SharedPromptCache()
        self._last_submitted = lambda: None
        self.model = model
        self.version = self.version + 1 if version is None else version

    def release(self) -> None:
        """Release the weights, so that a training step can reuse their memory. Call `load` before the next step."""
        self._drain()
        self._runner.weights.release()
        self.model = self._runner.model
        if self._multimodal is not None:
            self._multimodal.release()

    def load_adapter(self, name: str, adapter: Decoder | Mapping[str, AdapterPairs]) -> None:
        """Load an adapter for requests with this `Request.adapter`.

        Requests with different adapters run in one batch. Nothing is recompiled. The prefix cache is not shared between
        adapters.

        **Arguments:**

        - `adapter`: a model with low-rank pairs, from `load_peft` or `add_lora`, or the result of `adapter_pairs`.

        Raises ConfigError if the name is loaded already, if `max_adapters` adapters are loaded, or if the shapes do not
        fit the model, `max_adapter_rank` and `adapter_targets`.
        """
        pairs = adapter_pairs(adapter) if isinstance(adapter, Decoder) else adapter
        sequences = itertools.chain(self._slot_manager.sequences.values(), self._reader.unfinished.values())
        self._runner.adapters.load(name, pairs, (sequence.adapter for sequence in sequences))

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter. New requests are refused, and its memory is reused when its last request has finished.

        Raises ConfigError for an unknown name.
        """
        self._scheduler.drop_warmups(self._runner.adapters.drop(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(adapter.name for adapter in self._runner.adapters.loaded)

    def submit(self, request: Request) -> int:
        """Add a request to the waiting queue, and return the id that its outputs have.

        Raises ConfigError for a request that can never be served, and QueueFull if too many requests are waiting.
        """
        self.config.check_request(request, self.model.config.vocab_size)
        if self._slot_manager.block_manager is not None:
            max_length = len(request.prompt) + request.max_new_tokens
            self._slot_manager.block_manager.check_fits(max_length, self.config.prefill_chunk)
        self._scheduler.queue.check_room(request)
        adapter = self._runner.adapters.find(request.adapter)
        sequence = SequenceState(request_id=next(self._ids), request=request, adapter=adapter)
        last: SequenceState | None = self._last_submitted()
        if last is not None and last.has_same_prompt(request) and last.adapter is adapter:
            sequence.join(last.shared)
            sequence.block_hashes = last.block_hashes
        else:
            sequence.join(SharedPrompt(features_bytes=features_bytes(self._multimodal, request)))
            if request.media is None:
                hash_blocks = self._slot_manager.prefix_cache.hash_blocks
                sequence.block_hashes = hash_blocks(request.prompt, sequence.salt)
        self._last_submitted = weakref.ref(sequence)
        self._reader.unfinished[sequence.request_id] = sequence
        self._scheduler.enqueue(sequence)
        return sequence.request_id

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests that are submitted together and exceed the size of the waiting queue."""
        self.config.check_together(requests)

    def cancel(self, request_id: int) -> None:
        """Cancel a request. Its last output has the finish reason "cancelled". Unknown and finished ids are ignored."""
        sequence = self._reader.unfinished.get(request_id)
        if sequence is None:
            return
        self._scheduler.queue.remove(request_id)
        self._reader.finish(sequence, RequestOutput(request_id=request_id, finish_reason="cancelled"))
        self._scheduler.prefix_warmup.add(sequence)  # clients also cancel at stop strings, and then ask the next turn

    def close(self) -> None:
        """Stop background encoding and compilation. The engine cannot be used afterwards."""
        if self._multimodal is not None:
            self._multimodal.close()

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to compute or return, including warm-ups of the prefix cache."""
        return bool(
            self._reader.unfinished
            or self._reader.outputs
            or self._slot_manager.sequences  # a warm-up
            or self._scheduler.prefix_warmup
        )

    def step(self) -> list[RequestOutput]:
        """Return the outputs of one step. If possible, the next step is dispatched before the results are awaited."""
        self.warm_up()
        self._in_flight = [results for results in self._in_flight if self._reader.has_unfinished(results)]
        if not self._in_flight:
            self._dispatch()
        if self._in_flight and self._can_dispatch_ahead():
            self._dispatch()
        if self._in_flight:
            self._reader.read(self._in_flight.pop(0), self.version)
        elif not (self._slot_manager.sequences or self._reader.outputs):
            wait_for_any([sequence.shared.encoding for sequence in self._scheduler.queue])
        outputs, self._reader.outputs = self._reader.outputs, []
        return outputs

    def run(self, requests: Iterable[Request]) -> list[tuple[int, ...]]:
        """Return the generated tokens of each request, in order. The engine must have no other unfinished requests."""
        order: list[int] = []
        completions: dict[int, tuple[int, ...]] = {}

        def step() -> None:
            for output in self.step():
                check(output.finish_reason != "error", f"request {output.request_id} failed: {output.error}")
                completions[output.request_id] += output.tokens

        for request in requests:
            while self._scheduler.queue.is_full_for(request):
                step()
            order.append(self.submit(request))
            completions[order[-1]] = ()
        while self.has_work:
            step()
        return [completions[request_id] for request_id in order]

    def clear_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache, and all warm-ups."""
        self._scheduler.prefix_warmup.clear()
        if self._scheduler.prefix_warmup.current is not None:
            self._scheduler.release(self._scheduler.prefix_warmup.current)
        self._slot_manager.prefix_cache.clear()

    def counts(self) -> EngineStats:
        """Return the current statistics."""
        waiting = len(self._scheduler.queue)
        return EngineStats(
            running=len(self._reader.unfinished) - waiting,
            waiting=waiting,
            cache_usage=self._slot_manager.usage,
            preemptions=self._scheduler.preemptions,
            **self._reader.totals,
        )

    # --- steps ---

    def _can_dispatch_ahead(self) -> bool:
        """Return whether another step is needed and does not depend on unread results."""
        uses_drafts = self.config.drafts is not None
        running = [sequence for sequence in self._slot_manager.sequences.values() if not sequence.is_warmup]
        if any(results.has_awaited_scores for results in self._in_flight):
            return False
        if any(sequence.needs_results(drafts=uses_drafts) for sequence in running):
            return False
        return len(running) > 0 or len(self._scheduler.queue) > 0

    def _drain(self) -> bool:
        """Read the results of all dispatched steps. Returns whether there were any."""
        any_results = any(results.sequences for results in self._in_flight)
        for results in self._in_flight:
            self._reader.read(results, self.version)
        return any_results

    def _dispatch(self) -> None:
        """Schedule and dispatch one step without waiting for results."""
        results = StepResults()
        self._in_flight.append(results)
        if self._multimodal is not None and any(map(SequenceState.needs_encoding, self._scheduler.queue)):
            self._multimodal.schedule_encoding(self._scheduler.queue.ordered(SequenceState.needs_media))
        while (sequence := self._scheduler.admit_next()) is not None:
            self._start_sequence(sequence, results)
        if (warmup := self._scheduler.admit_warmup()) is not None:
            self._start_sequence(warmup, results)
        if self._slot_manager.sequences:
            self._start_prompts(results)
            self._reader.count(steps=1)
            decoding = self._scheduler.schedule_decode()
            prefill_budget = self.config.token_budget - len(decoding)
            chunks = self._scheduler.schedule_prefill(prefill_budget, decodes=len(decoding) > 0)
            self._prepare_sampling(decoding)
            self._slot_manager.set_page_tables()
            self._decode(decoding, results)
            for sequence, begin, count in chunks:
                self._prefill(sequence, begin, count, results)
        results.start_copies()
        self._in_flight = [results for results in self._in_flight if results.sequences]

    def _start_sequence(self, sequence: SequenceState, results: StepResults) -> None:
        """Start the prefill of a sequence that was assigned a slot. A resumed sequence continues to decode."""
        if sequence.is_decoding:
            return
        if sequence.request.media is not None:
            self._prefill_multimodal(sequence, results)
        else:
            self._scheduler.prefilling.append(sequence)

    # --- prefill ---

    def _start_prompts(self, results: StepResults) -> None:
        """Restore the cached prefixes of new prompts. Prompts wait if another sequence is prefilling their prefix."""
        waiting = [sequence for sequence in self._scheduler.prefilling if not sequence.prefill_started]
        for sequence in waiting:
            if sequence.prefill_started:  # together with an earlier sequence of the same prompt
                continue
            leader = self._slot_manager.find_leader(sequence)
            if leader is not None:
                leader.is_leader = True
                continue
            shared = sequence.shared
            prompt_end = None if sequence.needs_prompt_scores else shared.prompt_end
            same_prompt = [sequence] if prompt_end is None else [other for other in waiting if other.shared is shared]
            started = self._slot_manager.start(same_prompt)
            for other in started:
                if not (other.is_warmup or other.needs_prompt_scores or other.replay_tokens):
                    self._reader.count(prefix_queries=len(other.request.prompt), prefix_hits=other.num_cached)
            if prompt_end is None:
                continue
            snapshot, state, logits = prompt_end
            complete = self._slot_manager.restore_prompt_end(started, snapshot, state)
            if complete:
                self._shared_prompts.use(shared, self.config.preempted_bytes)
                self._scheduler.prefilling = [other for other in self._scheduler.prefilling if other not in complete]
                self._sample_first_tokens(complete, logits, results)

    def _prefill(self, sequence: SequenceState, begin: int, count: int, results: StepResults) -> None:
        """Dispatch a prefill chunk. After the last chunk of a prompt, also sample the first output token."""
        request, slot, end = sequence.request, sequence.slot, begin + count
        result = self._runner.prefill(
            slot,
            np.asarray(request.prompt[begin:end]),
            begin,
            np.asarray(request.prompt[begin + 1 : end + 1]),
            self._slot_manager.sampling.batch_of([slot], request.logprobs is not None),
            next_token=end == len(request.prompt) and not sequence.is_warmup,
            scores=sequence.needs_prompt_scores and end >= request.prompt_logprobs_from,
        )
        sequence.num_computed += count
        self._slot_manager.cache_block(sequence)
        if not sequence.is_warmup:
            self._scheduler.queue.charge(request.client, count)
        if result.scores is not None:
            results.prompt_chunks.append(PromptChunk(sequence, begin, end, result.scores))
        if end == len(request.prompt):
            self._finish_prompt(sequence, result.logits, results)

    def _finish_prompt(self, sequence: SequenceState, logits: Array | None, results: StepResults) -> None:
        """Save the end of a prompt for requests that wait for it, and sample the first output token."""
        if logits is None:  # a warm-up has no completion
            self._scheduler.release(sequence)
            return
        sequence.has_drafts = self.config.drafts is not None and self.config.drafts.drafts_prompts
        if sequence.shared.num_waiting > 0 and not sequence.has_drafts:  # drafts depend on the first token
            snapshot, state = self._slot_manager.save_prompt_end(sequence)
            sequence.shared.prompt_end = snapshot, state, logits
            self._shared_prompts.use(sequence.shared, self.config.preempted_bytes)
        self._sample_first_tokens([sequence], logits, results)

    def _prefill_multimodal(self, sequence: SequenceState, results: StepResults) -> None:
        """Prefill a prompt with images, videos or audio in one pass."""
        request, shared = sequence.request, sequence.shared
        try:
            prefilled = shared.prefilled
            if prefilled is None:
                assert self._multimodal is not None and shared.encoding is not None
                # wait here, so that an error in this prompt cannot affect the state of other slots
                prefilled = jax.block_until_ready(self._multimodal.prefill(shared.encoding.result()))
                shared.prefilled = prefilled
            cache, logits = prefilled
        except Exception as error:
            self._fail(sequence, error_message(error))
            return
        sequence.stop_waiting()
        self._shared_prompts.use(shared, self.config.preempted_bytes)
        self._slot_manager.insert_cache(sequence, cache, np.asarray(request.prompt, np.int32))
        self._scheduler.queue.charge(request.client, len(request.prompt))
        self._sample_first_tokens([sequence], logits, results)

    def _sample_first_tokens(self, sequences: Sequence[SequenceState], logits: Array, results: StepResults) -> None:
        """Dispatch the sampling of the first output tokens of sequences with the same prompt."""
        by_slot = {sequence.slot: sequence for sequence in sequences if self._prepare_row(sequence)}
        for slots in self._runner.slot_groups([*by_slot]):
            group = [by_slot[slot] for slot in slots.tolist() if slot in by_slot]
            rows = [sequence.slot for sequence in group]
            wants_scores = any(sequence.request.logprobs is not None for sequence in group)
            variant = self._slot_manager.sampling.variant(rows, wants_scores)
            rows += rows[:1] * (len(slots) - len(rows))
            batch = self._slot_manager.sampling.batch_of(rows, wants_scores)
            sampled = self._runner.first_tokens(slots, len(group[0].request.prompt), logits, batch, variant)
            results.first_tokens.append((group, sampled))
            for sequence in group:
                self._reader.add_pending(sequence, results)

    # --- decoding ---

    def _prepare_sampling(self, decoding: dict[SequenceState, list[int]]) -> None:
        """Write the sampling inputs of all decoding sequences, and remove sequences whose constraint fails."""
        for sequence in list(decoding):
            if not self._prepare_row(sequence):
                del decoding[sequence]

    def _prepare_row(self, sequence: SequenceState) -> bool:
        """Write the sampling inputs of a sequence.

        If its constraint fails, finish it with an error and return False.
        """
        rows, slot = self._slot_manager.sampling.rows, sequence.slot
        rows.count[slot] = sequence.num_sampled
        try:
            rows.masked[slot] = sequence.fill_allowed(rows.allowed[slot])
        except Exception as error:  # constraints come from clients
            self._fail(sequence, f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, sequence: SequenceState, error: str) -> None:
        """Finish a request with an error."""
        self._reader.finish(sequence, RequestOutput(request_id=sequence.request_id, finish_reason="error", error=error))

    def _decode(self, decoding: dict[SequenceState, list[int]], results: StepResults) -> None:
        """Dispatch the decoding of sequences, each with its draft tokens."""
        if not decoding:
            return
        by_slot = {sequence.slot: sequence for sequence in decoding}
        sizes = self._runner.config
        slots = padded_slots(by_slot, sizes.batch_sizes)
        rows = {by_slot[slot]: row for row, slot in enumerate(slots) if slot in by_slot}
        self._reader.count(draft_tokens=sum(map(len, decoding.values())))
        shape = len(slots), sizes.columns[-1 if any(decoding.values()) else 0]
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for sequence, drafts in decoding.items():
            row = rows[sequence]
            for column, token in enumerate([sequence.last_token, *drafts]):
                tokens[row, column] = token
                positions[row, column] = sequence.num_computed + column
        wants_scores = any(sequence.request.logprobs is not None for sequence in decoding)
        batch = self._slot_manager.sampling.batch_of(slots, wants_scores)
        variant = self._slot_manager.sampling.variant([*by_slot], wants_scores)
        results.decoded = self._runner.decode(slots, tokens, positions, batch, variant)
        results.decode_rows = rows
        for sequence in decoding:
            sequence.num_computed += 1
            sequence.has_drafts = True
            self._reader.add_pending(sequence, results)
