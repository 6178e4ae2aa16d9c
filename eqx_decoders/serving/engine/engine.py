"""`Engine`: continuous batching of many requests. `Scheduler` plans each step, and `ModelRunner` computes it."""

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from eqx_decoders.errors import check, check_word
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.adapters import AdapterPairs, adapter_parts
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.model_runner import ALL_SCORES, NEXT_TOKEN, ChunkResult, padded_slots
from eqx_decoders.serving.engine.multimodal_prefill import (
    MultimodalPrefill,
    client_message,
    features_bytes,
    wait_for_one,
)
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SampledTokens, token_scores
from eqx_decoders.serving.engine.scheduler import Scheduler
from eqx_decoders.serving.engine.sequence import PromptResults, SequenceState, SharedPrompt
from eqx_decoders.serving.engine.slot_manager import SlotManager


class Engine:
    """Continuous batching engine: each request gets the tokens that it would get alone.

    Requests come and go between steps. A step decodes the next token of every answer, and prefills chunks of prompts
    within `token_budget`, in turn. All programs are compiled by `warm_up` (or the first step), except those for images
    and audio, which depend on their sizes: these are compiled in the background. Finished conversations are prefilled
    for the prefix cache when there is nothing else to do. An engine belongs to one thread.

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
        self._scheduler, self._prompt_results = Scheduler(self._slot_manager, config), PromptResults()
        self._last_submitted: Any = lambda: None  # weak reference
        self._ids = itertools.count()
        self._cancelled: list[RequestOutput] = []
        self._totals: collections.Counter[str] = collections.Counter()
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
        check_word("running", running, ("refuse", "keep", "recompute"))
        self._runner.adapters.check_new_weights()
        self.clear_prefix_cache()
        count = len(self._slot_manager.sequences) + len(self._scheduler.queue)
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
        open_ones = itertools.chain(self._slot_manager.sequences.values(), self._scheduler.queue)
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
        self._scheduler.enqueue(sequence)
        return sequence.request_id

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests submitted at once that are more than the queue can ever hold."""
        self.config.check_together(requests)

    def cancel(self, request_id: int) -> None:
        """Cancel a request; its last output says so. Unknown and finished requests are ignored."""
        sequence = self._scheduler.queue.remove(request_id)
        if sequence is None:
            running = self._slot_manager.sequences.values()
            sequence = next((each for each in running if each.request_id == request_id), None)
            if sequence is None or sequence.background:
                return
            self._scheduler.release(sequence)
        if sequence.is_decoding:  # the client may have stopped it at the end of its answer
            self._scheduler.prefix_warmup.add(sequence)
        sequence.stop_waiting()
        self._cancelled.append(RequestOutput(request_id=request_id, finish_reason="cancelled"))

    def close(self) -> None:
        """Stop background encoding and compilation; no step may follow."""
        if self._multimodal is not None:
            self._multimodal.close()

    @property
    def has_work(self) -> bool:
        """True where a step would do anything."""
        return bool(
            self._slot_manager.sequences
            or len(self._scheduler.queue)
            or self._cancelled
            or self._scheduler.prefix_warmup
        )

    def step(self) -> list[RequestOutput]:
        """Compute one step, and return its outputs."""
        self.warm_up()
        outputs, self._cancelled = self._cancelled, []
        if self._multimodal is not None and any(map(SequenceState.needs_encoding, self._scheduler.queue)):
            self._multimodal.schedule_encoding(self._scheduler.queue.ordered(SequenceState.needs_media))
        while (sequence := self._scheduler.admit_next()) is not None:
            outputs += self._assigned(sequence)
        if (background := self._scheduler.admit_background()) is not None:
            outputs += self._assigned(background)
        if not self._slot_manager.sequences:
            wait_for_one([sequence.shared.encoding for sequence in self._scheduler.queue])
            return outputs
        outputs += self._start_prompts()
        self._count(steps=1)
        answers = self._scheduler.schedule_decode()
        chunks = self._scheduler.schedule_prefill(self.config.token_budget - len(answers), alone=not answers)
        outputs += self._prepare_sampling(answers)
        self._slot_manager.set_page_tables()
        # everything is dispatched before any result is waited for
        decoded = self._decode(answers)
        results = [self._prefill(*chunk) for chunk in chunks]
        if decoded is not None:
            outputs += self._finish_decode(*decoded)
        for chunk, result in zip(chunks, results, strict=True):
            outputs += self._finish_prefill(*chunk, result)
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
        running = sum(not sequence.background for sequence in self._slot_manager.sequences.values())
        now = dict(running=running, waiting=len(self._scheduler.queue), cache_usage=self._slot_manager.usage)
        return EngineStats(**now, **self._totals, preemptions=self._scheduler.preemptions)

    def _count(self, **increments: int) -> None:
        """Add to the totals of the statistics."""
        self._totals.update(increments)

    def _assigned(self, sequence: SequenceState) -> list[RequestOutput]:
        """Start, resume or restart a sequence that has got a slot."""
        if sequence.is_decoding:
            return []
        if sequence.request.media is not None:
            return self._prefill_multimodal(sequence)
        self._scheduler.prefilling.append(sequence)
        return []

    # --- prefill ---

    def _start_prompts(self) -> list[RequestOutput]:
        """Restore cached prefixes of new prompts, except those that wait for a prefix being prefilled."""
        outputs: list[RequestOutput] = []
        for sequence in [each for each in self._scheduler.prefilling if not each.started]:
            leader, shared = self._slot_manager.find_leader(sequence), sequence.shared
            if leader is not None:
                leader.awaited = True
                continue
            prompt_end = shared.prompt_end
            self._slot_manager.start(sequence)
            if not (sequence.background or sequence.needs_prompt_scores or sequence.delivered):
                self._count(prefix_queries=len(sequence.request.prompt), prefix_hits=sequence.num_cached)
            if prompt_end is None or sequence.needs_prompt_scores:
                continue
            snapshot, state, logits = prompt_end
            if self._slot_manager.restore_prompt_end(sequence, snapshot, state):
                self._prompt_results.use(shared, self.config.preempted_bytes)
                self._scheduler.prefilling.remove(sequence)
                outputs += self._first_output(sequence, logits)
        return outputs

    def _prefill(self, sequence: SequenceState, begin: int, count: int) -> ChunkResult:
        """Dispatch a prefill chunk."""
        request, slot = sequence.request, sequence.slot
        chunk, following = request.prompt[begin : begin + count], request.prompt[begin + 1 : begin + count + 1]
        wanted = NEXT_TOKEN if begin + count == len(request.prompt) and not sequence.background else 0
        scored = sequence.needs_prompt_scores and begin + count >= request.prompt_logprobs_from
        wanted += ALL_SCORES if scored else 0
        batch = self._slot_manager.sampling_batch.of([slot], request.logprobs is not None)
        result = self._runner.prefill(slot, np.asarray(chunk), begin, np.asarray(following), wanted, batch)
        sequence.num_computed += count
        self._slot_manager.cache_block(sequence)
        if not sequence.background:
            self._scheduler.queue.charge(request.client, count)
        return result

    def _finish_prefill(
        self, sequence: SequenceState, begin: int, count: int, result: ChunkResult
    ) -> list[RequestOutput]:
        """Return the output of a prefill chunk, if it is the last of its prompt."""
        request = sequence.request
        if sequence.needs_prompt_scores:
            first = max(begin, request.prompt_logprobs_from - 1)  # each row scores the token after its own
            following = request.prompt[first + 1 : begin + count + 1]
            rows = range(first - begin, first - begin + len(following))
            scores, num_top = jax.device_get(result.scores), request.prompt_logprobs or 0
            sequence.prompt_scores += token_scores(scores, rows, following, num_top)
        if begin + count < len(request.prompt):
            return []
        if sequence.background:
            self._scheduler.release(sequence)
            return []
        if sequence.needs_prompt_scores:
            sequence.shared.scores = tuple(sequence.prompt_scores)
        sequence.has_drafts = self.config.drafts is not None and self.config.drafts.drafts_prompts
        if sequence.shared.num_waiting > 0 and not sequence.has_drafts:  # drafts depend on the first token
            sequence.shared.prompt_end = *self._slot_manager.save_prompt_end(sequence), result.logits
            self._prompt_results.use(sequence.shared, self.config.preempted_bytes)
        return self._first_output(sequence, result.logits)

    def _prefill_multimodal(self, sequence: SequenceState) -> list[RequestOutput]:
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
            return [self._fail(sequence, client_message(error))]
        sequence.stop_waiting()
        self._prompt_results.use(shared, self.config.preempted_bytes)
        self._slot_manager.insert_cache(sequence, cache, np.asarray(request.prompt, np.int32))
        self._scheduler.queue.charge(request.client, len(request.prompt))
        return self._first_output(sequence, logits)

    def _first_output(self, sequence: SequenceState, logits: Any) -> list[RequestOutput]:
        """Sample the first token of an answer, and return it with the values that are reported once."""
        request = sequence.request
        try:
            self._prepare_row(sequence)
        except Exception as error:  # of its constraint
            return [self._fail(sequence, f"{type(error).__name__}: {error}")]
        batch = self._slot_manager.sampling_batch.of([sequence.slot], request.logprobs is not None)
        sampled = jax.device_get(self._runner.first_token(logits, np.asarray(request.prompt), batch))
        if not sequence.delivered:
            self._count(prompt_tokens=len(request.prompt))
        scores = () if request.prompt_logprobs is None else sequence.shared.scores or ()
        once = dict(cached_tokens=sequence.num_cached, queue_seconds=sequence.queue_seconds, prompt_scores=scores)
        return self._append_tokens(sequence, sampled.tokens[0, :1].tolist(), sampled.scores, 0, **once)

    # --- decoding ---

    def _prepare_sampling(self, answers: dict[SequenceState, list[int]]) -> list[RequestOutput]:
        """Write the sampling inputs of all answers; a request whose constraint fails ends, without the others."""
        outputs = []
        for sequence in list(answers):
            try:
                self._prepare_row(sequence)
            except Exception as error:  # of its constraint
                del answers[sequence]
                outputs.append(self._fail(sequence, f"{type(error).__name__}: {error}"))
        return outputs

    def _prepare_row(self, sequence: SequenceState) -> None:
        """Write the sampling inputs of one sequence."""
        batch, slot = self._slot_manager.sampling_batch, sequence.slot
        batch.count[slot] = len(sequence.answer)
        batch.masked[slot] = sequence.fill_mask(batch.allowed[slot])

    def _fail(self, sequence: SequenceState, error: str) -> RequestOutput:
        """End a request with an error."""
        self._scheduler.release(sequence)
        sequence.stop_waiting()
        return RequestOutput(request_id=sequence.request_id, finish_reason="error", error=error)

    def _decode(self, answers: dict[SequenceState, list[int]]) -> tuple[dict[SequenceState, int], SampledTokens] | None:
        """Dispatch a decoding step of these answers; returns the row of each, and the sampled tokens."""
        if not answers:
            return None
        by_slot, sizes = {sequence.slot: sequence for sequence in answers}, self._runner.config
        slots = padded_slots(by_slot, sizes.batch_sizes)
        rows = {by_slot[slot]: row for row, slot in enumerate(slots) if slot in by_slot}
        self._count(draft_tokens=sum(map(len, answers.values())))
        shape = len(slots), sizes.columns[-1 if any(answers.values()) else 0]
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for sequence, drafts in answers.items():
            inputs, row = [sequence.answer[-1], *drafts], rows[sequence]
            tokens[row, : len(inputs)] = inputs
            positions[row, : len(inputs)] = np.arange(sequence.num_computed, sequence.num_computed + len(inputs))
            sequence.has_drafts = True
        wants_scores = any(sequence.request.logprobs is not None for sequence in answers)
        return rows, self._runner.decode(
            slots, tokens, positions, self._slot_manager.sampling_batch.of(slots, wants_scores)
        )

    def _finish_decode(self, rows: dict[SequenceState, int], sampled: SampledTokens) -> list[RequestOutput]:
        """Return the outputs of a decoding step, by the row of each sequence."""
        sampled = jax.device_get(sampled)
        columns, outputs = sampled.tokens.shape[1], []
        self._count(accepted_draft_tokens=int(sum(sampled.num_accepted[row] - 1 for row in rows.values())))
        for sequence, row in rows.items():
            tokens = sampled.tokens[row, : sampled.num_accepted[row]].tolist()
            sequence.num_computed += len(tokens)
            outputs += self._append_tokens(sequence, tokens, sampled.scores, row * columns)
            self._scheduler.queue.charge(sequence.request.client, len(tokens))
        return outputs

    def _append_tokens(
        self, sequence: SequenceState, tokens: list[int], scores: Any, first_row: int, **once: Any
    ) -> list[RequestOutput]:
        """Append tokens to an answer up to its end, where its slot is freed. A replayed token is not returned again."""
        if sequence.is_replaying:
            sequence.answer.append(sequence.delivered[len(sequence.answer)])
            return []
        request, reason, error = sequence.request, None, None
        for index, token in enumerate(tokens):
            sequence.answer.append(token)
            reason, error = sequence.finish_reason(token)
            if reason is not None:
                tokens = tokens[: index + 1]
                break
        output: dict[str, Any] = dict(tokens=tuple(tokens), version=self.version, finish_reason=reason, error=error)
        if request.logprobs is not None:
            rows = range(first_row, first_row + len(tokens))
            output["scores"] = tuple(token_scores(scores, rows, tokens, request.logprobs))
        self._count(generated_tokens=len(tokens))
        if reason is not None:
            if self.config.expert_choices:
                output["experts"] = self._experts(sequence)
            self._scheduler.release(sequence)
            self._scheduler.prefix_warmup.add(sequence)
        return [RequestOutput(request_id=sequence.request_id, **output, **once)]

    def _experts(self, sequence: SequenceState) -> np.ndarray:
        """Return the experts that the tokens of a sequence were sent to; -1 for the last one, which is not read."""
        experts = self._runner.experts(sequence.slot, len(sequence.request.prompt) + len(sequence.answer)).copy()
        experts[-1] = -1
        return experts
