"""ASGI application (Starlette, extra "serve"): routes, API keys, request bodies, and clients that disconnect."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
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
from eqx_decoders.serving.http.api import Api, HttpRequest
from eqx_decoders.serving.http.openapi import OPERATIONS, Operation
from eqx_decoders.serving.http.response_types import ErrorBody
from eqx_decoders.serving.http.streaming import json_response


CLIENT_CLOSED_REQUEST = 499  # status in the log for clients that disconnected, as in nginx

Handler = Callable[..., Awaitable[Response]]
Result = TypeVar("Result")

_request_id = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("eqx_decoders.serving")


def create_app(api: Api, allow_origins: Sequence[str] = ()) -> Starlette:
    """Create the application. `allow_origins`: sites whose pages may call it from browsers (CORS); "*": all."""
    routes = [
        Route(
            operation.path,
            Endpoint(api, getattr(api, operation.handler), operation),
            methods=[operation.method],
        )
        for operation in OPERATIONS
    ]
    options: dict[str, Any] = dict(allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["x-request-id"])
    cors = [Middleware(CORSMiddleware, allow_origins=list(allow_origins), **options)] if allow_origins else []
    return Starlette(routes=routes, middleware=cors, exception_handlers={404: _not_found, 405: _not_found})


async def _not_found(request: Request, error: Any) -> Response:
    if error.status_code == 405:
        message = f"The method {request.method} is not allowed for this path."
    else:
        paths = ", ".join(
            operation.path
            for operation in OPERATIONS
            if operation.path.startswith("/v1/") and "{" not in operation.path
        )
        message = (
            f"Unknown path: {request.url.path[:100]}. This server has {paths}, and the other paths in /openapi.json. "
            "The base_url of OpenAI's clients must end in /v1."
        )
    return json_response(ErrorBody.of(ApiError(error.status_code, message)), error.status_code, **error.headers or {})


class _Client(NamedTuple):
    """Client of a request.

    - `name`: the index of its API key, or its address.
    - `with_key`: whether the name is that of an API key.
    """

    name: str
    with_key: bool


class Endpoint:
    """ASGI application of one operation."""

    def __init__(self, api: Api, handler: Handler, operation: Operation):
        self._api, self._handler = api, handler
        self._path, self._public, self._has_body = operation.path, operation.public, operation.method == "POST"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start_time, request, status = time.monotonic(), Request(scope, receive), CLIENT_CLOSED_REQUEST
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
                response = await self._respond(request, request_id, start_time)
            except ApiError as error:
                response = _error_response(error)
            await response(scope, receive, send_with_id)
        except ClientDisconnect:
            pass
        except Exception:
            _log.exception("%s %s failed (request %s)", request.method, self._path, request_id)
            if status == CLIENT_CLOSED_REQUEST:
                response = _error_response(ApiError(500, "The server failed to process this request."))
                await response(scope, receive, send_with_id)
        finally:
            self._api.metrics.count_response(request.method, self._path, status)
            milliseconds = 1e3 * (time.monotonic() - start_time)
            _log.info("%s %s %d %.0f ms %s", request.method, self._path, status, milliseconds, request_id)

    async def _respond(self, request: Request, request_id: str, start_time: float) -> Response:
        client = self._client(request)
        body = b""
        if self._has_body:
            body = await _receive_body(request, self._api.config.max_body_bytes)
            _check_content_type(request.headers)
        http_request = HttpRequest(
            request_id=request_id, client=client.name, with_key=client.with_key, body=body, arrived=start_time
        )
        return await _unless_disconnected(self._handler(http_request, **request.path_params), request)

    def _client(self, request: Request) -> _Client:
        """Identify the client. Raises ApiError for a wrong API key."""
        key = self._api.find_key(request.headers.get("authorization"))
        if key is None and not self._public:
            raise ApiError(
                401, "A valid API key is required. Send it as 'Authorization: Bearer …'.", code="invalid_api_key"
            )
        if key is not None and key >= 0:
            return _Client(f"key {key}", with_key=True)
        return _Client("" if request.client is None else request.client.host, with_key=False)


def _check_content_type(headers: Headers) -> None:
    """Raise ApiError if the body is not declared as JSON. Browsers send other types to other sites without asking."""
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415, f"Content-Type={content_type[:60]!r} must be application/json.", code="unsupported_media_type"
        )


def _error_response(error: ApiError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(ErrorBody.of(error), error.status, **headers)


async def _receive_body(request: Request, max_bytes: int) -> bytearray:
    """Read the body. Raises ApiError if it is too large; uvicorn discards the rest."""
    too_large = ApiError(413, f"The body has more than {max_bytes:,} bytes. Send less.", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return body


async def _unless_disconnected(work: Awaitable[Result], request: Request) -> Result:
    """Await `work`. If the client disconnects before, cancel `work` and raise ClientDisconnect."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, disconnected):
            pending.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)
