"""Many requests through an engine: answers to prompts, as texts up to their stop strings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.errors import EqxDecodersError, check
from eqx_decoders.io.text.answers.formats import ReasoningFormat
from eqx_decoders.io.text.answers.parser import PROMPT_END, AnswerFormat, AnswerParser
from eqx_decoders.io.text.tokenizer import Tokenizer, decode
from eqx_decoders.serving.engine.request import QueueFull, Request, RequestOutput
from eqx_decoders.serving.engine.sampler import SamplingParams
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings
from eqx_decoders.serving.rollouts import RequestEngine


OPEN = 4  # requests at once for each slot of an engine: those of one prompt wait together

Progress = Callable[[int], None]
Take = Callable[[int, RequestOutput], bool]

EndReason = Literal["stop_token", "stop_string", "length"]


@runtime_checkable
class EvaluationEngine(RequestEngine, Protocol):
    """Engine that can forget a request."""

    def cancel(self, request_id: int) -> None: ...


class AnswerRequest(NamedTuple):
    """Prompt to be answered, in at most `max_new_tokens`, up to one of the strings `stop` or the tokens `stop_ids`.

    `reasoning`: markers of the reasoning that the model may write first. Stop strings in the reasoning are ignored.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    reasoning: ReasoningFormat | None = None

    def request(self) -> Request:
        """Return the request for an engine."""
        prompt, new = self.prompt, self.max_new_tokens
        return Request(prompt=prompt, max_new_tokens=new, sampling=self.sampling, stop_ids=self.stop_ids)


class WrittenAnswer(NamedTuple):
    """Answer of a model: its text without what ended it, the number of its tokens, and why it ended."""

    text: str
    num_tokens: int
    end: EndReason


class _AnswerWriter:
    """Incremental text of an answer, which includes its reasoning. Stop strings in the reasoning are ignored."""

    def __init__(self, tokenizer: Tokenizer, request: AnswerRequest):
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops, self._stop_ids = StopStrings(request.stop), request.stop_ids
        self._parser = _reasoning_parser(tokenizer, request)  # None after the reasoning
        self._reasoning = ""  # text of the reasoning, or text that may be the start of a reasoning marker
        self._pieces: list[str] = []
        self._count, self._end = 0, "length"

    def push(self, output: RequestOutput) -> bool:
        """Add the tokens of an output; return whether a stop string ended the answer."""
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

    def answer(self) -> WrittenAnswer:
        """Return the answer, as no more tokens come."""
        if self._stops.found is None:
            self._push_text(self._detokenizer.flush(), final=True)
            self._end = "stop_string" if self._stops.found is not None else self._end
            self._pieces.append(self._stops.flush())
        end: EndReason = self._end  # pyright: ignore[reportAssignmentType]
        return WrittenAnswer("".join(self._pieces), self._count, end)


def _reasoning_parser(tokenizer: Tokenizer, request: AnswerRequest) -> AnswerParser | None:
    """Return a parser that finds the end of the reasoning, or None if there is no reasoning or no stop string."""
    if request.reasoning is None or not request.stop:
        return None
    return AnswerFormat(None, request.reasoning).parser(prompt=decode(tokenizer, request.prompt[-PROMPT_END:]))


def run_requests(
    engine: EvaluationEngine,
    requests: Iterable[Request],
    take: Take,
    progress: Progress,
) -> None:
    """Submit requests as there is room, and hand each output to `take` with the number of its request.

    A request is cancelled where `take` returns True: it has all that it needs. `progress` is called after each step of
    the engine. Raises EqxDecodersError for a request that fails.
    """
    waiting: Iterator[tuple[int, Request]] = enumerate(requests)
    numbers: dict[int, int] = {}
    most = min(OPEN * engine.config.max_batch_size, engine.config.max_waiting)
    try:
        while True:
            while len(numbers) < most and (item := next(waiting, None)) is not None:
                try:
                    numbers[engine.submit(item[1])] = item[0]
                except QueueFull:
                    waiting = itertools.chain([item], waiting)
                    break
            if not numbers:
                return
            progress(sum([_take(engine, numbers, output, take) for output in engine.step()]))
    finally:
        for number in numbers:
            engine.cancel(number)


def _take(engine: EvaluationEngine, numbers: dict[int, int], output: RequestOutput, take: Take) -> bool:
    """Hand over one output; forget its request where it has ended, and return whether it has."""
    number = numbers.get(output.request_id)
    if number is None:  # of one that was cancelled
        return False
    check(output.finish_reason != "error", f"request {number} failed: {output.error}", EqxDecodersError)
    enough = take(number, output)
    if enough and output.finish_reason is None:
        engine.cancel(output.request_id)
    ended = enough or output.finish_reason is not None
    if ended:
        del numbers[output.request_id]
    return ended


def no_progress(count: int) -> None:
    """Show nothing of so many requests more that have ended."""


def write_answers(
    tokenizer: Tokenizer, engine: EvaluationEngine, requests: Sequence[AnswerRequest], progress: Progress = no_progress
) -> list[WrittenAnswer]:
    """Return the model's answers, in order; they do not depend on what else is asked, or in which order."""
    writers: dict[int, _AnswerWriter] = {}
    answers: dict[int, WrittenAnswer] = {}

    def take(number: int, output: RequestOutput) -> bool:
        if number not in writers:
            writers[number] = _AnswerWriter(tokenizer, requests[number])
        stopped = writers[number].push(output)
        if stopped or output.finish_reason is not None:
            answers[number] = writers.pop(number).answer()
        return stopped

    run_requests(engine, (each.request() for each in requests), take, progress)
    return [answers[number] for number in range(len(requests))]
