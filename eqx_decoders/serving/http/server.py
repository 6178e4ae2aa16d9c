"""HTTP server (uvicorn, extra "serve"), which tells when it is ready, and shuts down in order."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from eqx_decoders.errors import CheckedFields, ConfigError, NonNegativeFloat, PositiveFloat, missing_package
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.api_config import ApiConfig
from eqx_decoders.serving.http.engine_thread import EngineLike, EngineThread


POLL = 0.05  # seconds between checks if it should stop
REST = 1.0  # seconds to wait after a connection could not be accepted
BACKLOG = 1024  # connections that wait to be accepted: many may come at once
OWN_FILES = 100  # that may be open apart from connections: pipes of processes that render and decode, and JAX's

_log = logging.getLogger("eqx_decoders.serving")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig(CheckedFields):
    """Timeouts of a server, in seconds.

    - `head`: until the head of a request has arrived, and between two requests of one connection.
    - `write`: until a client has taken what it was sent, where that is more than some kilobytes.
    - `drain`: for open requests when the server is stopped; then they are cut off.
    - `end`: for telling their clients so, and again for the engine's last step.
    """

    head: PositiveFloat = 30.0
    write: PositiveFloat = 60.0
    drain: NonNegativeFloat = 10.0
    end: PositiveFloat = 3.0


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address; it does not listen yet. Raises ConfigError where that fails."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"host={host!r} with port={port} cannot be had: {cause}. Choose others.") from error
    return sock


def raise_file_limit() -> None:
    """Raise the limit of open files of this process to its maximum: each connection is a file."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # another system; one that has its own bounds
        import resource

        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


def max_connections() -> int:
    """Return the maximum of open connections, which leaves files for other uses."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return 1 << 14
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 1 << 16
    with contextlib.suppress(OSError):
        limit -= len(os.listdir("/proc/self/fd"))
    return max(8, min(limit - OWN_FILES, 1 << 16))


def address_of(sock: socket.socket) -> str:
    """Return the URL of a socket for browsers."""
    host, port = sock.getsockname()[:2]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


async def serve(
    frontend: TextFrontend,
    engine: EngineLike,
    config: ApiConfig,
    sock: socket.socket,
    *,
    should_stop: Callable[[], bool],
    ready: Callable[[], None] = lambda: None,
    allow_origins: Sequence[str] = (),
    timeouts: ServerConfig = ServerConfig(),
    read_adapter: Callable[[str], Any] | None = None,
) -> bool:
    """Serve until `should_stop()`; then take no new requests, wait for open ones, and return.

    `read_adapter` reads the directory of an adapter that a client wants loaded; None: they can't load any. Returns
    whether the engine's thread has ended, too: a step that hangs cannot be interrupted.
    """
    uvicorn = _uvicorn()
    from eqx_decoders.serving.http.api import Api
    from eqx_decoders.serving.http.app import create_app

    engine_thread = EngineThread(engine)
    api = Api(frontend, engine_thread, config, read_adapter)
    options: dict[str, Any] = dict(
        http=_protocol(timeouts.head, timeouts.write),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(timeouts.head)),
        timeout_graceful_shutdown=max(1, round(timeouts.end)),
    )
    server = _server(uvicorn)(uvicorn.Config(create_app(api, allow_origins), **options))
    engine_thread.start()
    running = asyncio.ensure_future(server.serve(sockets=[]))
    accepting = None
    try:
        while not server.started and not running.done():
            await asyncio.sleep(POLL)
        if not running.done():
            accepting = asyncio.ensure_future(_accept(_listen(sock), server, max_connections()))
            ready()
        while not (should_stop() or running.done() or (accepting is not None and accepting.done())):
            await asyncio.sleep(POLL)
        if accepting is not None and accepting.done():
            accepting.result()
    finally:
        api.stopping = True
        ended = await engine_thread.stop(timeouts.drain, timeouts.end)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it writes a page on each task that it ends
        server.should_exit = True
        api.close()
        if accepting is not None:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        sock.close()
        await running
    return ended


def _listen(sock: socket.socket) -> socket.socket:
    """Let the socket listen. Raises ConfigError where another server has taken the address meanwhile."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"{address_of(sock)} cannot be had: {error.strerror}. Choose another port.") from error
    sock.setblocking(False)
    return sock


async def _accept(sock: socket.socket, server: Any, max_open: int) -> None:
    """Accept connections. Beyond `max_open`, those that have been idle for the longest time are closed for new ones.

    Without idle ones, one that is still receiving its request is closed, of the address with most of these; while all
    are at work, new ones wait. (asyncio's own server retries in a loop where no file can be opened.)
    """
    loop, idle, connections = asyncio.get_running_loop(), {}, server.server_state.connections

    def protocol() -> Any:
        instance = server.config.http_protocol_class(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )
        instance.idle = idle
        return instance

    while True:
        try:
            connection, _ = await loop.sock_accept(sock)
        except OSError as error:  # no more files can be opened, or the client has gone already
            if not isinstance(error, ConnectionError):
                _log.warning("a connection could not be taken: %s", error.strerror)
                await asyncio.sleep(REST)
            continue
        while len(connections) >= max_open:
            victim = next(iter(idle), None) or _receiving(connections)
            if victim is not None:
                idle.pop(victim, None)
                victim.transport.abort()
                break
            await asyncio.sleep(POLL)
        connection.setblocking(False)
        try:
            await loop.connect_accepted_socket(protocol, connection)
        except OSError:
            connection.close()


def _receiving(connections: Iterable[Any]) -> Any:
    """Return a connection that is receiving its request, of the address with most of these, if there is one."""
    receiving = [
        each
        for each in connections
        if each.cycle is not None and each.cycle.more_body and not each.transport.is_closing()
    ]
    counts = collections.Counter(each.client and each.client[0] for each in receiving)
    return max(receiving, key=lambda each: counts[each.client and each.client[0]], default=None)


def _uvicorn() -> Any:
    """Return uvicorn; MissingPackage where it, or another package of the server, is not installed."""
    for package in ("uvicorn", "starlette", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise missing_package(package, "serve")
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # each bad request is a warning to it
    return uvicorn


def _server(uvicorn: Any) -> Any:
    class Server(uvicorn.Server):
        """Uvicorn server that leaves signals to the program."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _protocol(head: int | float, write: int | float) -> Any:
    """Return an HTTP/1.1 protocol whose connections time out while waiting for a request, or for the client to read."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        idle: dict[Any, None]  # all connections that wait for a request, the longest one first
        head_timer: asyncio.TimerHandle | None = None  # while waiting for the head of a request
        write_timer: asyncio.TimerHandle | None = None  # while the client takes less than is sent

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.loop.call_later(write, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.write_timer = _cancel(self.write_timer)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.head_timer, self.write_timer = _cancel(self.head_timer), _cancel(self.write_timer)
            self.idle.pop(self, None)

        def _watch(self) -> None:
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy or self.transport.is_closing():
                self.head_timer = _cancel(self.head_timer)
                self.idle.pop(self, None)
            elif self.head_timer is None:
                self.head_timer = self.loop.call_later(head, self.transport.close)
                self.idle[self] = None

    return Protocol


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def run_in_thread(**arguments: Any) -> Callable[[], bool]:
    """Run `serve` with these arguments in a thread; returns a function that stops it, and returns its result.

    The server takes requests when this returns; earlier errors are raised here.
    """
    ready, stopping, result = threading.Event(), threading.Event(), concurrent.futures.Future[bool]()

    def run() -> None:
        try:
            result.set_result(asyncio.run(serve(**arguments, should_stop=stopping.is_set, ready=ready.set)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    while not (ready.wait(POLL) or result.done()):
        pass
    if not ready.is_set():
        result.result()

    def stop() -> bool:
        stopping.set()
        return result.result()

    return stop
