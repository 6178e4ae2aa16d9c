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
from eqx_decoders.serving.engine.adapters import AdapterPairs, adapter_parts
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.multimodal_prefill import (
    MultimodalPrefill,
    client_message,
    features_bytes,
    wait_for_one,
)
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput
from eqx_decoders.serving.engine.scheduler import Scheduler
from eqx_decoders.serving.engine.sequence import PromptResults, SequenceState, SharedPrompt
from eqx_decoders.serving.engine.slot_manager import SlotManager, padded_slots
from eqx_decoders.serving.engine.step_results import PromptChunk, ResultReader, StepResults


class Engine:
    """Continuous batching engine: each request gets the tokens that it would get alone.

    Requests come and go between steps. A step decodes the next token of every answer, and prefills chunks of prompts
    within `token_budget`, in turn. It is dispatched before the results of the last one are read, so that the device
    computes while the host reads and plans; only drafts and constraints are read first. All programs are compiled by
    `warm_up` (or the first step), except those for images and audio, which depend on their sizes: these are compiled in
    the background. Finished conversations are prefilled for the prefix cache when there is nothing else to do. An
    engine belongs to one thread.

        engine = Engine(model, EngineConfig(max_batch_size=4))
        request_id = engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=20))
        while engine.has_work:
            for output in engine.step():
                ...
    """

    def __init__(self, model: Decoder, config: EngineConfig = EngineConfig()):
        self.model, self.config, self.version = model, config, 0
        config.check_model(model)
        self._slot_manager = SlotManager.create(model, config)
        self._runner = self._slot_manager.runner
        self._multimodal = None
        if model.config.media is not None:
            cache_format = self._runner.config.cache_format
            self._multimodal = MultimodalPrefill(self._runner.weights.loaded.model, config.max_length, cache_format)
        self._scheduler = Scheduler(self._slot_manager, config, self._settle)
        self._prompt_results = PromptResults()
        scheduler, experts = self._scheduler, self._runner.experts if config.expert_choices else None
        self._reader = ResultReader(scheduler.release, scheduler.queue.charge, scheduler.prefix_warmup.add, experts)
        self._in_flight: list[StepResults] = []  # steps whose results are not read, the first one first
        self._last_submitted: Any = lambda: None  # weak reference
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
        """Answer with the weights of a model like the first from now on.

        Nothing is compiled, and arrays are copied only where their dtype or sharding is not that of the first model.
        The prefix cache is emptied: nothing that other weights computed is found again.

        **Arguments:**

        - `version`: number of these weights, which outputs have; None: the last one + 1.
        - `running`: requests that have no complete answer are refused, or "keep" the keys and values of their tokens so
            far, or "recompute" them with the new weights. Their tokens stay.

        Raises ConfigError for a model with other weights, and for such requests if they are refused.
        """
        check_option("running", running, ("refuse", "keep", "recompute"))
        self._runner.adapters.check_new_weights()
        self._settle()
        self.clear_prefix_cache()
        count = len(self._reader.open)
        remedy = "step until has_work is False, cancel them, or give running='keep' or 'recompute'"
        check(running != "refuse" or count == 0, f"Engine.load: {count} requests have no complete answer: {remedy}.")
        self._runner.load(model)
        if self._multimodal is not None:
            self._multimodal.load(self._runner.weights.loaded.model)
        self._slot_manager.prefix_cache.renew()
        self._scheduler.renew(recompute=running == "recompute")
        self._prompt_results, self._last_submitted = PromptResults(), lambda: None
        self.model, self.version = model, self.version + 1 if version is None else version

    def release(self) -> None:
        """Drop the weights, so that a training step may overwrite them; `load` gives others before the next step."""
        self._settle()
        self._runner.weights.release()
        self.model = self._runner.model
        if self._multimodal is not None:
            self._multimodal.release()

    def load_adapter(self, name: str, adapter: Decoder | Mapping[str, AdapterPairs]) -> None:
        """Answer requests for an adapter from now on (`Request.adapter`), in one batch with all others.

        Nothing is compiled. What it computes is cached for its own requests alone.

        **Arguments:**

        - `adapter`: the model with the adapter's pairs, as `load_peft` and `add_lora` return it, or their
            `adapter_parts`.

        Raises ConfigError for a name that is loaded, where all of `max_adapters` places are taken, and for pairs that
        don't fit these.
        """
        parts = adapter_parts(adapter) if isinstance(adapter, Decoder) else adapter
        open_ones = itertools.chain(self._slot_manager.sequences.values(), self._reader.open.values())
        self._runner.adapters.load(name, parts, (each.adapter for each in open_ones))

    def drop_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter. Its place is free when those that are open have their answers.

        Raises ConfigError for an unknown one.
        """
        self._scheduler.drop_texts(self._runner.adapters.drop(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that answer requests."""
        return tuple(each.name for each in self._runner.adapters.served)

    def submit(self, request: Request) -> int:
        """Queue a request, and return the id that its outputs have.

        Raises ConfigError for a request that could never be answered, and QueueFull if too many wait.
        """
        self.config.check_request(request, self.model.config.vocab_size)
        if self._slot_manager.block_manager is not None:
            longest = len(request.prompt) + request.max_new_tokens
            self._slot_manager.block_manager.check_fits(longest, self.config.prefill_chunk)
        self._scheduler.queue.check_room(request)
        adapter = self._runner.adapters.find(request.adapter)
        sequence = SequenceState(request_id=next(self._ids), request=request, adapter=adapter)
        last: SequenceState | None = self._last_submitted()
        last = last if last is not None and last.has_same_prompt(request) and last.adapter is adapter else None
        size = features_bytes(self._multimodal, request) if last is None else 0
        sequence.join(SharedPrompt(features_bytes=size) if last is None else last.shared)
        if request.media is None:
            hash_blocks = self._slot_manager.prefix_cache.hash_blocks
            hashes = hash_blocks(request.prompt, sequence.salt) if last is None else last.block_hashes
            sequence.block_hashes = hashes
        self._last_submitted = weakref.ref(sequence)
        self._reader.open[sequence.request_id] = sequence
        self._scheduler.enqueue(sequence)
        return sequence.request_id

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests submitted at once that are more than the queue can ever hold."""
        self.config.check_together(requests)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; its last output says so. Unknown and finished requests are ignored."""
        sequence = self._reader.open.get(request_id)
        if sequence is None:
            return
        self._scheduler.queue.remove(request_id)
        self._reader.close(sequence, RequestOutput(request_id=request_id, finish_reason="cancelled"))
        self._scheduler.prefix_warmup.add(sequence)  # the client may have stopped it at the end of its answer

    def close(self) -> None:
        """Stop background encoding and compilation; no step may follow."""
        if self._multimodal is not None:
            self._multimodal.close()

    @property
    def has_work(self) -> bool:
        """True where a step would do anything."""
        return bool(
            self._reader.open
            or self._reader.outputs
            or self._slot_manager.sequences  # a finished text
            or self._scheduler.prefix_warmup
        )

    def step(self) -> list[RequestOutput]:
        """Wait for one step, and return its outputs; the next one is dispatched before, where it can be."""
        self.warm_up()
        self._in_flight = [each for each in self._in_flight if self._reader.is_awaited(each)]
        if not self._in_flight:
            self._dispatch()
        if self._in_flight and self._goes_ahead():
            self._dispatch()
        if self._in_flight:
            self._reader.read(self._in_flight.pop(0), self.version)
        elif not (self._slot_manager.sequences or self._reader.outputs):
            wait_for_one([sequence.shared.encoding for sequence in self._scheduler.queue])
        outputs, self._reader.outputs = self._reader.outputs, []
        return outputs

    def run(self, requests: Iterable[Request]) -> list[tuple[int, ...]]:
        """Return the answers to some requests, in their order; no others may be open."""
        order: list[int] = []
        answers: dict[int, tuple[int, ...]] = {}

        def step() -> None:
            for output in self.step():
                check(output.finish_reason != "error", f"request {output.request_id} failed: {output.error}")
                answers[output.request_id] += output.tokens

        for request in requests:
            while self._scheduler.queue.is_full_for(request):
                step()
            order.append(self.submit(request))
            answers[order[-1]] = ()
        while self.has_work:
            step()
        return [answers[request_id] for request_id in order]

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._scheduler.prefix_warmup.clear()
        if self._scheduler.prefix_warmup.current is not None:
            self._scheduler.release(self._scheduler.prefix_warmup.current)
        self._slot_manager.prefix_cache.clear()

    def counts(self) -> EngineStats:
        """Return the current statistics."""
        waiting = len(self._scheduler.queue)
        now = dict(running=len(self._reader.open) - waiting, waiting=waiting, cache_usage=self._slot_manager.usage)
        return EngineStats(**now, **self._reader.totals, preemptions=self._scheduler.preemptions)

    # --- steps ---

    def _goes_ahead(self) -> bool:
        """Return whether requests need a next step, and it depends on no results that are not read."""
        drafts = self.config.drafts is not None
        requests = [each for each in self._slot_manager.sequences.values() if not each.background]
        waits = any(results.awaited for results in self._in_flight)
        waits = waits or any(sequence.needs_results(drafts=drafts) for sequence in requests)
        return not waits and (len(requests) > 0 or len(self._scheduler.queue) > 0)

    def _settle(self) -> bool:
        """Read the results of all dispatched steps; return whether there were any."""
        any_results = any(results.sequences for results in self._in_flight)
        for results in self._in_flight:
            self._reader.read(results, self.version)
        return any_results

    def _dispatch(self) -> None:
        """Dispatch one step, without waiting for any results."""
        results = StepResults()
        self._in_flight.append(results)
        if self._multimodal is not None and any(map(SequenceState.needs_encoding, self._scheduler.queue)):
            self._multimodal.schedule_encoding(self._scheduler.queue.ordered(SequenceState.needs_media))
        while (sequence := self._scheduler.admit_next()) is not None:
            self._assigned(sequence, results)
        if (background := self._scheduler.admit_background()) is not None:
            self._assigned(background, results)
        if self._slot_manager.sequences:
            self._start_prompts(results)
            self._reader.count(steps=1)
            answers = self._scheduler.schedule_decode()
            chunks = self._scheduler.schedule_prefill(self.config.token_budget - len(answers), alone=not answers)
            self._prepare_sampling(answers)
            self._slot_manager.set_page_tables()
            self._decode(answers, results)
            for chunk in chunks:
                self._prefill(*chunk, results)
        results.start_copies()
        self._in_flight = [each for each in self._in_flight if each.sequences]

    def _assigned(self, sequence: SequenceState, results: StepResults) -> None:
        """Start, resume or restart a sequence that has got a slot."""
        if sequence.is_decoding:
            return
        if sequence.request.media is not None:
            self._prefill_multimodal(sequence, results)
        else:
            self._scheduler.prefilling.append(sequence)

    # --- prefill ---

    def _start_prompts(self, results: StepResults) -> None:
        """Restore cached prefixes of new prompts, except those that wait for a prefix being prefilled."""
        waiting = [each for each in self._scheduler.prefilling if not each.started]
        for sequence in waiting:
            if sequence.started:  # with one before
                continue
            leader, shared = self._slot_manager.find_leader(sequence), sequence.shared
            if leader is not None:
                leader.awaited = True
                continue
            prompt_end = None if sequence.needs_prompt_scores else shared.prompt_end
            alike = [sequence] if prompt_end is None else [each for each in waiting if each.shared is shared]
            started = self._slot_manager.start(alike)
            for each in started:
                if not (each.background or each.needs_prompt_scores or each.delivered):
                    self._reader.count(prefix_queries=len(each.request.prompt), prefix_hits=each.num_cached)
            if prompt_end is None:
                continue
            snapshot, state, logits = prompt_end
            complete = self._slot_manager.restore_prompt_end(started, snapshot, state)
            if complete:
                self._prompt_results.use(shared, self.config.preempted_bytes)
                self._scheduler.prefilling = [each for each in self._scheduler.prefilling if each not in complete]
                self._first_tokens(complete, logits, results)

    def _prefill(self, sequence: SequenceState, begin: int, count: int, results: StepResults) -> None:
        """Dispatch a prefill chunk and, after the last one of a prompt, the draw of the first token."""
        request, slot, end = sequence.request, sequence.slot, begin + count
        chunk, following = request.prompt[begin:end], request.prompt[begin + 1 : end + 1]
        wanted = dict(
            next_token=end == len(request.prompt) and not sequence.background,
            scores=sequence.needs_prompt_scores and end >= request.prompt_logprobs_from,
        )
        batch = self._slot_manager.sampling.of([slot], request.logprobs is not None)
        result = self._runner.prefill(slot, np.asarray(chunk), begin, np.asarray(following), batch, **wanted)
        sequence.num_computed += count
        self._slot_manager.cache_block(sequence)
        if not sequence.background:
            self._scheduler.queue.charge(request.client, count)
        if result.scores is not None:
            results.chunks.append(PromptChunk(sequence, begin, end, result.scores))
        if end == len(request.prompt):
            self._finish_prompt(sequence, result.logits, results)

    def _finish_prompt(self, sequence: SequenceState, logits: Array | None, results: StepResults) -> None:
        """Save the end of a prompt for those that wait for it, and sample the first token of its answer."""
        if logits is None:  # a text in the background has no answer
            self._scheduler.release(sequence)
            return
        sequence.has_drafts = self.config.drafts is not None and self.config.drafts.drafts_prompts
        if sequence.shared.num_waiting > 0 and not sequence.has_drafts:  # drafts depend on the first token
            sequence.shared.prompt_end = *self._slot_manager.save_prompt_end(sequence), logits
            self._prompt_results.use(sequence.shared, self.config.preempted_bytes)
        self._first_tokens([sequence], logits, results)

    def _prefill_multimodal(self, sequence: SequenceState, results: StepResults) -> None:
        """Prefill a prompt with images, videos or audio in one pass."""
        request, shared = sequence.request, sequence.shared
        try:
            prefilled = shared.prefilled
            if prefilled is None:
                assert self._multimodal is not None and shared.encoding is not None
                # waited for: an error in it must not reach the state of all slots
                prefilled = jax.block_until_ready(self._multimodal.prefill(shared.encoding.result()))
                shared.prefilled = prefilled
            cache, logits = prefilled
        except Exception as error:
            self._fail(sequence, client_message(error))
            return
        sequence.stop_waiting()
        self._prompt_results.use(shared, self.config.preempted_bytes)
        self._slot_manager.insert_cache(sequence, cache, np.asarray(request.prompt, np.int32))
        self._scheduler.queue.charge(request.client, len(request.prompt))
        self._first_tokens([sequence], logits, results)

    def _first_tokens(self, sequences: Sequence[SequenceState], logits: Array, results: StepResults) -> None:
        """Dispatch the draws of the first tokens of answers to one prompt."""
        by_slot = {each.slot: each for each in sequences if self._prepare_row(each)}
        for slots in self._runner.together([*by_slot]):
            group = [by_slot[slot] for slot in slots.tolist() if slot in by_slot]
            rows, scores = [each.slot for each in group], any(each.request.logprobs is not None for each in group)
            form = self._slot_manager.sampling.form(rows, scores)
            rows += rows[:1] * (len(slots) - len(rows))
            batch = self._slot_manager.sampling.of(rows, scores)
            sampled = self._runner.first_tokens(slots, len(group[0].request.prompt), logits, batch, form)
            results.first.append((group, sampled))
            for sequence in group:
                self._reader.sampled(sequence, results)

    # --- decoding ---

    def _prepare_sampling(self, answers: dict[SequenceState, list[int]]) -> None:
        """Write the sampling inputs of all answers, and leave out those that end with an error."""
        for sequence in list(answers):
            if not self._prepare_row(sequence):
                del answers[sequence]

    def _prepare_row(self, sequence: SequenceState) -> bool:
        """Write the sampling inputs of one sequence; one whose constraint fails ends, without the others."""
        rows, slot = self._slot_manager.sampling.rows, sequence.slot
        rows.count[slot] = sequence.num_sampled
        try:
            rows.masked[slot] = sequence.fill_mask(rows.allowed[slot])
        except Exception as error:  # of its constraint
            self._fail(sequence, f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, sequence: SequenceState, error: str) -> None:
        """End a request with an error."""
        self._reader.close(sequence, RequestOutput(request_id=sequence.request_id, finish_reason="error", error=error))

    def _decode(self, answers: dict[SequenceState, list[int]], results: StepResults) -> None:
        """Dispatch a decoding step of these answers."""
        if not answers:
            return
        by_slot, sizes = {sequence.slot: sequence for sequence in answers}, self._runner.config
        slots = padded_slots(by_slot, sizes.batch_sizes)
        rows = {by_slot[slot]: row for row, slot in enumerate(slots) if slot in by_slot}
        self._reader.count(draft_tokens=sum(map(len, answers.values())))
        shape = len(slots), sizes.columns[-1 if any(answers.values()) else 0]
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for sequence, drafts in answers.items():
            row = rows[sequence]
            for column, token in enumerate([sequence.last_token, *drafts]):
                tokens[row, column], positions[row, column] = token, sequence.num_computed + column
        wants_scores = any(sequence.request.logprobs is not None for sequence in answers)
        batch = self._slot_manager.sampling.of(slots, wants_scores)
        form = self._slot_manager.sampling.form([*by_slot], wants_scores)
        results.sampled, results.rows = self._runner.decode(slots, tokens, positions, batch, form), rows
        for sequence in answers:
            sequence.num_computed += 1
            sequence.has_drafts = True
            self._reader.sampled(sequence, results)
