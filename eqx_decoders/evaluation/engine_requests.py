"""Running many requests with an engine: `run_requests`, and `generate_completions` with stop strings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.errors import EqxDecodersError, check
from eqx_decoders.io.text.output_parsing.formats import ReasoningFormat
from eqx_decoders.io.text.output_parsing.parser import PROMPT_TAIL_TOKENS, OutputFormat, OutputParser
from eqx_decoders.io.text.tokenizer import Tokenizer, decode
from eqx_decoders.serving.engine.request import QueueFull, Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings
from eqx_decoders.serving.rollouts import RequestEngine


REQUESTS_PER_SLOT = 4  # submitted requests per slot, so that requests with the same prompt are queued together

Progress = Callable[[int], None]
OnOutput = Callable[[int, RequestOutput], bool]

EndReason = Literal["stop_token", "stop_string", "length"]


@runtime_checkable
class EvaluationEngine(RequestEngine, Protocol):
    """Engine with `cancel`."""

    def cancel(self, request_id: int) -> None: ...


class CompletionRequest(NamedTuple):
    """Request for a completion that ends at `max_new_tokens`, a string of `stop`, or a token of `stop_ids`.

    `reasoning`: markers of the model's reasoning. Stop strings in the reasoning are ignored.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    reasoning: ReasoningFormat | None = None

    def request(self) -> Request:
        """Return the request for an engine."""
        return Request(
            prompt=self.prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
        )


class Completion(NamedTuple):
    """Completion of a prompt: its text without the stop string or token, its number of tokens, and why it ended."""

    text: str
    num_tokens: int
    end_reason: EndReason


class _CompletionWriter:
    """Incremental text of a completion, including its reasoning. Stop strings in the reasoning are ignored."""

    def __init__(self, tokenizer: Tokenizer, request: CompletionRequest):
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops, self._stop_ids = StopStrings(request.stop), request.stop_ids
        self._parser = _reasoning_parser(tokenizer, request)  # None after the reasoning
        self._reasoning = ""  # text of the reasoning, or text that may be the start of a reasoning marker
        self._pieces: list[str] = []
        self._count, self._end = 0, "length"

    def push(self, output: RequestOutput) -> bool:
        """Add the tokens of an output. Returns whether the completion has reached a stop string."""
        for token in output.tokens:
            self._count += 1
            if token in self._stop_ids:
                self._end = "stop_token"
                break
            self._push_text(self._detokenizer.push(token))
            if self._stops.found is not None:
                self._end = "stop_string"
                return True
        return False

    def _push_text(self, text: str, *, final: bool = False) -> None:
        if self._parser is not None:
            self._reasoning += text
            self._parser.push(text)
            if (self._parser.in_reasoning or self._parser.is_undecided) and not final:
                return
            end = len(self._reasoning) if self._parser.in_reasoning else self._parser.reasoning_end
            self._pieces.append(self._reasoning[:end])
            text = self._reasoning[end:]
            self._parser = None
        self._pieces.append(self._stops.push(text))

    def finish(self) -> Completion:
        """Return the completion after its last output."""
        if self._stops.found is None:
            self._push_text(self._detokenizer.flush(), final=True)
            self._end = "stop_string" if self._stops.found is not None else self._end
            self._pieces.append(self._stops.flush())
        end_reason: EndReason = self._end  # pyright: ignore[reportAssignmentType]
        return Completion("".join(self._pieces), self._count, end_reason)


def _reasoning_parser(tokenizer: Tokenizer, request: CompletionRequest) -> OutputParser | None:
    """Return a parser that finds the end of the reasoning, or None if there is no reasoning or no stop string."""
    if request.reasoning is None or not request.stop:
        return None
    return OutputFormat(None, request.reasoning).parser(prompt=decode(tokenizer, request.prompt[-PROMPT_TAIL_TOKENS:]))


def run_requests(
    engine: EvaluationEngine,
    requests: Iterable[Request],
    on_output: OnOutput,
    progress: Progress,
) -> None:
    """Run requests, and call `on_output(index, output)` for each output with the index of its request.

    If `on_output` returns True, the request is cancelled. `progress` is called after each engine step with the number
    of newly finished requests. Raises EqxDecodersError for a request that fails.
    """
    waiting: Iterator[tuple[int, Request]] = enumerate(requests)
    indices: dict[int, int] = {}  # by request id
    max_submitted = min(REQUESTS_PER_SLOT * engine.config.max_batch_size, engine.config.max_waiting)
    try:
        while True:
            while len(indices) < max_submitted and (item := next(waiting, None)) is not None:
                index, request = item
                try:
                    indices[engine.submit(request)] = index
                except QueueFull:
                    waiting = itertools.chain([item], waiting)
                    break
            if not indices:
                return
            progress(sum([_process(engine, indices, output, on_output) for output in engine.step()]))
    finally:
        for request_id in indices:
            engine.cancel(request_id)


def _process(engine: EvaluationEngine, indices: dict[int, int], output: RequestOutput, on_output: OnOutput) -> bool:
    """Process one output, and return whether its request has finished."""
    index = indices.get(output.request_id)
    if index is None:  # the request was cancelled
        return False
    check(output.finish_reason != "error", f"request {index} failed: {output.error}", EqxDecodersError)
    is_done = on_output(index, output)
    if is_done and output.finish_reason is None:
        engine.cancel(output.request_id)
    has_finished = is_done or output.finish_reason is not None
    if has_finished:
        del indices[output.request_id]
    return has_finished


def no_progress(count: int) -> None:
    """Ignore the number of finished requests."""


def generate_completions(
    tokenizer: Tokenizer,
    engine: EvaluationEngine,
    requests: Sequence[CompletionRequest],
    progress: Progress = no_progress,
) -> list[Completion]:
    """Return the completions of requests, in order. Each is independent of the other requests and of their order."""
    writers: dict[int, _CompletionWriter] = {}
    completions: dict[int, Completion] = {}

    def on_output(index: int, output: RequestOutput) -> bool:
        if index not in writers:
            writers[index] = _CompletionWriter(tokenizer, requests[index])
        has_stopped = writers[index].push(output)
        if has_stopped or output.finish_reason is not None:
            completions[index] = writers.pop(index).finish()
        return has_stopped

    run_requests(engine, (request.request() for request in requests), on_output, progress)
    return [completions[index] for index in range(len(requests))]
