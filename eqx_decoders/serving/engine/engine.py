"""The engine: many requests, one model. It decides what each step computes; `ModelRunner` computes it."""

import dataclasses
import itertools
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.serving.engine.batch_sizes import rows_for
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.drafters import MTPDrafter
from eqx_decoders.serving.engine.finished_texts import FinishedTexts
from eqx_decoders.serving.engine.media_prefill import MediaPrefill, features_bytes, wait_for_one, what_failed
from eqx_decoders.serving.engine.model_runner import ALL_SCORES, NEXT_TOKEN, SampledTokens
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput, TokenScore
from eqx_decoders.serving.engine.request_queue import RequestQueue
from eqx_decoders.serving.engine.sampler import token_scores
from eqx_decoders.serving.engine.sequence import PromptResults, SequenceState, SharedPrompt
from eqx_decoders.serving.engine.slot_manager import SlotManager


class Engine:
    """Continues the prompts of many requests with one model: each gets the tokens that it would get alone.

    Requests come and go between steps. A step feeds the last token of every answer, and chunks of prompts as far as
    `token_budget` goes, in turn. All programs are compiled by `warm_up` (or the first step), except those for images
    and audio, which depend on their sizes: these are compiled beside the steps. What was written is computed as a
    prompt when there is nothing else to do, for the conversation's next turn. Not for several threads at once.

        engine = Engine(model, EngineConfig(max_batch_size=4))
        request_id = engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=20))
        while engine.has_work:
            for update in engine.step():
                ...
    """

    def __init__(self, model: Decoder, config: EngineConfig = EngineConfig()):
        self.model, self.config = model, config
        config.check_model(model)
        self._seats = SlotManager.create(model, config)
        self._slots = self._seats.slots
        self._sight = None
        if model.config.media is not None:
            self._sight = MediaPrefill(self._slots.model, config.max_length, self._slots.kind)
        self._waiting: RequestQueue[SequenceState] = RequestQueue(config.max_waiting, config.max_waiting_tokens)
        self._turn: list[SequenceState] = []  # whose prompts are being computed, the next one first
        self._asked = self._slots.asked(config.max_batch_size)
        self._written, self._shared = FinishedTexts(self._seats), PromptResults()
        self._last: Any = lambda: None  # the request that came last
        self._ids = itertools.count()
        self._cancelled: list[RequestOutput] = []
        self._counts = EngineStats()
        self._warm = False

    # --- for whoever asks ---

    def warm_up(self) -> None:
        """Compile all programs."""
        if not self._warm:
            self._slots.compile()
            self._warm = True

    def submit(self, request: Request) -> int:
        """Let a request wait for its turn; returns the id by which its updates are known.

        Raises ConfigError for a request that could never be answered, and QueueFull if too many wait.
        """
        self.config.check_request(request, self.model.config.vocab_size)
        if self._seats.paging is not None:
            longest = len(request.prompt) + request.max_new_tokens
            self._seats.paging.check_fits(longest, self.config.prefill_chunk)
        self._waiting.check_room(request)
        job = SequenceState(request_id=next(self._ids), request=request)
        last: SequenceState | None = self._last()
        last = last if last is not None and last.is_alike(request) else None
        job.join(SharedPrompt(features_bytes=features_bytes(self._sight, request)) if last is None else last.shared)
        if request.media is None:
            prefixes = self._seats.prefixes
            job.names = prefixes.names(request.prompt, request.cache_salt) if last is None else last.names
        self._last = weakref.ref(job)
        self._wait(job)
        return job.request_id

    def check_together(self, requests: Sequence[Request]) -> None:
        """Raise ConfigError for requests that come at once, and are more than could ever wait together."""
        self.config.check_together(requests)

    def cancel(self, request_id: int) -> None:
        """Give up a request; its last update says so. One that has ended already, or never was, is ignored."""
        job = self._waiting.remove(request_id)
        if job is None:
            job = next((job for job in self._seats.jobs.values() if job.request_id == request_id), None)
            if job is None or job.idle:
                return
            self._leave(job)
        if job.decodes:  # whoever reads it may have found its end
            self._written.add(job)
        job.wait_no_more()
        self._cancelled.append(RequestOutput(request_id=request_id, finish_reason="cancelled"))

    def close(self) -> None:
        """End what is compiled and encoded beside the steps; there are none after it."""
        if self._sight is not None:
            self._sight.close()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._seats.jobs or len(self._waiting) or self._cancelled or self._written)

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns what it has brought."""
        self.warm_up()
        updates, self._cancelled = self._cancelled, []
        if self._sight is not None and any(map(SequenceState.has_to_see, self._waiting)):
            self._sight.look_ahead(self._waiting.in_turn(SequenceState.shows))
        updates += self._admit()
        if self._waiting.first(SequenceState.is_ready) is None and (idle := self._written.next()) is not None:
            updates += self._enter(*idle)
        if not self._seats.jobs:
            wait_for_one([job.shared.seeing for job in self._waiting])
            return updates
        updates += self._begin()
        self._count(steps=1)
        answers = self._plan_answers()
        chunks = self._plan_chunks(self.config.token_budget - len(answers), alone=not answers)
        updates += self._bind(answers)
        self._seats.set_tables()
        # all of it is begun before anything is waited for
        decoded = self._decode(answers)
        results = [self._prefill(*chunk) for chunk in chunks]
        if decoded is not None:
            updates += self._finish_decoding(*decoded)
        for chunk, result in zip(chunks, results, strict=True):
            updates += self._finish_chunk(*chunk, result)
        return updates

    def run(self, requests: Iterable[Request]) -> list[tuple[int, ...]]:
        """The answers to some requests, in their order, with nothing else going on."""
        order: list[int] = []
        answers: dict[int, tuple[int, ...]] = {}

        def step() -> None:
            for update in self.step():
                check(update.finish_reason != "error", f"request {update.request_id} failed: {update.error}")
                answers[update.request_id] += update.tokens

        for request in requests:
            while self._waiting.is_full_for(request):
                step()
            order.append(self.submit(request))
            answers[order[-1]] = ()
        while self.has_work:
            step()
        return [answers[number] for number in order]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._written.clear()
        if self._written.current is not None:
            self._leave(self._written.current)
        self._seats.prefixes.clear()

    def counts(self) -> EngineStats:
        """How it stands."""
        running = sum(not job.idle for job in self._seats.jobs.values())
        now = dict(running=running, waiting=len(self._waiting), cache_usage=self._seats.usage)
        return dataclasses.replace(self._counts, **now)

    def _count(self, **more: int) -> None:
        """Add to the counts."""
        new = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = dataclasses.replace(self._counts, **new)

    # --- who gets a slot ---

    def _wait(self, job: SequenceState) -> None:
        self._waiting.add(job, {other.request.client for other in self._seats.jobs.values()})

    def _admit(self) -> list[RequestOutput]:
        """Give slots to those whose turn it is, taking them from lower priorities where there are no others."""
        updates: list[RequestOutput] = []
        while (job := self._waiting.first(SequenceState.is_ready)) is not None:
            free = self._seats.free
            if free is None or not self._seats.has_room(job):
                victim = self._written.current or self._seats.last()
                if victim is None or (not victim.idle and victim.request.priority >= job.request.priority):
                    break
                self._give_way(victim)
                continue
            self._waiting.remove(job.request_id)
            updates += self._enter(job, free)
        return updates

    def _enter(self, job: SequenceState, slot: int) -> list[RequestOutput]:
        """Give a request a slot."""
        request = job.request
        returns = job.saved is not None or job.repeats
        job.queue_seconds = job.queue_seconds if returns else time.monotonic() - job.arrived
        self._asked.sampling.set(slot, request.sampling)
        self._asked.prompt_length[slot], self._asked.count[slot] = len(request.prompt), 0
        self._seats.enter(job, slot)
        if request.media is not None and not job.decodes:
            return self._see(job)
        if not job.decodes:
            self._turn.append(job)
        return []

    def _give_way(self, job: SequenceState) -> None:
        """Take the slot of a request, which goes on later from where it stands, or begins again."""
        if job.idle:
            self._leave(job)
            return
        self._rest(job)
        self._seats.interrupt(job, self.config.preempted_bytes - sum(other.saved_bytes for other in self._waiting))
        if job.request.media is not None and job.saved is None:
            job.join(SharedPrompt(features_bytes=job.shared.features_bytes))
        self._count(preemptions=1)
        self._wait(job)

    def _leave(self, job: SequenceState) -> None:
        """Free the slot of a request that is complete, or given up."""
        self._rest(job)
        self._seats.leave(job)
        if job.idle:
            self._written.current = None

    def _rest(self, job: SequenceState) -> None:
        """Nothing is computed for a slot."""
        if job in self._turn:
            self._turn.remove(job)
        self._asked.masked[job.slot] = False

    # --- prompts ---

    def _plan_chunks(self, budget: int, *, alone: bool) -> list[tuple[SequenceState, int, int]]:
        """Chunks of prompts, one of each in turn, while the budget lasts: whose, where they begin, and their tokens.

        At least one; where there are no pages for any, and nothing else is done (`alone`), others give theirs.
        """
        chunks: list[tuple[SequenceState, int, int]] = []
        planned: dict[int, int] = {}
        held: list[SequenceState] = []
        self._turn.sort(key=lambda job: job.idle and not job.awaited)
        while self._turn and (budget > 0 or not chunks):
            job = self._turn.pop(0)
            busy = not alone or any(not other.idle for other, _, _ in chunks)
            if (job.idle and not job.awaited and busy) or not job.begun:
                held.append(job)
                continue
            begin = planned.get(job.request_id, job.done)
            count = min(self._seats.block, len(job.request.prompt) - begin)
            if not self._seats.reserve(job, begin, begin + count):
                victim = self._written.current or (self._seats.last(besides=[job]) if alone and not chunks else None)
                if victim is None:
                    held.append(job)
                    continue
                held = [other for other in held if other is not victim]
                self._turn.insert(0, job)
                self._give_way(victim)  # perhaps itself
                continue
            chunks.append((job, begin, count))
            planned[job.request_id] = begin + count
            if begin + count < len(job.request.prompt):
                # pages behind windows are given back chunk by chunk, so two can't be planned ahead
                (self._turn if self._seats.paging is None else held).append(job)
            budget -= count
        self._turn += held
        return chunks

    def _begin(self) -> list[RequestOutput]:
        """Begin prompts with what is known of them, but for those that need what others are computing."""
        updates: list[RequestOutput] = []
        for job in [job for job in self._turn if not job.begun]:
            leader, shared = self._seats.leader(job), job.shared
            if leader is not None:
                leader.awaited = True
                continue
            end = shared.end
            self._seats.begin(job)
            if not (job.idle or job.wants_scores or job.told):
                self._count(prefix_queries=len(job.request.prompt), prefix_hits=job.cached)
            if end is not None and not job.wants_scores and self._seats.take_end(job, *end[:2]):
                self._shared.use(shared, self.config.preempted_bytes)
                self._turn.remove(job)
                updates += self._answer(job, end[2])
        return updates

    def _prefill(self, job: SequenceState, begin: int, count: int) -> Any:
        """Begin to compute a chunk of a prompt."""
        request = job.request
        chunk, following = request.prompt[begin : begin + count], request.prompt[begin + 1 : begin + count + 1]
        wanted = NEXT_TOKEN if begin + count == len(request.prompt) and not job.idle else 0
        wanted += ALL_SCORES if job.wants_scores else 0
        asked = self._asked.of([job.slot], request.logprobs is not None)
        result = self._slots.prefill(job.slot, np.asarray(chunk), begin, np.asarray(following), wanted, asked)
        job.done += count
        self._seats.remember(job)
        if not job.idle:
            self._waiting.serve(request.client, count)
        return result

    def _bind(self, answers: dict[SequenceState, list[int]]) -> list[RequestOutput]:
        """Say how the next tokens are chosen. Where that fails, the request ends, and the others go on without it."""
        updates = []
        for job in list(answers):
            try:
                self._choose_for(job)
            except Exception as error:  # of its constraint
                del answers[job]
                updates.append(self._failed(job, f"{type(error).__name__}: {error}"))
        return updates

    def _choose_for(self, job: SequenceState) -> None:
        """Say how the next token of one request is chosen."""
        self._asked.count[job.slot] = len(job.answer)
        self._asked.masked[job.slot] = job.mask(self._asked.allowed[job.slot])

    def _failed(self, job: SequenceState, error: str) -> RequestOutput:
        """End a request with an error of its own."""
        self._leave(job)
        job.wait_no_more()
        return RequestOutput(request_id=job.request_id, finish_reason="error", error=error)

    def _finish_chunk(self, job: SequenceState, begin: int, count: int, result: Any) -> list[RequestOutput]:
        """What a chunk has brought."""
        request = job.request
        if job.wants_scores:
            following = request.prompt[begin + 1 : begin + count + 1]
            scores = jax.device_get(result.scores)
            job.prompt_scores += token_scores(scores, range(len(following)), following, request.prompt_logprobs or 0)
        if begin + count < len(request.prompt):
            return []
        if job.idle:
            self._leave(job)
            return []
        if job.wants_scores:
            job.shared.scores = tuple(job.prompt_scores)
        job.drafted = isinstance(self.config.drafts, MTPDrafter)
        if job.shared.waiting > 0 and not job.drafted:  # drafts by depths depend on the first token
            job.shared.end = *self._seats.keep_end(job), result.logits
            self._shared.use(job.shared, self.config.preempted_bytes)
        return self._answer(job, result.logits)

    def _answer(self, job: SequenceState, logits: Any) -> list[RequestOutput]:
        """The first token of an answer, with what is told once."""
        request = job.request
        try:
            self._choose_for(job)
        except Exception as error:  # of its constraint
            return [self._failed(job, f"{type(error).__name__}: {error}")]
        asked = self._asked.of([job.slot], request.logprobs is not None)
        chosen = jax.device_get(self._slots.first_token(logits, np.asarray(request.prompt), asked))
        if not job.told:
            self._count(prompt_tokens=len(request.prompt))
        scores = () if request.prompt_logprobs is None else job.shared.scores or ()
        told = dict(cached_tokens=job.cached, queue_seconds=job.queue_seconds, prompt_scores=scores)
        return self._grown(job, chosen.tokens[0, :1].tolist(), chosen.scores, 0, **told)

    def _see(self, job: SequenceState) -> list[RequestOutput]:
        """Read a prompt with images, videos or audio at once."""
        request, shared, prompt = job.request, job.shared, np.asarray([job.request.prompt], np.int32)
        try:
            seen = shared.seen
            if seen is None:
                assert self._sight is not None and shared.seeing is not None
                # awaited: what goes wrong in it must not reach the state of all slots
                seen = shared.seen = jax.block_until_ready(self._sight.read(shared.seeing.result()))
            cache, logits = seen
        except Exception as error:
            return [self._failed(job, what_failed(error))]
        job.wait_no_more()
        self._shared.use(shared, self.config.preempted_bytes)
        self._seats.take_whole(job, cache, prompt[0])
        self._waiting.serve(request.client, len(request.prompt))
        return self._answer(job, logits)

    # --- answers ---

    def _plan_answers(self) -> dict[SequenceState, list[int]]:
        """The answers that go on, with the drafts for each; who finds no page makes the last one give way."""
        planned: dict[SequenceState, list[int]] = {}
        jobs = [job for job in self._seats.jobs.values() if job.decodes]
        for job in sorted(jobs, key=lambda job: (-job.request.priority, job.request_id)):
            drafts = job.drafts(self.config.drafts)
            while job.slot >= 0 and not self._seats.reserve(job, job.done, job.done + 1 + len(drafts)):
                victim = self._written.current or self._seats.last(besides=planned)
                assert victim is not None
                self._give_way(victim)
            if job.slot >= 0:
                planned[job] = drafts
        return planned

    def _decode(self, answers: dict[SequenceState, list[int]]) -> tuple[dict[SequenceState, int], SampledTokens] | None:
        """Begin a step of these answers; returns in which row each is, and what is chosen."""
        if not answers:
            return None
        by_slot = {job.slot: job for job in answers}
        slots = rows_for(by_slot, self._slots.rows)
        rows = {by_slot[slot]: row for row, slot in enumerate(slots) if slot in by_slot}
        self._count(draft_tokens=sum(map(len, answers.values())))
        asked, columns = self._asked, self._slots.columns[-1 if any(answers.values()) else 0]
        tokens, positions = np.zeros((len(slots), columns), np.int32), np.full((len(slots), columns), -1, np.int32)
        for job, drafts in answers.items():
            fed, row = [job.answer[-1], *drafts], rows[job]
            tokens[row, : len(fed)] = fed
            positions[row, : len(fed)] = np.arange(job.done, job.done + len(fed))
            job.drafted = True
        wants = any(job.request.logprobs is not None for job in answers)
        return rows, self._slots.decode(slots, tokens, positions, asked.of(slots, wants))

    def _finish_decoding(self, rows: dict[SequenceState, int], chosen: SampledTokens) -> list[RequestOutput]:
        """What a step of answers has brought, each in its row."""
        chosen = jax.device_get(chosen)
        columns, updates = chosen.tokens.shape[1], []
        self._count(accepted_draft_tokens=int(sum(chosen.kept[row] - 1 for row in rows.values())))
        for job, row in rows.items():
            tokens = chosen.tokens[row, : chosen.kept[row]].tolist()
            job.done += len(tokens)
            updates += self._grown(job, tokens, chosen.scores, row * columns)
            self._waiting.serve(job.request.client, len(tokens))
        return updates

    def _grown(self, job: SequenceState, tokens: list[int], scores: Any, at: int, **first: Any) -> list[RequestOutput]:
        """The answer with more tokens, cut where it ends; its slot is free then. What was told is not told again."""
        if job.repeats:
            job.answer.append(job.told[len(job.answer)])
            return []
        request, reason, error = job.request, None, None
        for index, token in enumerate(tokens):
            job.answer.append(token)
            reason, error = job.ends(token)
            if reason is not None:
                tokens = tokens[: index + 1]
                break
        found: tuple[TokenScore, ...] = ()
        if request.logprobs is not None:
            found = tuple(token_scores(scores, range(at, at + len(tokens)), tokens, request.logprobs))
        self._count(generated_tokens=len(tokens))
        if reason is not None:
            self._leave(job)
            self._written.add(job)
        told: dict[str, Any] = dict(tokens=tuple(tokens), scores=found, finish_reason=reason, error=error)
        return [RequestOutput(request_id=job.request_id, **told, **first)]
