"""The ASGI application (Starlette, extra "serve"): addresses, keys, sizes, time limits, and clients that go away."""

import asyncio
import collections
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eqx_decoders.errors import need_extra
from eqx_decoders.serving.frontend.threads import beside
from eqx_decoders.serving.http.api import Api, EventStream, HttpRequest, HttpResponse
from eqx_decoders.serving.http.incremental_json import SMALL
from eqx_decoders.serving.http.json_fields import ApiError


PING = 15.0  # seconds without an event after which one is sent that says nothing: proxies close silent connections
LINGER = 2.0  # seconds in which a client may still send what is not read, so that it reads why
PART = 1 << 17  # bytes of an answer that are handed on at once: more would wait in memory for a slow client
LONG = 1 << 21  # bytes that take some milliseconds to be copied
ID_LENGTH = 64
GONE = 499  # how the log calls requests of clients that went away, as nginx does

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[..., Awaitable[HttpResponse | EventStream]]
Result = TypeVar("Result")

_log = logging.getLogger("eqx_decoders.serving")


class ClientGone(Exception):
    """Nobody is there to be answered."""


def create_app(api: Api, allow_origins: Sequence[str] = ()) -> Any:
    """The application. `allow_origins`: pages of which sites may call it from browsers (CORS); "*": of all."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
    except ImportError as error:
        raise need_extra("starlette", "serve") from error
    guard = _Guard(api)

    def route(method: str, path: str, handler: Handler, *, open_: bool = False) -> Any:
        endpoint = Endpoint(guard, handler, path, open_=open_)
        return Route(path, endpoint, methods=[method])

    routes = [
        route("GET", "/", api.show_page, open_=True),
        route("GET", "/health", api.health, open_=True),
        route("GET", "/metrics", api.show_metrics, open_=True),
        route("GET", "/v1/models", api.models),
        route("GET", "/v1/models/{name:path}", api.model),
        route("POST", "/v1/completions", api.completions),
        route("POST", "/v1/chat/completions", api.chat),
        route("POST", "/tokenize", api.tokenize),
        route("POST", "/detokenize", api.detokenize),
        route("GET", "/tokenizer_info", api.tokenizer_info),
    ]
    options: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["x-request-id"])
    cors = [Middleware(CORSMiddleware, allow_origins=list(allow_origins), **options)] if allow_origins else []
    return Starlette(routes=routes, middleware=cors, exception_handlers={404: _unknown, 405: _unknown})


async def _unknown(request: Any, error: Any) -> Any:
    from starlette.responses import Response

    told = {404: f"{request.url.path[:100]} is no address of this API.", 405: f"{request.method} is not allowed here."}
    found = ApiError(error.status_code, told[error.status_code])
    reply = HttpResponse.json(found.body, found.status)
    return Response(reply.content, found.status, headers=error.headers, media_type=reply.content_type)


class _Place:
    """One of the requests at once, whose it is, and the bytes of its body.

    Where all are taken, the client with most of them loses one to a client who has fewer: it is refused, if nothing of
    its answer has been sent. Bodies that are still coming are the first to go.
    """

    def __init__(self, guard: "_Guard", client: str):
        self._guard, self._bytes, self.client = guard, 0, client
        self.coming, self.settled, self.refused = True, False, False
        self._task = asyncio.current_task()

    def __enter__(self) -> "_Place":
        if len(self._guard.places) >= self._guard.config.max_open:
            self._guard.make_room(self.client)
        self._guard.places[self] = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._guard.places.pop(self, None)
        self.give_back()
        if self.refused and kind is asyncio.CancelledError and self._task is not None and not self._task.uncancel():
            raise self._guard.busy()

    def refuse(self) -> None:
        """Give it to another client: its request ends with ApiError."""
        self.refused = True
        self._guard.places.pop(self)
        if self._task is not None:
            self._task.cancel()

    def give_back(self) -> None:
        """Nothing of the body is kept any more."""
        self._guard.bytes -= self._bytes
        self._bytes = 0

    def take(self, count: int) -> None:
        """So many bytes more of the body have come. ApiError where all bodies that are open have too many."""
        self._bytes += count
        self._guard.bytes += count
        if self._bytes > SMALL and self._guard.bytes > self._guard.config.max_open_bytes:
            message = f"The bodies of all open requests have {self._guard.bytes:,} bytes: come again later."
            self.give_back()  # what more comes of it is not kept
            raise ApiError(429, message, code="busy", retry_after=1)


class _Guard:
    """What all endpoints share: the API, the requests that are open in their order, and the bytes of their bodies."""

    def __init__(self, api: Api):
        self.api, self.config, self.metrics, self.bytes = api, api.config, api.metrics, 0
        self.places = dict[_Place, None]()

    def make_room(self, client: str) -> None:
        """Take a place from the client with most of them; ApiError where none has more than this one will have."""
        counts = collections.Counter(place.client for place in self.places)
        able = [one for one in self.places if not one.settled and counts[one.client] > counts[client] + 1]
        if not able:
            raise self.busy()
        max(reversed(able), key=lambda one: (counts[one.client], one.coming)).refuse()

    def busy(self) -> ApiError:
        """What is said to those who get no place."""
        told = f"{len(self.places)} requests are open: come again later."
        return ApiError(429, told, code="busy", retry_after=1)


class _Client(NamedTuple):
    """Who asks: by a key, or from where."""

    name: str
    known: bool


class Endpoint:
    """One address, as an ASGI application. `open_`: it needs no API key."""

    def __init__(self, guard: _Guard, handler: Handler, path: str, *, open_: bool):
        self._guard, self._handler, self._path, self._open = guard, handler, path, open_

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        begun, headers = time.monotonic(), dict(scope["headers"])
        request_id = _request_id(headers)
        sending = _Sending(send, {"x-request-id": request_id})
        try:
            try:
                client = await self._client(scope, headers, receive)
                with _Place(self._guard, client.name) if not self._open else contextlib.nullcontext() as place:
                    reply = await self._reply(scope, headers, request_id, receive, client, place)
                    await _send(reply, receive, sending)
            except ApiError as error:
                await _send(_refusal(error), receive, sending)
        except ClientGone:
            pass
        except Exception:
            _log.exception("%s %s has failed (%s)", scope["method"], self._path, request_id)
            if not sending.status:
                refusal = _refusal(ApiError(500, "The server could not answer this request."))
                with contextlib.suppress(ClientGone):
                    await _send(refusal, receive, sending)
        finally:
            status = sending.status or GONE
            self._guard.metrics.replied(scope["method"], self._path, status)
            took = 1e3 * (time.monotonic() - begun)
            _log.info("%s %s %d %.0f ms %s", scope["method"], self._path, status, took, request_id)

    async def _client(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], receive: Receive) -> _Client:
        """Who asks; ApiError for one without a valid key, who takes no place from those who have one."""
        key = self._guard.api.key(headers.get(b"authorization", b"").decode("latin-1"))
        if key is None and not self._open:
            await _linger(receive)
            raise ApiError(401, "A valid API key is needed: send 'Authorization: Bearer …'.", code="invalid_api_key")
        known, address = key is not None and key >= 0, (scope.get("client") or ("",))[0]
        return _Client(f"key {key}" if known else address, known)

    async def _reply(
        self,
        scope: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        request_id: str,
        receive: Receive,
        client: _Client,
        place: _Place | None,
    ) -> HttpResponse | EventStream:
        body, arrived = b"", time.monotonic()
        if scope["method"] == "POST":
            config = self._guard.config
            take = (lambda _: None) if place is None else place.take
            body = await _body(headers, receive, config.max_body_bytes, config.body_seconds, take)
            _check_type(headers)
        call = HttpRequest(request_id=request_id, client=client.name, with_key=client.known, body=body, arrived=arrived)

        async def answer() -> HttpResponse | EventStream:
            found = await self._handler(call, **scope.get("path_params", {}))
            if place is not None and place.refused and isinstance(found, EventStream):
                found.close()  # nobody will read it
            if place is not None:
                place.settled = True
            return found

        if place is not None:
            place.coming = False
        return await _unless_gone(answer(), receive)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    """ApiError for a body that is not said to be JSON: those that pages of other sites may send unasked are not."""
    kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type={kind[:60]!r} must be application/json.", code="unsupported_media_type")


class _Sending:
    """Sends a response, with what it has sent so far. `headers` go with every response."""

    def __init__(self, send: Send, headers: Mapping[str, str]):
        self._send, self._headers, self.status = send, headers, 0

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, whole = status, {**self._headers, **headers}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in whole.items()]
        await self._hand_on({"type": "http.response.start", "status": status, "headers": pairs})

    async def body(self, content: bytes, *, more: bool) -> None:
        await self._hand_on({"type": "http.response.body", "body": content, "more_body": more})

    async def _hand_on(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own, if it is one, or a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    good = 0 < len(given) <= ID_LENGTH and given.isascii() and all(one.isalnum() or one in "-_." for one in given)
    return given if good else uuid.uuid4().hex


def _refusal(error: ApiError) -> HttpResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status in (401, 408, 413) or error.code == "busy":
        headers["connection"] = "close"  # what the client still sends is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpResponse.json(error.body, error.status, **headers)


async def _body(
    headers: Mapping[bytes, bytes], receive: Receive, most: int, seconds: int | float, take: Callable[[int], None]
) -> bytes:
    """The whole body, or ApiError for one that is too large or too slow; ClientGone if it ends before its end.

    `take` is told how many bytes have come, and may refuse them.
    """
    large = ApiError(413, f"The body has more than {most:,} bytes: send less.", code="body_too_large")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > most:
        await _linger(receive)
        raise large
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > most:
                    raise large
                take(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not come within {seconds:g} s.", code="timeout") from error
    except ApiError:
        parts.clear()
        if more:
            await _linger(receive)
        raise
    # many bytes are joined beside the loop, and without the interpreter's lock
    return b"".join(parts) if size < LONG else await beside(lambda: b"".join(parts))


async def _linger(receive: Receive) -> None:
    """Read on for a moment and forget it: a client whose connection is closed while it sends never reads the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


async def _unless_gone(work: Awaitable[Result], receive: Receive) -> Result:
    """What `work` gives; it is cancelled, and ClientGone raised, when the client goes away before."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _send(reply: HttpResponse | EventStream, receive: Receive, sending: _Sending) -> None:
    """Send a response; the work for one that is streamed ends with it, however it ends."""
    if isinstance(reply, HttpResponse):
        length = {"content-type": reply.content_type, "content-length": str(len(reply.content))}
        await sending.start(reply.status, {**length, **reply.headers})
        for begin in range(0, max(1, len(reply.content)), PART):
            part = reply.content[begin : begin + PART]
            await sending.body(part, more=begin + PART < len(reply.content))
        return
    try:
        await _unless_gone(_send_events(reply.content, sending), receive)
    finally:
        reply.close()


async def _send_events(events: AsyncIterator[bytes], sending: _Sending) -> None:
    kind = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
    await sending.start(200, kind)
    following = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=PING)
            part = following.result() if done else b": ping\n\n"
            if part is None:
                break
            await sending.body(part, more=True)
            if done:
                following = asyncio.ensure_future(anext(events, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    await sending.body(b"", more=False)
