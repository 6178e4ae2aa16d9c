"""Complete responses and server-sent events, from the outputs of the engine for one request."""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.structured_output import TokenConstraint
from eqx_decoders.serving.frontend.worker_threads import ITEMS_PER_STEP, run_in_worker_if_large
from eqx_decoders.serving.http.engine_thread import RequestOutputs
from eqx_decoders.serving.http.json_body import write
from eqx_decoders.serving.http.metrics import RequestTimer
from eqx_decoders.serving.http.protocol import GenerationRequest
from eqx_decoders.serving.http.response_types import CachedTokens, ErrorBody, ResponseFields, Usage
from eqx_decoders.serving.http.responses import Choice, CollectedDeltas, Delta, ResponseBuilder


PING_SECONDS = 15.0  # without an event, after which a comment is sent: proxies close idle connections
LINE_SEPARATORS = [(character.encode(), f"\\u{ord(character):04x}".encode()) for character in "\x85\u2028\u2029"]

_log = logging.getLogger("eqx_decoders.serving")


def json_response(value: ResponseFields | dict[str, Any], status: int = 200, **headers: str) -> Response:
    """Create a response with a value as JSON."""
    return Response(write(value), status, headers, "application/json")


class EventStream(StreamingResponse):
    """Response of server-sent events. `close` is called at its end, also after errors and disconnects."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]):
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._events, self.close = _with_pings(events), close
        super().__init__(self._events, headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
            await self._events.aclose()  # it still waits for the next event if the client has disconnected


async def _with_pings(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield events, and a comment after `PING_SECONDS` without an event."""
    next_event = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({next_event}, timeout=PING_SECONDS)
            content = next_event.result() if done else b": ping\n\n"
            if content is None:
                return
            yield content
            if done:
                next_event = asyncio.ensure_future(anext(events, None))
    finally:
        next_event.cancel()
        await asyncio.gather(next_event, return_exceptions=True)


@dataclasses.dataclass(kw_only=True)
class PendingResponse:
    """Completions of one request in progress."""

    request: GenerationRequest
    builder: ResponseBuilder
    outputs: RequestOutputs
    choices: list[Choice]
    timers: list[RequestTimer]
    prompts: list[tuple[int, ...]]  # one per choice
    constraints: Sequence[TokenConstraint | None]
    stop_ids: Sequence[int]

    @property
    def usage(self) -> Usage:
        """Token usage. A prompt with several completions counts once."""
        first_choices = range(0, len(self.choices), self.request.n)
        prompt = sum(len(self.prompts[index]) for index in first_choices)
        completion = sum(choice.count for choice in self.choices)
        cached = CachedTokens(cached_tokens=sum(self.choices[index].cached for index in first_choices))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=cached,
        )

    async def complete(self) -> Response:
        """Return the complete response."""
        collected = [CollectedDeltas() for _ in self.choices]
        try:
            async for index, delta in self._deltas():
                collected[index].add(delta)
        finally:
            self.close()
        deltas = [choice.join() for choice in collected]
        prompts = dict(enumerate(self.prompts)) if self.request.return_token_ids else {}
        size = sum(self._json_size(delta) for delta in deltas) + sum(map(len, prompts.values()))
        build = functools.partial(self.builder.complete, deltas, self.usage, prompts)
        return await run_in_worker_if_large(size, lambda: json_response(build()))

    def _json_size(self, delta: Delta) -> int:
        """Estimate the number of values in the JSON of a delta."""
        return (
            len(delta.tokens)
            + (len(delta.text) + len(delta.reasoning)) // 8
            + len(delta.scores) * (1 + (self.request.alternatives or 0))
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events: chunks, an error if the request fails, and [DONE]."""
        request, builder, started = self.request, self.builder, set[int]()
        try:
            for index in range(len(self.choices)):
                first = builder.first(index)
                if first is not None:
                    yield event(first)
            async for index, delta in self._deltas():
                if not delta.empty:
                    prompt = None if index in started else self.prompts[index]
                    size = self._json_size(delta) + len(prompt or ())
                    make_event = functools.partial(_chunk, builder, index, delta, prompt)
                    yield await run_in_worker_if_large(size, make_event)
                    started.add(index)
            if request.include_usage:
                yield event(builder.last(self.usage))
        except ApiError as error:
            yield event(ErrorBody.of(error))
        except Exception:
            _log.exception("a stream failed")
            yield event(ErrorBody.of(ApiError(500, "The server failed to process this request.")))
        yield b"data: [DONE]\n\n"

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        async for index, output in self.outputs:
            choice, timer = self.choices[index], self.timers[index]
            try:
                take = functools.partial(choice.take, output)
                delta = await run_in_worker_if_large(ITEMS_PER_STEP * len(output.prompt_scores), take)
            except ApiError as error:
                timer.ended("error" if error.status == 500 else "abort")
                choice.finished = True
                raise
            timer.tokens(len(output.tokens), output.queue_seconds)
            if choice.finished:
                self.outputs.cancel(index)
                timer.ended(delta.finish or "stop")
                _check_grammar(self.constraints[index], delta, self.stop_ids)
            yield index, delta

    def close(self) -> None:
        """Cancel incomplete completions."""
        self.outputs.close()
        for choice, timer in zip(self.choices, self.timers, strict=True):
            if not choice.finished:
                choice.finished = True
                timer.ended("abort")


def _check_grammar(constraint: TokenConstraint | None, delta: Delta, stop_ids: Sequence[int]) -> None:
    """Raise ApiError for a completion that ended before it matched its grammar."""
    ended = delta.finish == "stop" and delta.tokens and delta.tokens[-1] in stop_ids
    if ended and constraint is not None and constraint.error:
        raise ApiError(400, f"The completion could not follow the grammar of the request: {constraint.error}.")


def _chunk(builder: ResponseBuilder, index: int, delta: Delta, prompt: tuple[int, ...] | None) -> bytes:
    return event(builder.chunk(index, delta, prompt))


def event(value: Any) -> bytes:
    """Return a value as a server-sent event.

    The characters U+0085, U+2028 and U+2029 are escaped, because some clients treat them as line breaks (as Python's
    `str.splitlines` does) and JSON allows them in strings.
    """
    content = write(value)
    for character, escape in LINE_SEPARATORS:
        content = content.replace(character, escape)
    return b"data: " + content + b"\n\n"
