"""ASGI application (Starlette, extra "serve"): routes, API keys, limits of size and time, and disconnecting clients."""

import asyncio
import collections
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.worker_threads import run_in_worker
from eqx_decoders.serving.http.api import Api, HttpRequest
from eqx_decoders.serving.http.api_config import ApiConfig
from eqx_decoders.serving.http.json_body import SMALL
from eqx_decoders.serving.http.openapi import OPERATIONS, Operation
from eqx_decoders.serving.http.response_types import ErrorBody
from eqx_decoders.serving.http.streaming import EventStream, json_response


LINGER = 2.0  # seconds in which a refused client may go on sending, so that it reads the error
LONG = 1 << 21  # bytes that take some milliseconds to copy
GONE = 499  # status in the log of requests whose client has disconnected, as in nginx

Handler = Callable[..., Awaitable[Response]]
Result = TypeVar("Result")

_request_id = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("eqx_decoders.serving")


def create_app(api: Api, allow_origins: Sequence[str] = ()) -> Starlette:
    """Create the application. `allow_origins`: sites whose pages may call it from browsers (CORS); "*": all."""
    open_requests = _OpenRequests(api)
    routes = [
        Route(each.path, Endpoint(open_requests, getattr(api, each.handler), each), methods=[each.method])
        for each in OPERATIONS
    ]
    options: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["x-request-id"])
    cors = [Middleware(CORSMiddleware, allow_origins=list(allow_origins), **options)] if allow_origins else []
    return Starlette(routes=routes, middleware=cors, exception_handlers={404: _unknown, 405: _unknown})


async def _unknown(request: Request, error: Any) -> Response:
    paths = ", ".join(each.path for each in OPERATIONS if each.path.startswith("/v1/") and "{" not in each.path)
    message = f"Unknown path: {request.url.path[:100]}. This server has {paths}, and others listed in /openapi.json. "
    message += "The base_url of OpenAI's clients must end in /v1."
    if error.status_code == 405:
        message = f"{request.method} is not allowed here."
    return json_response(ErrorBody.of(ApiError(error.status_code, message)), error.status_code, **error.headers or {})


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
    """ASGI application of one operation."""

    def __init__(self, open_requests: _OpenRequests, handler: Handler, operation: Operation):
        self._open_requests, self._handler = open_requests, handler
        self._path, self._public = operation.path, operation.public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_time, request, status = time.monotonic(), Request(scope, receive), GONE
        header = request.headers.get("x-request-id", "")
        request_id = header if _request_id.fullmatch(header) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        try:
            try:
                client = await self._client(request)
                counted = contextlib.nullcontext() if self._public else _OpenRequest(self._open_requests, client.name)
                with counted as open_request:
                    response = await self._respond(request, request_id, client, open_request)
                    await response(scope, receive, send_with_id)
            except ApiError as error:
                await _refusal(error)(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception:
            _log.exception("%s %s has failed (%s)", request.method, self._path, request_id)
            if status == GONE:
                refusal = _refusal(ApiError(500, "The server could not answer this request."))
                await refusal(scope, receive, send_with_id)
        finally:
            self._open_requests.metrics.count_response(request.method, self._path, status)
            took = 1e3 * (time.monotonic() - start_time)
            _log.info("%s %s %d %.0f ms %s", request.method, self._path, status, took, request_id)

    async def _client(self, request: Request) -> _Client:
        """Identify the client; ApiError for a wrong API key, which counts as no open request."""
        key = self._open_requests.api.find_key(request.headers.get("authorization"))
        if key is None and not self._public:
            await _drain(request.stream())
            raise ApiError(401, "A valid API key is needed: send 'Authorization: Bearer …'.", code="invalid_api_key")
        known, address = key is not None and key >= 0, "" if request.client is None else request.client.host
        return _Client(f"key {key}" if known else address, known)

    async def _respond(
        self, request: Request, request_id: str, client: _Client, open_request: _OpenRequest | None
    ) -> Response:
        arrived, config = time.monotonic(), self._open_requests.config
        body = b""
        if open_request is not None and request.method == "POST":
            body = await _read_body(request, config, open_request)
            _check_type(request.headers)
        http_request = HttpRequest(
            request_id=request_id, client=client.name, with_key=client.known, body=body, arrived=arrived
        )

        async def answer() -> Response:
            response = await self._handler(http_request, **request.path_params)
            if open_request is not None and open_request.refused and isinstance(response, EventStream):
                response.close()  # nobody will read it
            if open_request is not None:
                open_request.answered = True
            return response

        if open_request is not None:
            open_request.receiving = False
        return await _or_disconnected(answer(), request)


def _check_type(headers: Headers) -> None:
    """Raise ApiError for a body that is not declared as JSON: pages of other sites could send those unasked."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = f"Content-Type={content_type[:60]!r} must be application/json."
        raise ApiError(415, message, code="unsupported_media_type")


def _refusal(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status in (401, 408, 413) or error.code == "busy":
        headers["connection"] = "close"  # what the client still sends is not read
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(ErrorBody.of(error), error.status, **headers)


async def _read_body(request: Request, config: ApiConfig, open_request: _OpenRequest) -> bytes:
    """Read the whole body; ApiError for one that is too large or too slow, or one of too many."""
    parts, size, most, stream = [], 0, config.max_body_bytes, request.stream()
    too_large = ApiError(413, f"The body has more than {most:,} bytes: send less.", code="body_too_large")
    length = request.headers.get("content-length", "0")
    try:
        if length.isdigit() and int(length[:20]) > most:
            raise too_large
        async with asyncio.timeout(config.body_seconds):
            async for part in stream:
                size += len(part)
                if size > most:
                    raise too_large
                open_request.add_bytes(len(part))
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not come within {config.body_seconds:g} s.", code="timeout") from error
    except ApiError:
        parts.clear()
        await _drain(stream)
        raise
    # many bytes are joined in a thread, without the interpreter's lock
    return b"".join(parts) if size < LONG else await run_in_worker(lambda: b"".join(parts))


async def _drain(stream: AsyncIterator[bytes]) -> None:
    """Drop the rest of a body for a moment: a client that still sends never reads why its connection closes."""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(LINGER):
            async for _ in stream:
                pass


async def _or_disconnected(work: Awaitable[Result], request: Request) -> Result:
    """Await `work`; it is cancelled, and ClientDisconnect raised, when the client disconnects before."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
