"""Conversations become texts in processes beside the server, short ones apart from long ones."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Any

from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, RenderingProcess
from eqx_decoders.serving.frontend.fair_turns import FairTurns


BATCH = 32  # conversations that share a process
LONG = 1 << 15  # characters of a conversation that is rendered apart


class Renderer:
    """Renders conversations with one template. Its methods belong to one event loop.

    **Arguments:**

    - `chat`: the template.
    """

    def __init__(self, chat: ChatTemplate):
        self.source = chat.source
        self._short, self._long = _Lane(chat, BATCH), _Lane(chat, 1)

    async def render(self, conversation: Conversation, letters: int, client: str = "") -> Rendered:
        """The text of a conversation of so many characters; clients take turns.

        If this is cancelled, and has not begun, it is dropped.
        """
        return await (self._short if letters < LONG else self._long).render(conversation, client)

    def close(self) -> None:
        """End the processes that wait."""
        for lane in (self._short, self._long):
            lane.close()


class _Lane:
    """Those that come while a process renders share the next one, at most `batch` of them: each costs 0.1 s."""

    def __init__(self, chat: ChatTemplate, batch: int):
        self._chat, self._batch, self._turns = chat, batch, FairTurns("their texts", batch)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rendering")
        self._waiting: list[tuple[Conversation, asyncio.Future[Rendered]]] = []
        self._task: asyncio.Task[None] | None = None
        self._process: RenderingProcess | None = None  # for the next conversations
        self._closed, self._alone = False, 0  # how many of the next conversations are rendered singly

    async def render(self, conversation: Conversation, client: str) -> Rendered:
        async with self._turns.turn(client):
            done: asyncio.Future[Rendered] = asyncio.get_running_loop().create_future()
            self._waiting.append((conversation, done))
            if self._task is None or self._task.done():
                self._task = asyncio.ensure_future(self._work())
            return await done

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            self._waiting = [(one, done) for one, done in self._waiting if not done.done()]  # others' clients are gone
            batch = self._waiting[: 1 if self._alone > 0 else self._batch]
            if not batch:
                return
            try:
                self._alone = max(0, self._alone - 1)
                found = await loop.run_in_executor(self._thread, self._some, [one for one, _ in batch])
            except Exception as error:
                self._alone = len(batch) if len(batch) > 1 else 0  # which of them it is, shows when each is by itself
                found = [] if self._alone else [error]
            self._waiting = self._waiting[len(found) :]
            for (_, done), one in zip(batch, found, strict=False):
                if done.done():
                    continue
                if isinstance(one, Exception):
                    done.set_exception(one)
                else:
                    done.set_result(one)

    def _some(self, conversations: Sequence[Conversation]) -> Sequence[Any]:
        """In the process that waits for it, if there is one; another one then waits for the next conversations."""
        process, self._process = self._process, None
        try:
            return self._chat.render_some(conversations, process)
        finally:
            if not self._closed:
                with contextlib.suppress(OSError):  # no further file or memory now: the next ones start it themselves
                    self._process = RenderingProcess()
