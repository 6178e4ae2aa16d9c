"""`StepResults`: what a dispatched step computes. `ResultReader` reads it, when the next step is dispatched already."""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import SampledTokens, Scores, TokenScore, token_scores
from eqx_decoders.serving.engine.sequence import SequenceState
from eqx_decoders.sharding.axes import AnyArray


class PromptChunk(NamedTuple):
    """Scores of the tokens of a prompt after those from `begin` up to `end`."""

    sequence: SequenceState
    begin: int
    end: int
    scores: Scores


@dataclasses.dataclass(eq=False)
class StepResults:
    """Results of one step, on the device.

    **Arguments:**

    - `chunks`: scores of parts of prompts.
    - `first`: first tokens of answers, a row for each answer to one prompt.
    - `rows`, `sampled`: the row of each answer in the decoding step, and what this has sampled.
    - `experts`: experts of the answers that have no token after this step.
    """

    chunks: list[PromptChunk] = dataclasses.field(default_factory=list)
    first: list[tuple[list[SequenceState], SampledTokens]] = dataclasses.field(default_factory=list)
    rows: dict[SequenceState, int] = dataclasses.field(default_factory=dict)
    sampled: SampledTokens | None = None
    experts: dict[SequenceState, AnyArray] = dataclasses.field(default_factory=dict)

    @property
    def sequences(self) -> set[SequenceState]:
        """The sequences that these are results of."""
        return {
            *self.rows,
            *(each.sequence for each in self.chunks),
            *(sequence for sequences, _ in self.first for sequence in sequences),
        }

    @property
    def awaited(self) -> bool:
        """True where a request waits for the scores of its prompt, and these are all computed."""
        return any(
            each.sequence.is_decoding and each.sequence.needs_prompt_scores and each.sequence.shared.num_waiting > 0
            for each in self.chunks
        )

    def take(self) -> "StepResults":
        """Return all results, and leave none."""
        taken = dataclasses.replace(self)
        self.chunks, self.first, self.rows, self.sampled, self.experts = [], [], {}, None, {}
        return taken

    def start_copies(self) -> None:
        """Let the device copy to the host what will be read, as soon as it is there."""
        for array in jax.tree.leaves(self._arrays()):
            array.copy_to_host_async()

    def on_host(self) -> "StepResults":
        """Return the results on the host, when they are there; without scores of tokens that no request reports.

        Arrays are lists, which are faster to read by single numbers, but for `experts`.
        """
        *arrays, experts = jax.device_get(self._arrays())
        chunks, first, sampled = jax.tree.map(np.ndarray.tolist, arrays)
        return StepResults(
            [old._replace(scores=scores) for old, scores in zip(self.chunks, chunks, strict=True)],
            [(sequences, new) for (sequences, _), new in zip(self.first, first, strict=True)],
            self.rows,
            sampled,
            dict(zip(self.experts, experts, strict=True)),
        )

    def _arrays(self) -> tuple[Any, ...]:
        """Return what is read: scores of chunks, first tokens, tokens of the decoding step, and experts."""
        first = [_read_parts(sampled, sequences) for sequences, sampled in self.first]
        sampled = None if self.sampled is None else _read_parts(self.sampled, self.rows)
        return [each.scores for each in self.chunks], first, sampled, list(self.experts.values())


def _read_parts(sampled: SampledTokens, sequences: Iterable[SequenceState]) -> SampledTokens:
    scored = any(sequence.request.logprobs is not None for sequence in sequences)
    nothing: Any = None
    return sampled if scored else sampled._replace(scores=nothing)


class ResultReader:
    """Appends what steps have sampled to the answers, and keeps the outputs of these.

    `open` has the requests without a complete answer, by id: what was computed for others is ignored. A step that was
    dispatched before the last token of an answer was read has computed one more, in vain; programs that are dispatched
    later find the slot of that answer empty.

    **Arguments:**

    - `release`: frees the slot of a sequence.
    - `charge`: counts tokens that were computed for a client.
    - `ended`: called with each answer that is complete.
    - `experts`: starts to return the experts of the tokens of a slot; None: answers have none.
    """

    def __init__(
        self,
        release: Callable[[SequenceState], None],
        charge: Callable[[str, int], None],
        ended: Callable[[SequenceState], None],
        experts: Callable[[int], Array] | None,
    ):
        self._release, self._charge, self._ended, self._experts = release, charge, ended, experts
        self.open: dict[int, SequenceState] = {}
        self.outputs: list[RequestOutput] = []
        self.totals: collections.Counter[str] = collections.Counter()

    def is_awaited(self, results: StepResults) -> bool:
        """Return whether any of these results are of requests that are open."""
        return any(sequence.request_id in self.open for sequence in results.sequences)

    def count(self, **increments: int) -> None:
        """Add to the totals of the statistics."""
        for name, number in increments.items():
            self.totals[name] += number

    def close(self, sequence: SequenceState, output: RequestOutput) -> None:
        """End a request with its last output, and free its slot."""
        del self.open[sequence.request_id]
        if sequence.slot >= 0:
            self._release(sequence)
        sequence.stop_waiting()
        self.outputs.append(output)

    def sampled(self, sequence: SequenceState, results: StepResults) -> None:
        """Note that a step samples one more token of an answer; its last one frees its slot at once."""
        sequence.num_pending += 1
        if sequence.num_sampled == sequence.request.max_new_tokens:
            if self._experts is not None:
                results.experts[sequence] = self._experts(sequence.slot)
            self._release(sequence)

    def read(self, results: StepResults, version: int) -> None:
        """Wait for the results of a step, which weights of this number computed, and append them to the answers."""
        results = results.take().on_host()
        for chunk in results.chunks:
            if chunk.sequence.request_id in self.open:
                self._read_chunk(chunk)
        for sequences, sampled in results.first:
            for row, sequence in enumerate(sequences):
                if sequence.request_id in self.open:
                    self._read_first(sequence, row, sampled, results, version)
        if results.sampled is not None:
            self._read_decoded(results.rows, results.sampled, results, version)

    def _read_chunk(self, chunk: PromptChunk) -> None:
        """Append the scores of a part of a prompt."""
        sequence, request = chunk.sequence, chunk.sequence.request
        first = max(chunk.begin, request.prompt_logprobs_from - 1)  # each row scores the token after its own
        following = request.prompt[first + 1 : chunk.end + 1]
        rows = range(first - chunk.begin, first - chunk.begin + len(following))
        sequence.prompt_scores += token_scores(chunk.scores, rows, following, request.prompt_logprobs or 0)
        if chunk.end == len(request.prompt):
            sequence.shared.scores = tuple(sequence.prompt_scores)

    def _read_first(self, sequence: SequenceState, row: int, sampled: Any, results: StepResults, version: int) -> None:
        """Append the first token of an answer; its output has the values that are reported once."""
        request = sequence.request
        if not sequence.delivered:
            self.count(prompt_tokens=len(request.prompt))
        scores: tuple[TokenScore, ...] = ()
        if request.prompt_logprobs is not None:
            scores = sequence.shared.scores or ()
        once = dict(cached_tokens=sequence.num_cached, queue_seconds=sequence.queue_seconds, prompt_scores=scores)
        output = dict(version=version, **once)
        self._append(sequence, sampled.tokens[row][:1], sampled.scores, row, results, **output)

    def _read_decoded(self, rows: dict[SequenceState, int], sampled: Any, results: StepResults, version: int) -> None:
        """Append the tokens of a decoding step, by the row of each sequence."""
        tokens, counts, scores = sampled.tokens, sampled.num_accepted, sampled.scores
        columns = len(tokens[0])
        rows = {sequence: row for sequence, row in rows.items() if sequence.request_id in self.open}
        self.count(accepted_draft_tokens=sum(counts[row] - 1 for row in rows.values()))
        for sequence, row in rows.items():
            count = counts[row]
            sequence.num_computed += count - 1
            self._append(sequence, tokens[row][:count], scores, row * columns, results, version=version)
            self._charge(sequence.request.client, count)

    def _append(
        self,
        sequence: SequenceState,
        tokens: list[int],
        scores: Any,
        first_row: int,
        results: StepResults,
        **output: Any,
    ) -> None:
        """Append tokens to an answer up to its end, where its slot is freed. A replayed token is not returned again."""
        sequence.num_pending -= 1
        if len(sequence.answer) < len(sequence.delivered):
            sequence.answer.append(sequence.delivered[len(sequence.answer)])
            return
        request, reason, error = sequence.request, None, None
        for index, token in enumerate(tokens):
            sequence.answer.append(token)
            reason, error = sequence.finish_reason(token)
            if reason is not None:
                tokens = tokens[: index + 1]
                break
        if request.logprobs is not None:
            rows = range(first_row, first_row + len(tokens))
            output["scores"] = tuple(token_scores(scores, rows, tokens, request.logprobs))
        self.totals["generated_tokens"] += len(tokens)
        if reason is not None and self._experts is not None:
            experts = results.experts.get(sequence)
            experts = np.asarray(self._experts(sequence.slot) if experts is None else experts)
            output["experts"] = experts[: len(request.prompt) + len(sequence.answer)].copy()
            output["experts"][-1] = -1  # the last token is not read
        output |= dict(tokens=tuple(tokens), finish_reason=reason, error=error)
        whole = RequestOutput(request_id=sequence.request_id, **output)
        if reason is None:
            self.outputs.append(whole)
            return
        self.close(sequence, whole)
        self._ended(sequence)
