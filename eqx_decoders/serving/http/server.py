"""HTTP server (uvicorn, extra "serve"): start, readiness, and shutdown that lets open requests finish."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError, missing_package
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.config import ApiConfig, ServerConfig
from eqx_decoders.serving.http.engine_thread import EngineLike, EngineThread


POLL_SECONDS = 0.05  # between checks whether to stop


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address, without listening. Raises ConfigError if the address is not available."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError, OverflowError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ConfigError(f"host={host!r} with port={port} is not available: {cause}. Choose another one.") from error
    return sock


def raise_file_limit() -> None:
    """Raise the limit of open files of this process to its maximum, because each connection is a file."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # systems without `resource`, or with other limits
        import resource

        _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


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
    server_config: ServerConfig = ServerConfig(),
    read_adapter: Callable[[str], Any] | None = None,
) -> bool:
    """Serve until `should_stop()`, then refuse new requests, wait for open requests, and return.

    Returns whether the thread of the engine has ended: a step that hangs cannot be interrupted.

    **Arguments:**

    - `sock`: socket from `bind`.
    - `ready`: called when the server accepts requests.
    - `allow_origins`: sites whose pages may call the API from browsers (CORS); "*": all.
    - `read_adapter`: reads the directory of an adapter that a client loads. None: clients cannot load adapters.
    """
    uvicorn = _import_uvicorn()
    from eqx_decoders.serving.http.api import Api
    from eqx_decoders.serving.http.app import create_app

    class Server(uvicorn.Server):
        """Uvicorn server that leaves signals to the program."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    try:
        sock.listen()
    except OSError as error:  # another process listens at the same address
        address = address_of(sock)
        raise ConfigError(f"{address} is not available: {error.strerror}. Choose another port.") from error
    engine_thread = EngineThread(engine)
    api = Api(frontend, engine_thread, config, read_adapter)
    uvicorn_config = uvicorn.Config(
        create_app(api, allow_origins),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=server_config.limit_concurrency,
        timeout_keep_alive=server_config.timeout_keep_alive,
        timeout_graceful_shutdown=max(1, round(server_config.shutdown_seconds)),
    )
    server = Server(uvicorn_config)
    engine_thread.start()
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(POLL_SECONDS)
        if server.started:
            ready()
        while not should_stop() and not running.done():
            await asyncio.sleep(POLL_SECONDS)
    finally:
        api.stopping = True
        ended = await engine_thread.stop(server_config.drain_seconds, server_config.shutdown_seconds)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs a traceback per cancelled task
        server.should_exit = True
        api.close()
        await running
    return ended


def _import_uvicorn() -> Any:
    """Import uvicorn. Raises MissingPackage if it, or another package of the extra "serve", is not installed."""
    for package in ("uvicorn", "starlette", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise missing_package(package, "serve")
    import uvicorn

    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it logs a warning per malformed request
    return uvicorn


def run_in_thread(**arguments: Any) -> Callable[[], bool]:
    """Run `serve` with these arguments in a thread. Returns a function that stops the server and returns its result.

    The server accepts requests when this function returns. Errors of the start are raised here.
    """
    ready, stopping, result = threading.Event(), threading.Event(), concurrent.futures.Future[bool]()

    def run() -> None:
        try:
            result.set_result(asyncio.run(serve(**arguments, should_stop=stopping.is_set, ready=ready.set)))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    while not (ready.wait(POLL_SECONDS) or result.done()):
        pass
    if not ready.is_set():
        result.result()

    def stop() -> bool:
        stopping.set()
        return result.result()

    return stop
