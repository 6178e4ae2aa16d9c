"""`StepResults`: device arrays of a dispatched step. `ResultReader`: turns them into the outputs of requests."""

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
    """Log-probabilities of the prompt tokens that follow the tokens `begin:end`."""

    sequence: SequenceState
    begin: int
    end: int
    scores: Scores


@dataclasses.dataclass(eq=False)
class StepResults:
    """Results of one step, on the device.

    **Arguments:**

    - `prompt_chunks`: log-probabilities of prompt tokens.
    - `first_tokens`: first output tokens, by groups of sequences with the same prompt, one row per sequence.
    - `decode_rows`, `decoded`: row of each sequence in the decoding step, and the sampled tokens of the rows.
    - `experts`: experts of sequences whose last token is sampled in this step.
    """

    prompt_chunks: list[PromptChunk] = dataclasses.field(default_factory=list)
    first_tokens: list[tuple[list[SequenceState], SampledTokens]] = dataclasses.field(default_factory=list)
    decode_rows: dict[SequenceState, int] = dataclasses.field(default_factory=dict)
    decoded: SampledTokens | None = None
    experts: dict[SequenceState, AnyArray] = dataclasses.field(default_factory=dict)

    @property
    def sequences(self) -> set[SequenceState]:
        """All sequences with results in this step."""
        return {
            *self.decode_rows,
            *(chunk.sequence for chunk in self.prompt_chunks),
            *(sequence for sequences, _ in self.first_tokens for sequence in sequences),
        }

    @property
    def has_awaited_scores(self) -> bool:
        """True if these results complete the prompt log-probabilities that waiting requests share."""
        return any(
            sequence.is_decoding and sequence.needs_prompt_scores and sequence.shared.num_waiting > 0
            for sequence in (chunk.sequence for chunk in self.prompt_chunks)
        )

    def take(self) -> "StepResults":
        """Return a copy of the results, and clear this object."""
        taken = dataclasses.replace(self)
        self.prompt_chunks, self.first_tokens, self.decode_rows, self.decoded, self.experts = [], [], {}, None, {}
        return taken

    def start_copies(self) -> None:
        """Start to copy the results to the host."""
        for array in jax.tree.leaves(self._arrays()):
            array.copy_to_host_async()

    def on_host(self) -> "StepResults":
        """Wait for the results and return them on the host, without scores that no request asked for.

        Arrays other than `experts` become lists, because reading single elements of lists is faster.
        """
        *arrays, experts = jax.device_get(self._arrays())
        chunk_scores, first_tokens, decoded = jax.tree.map(np.ndarray.tolist, arrays)
        return StepResults(
            prompt_chunks=[
                chunk._replace(scores=scores) for chunk, scores in zip(self.prompt_chunks, chunk_scores, strict=True)
            ],
            first_tokens=[
                (sequences, sampled) for (sequences, _), sampled in zip(self.first_tokens, first_tokens, strict=True)
            ],
            decode_rows=self.decode_rows,
            decoded=decoded,
            experts=dict(zip(self.experts, experts, strict=True)),
        )

    def _arrays(self) -> tuple[Any, ...]:
        """Return the arrays to be copied: prompt scores, first tokens, decoded tokens, and experts."""
        first_tokens = [_without_unused_scores(sampled, sequences) for sequences, sampled in self.first_tokens]
        decoded = None if self.decoded is None else _without_unused_scores(self.decoded, self.decode_rows)
        return [chunk.scores for chunk in self.prompt_chunks], first_tokens, decoded, list(self.experts.values())


def _without_unused_scores(sampled: SampledTokens, sequences: Iterable[SequenceState]) -> SampledTokens:
    wants_scores = any(sequence.request.logprobs is not None for sequence in sequences)
    no_scores: Any = None
    return sampled if wants_scores else sampled._replace(scores=no_scores)


class ResultReader:
    """Reads the results of steps, extends the output tokens of sequences, and collects the outputs of requests.

    `unfinished`: unfinished requests by id. Results of other requests are ignored: if a request turns out to be
    finished after the next step was dispatched, that step has computed one token in vain. The slot is freed, and later
    programs find it empty.

    **Arguments:**

    - `release`: frees the slot of a sequence.
    - `charge`: charges a client for computed tokens.
    - `on_finished`: called with each sequence that finishes normally.
    - `read_experts`: starts to read the experts of the tokens in a slot. None: experts are not returned.
    """

    def __init__(
        self,
        *,
        release: Callable[[SequenceState], None],
        charge: Callable[[str, int], None],
        on_finished: Callable[[SequenceState], None],
        read_experts: Callable[[int], Array] | None,
    ):
        self._release = release
        self._charge = charge
        self._on_finished = on_finished
        self._read_experts = read_experts
        self.unfinished: dict[int, SequenceState] = {}
        self.outputs: list[RequestOutput] = []
        self.totals: collections.Counter[str] = collections.Counter()

    def has_unfinished(self, results: StepResults) -> bool:
        """Return whether any of these results belong to an unfinished request."""
        return any(sequence.request_id in self.unfinished for sequence in results.sequences)

    def count(self, **increments: int) -> None:
        """Add to the totals of `EngineStats`."""
        for name, number in increments.items():
            self.totals[name] += number

    def finish(self, sequence: SequenceState, output: RequestOutput) -> None:
        """Finish a request with its last output, and free its slot."""
        del self.unfinished[sequence.request_id]
        if sequence.slot >= 0:
            self._release(sequence)
        sequence.stop_waiting()
        self.outputs.append(output)

    def add_pending(self, sequence: SequenceState, results: StepResults) -> None:
        """Record that a step samples one more token. If it is the last possible token, free the slot right away."""
        sequence.num_pending += 1
        if sequence.num_sampled == sequence.request.max_new_tokens:
            if self._read_experts is not None:
                results.experts[sequence] = self._read_experts(sequence.slot)
            self._release(sequence)

    def read(self, results: StepResults, version: int) -> None:
        """Wait for the results of a step and process them. `version`: version of the weights that computed them."""
        results = results.take().on_host()
        for chunk in results.prompt_chunks:
            if chunk.sequence.request_id in self.unfinished:
                self._read_chunk(chunk)
        for sequences, sampled in results.first_tokens:
            for row, sequence in enumerate(sequences):
                if sequence.request_id in self.unfinished:
                    self._read_first_token(sequence, row, sampled, results, version)
        if results.decoded is not None:
            self._read_decoded(results.decode_rows, results.decoded, results, version)

    def _read_chunk(self, chunk: PromptChunk) -> None:
        """Append the log-probabilities of a prompt chunk."""
        sequence, request = chunk.sequence, chunk.sequence.request
        first = max(chunk.begin, request.prompt_logprobs_from - 1)  # row i scores token i + 1
        following = request.prompt[first + 1 : chunk.end + 1]
        rows = range(first - chunk.begin, first - chunk.begin + len(following))
        sequence.prompt_scores += token_scores(chunk.scores, rows, following, request.prompt_logprobs or 0)
        if chunk.end == len(request.prompt):
            sequence.shared.scores = tuple(sequence.prompt_scores)

    def _read_first_token(
        self, sequence: SequenceState, row: int, sampled: Any, results: StepResults, version: int
    ) -> None:
        """Append the first output token, in an output with the fields that are reported once."""
        request = sequence.request
        if not sequence.replay_tokens:
            self.count(prompt_tokens=len(request.prompt))
        prompt_scores: tuple[TokenScore, ...] = ()
        if request.prompt_logprobs is not None:
            prompt_scores = sequence.shared.scores or ()
        self._append(
            sequence,
            sampled.tokens[row][:1],
            sampled.scores,
            row,
            results,
            version=version,
            cached_tokens=sequence.num_cached,
            queue_seconds=sequence.queue_seconds,
            prompt_scores=prompt_scores,
        )

    def _read_decoded(self, rows: dict[SequenceState, int], sampled: Any, results: StepResults, version: int) -> None:
        """Append the tokens of a decoding step. `rows`: row of each sequence."""
        tokens, counts, scores = sampled.tokens, sampled.num_accepted, sampled.scores
        columns = len(tokens[0])
        rows = {sequence: row for sequence, row in rows.items() if sequence.request_id in self.unfinished}
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
        **output_fields: Any,
    ) -> None:
        """Append sampled tokens up to the end of the completion and add the output. Replayed tokens are not returned.

        `first_row`: row of `scores` of the first token. `output_fields`: further fields of the output.
        """
        sequence.num_pending -= 1
        if len(sequence.output_tokens) < len(sequence.replay_tokens):
            sequence.output_tokens.append(sequence.replay_tokens[len(sequence.output_tokens)])
            return
        request, reason, error = sequence.request, None, None
        for index, token in enumerate(tokens):
            sequence.output_tokens.append(token)
            reason, error = sequence.finish_reason(token)
            if reason is not None:
                tokens = tokens[: index + 1]
                break
        if request.logprobs is not None:
            rows = range(first_row, first_row + len(tokens))
            output_fields["scores"] = tuple(token_scores(scores, rows, tokens, request.logprobs))
        self.totals["generated_tokens"] += len(tokens)
        if reason is not None and self._read_experts is not None:
            experts = results.experts.get(sequence)
            experts = np.asarray(self._read_experts(sequence.slot) if experts is None else experts)
            output_fields["experts"] = experts[: len(request.prompt) + len(sequence.output_tokens)].copy()
            output_fields["experts"][-1] = -1  # the last token is never fed to the model
        output = RequestOutput(
            request_id=sequence.request_id, tokens=tuple(tokens), finish_reason=reason, error=error, **output_fields
        )
        if reason is None:
            self.outputs.append(output)
            return
        self.finish(sequence, output)
        self._on_finished(sequence)
