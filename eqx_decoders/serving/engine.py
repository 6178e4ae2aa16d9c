"""The engine: many requests, one model. It decides what each step computes; `Slots` computes it."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.decoder import Decoder
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.inference.apart import usual_format
from eqx_decoders.inference.generate import prefilled
from eqx_decoders.layers.cache_format import CacheFormat
from eqx_decoders.layers.embedding import LearnedPositions
from eqx_decoders.serving.drafts import FurtherPrediction, SmallerModel, check_drafts, device_drafting
from eqx_decoders.serving.engine_config import EngineConfig
from eqx_decoders.serving.job import Job
from eqx_decoders.serving.request import EngineCounts, Request, TokenScore, Update
from eqx_decoders.serving.seats import Seats
from eqx_decoders.serving.slots import ALL_SCORES, NEXT_TOKEN, Asked, Chosen, Slots
from eqx_decoders.serving.steps import row_counts, rows_for
from eqx_decoders.serving.waiting import WaitingList


class Engine:
    """Continues the prompts of many requests with one model: each gets the tokens that it would get alone.

    Requests come and go between steps. A step feeds the last token of every answer, and chunks of prompts as far as
    `token_budget` goes, in turn. All programs are compiled by `warm_up` (or the first step), except those for pictures
    and sounds, which depend on their sizes. Not for several threads at once.

        engine = Engine(model, EngineConfig(max_batch_size=4))
        request_id = engine.submit(Request(prompt=(1, 2, 3), max_new_tokens=20))
        while engine.has_work:
            for update in engine.step():
                ...
    """

    def __init__(self, model: Decoder, config: EngineConfig = EngineConfig()):
        self.model, self.config = model, config
        positions = model.config.positions
        limit = positions.max_positions if isinstance(positions, LearnedPositions) else None
        rule = f"EngineConfig.max_length={config.max_length} must be at most {limit}, the model's learned positions"
        check(limit is None or config.max_length <= limit, f"{rule}.")
        check_drafts(config.drafts, model)
        # the last chunk of a prompt is rounded up to one of few sizes, which depends on its length alone
        sizes = {size for size in (16, config.prefill_chunk // 2) if 16 <= size < config.prefill_chunk}
        layout = model.execution.layout
        apart = not config.batch_invariant and config.drafts is None and layout.single and layout.platform == "cpu"
        self._rows = row_counts(config.max_batch_size) if apart else (config.max_batch_size,)
        self._columns = (1,) if config.drafts is None else (1, 1 + config.drafts.num_tokens)
        self._kind = usual_format(model.execution) if config.cache_dtype is None else CacheFormat.of(config.cache_dtype)
        self._slots = Slots(
            model,
            count=config.max_batch_size,
            length=config.max_length,
            chunks=(*sorted(sizes), config.prefill_chunk),
            rows=self._rows,
            columns=self._columns,
            biases=config.max_logit_bias,
            top=config.max_logprobs,
            dtype=self._kind,
            pages=config.pages,
            small=config.drafts.model if isinstance(config.drafts, SmallerModel) else None,
            drafting=device_drafting(config.drafts),
        )
        self._seats = Seats(self._slots, config.pages, config.prefix_cache_bytes)
        self._waiting: WaitingList[Job] = WaitingList(config.max_waiting, config.max_waiting_tokens)
        self._turn: list[Job] = []  # whose prompts are being computed, the next one first
        self._asked = self._slots.asked(config.max_batch_size)
        self._ids = itertools.count()
        self._cancelled: list[Update] = []
        self._counts = EngineCounts()
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
        names = self._seats.prefixes.names(request.prompt, request.cache_salt) if request.media is None else []
        job = Job(request_id=next(self._ids), request=request, names=names)
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
            if job is None:
                return
            self._leave(job)
        self._cancelled.append(Update(request_id=request_id, finish_reason="cancelled"))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._seats.jobs or len(self._waiting) or self._cancelled)

    def step(self) -> list[Update]:
        """Compute one step; returns what it has brought."""
        self.warm_up()
        updates, self._cancelled = self._cancelled, []
        updates += self._admit()
        self._count(steps=1)
        answers = self._plan_answers()
        chunks = self._plan_chunks(self.config.token_budget - len(answers), alone=not answers)
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
        self._seats.prefixes.clear()

    def counts(self) -> EngineCounts:
        """How it stands."""
        now = dict(running=len(self._seats.jobs), waiting=len(self._waiting), cache_usage=self._seats.usage)
        return dataclasses.replace(self._counts, **now)

    def _count(self, **more: int) -> None:
        """Add to the counts."""
        new = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = dataclasses.replace(self._counts, **new)

    # --- who gets a slot ---

    def _wait(self, job: Job) -> None:
        self._waiting.add(job, {other.request.client for other in self._seats.jobs.values()})

    def _admit(self) -> list[Update]:
        """Give slots to those whose turn it is, taking them from lower priorities where there are no others."""
        updates: list[Update] = []
        while (job := self._waiting.first()) is not None:
            free = self._seats.free
            if free is None or not self._seats.has_room(job):
                victim = self._seats.last()
                if victim is None or victim.request.priority >= job.request.priority:
                    break
                self._interrupt(victim)
                continue
            self._waiting.remove(job.request_id)
            updates += self._enter(job, free)
        return updates

    def _enter(self, job: Job, slot: int) -> list[Update]:
        """Give a request a slot."""
        request, returns = job.request, job.saved is not None
        job.queue_seconds = job.queue_seconds if returns else time.monotonic() - job.arrived
        self._asked.sampling.set(slot, request.sampling)
        self._asked.prompt_length[slot] = len(request.prompt)
        self._seats.enter(job, slot)
        if request.media is not None and not returns:
            return self._see(job)
        if not returns and request.prompt_logprobs is None:
            self._count(prefix_queries=len(request.prompt), prefix_hits=job.cached)
        if not job.decodes:
            self._turn.append(job)
        return []

    def _interrupt(self, job: Job) -> None:
        """Take the slot of a request, which goes on later from where it stands."""
        self._rest(job)
        self._seats.interrupt(job)
        self._count(preemptions=1)
        self._wait(job)

    def _leave(self, job: Job) -> None:
        """Free the slot of a request that is complete, or given up."""
        self._rest(job)
        self._seats.leave(job)

    def _rest(self, job: Job) -> None:
        """Nothing is computed for a slot."""
        if job in self._turn:
            self._turn.remove(job)
        self._asked.masked[job.slot] = False

    # --- prompts ---

    def _plan_chunks(self, budget: int, *, alone: bool) -> list[tuple[Job, int, int]]:
        """Chunks of prompts, one of each in turn, while the budget lasts: whose, where they begin, and their tokens.

        At least one; where there are no pages for any, and nothing else is done (`alone`), others give theirs.
        """
        chunks: list[tuple[Job, int, int]] = []
        planned: dict[int, int] = {}
        held: list[Job] = []
        while self._turn and (budget > 0 or not chunks):
            job = self._turn.pop(0)
            begin = planned.get(job.request_id, job.done)
            count = min(self._seats.block, len(job.request.prompt) - begin)
            if not self._seats.reserve(job, begin, begin + count):
                if alone and not chunks and (victim := self._seats.last(besides=[job])) is not None:
                    held = [other for other in held if other is not victim]
                    self._interrupt(victim)
                    self._turn.insert(0, job)
                else:
                    held.append(job)
                continue
            chunks.append((job, begin, count))
            planned[job.request_id] = begin + count
            if begin + count < len(job.request.prompt):
                # pages behind windows are given back chunk by chunk, so two can't be planned ahead
                (self._turn if self._seats.paging is None else held).append(job)
            budget -= count
        self._turn += held
        return chunks

    def _prefill(self, job: Job, begin: int, count: int) -> Any:
        """Begin to compute a chunk of a prompt."""
        request = job.request
        chunk, following = request.prompt[begin : begin + count], request.prompt[begin + 1 : begin + count + 1]
        wanted = NEXT_TOKEN if begin + count == len(request.prompt) else 0
        wanted += 0 if request.prompt_logprobs is None else ALL_SCORES
        asked = self._asked_of(job)
        result = self._slots.prefill(job.slot, np.asarray(chunk), begin, np.asarray(following), wanted, asked)
        job.done += count
        self._seats.remember(job)
        self._waiting.serve(request.client, count)
        return result

    def _asked_of(self, job: Job) -> Asked:
        """How the next token of one request is chosen."""
        asked, slot = self._asked, job.slot
        asked.count[slot] = len(job.answer)
        asked.masked[slot] = job.mask(asked.allowed[slot])
        return asked.of([slot], job.request.logprobs is not None)

    def _finish_chunk(self, job: Job, begin: int, count: int, result: Any) -> list[Update]:
        """What a chunk has brought."""
        request = job.request
        ends = begin + count == len(request.prompt)
        if request.prompt_logprobs is not None:
            following = request.prompt[begin + 1 : begin + count + 1]
            scores = jax.device_get(result.scores)
            job.prompt_scores += _token_scores(scores, range(len(following)), following, request.prompt_logprobs)
        if not ends:
            return []
        self._count(prompt_tokens=len(request.prompt))
        job.drafted = isinstance(self.config.drafts, FurtherPrediction)
        chosen = jax.device_get(result.chosen)
        return [self._begun(job, chosen)]

    def _begun(self, job: Job, chosen: Any) -> Update:
        """The first token of an answer, with what is told once."""
        told = dict(cached_tokens=job.cached, queue_seconds=job.queue_seconds, prompt_scores=tuple(job.prompt_scores))
        return self._grown(job, chosen.tokens[0, :1].tolist(), chosen.scores, 0, **told)

    def _see(self, job: Job) -> list[Update]:
        """Compute a prompt with pictures, films or sounds at once."""
        request, asked = job.request, self._asked_of(job)
        count, prompt = len(request.prompt), np.asarray([request.prompt], np.int32)
        try:
            cache, logits = prefilled(self._slots.model, prompt, request.media, self.config.max_length, self._kind)
        except ConfigError as error:
            self._leave(job)
            return [Update(request_id=job.request_id, finish_reason="error", error=str(error))]
        self._seats.take_whole(job, cache, prompt[0])
        chosen = jax.device_get(self._slots.first_token(logits, prompt, asked))
        self._waiting.serve(request.client, count)
        self._count(prompt_tokens=count)
        return [self._begun(job, chosen)]

    # --- answers ---

    def _plan_answers(self) -> dict[Job, list[int]]:
        """The answers that go on, with the drafts for each; who finds no page makes the last one give way."""
        planned: dict[Job, list[int]] = {}
        jobs = [job for job in self._seats.jobs.values() if job.decodes]
        for job in sorted(jobs, key=lambda job: (-job.request.priority, job.request_id)):
            drafts = job.drafts(self.config.drafts)
            while job.slot >= 0 and not self._seats.reserve(job, job.done, job.done + 1 + len(drafts)):
                victim = self._seats.last(besides=planned)
                assert victim is not None
                self._interrupt(victim)
            if job.slot >= 0:
                planned[job] = drafts
        return planned

    def _decode(self, answers: dict[Job, list[int]]) -> tuple[dict[Job, int], Chosen] | None:
        """Begin a step of these answers; returns in which row each is, and what is chosen."""
        if not answers:
            return None
        by_slot = {job.slot: job for job in answers}
        slots = rows_for(by_slot, self._rows)
        rows = {by_slot[slot]: row for row, slot in enumerate(slots) if slot in by_slot}
        self._count(draft_tokens=sum(map(len, answers.values())))
        asked, columns = self._asked, self._columns[-1 if any(answers.values()) else 0]
        tokens, positions = np.zeros((len(slots), columns), np.int32), np.full((len(slots), columns), -1, np.int32)
        for job, drafts in answers.items():
            fed, row = [job.answer[-1], *drafts], rows[job]
            tokens[row, : len(fed)] = fed
            positions[row, : len(fed)] = np.arange(job.done, job.done + len(fed))
            asked.count[job.slot] = len(job.answer)
            asked.masked[job.slot] = job.mask(asked.allowed[job.slot])
            job.drafted = True
        wants = any(job.request.logprobs is not None for job in answers)
        return rows, self._slots.decode(slots, tokens, positions, asked.of(slots, wants))

    def _finish_decoding(self, rows: dict[Job, int], chosen: Chosen) -> list[Update]:
        """What a step of answers has brought, each in its row."""
        chosen = jax.device_get(chosen)
        columns, updates = chosen.tokens.shape[1], []
        self._count(accepted_draft_tokens=int(sum(chosen.kept[row] - 1 for row in rows.values())))
        for job, row in rows.items():
            tokens = chosen.tokens[row, : chosen.kept[row]].tolist()
            job.done += len(tokens)
            updates.append(self._grown(job, tokens, chosen.scores, row * columns))
            self._waiting.serve(job.request.client, len(tokens))
        return updates

    def _grown(self, job: Job, tokens: list[int], scores: Any, at: int, **first: Any) -> Update:
        """The answer with more tokens, cut where it ends; its slot is free then."""
        request, reason, error = job.request, None, None
        for index, token in enumerate(tokens):
            job.answer.append(token)
            reason, error = job.ends(token)
            if reason is not None:
                tokens = tokens[: index + 1]
                break
        found: tuple[TokenScore, ...] = ()
        if request.logprobs is not None:
            found = tuple(_token_scores(scores, range(at, at + len(tokens)), tokens, request.logprobs))
        self._count(generated_tokens=len(tokens))
        if reason is not None:
            self._leave(job)
        told: dict[str, Any] = dict(tokens=tuple(tokens), scores=found, finish_reason=reason, error=error)
        return Update(request_id=job.request_id, **told, **first)


def _token_scores(scores: Any, rows: range, tokens: Sequence[int], count: int) -> list[TokenScore]:
    """Those of single tokens, by their rows."""
    found = []
    for row, token in zip(rows, tokens, strict=True):
        best = zip(scores.top_ids[row, :count].tolist(), scores.top[row, :count].tolist(), strict=True)
        found.append(TokenScore(int(token), float(scores.chosen[row]), tuple(best)))
    return found
