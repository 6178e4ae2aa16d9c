"""Server-sent events, and keep-alive pings in idle streams."""

import asyncio
import json

from eqx_decoders.serving.http import streaming
from eqx_decoders.serving.http.streaming import EventStream, event


def messages_of(response) -> list[dict]:
    """Return the ASGI messages that an application sends to a connected client."""
    messages = []

    async def run() -> None:
        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            messages.append(message)

        await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(run())
    return messages


def test_escapes_line_separators_in_events():
    text = "a\x85b\u2028c\u2029d\r\n\x0b\x0c\x1c\x1d\x1ee\\u2028\u00a0é\U00012028"
    content = event({text: [text]}).decode()
    assert content.splitlines() == [content.rstrip("\n"), ""] and json.loads(content[6:]) == {text: [text]}


def test_idle_streams_send_pings_and_are_closed(monkeypatch):
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.02)
    closed = []

    async def events():
        yield b"data: 1\n\n"
        await asyncio.sleep(0.1)
        yield b"data: 2\n\n"

    bodies = [each["body"] for each in messages_of(EventStream(events(), lambda: closed.append(1)))[1:]]
    assert bodies[0] == b"data: 1\n\n" and b": ping\n\n" in bodies and bodies[-2:] == [b"data: 2\n\n", b""]
    assert closed == [1]
