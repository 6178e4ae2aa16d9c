"""Responses on their way: whole, or as events, from what an engine tells of the answers to one request."""

import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from eqx_decoders.serving.frontend.structured_output import TokenConstraint
from eqx_decoders.serving.frontend.threads import SLOW, unless_small
from eqx_decoders.serving.http.engine_thread import RequestOutputs
from eqx_decoders.serving.http.incremental_json import write
from eqx_decoders.serving.http.json_fields import ApiError
from eqx_decoders.serving.http.metrics import Clock
from eqx_decoders.serving.http.protocol import GenerationRequest
from eqx_decoders.serving.http.responses import Choice, CollectedDeltas, Delta, ResponseBuilder, Usage


_log = logging.getLogger("eqx_decoders.serving")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpResponse:
    """A whole response."""

    content: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200, **headers: str) -> "HttpResponse":
        return cls(content=write(value), status=status, headers=headers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventStream:
    """A response that is sent piece by piece. Whoever sends it calls `close` afterwards, whatever has happened."""

    content: AsyncIterator[bytes]
    close: Callable[[], None]


@dataclasses.dataclass(kw_only=True)
class PendingResponse:
    """The answers to one request on their way."""

    asked: GenerationRequest
    shape: ResponseBuilder
    answers: RequestOutputs
    choices: list[Choice]
    clocks: list[Clock]
    prompts: list[tuple[int, ...]]  # of each choice
    constraints: Sequence[TokenConstraint | None]
    stop_ids: Sequence[int]

    @property
    def usage(self) -> Usage:
        """The prompts count once, also where there are several answers to each."""
        own = range(0, len(self.choices), self.asked.n)
        return Usage(
            prompt=sum(len(self.prompts[number]) for number in own),
            answers=sum(choice.count for choice in self.choices),
            cached=sum(self.choices[number].cached for number in own),
        )

    async def whole(self) -> HttpResponse:
        """The whole response."""
        gathered = [CollectedDeltas() for _ in self.choices]
        try:
            async for number, piece in self._pieces():
                gathered[number].add(piece)
        finally:
            self.close()
        whole = [one.whole() for one in gathered]
        prompts = dict(enumerate(self.prompts)) if self.asked.return_token_ids else {}
        size = sum(self._weight(piece) for piece in whole) + sum(map(len, prompts.values()))
        return await unless_small(size, lambda: HttpResponse.json(self.shape.whole(whole, self.usage, prompts)))

    def _weight(self, piece: Delta) -> int:
        """How many numbers and letters the JSON of a piece has, about."""
        return len(piece.tokens) + len(piece.text) // 8 + len(piece.scores) * (1 + (self.asked.logprobs or 0))

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events: the chunks, errors as OpenAI's clients expect them, and [DONE]."""
        asked, shape, begun = self.asked, self.shape, set[int]()
        try:
            for number in range(len(self.choices)):
                first = shape.first(number)
                if first is not None:
                    yield event(first)
            async for number, piece in self._pieces():
                if not piece.empty:
                    prompt = None if number in begun else self.prompts[number]
                    size = self._weight(piece) + len(prompt or ())
                    made = functools.partial(_chunk, shape, number, piece, prompt)
                    yield await unless_small(size, made)
                    begun.add(number)
            if asked.include_usage:
                yield event(shape.last(self.usage))
        except ApiError as error:
            yield event(error.body)
        except Exception:
            _log.exception("a stream has failed")
            yield event(ApiError(500, "The server could not answer this request.").body)
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncIterator[tuple[int, Delta]]:
        async for number, update in self.answers:
            choice, clock = self.choices[number], self.clocks[number]
            try:
                take = functools.partial(choice.take, update)
                piece = await unless_small(SLOW * len(update.prompt_scores), take)
            except ApiError as error:
                clock.ended("error" if error.status == 500 else "abort")
                choice.finished = True
                raise
            clock.tokens(len(update.tokens), update.queue_seconds)
            if choice.finished:
                self.answers.cancel(number)
                clock.ended(piece.finish or "stop")
                _check_form(self.constraints[number], piece, self.stop_ids)
            yield number, piece

    def close(self) -> None:
        """Nobody waits any more: what is not complete is cancelled."""
        self.answers.close()
        for choice, clock in zip(self.choices, self.clocks, strict=True):
            if not choice.finished:
                choice.finished = True
                clock.ended("abort")


def _check_form(constraint: TokenConstraint | None, piece: Delta, stop_ids: Sequence[int]) -> None:
    """ApiError for an answer that had to end before it had the form that was asked for."""
    ended = constraint is not None and piece.finish == "stop" and piece.tokens and piece.tokens[-1] in stop_ids
    if ended and constraint is not None and constraint.error:
        raise ApiError(400, f"The form that was asked for could not be kept: {constraint.error}.")


def _chunk(shape: ResponseBuilder, number: int, piece: Delta, prompt: Sequence[int] | None) -> bytes:
    return event(shape.chunk(number, piece, prompt))


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + write(value) + b"\n\n"
