"""A server with a fake engine on a free port, and functions that send requests to it."""

import contextlib
import dataclasses
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eqx_decoders.io.text.chat_template import load_chat_template
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.serving.frontend.prompts import TextFrontend
from eqx_decoders.serving.http.config import ApiConfig, ServerConfig
from eqx_decoders.serving.http.server import bind, run_in_thread
from tests.errors import assert_names
from tests.serving.fake_engine import FakeEngine


CHAT = Path(__file__).parents[1] / "fixtures" / "chat_llama"


def chat_frontend(**changes: Any) -> TextFrontend:
    """Return the frontend of a fixture with a byte-level vocabulary of 320 ids and a chat template."""
    found = TextFrontend(
        tokenizer=load_tokenizer(CHAT),
        chat=load_chat_template(CHAT),
        stop_ids=(257, 258),
    )
    return dataclasses.replace(found, **changes)


@dataclasses.dataclass
class Running:
    """A running server and its engine."""

    port: int
    engine: FakeEngine
    stop: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def call(self, path: str, body: Any = None, *, raw: bytes | None = None, method: str | None = None, **headers: str):
        """Send a request. Returns status, headers and content."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            kind = method or ("GET" if data is None else "POST")
            link.request(kind, path, data, {"Content-Type": "application/json"} | names)
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            link.close()

    def json(self, path: str, body: Any = None, *, code: int | None = 200, **options: Any) -> Any:
        """Return the JSON response of a request, which must have status `code`; None: any status."""
        status, _, content = self.call(path, body, **options)
        assert code in (status, None), (status, content[:500])
        return json.loads(content)

    def error(self, path: str, body: Any = None, *names: object, code: int = 400, **options: Any) -> dict[str, Any]:
        """Return the error of a request, which must fail with `code` and a message that contains `names`."""
        error = self.json(path, body, code=code, **options)["error"]
        assert_names(error["message"], *names)
        return error

    def connect(self) -> socket.socket:
        """Open a TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None,
    frontend: TextFrontend | None = None,
    server_config: ServerConfig = ServerConfig(drain_seconds=1.0, shutdown_seconds=1.0),
    allow_origins: tuple[str, ...] = (),
    read_adapter: Any = None,
    **config: Any,
) -> Iterator[Running]:
    """Run a server inside the with block."""
    engine = engine or FakeEngine()
    defaults = dict(name="fake", max_length=engine.max_length, vocab_size=engine.vocab_size, seed=1)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    frontend = frontend or chat_frontend()
    options = dict(frontend=frontend, engine=engine, config=ApiConfig(**(defaults | config)), sock=sock)
    stop = run_in_thread(server_config=server_config, allow_origins=allow_origins, read_adapter=read_adapter, **options)
    try:
        yield Running(port, engine, stop)
    finally:
        engine.gate.set()
        stop()
