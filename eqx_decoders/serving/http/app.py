"""ASGI application (Starlette, extra "serve"): routes, API keys, limits of size and time, and disconnecting clients."""

import asyncio
import collections
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

from eqx_decoders.errors import need_extra
from eqx_decoders.serving.frontend.incremental_json import SMALL
from eqx_decoders.serving.frontend.json_fields import ApiError
from eqx_decoders.serving.frontend.worker_threads import run_in_worker
from eqx_decoders.serving.http.api import Api, EventStream, HttpRequest, HttpResponse


PING = 15.0  # seconds without an event after which a comment is sent: proxies close silent connections
LINGER = 2.0  # seconds in which a refused client may go on sending, so that it reads the error
PART = 1 << 17  # bytes of a response that are sent at once: more would wait in memory for a slow client
LONG = 1 << 21  # bytes that take some milliseconds to copy
ID_LENGTH = 64
GONE = 499  # status in the log of requests whose client has disconnected, as in nginx

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[..., Awaitable[HttpResponse | EventStream]]
Result = TypeVar("Result")

_log = logging.getLogger("eqx_decoders.serving")


class ClientGone(Exception):
    """Error for a client that has disconnected."""


def create_app(api: Api, allow_origins: Sequence[str] = ()) -> Any:
    """Create the application. `allow_origins`: sites whose pages may call it from browsers (CORS); "*": all."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
    except ImportError as error:
        raise need_extra("starlette", "serve") from error
    open_requests = _OpenRequests(api)

    def route(method: str, path: str, handler: Handler, *, public: bool = False) -> Any:
        endpoint = Endpoint(open_requests, handler, path, public=public)
        return Route(path, endpoint, methods=[method])

    routes = [
        route("GET", "/", api.show_page, public=True),
        route("GET", "/health", api.health, public=True),
        route("GET", "/metrics", api.show_metrics, public=True),
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

    messages = {
        404: f"{request.url.path[:100]} is no address of this API.",
        405: f"{request.method} is not allowed here.",
    }
    refusal = ApiError(error.status_code, messages[error.status_code])
    response = HttpResponse.json(refusal.body, refusal.status)
    return Response(response.content, refusal.status, headers=error.headers, media_type=response.content_type)


class _OpenRequest:
    """Open request with its client and the bytes of its body, as a context manager.

    Where too many requests are open, the client with most of them loses one to a client who has fewer: it is refused,
    unless a part of its answer has been sent. Those whose bodies are still being received are refused first.
    """

    def __init__(self, open_requests: "_OpenRequests", client: str):
        self._open_requests, self._bytes, self.client = open_requests, 0, client
        self.receiving, self.answered, self.refused = True, False, False
        self._task = asyncio.current_task()

    def __enter__(self) -> "_OpenRequest":
        if len(self._open_requests.requests) >= self._open_requests.config.max_open:
            self._open_requests.refuse_other(self.client)
        self._open_requests.requests[self] = None
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._open_requests.requests.pop(self, None)
        self.release_bytes()
        cancelled = self.refused and error_type is asyncio.CancelledError
        if cancelled and self._task is not None and not self._task.uncancel():
            raise self._open_requests.busy()

    def refuse(self) -> None:
        """End the request with ApiError, for another client."""
        self.refused = True
        self._open_requests.requests.pop(self)
        if self._task is not None:
            self._task.cancel()

    def release_bytes(self) -> None:
        """Count the body as freed."""
        self._open_requests.bytes -= self._bytes
        self._bytes = 0

    def add_bytes(self, count: int) -> None:
        """Count received bytes of the body. ApiError where the bodies of all open requests have too many."""
        self._bytes += count
        self._open_requests.bytes += count
        if self._bytes > SMALL and self._open_requests.bytes > self._open_requests.config.max_open_bytes:
            message = f"The bodies of all open requests have {self._open_requests.bytes:,} bytes: come again later."
            self.release_bytes()  # the rest of it is dropped
            raise ApiError(429, message, code="busy", retry_after=1)


class _OpenRequests:
    """Open requests in order, and the total bytes of their bodies; shared by all endpoints."""

    def __init__(self, api: Api):
        self.api, self.config, self.metrics, self.bytes = api, api.config, api.metrics, 0
        self.requests = dict[_OpenRequest, None]()

    def refuse_other(self, client: str) -> None:
        """Refuse a request of the client with most of them; ApiError where none has more than this client will have."""
        counts = collections.Counter(each.client for each in self.requests)
        candidates = [one for one in self.requests if not one.answered and counts[one.client] > counts[client] + 1]
        if not candidates:
            raise self.busy()
        max(reversed(candidates), key=lambda one: (counts[one.client], one.receiving)).refuse()

    def busy(self) -> ApiError:
        """Create the error for a request that is refused."""
        message = f"{len(self.requests)} requests are open: come again later."
        return ApiError(429, message, code="busy", retry_after=1)


class _Client(NamedTuple):
    """Client, by API key or address."""

    name: str
    known: bool


class Endpoint:
    """ASGI application of one route. `public` ones need no API key."""

    def __init__(self, open_requests: _OpenRequests, handler: Handler, path: str, *, public: bool):
        self._open_requests, self._handler, self._path, self._public = open_requests, handler, path, public

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        start_time, headers = time.monotonic(), dict(scope["headers"])
        request_id = _request_id(headers)
        sender = _ResponseSender(send, {"x-request-id": request_id})
        try:
            try:
                client = await self._client(scope, headers, receive)
                counted = contextlib.nullcontext() if self._public else _OpenRequest(self._open_requests, client.name)
                with counted as open_request:
                    response = await self._respond(scope, headers, request_id, receive, client, open_request)
                    await _send(response, receive, sender)
            except ApiError as error:
                await _send(_refusal(error), receive, sender)
        except ClientGone:
            pass
        except Exception:
            _log.exception("%s %s has failed (%s)", scope["method"], self._path, request_id)
            if not sender.status:
                refusal = _refusal(ApiError(500, "The server could not answer this request."))
                with contextlib.suppress(ClientGone):
                    await _send(refusal, receive, sender)
        finally:
            status = sender.status or GONE
            self._open_requests.metrics.count_response(scope["method"], self._path, status)
            took = 1e3 * (time.monotonic() - start_time)
            _log.info("%s %s %d %.0f ms %s", scope["method"], self._path, status, took, request_id)

    async def _client(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], receive: Receive) -> _Client:
        """Identify the client; ApiError for a wrong API key, which counts as no open request."""
        key = self._open_requests.api.find_key(headers.get(b"authorization", b"").decode("latin-1"))
        if key is None and not self._public:
            await _drain(receive)
            raise ApiError(401, "A valid API key is needed: send 'Authorization: Bearer …'.", code="invalid_api_key")
        known, address = key is not None and key >= 0, (scope.get("client") or ("",))[0]
        return _Client(f"key {key}" if known else address, known)

    async def _respond(
        self,
        scope: Mapping[str, Any],
        headers: Mapping[bytes, bytes],
        request_id: str,
        receive: Receive,
        client: _Client,
        open_request: _OpenRequest | None,
    ) -> HttpResponse | EventStream:
        body, arrived = b"", time.monotonic()
        if scope["method"] == "POST":
            config = self._open_requests.config
            add_bytes = (lambda _: None) if open_request is None else open_request.add_bytes
            body = await _read_body(headers, receive, config.max_body_bytes, config.body_seconds, add_bytes)
            _check_type(headers)
        request = HttpRequest(
            request_id=request_id, client=client.name, with_key=client.known, body=body, arrived=arrived
        )

        async def answer() -> HttpResponse | EventStream:
            response = await self._handler(request, **scope.get("path_params", {}))
            if open_request is not None and open_request.refused and isinstance(response, EventStream):
                response.close()  # nobody will read it
            if open_request is not None:
                open_request.answered = True
            return response

        if open_request is not None:
            open_request.receiving = False
        return await _or_disconnected(answer(), receive)


def _check_type(headers: Mapping[bytes, bytes]) -> None:
    """Raise ApiError for a body that is not declared as JSON: pages of other sites could send those unasked."""
    content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"Content-Type={content_type[:60]!r} must be application/json.", code="unsupported_media_type"
        )


class _ResponseSender:
    """Sender of a response, which records its status. `headers` are sent with every response."""

    def __init__(self, send: Send, headers: Mapping[str, str]):
        self._send, self._headers, self.status = send, headers, 0

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, all_headers = status, {**self._headers, **headers}
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
        await self._forward({"type": "http.response.start", "status": status, "headers": pairs})

    async def body(self, content: bytes, *, more: bool) -> None:
        await self._forward({"type": "http.response.body", "body": content, "more_body": more})

    async def _forward(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the client's request id, if it is valid, or a new one."""
    header = headers.get(b"x-request-id", b"").decode("latin-1")
    valid = (
        0 < len(header) <= ID_LENGTH
        and header.isascii()
        and all(character.isalnum() or character in "-_." for character in header)
    )
    return header if valid else uuid.uuid4().hex


def _refusal(error: ApiError) -> HttpResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status in (401, 408, 413) or error.code == "busy":
        headers["connection"] = "close"  # what the client still sends is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpResponse.json(error.body, error.status, **headers)


async def _read_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    max_bytes: int,
    seconds: int | float,
    add_bytes: Callable[[int], None],
) -> bytes:
    """Read the whole body; ApiError for one that is too large or too slow, ClientGone if the client disconnects.

    `add_bytes` is called with the number of bytes received, and may raise ApiError.
    """
    too_large = ApiError(413, f"The body has more than {max_bytes:,} bytes: send less.", code="body_too_large")
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        await _drain(receive)
        raise too_large
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(seconds):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                part, more = message.get("body", b""), message.get("more_body", False)
                size += len(part)
                if size > max_bytes:
                    raise too_large
                add_bytes(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not come within {seconds:g} s.", code="timeout") from error
    except ApiError:
        parts.clear()
        if more:
            await _drain(receive)
        raise
    # many bytes are joined in a thread, without the interpreter's lock
    return b"".join(parts) if size < LONG else await run_in_worker(lambda: b"".join(parts))


async def _drain(receive: Receive) -> None:
    """Read and drop the body for a moment: a client never reads an answer to a connection that closes while it
    sends.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            message = await receive()
            while message["type"] == "http.request" and message.get("more_body", False):
                message = await receive()


async def _or_disconnected(work: Awaitable[Result], receive: Receive) -> Result:
    """Await `work`; it is cancelled, and ClientGone raised, when the client disconnects before."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _send(response: HttpResponse | EventStream, receive: Receive, sender: _ResponseSender) -> None:
    """Send a response, and close it, if it is streamed."""
    if isinstance(response, HttpResponse):
        length = {"content-type": response.content_type, "content-length": str(len(response.content))}
        await sender.start(response.status, {**length, **response.headers})
        for begin in range(0, max(1, len(response.content)), PART):
            part = response.content[begin : begin + PART]
            await sender.body(part, more=begin + PART < len(response.content))
        return
    try:
        await _or_disconnected(_send_events(response.content, sender), receive)
    finally:
        response.close()


async def _send_events(events: AsyncIterator[bytes], sender: _ResponseSender) -> None:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    await sender.start(200, headers)
    next_event = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({next_event}, timeout=PING)
            content = next_event.result() if done else b": ping\n\n"
            if content is None:
                break
            await sender.body(content, more=True)
            if done:
                next_event = asyncio.ensure_future(anext(events, None))
    finally:
        next_event.cancel()
        await asyncio.gather(next_event, return_exceptions=True)
    await sender.body(b"", more=False)
