"""An HTTP server (uvicorn, extra "serve") that tells when it is ready, and ends in order when it is asked to."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError, check_number, need_extra
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.api import Api
from eqx_decoders.serving.http.app import create_app
from eqx_decoders.serving.http.engine_thread import EngineLike, EngineThread
from eqx_decoders.serving.http.protocol import ApiConfig


POLL = 0.05  # seconds between two looks at whether it is to end
REST = 1.0  # seconds after a connection that could not be taken
BACKLOG = 1024  # connections that wait to be accepted: many may come at once
OWN_FILES = 100  # that may be open beside connections: those of the processes that render and decode, and of JAX

_log = logging.getLogger("eqx_decoders.serving")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How long things may take, in seconds.

    - `head`: until the head of a request has come, and between two requests of one connection.
    - `write`: until a client has taken what it is sent, as far as that is more than some kilobytes.
    - `drain`: for requests that are open when the server is told to end; then they are cut off.
    - `end`: for telling their clients so, and again for the engine's last step.
    """

    head: int | float = 30.0
    write: int | float = 60.0
    drain: int | float = 10.0
    end: int | float = 3.0

    def __post_init__(self):
        for field in ("head", "write", "end"):
            check_number(f"ServerConfig.{field}", getattr(self, field), above=0)
        check_number("ServerConfig.drain", self.drain, least=0)


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which takes no connections yet. ConfigError where it cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"host={host!r} with port={port} cannot be had: {cause}. Choose others.") from error
    return sock


def raise_file_limit() -> None:
    """Let this process open as many files as it is allowed to: each connection is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # another system; one that has its own bounds
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections() -> int:
    """How many connections there may be at once, so that files can be opened beside them."""
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
    """Where a browser finds it."""
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


async def serve(
    language: TextFrontend,
    engine: EngineLike,
    config: ApiConfig,
    sock: socket.socket,
    *,
    asked_to_end: Callable[[], bool],
    ready: Callable[[], None] = lambda: None,
    allow_origins: Sequence[str] = (),
    times: ServerConfig = ServerConfig(),
) -> bool:
    """Serve until `asked_to_end`; then take no new requests, let those that are open end, and return.

    Returns whether the engine's thread has ended, too: a step that hangs cannot be interrupted.
    """
    uvicorn = _uvicorn()
    worker = EngineThread(engine)
    api = Api(language, worker, config)
    options: dict[str, Any] = dict(
        http=_protocol(times.head, times.write),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, round(times.head)),
        timeout_graceful_shutdown=max(1, round(times.end)),
    )
    server = _server(uvicorn)(uvicorn.Config(create_app(api, allow_origins), **options))
    worker.start()
    running = asyncio.ensure_future(server.serve(sockets=[]))
    accepting = None
    try:
        while not server.started and not running.done():
            await asyncio.sleep(POLL)
        if not running.done():
            accepting = asyncio.ensure_future(_accept(_listening(sock), server, most_connections()))
            ready()
        while not (asked_to_end() or running.done() or (accepting is not None and accepting.done())):
            await asyncio.sleep(POLL)
        if accepting is not None and accepting.done():
            accepting.result()
    finally:
        api.stopping = True
        ended = await worker.stop(times.drain, times.end)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it writes a page on each task that it ends
        server.should_exit = True
        api.close()
        if accepting is not None:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        sock.close()
        await running
    return ended


def _listening(sock: socket.socket) -> socket.socket:
    """The socket, taking connections. ConfigError where another server has taken the address meanwhile."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"{address_of(sock)} cannot be had: {error.strerror}. Choose another port.") from error
    sock.setblocking(False)
    return sock


async def _accept(sock: socket.socket, server: Any, most: int) -> None:
    """Take connections, at most so many: for further ones those are closed that have said nothing for the longest time.

    Where there are none, one that is still sending its request is closed, of the address with most of these; where all
    are at work, further ones wait. (asyncio's own server tries again and again where no file can be opened.)
    """
    loop, idle, connections = asyncio.get_running_loop(), {}, server.server_state.connections

    def protocol() -> Any:
        made = server.config.http_protocol_class(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state, _loop=loop
        )
        made.idle = idle
        return made

    while True:
        try:
            link, _ = await loop.sock_accept(sock)
        except OSError as error:  # no more files can be opened, or the client has gone already
            if not isinstance(error, ConnectionError):
                _log.warning("a connection could not be taken: %s", error.strerror)
                await asyncio.sleep(REST)
            continue
        while len(connections) >= most:
            last = next(iter(idle), None) or _sending(connections)
            if last is not None:
                idle.pop(last, None)
                last.transport.abort()
                break
            await asyncio.sleep(POLL)
        link.setblocking(False)
        try:
            await loop.connect_accepted_socket(protocol, link)
        except OSError:
            link.close()


def _sending(connections: Iterable[Any]) -> Any:
    """One of those whose requests are still coming, of the address with most of them; None where there are none."""
    found = [
        one for one in connections if one.cycle is not None and one.cycle.more_body and not one.transport.is_closing()
    ]
    counts = collections.Counter(one.client and one.client[0] for one in found)
    return max(found, key=lambda one: counts[one.client and one.client[0]], default=None)


def _uvicorn() -> Any:
    try:
        import uvicorn
    except ImportError as error:
        raise need_extra("uvicorn", "serve") from error
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # each bad request is a warning to it
    return uvicorn


def _server(uvicorn: Any) -> Any:
    class Server(uvicorn.Server):
        """Leaves signals to the program."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server


def _protocol(head: int | float, write: int | float) -> Any:
    """HTTP/1.1 whose connections end where the head of a request does not come in time, or nobody reads the answer."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        idle: dict[Any, None]  # of all connections those for whose requests is waited, the longest first
        late: asyncio.TimerHandle | None = None  # while the head of a request is waited for
        stuck: asyncio.TimerHandle | None = None  # while more is to be sent than is taken

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
            self.stuck = self.loop.call_later(write, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.stuck = _ended(self.stuck)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self.late, self.stuck = _ended(self.late), _ended(self.stuck)
            self.idle.pop(self, None)

        def _watch(self) -> None:
            at_work = self.cycle is not None and not self.cycle.response_complete
            if at_work or self.transport.is_closing():
                self.late = _ended(self.late)
                self.idle.pop(self, None)
            elif self.late is None:
                self.late = self.loop.call_later(head, self.transport.close)
                self.idle[self] = None

    return Protocol


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def run_in_thread(**arguments: Any) -> Callable[[], bool]:
    """`serve` with these arguments in a thread with an event loop of its own; what ends it, and gives what it returns.

    It has begun to take requests when this returns; errors before that are raised here.
    """
    ready, end, found = threading.Event(), threading.Event(), concurrent.futures.Future[bool]()

    def run() -> None:
        try:
            found.set_result(asyncio.run(serve(**arguments, asked_to_end=end.is_set, ready=ready.set)))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    while not (ready.wait(POLL) or found.done()):
        pass
    if not ready.is_set():
        found.result()

    def stop() -> bool:
        end.set()
        return found.result()

    return stop
