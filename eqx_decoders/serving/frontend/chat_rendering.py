"""Rendering of conversations with a chat template, in processes. Long conversations do not delay short ones."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Sequence
from typing import Any

from eqx_decoders.io.text.chat_template import ChatTemplate, Conversation, Rendered, RenderingProcess
from eqx_decoders.serving.frontend.fair_semaphore import FairSemaphore


BATCH = 32  # conversations that share a process
LONG = 1 << 15  # characters from which a conversation gets a process of its own


class Renderer:
    """Renderer of conversations with one chat template. It belongs to one event loop.

    **Arguments:**

    - `chat`: the chat template.
    """

    def __init__(self, chat: ChatTemplate):
        self.source = chat.source
        self._short, self._long = _RenderQueue(chat, BATCH), _RenderQueue(chat, 1)

    async def render(self, conversation: Conversation, length: int, client: str = "") -> Rendered:
        """Return the text of a conversation of `length` characters; clients take turns.

        If this is cancelled before it starts, it is dropped.
        """
        return await (self._short if length < LONG else self._long).render(conversation, client)

    def close(self) -> None:
        """End the idle processes."""
        for queue in (self._short, self._long):
            queue.close()


class _RenderQueue:
    """Queue whose conversations share a process, at most `batch` of them: a process costs 0.1 s."""

    def __init__(self, chat: ChatTemplate, batch: int):
        self._chat, self._batch, self._semaphore = chat, batch, FairSemaphore("their texts", batch)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "rendering")
        self._waiting: list[tuple[Conversation, asyncio.Future[Rendered]]] = []
        self._task: asyncio.Task[None] | None = None
        self._process: RenderingProcess | None = None  # for the next conversations
        self._closed, self._num_single = False, 0  # next conversations that are rendered singly, after an error

    async def render(self, conversation: Conversation, client: str) -> Rendered:
        async with self._semaphore.acquire(client):
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
            self._waiting = [each for each in self._waiting if not each[1].done()]  # clients of others are gone
            batch = self._waiting[: 1 if self._num_single > 0 else self._batch]
            if not batch:
                return
            try:
                self._num_single = max(0, self._num_single - 1)
                conversations = [conversation for conversation, _ in batch]
                results = await loop.run_in_executor(self._thread, self._render_batch, conversations)
            except Exception as error:
                self._num_single = len(batch) if len(batch) > 1 else 0  # to find out which of them it is
                results = [] if self._num_single else [error]
            self._waiting = self._waiting[len(results) :]
            for (_, done), result in zip(batch, results, strict=False):
                if done.done():
                    continue
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)

    def _render_batch(self, conversations: Sequence[Conversation]) -> Sequence[Any]:
        """Render in the waiting process, if there is one; then start the one for the next batch."""
        process, self._process = self._process, None
        try:
            return self._chat.render_some(conversations, process)
        finally:
            if not self._closed:
                with contextlib.suppress(OSError):  # no file or memory is free: the next batch starts it
                    self._process = RenderingProcess()
