"""A thread that owns an engine, and the event loop's side of it: requests go in, updates come out."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput


State = Literal["new", "running", "draining", "failed", "stopped"]

_log = logging.getLogger("eqx_decoders.serving")


@runtime_checkable
class EngineLike(Protocol):
    """What the thread calls; nothing else may call it meanwhile."""

    @property
    def has_work(self) -> bool: ...
    def check_together(self, requests: Sequence[Request]) -> None: ...
    def submit(self, request: Request) -> int: ...
    def cancel(self, request_id: int) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def counts(self) -> EngineStats: ...


class NotServing(EqxDecodersError):
    """No more requests are taken: the server is stopping, or its engine has failed."""


class RequestOutputs:
    """The updates of some requests that were submitted together, as they come.

        answers = await worker.submit(requests)
        try:
            async for number, update in answers:
                ...
        finally:
            answers.close()

    It ends when all of them are complete. `close` cancels those that are not.
    """

    def __init__(self, worker: "EngineThread", count: int):
        self._worker = worker
        self._updates: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()
        self._open = set(range(count))
        self.ids: list[int] = []  # of the engine, written and read by its thread
        self.closed = False

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self._each()

    async def _each(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        while self._open:
            number, update = await self._updates.get()
            if number in self._open:
                if update.finish_reason is not None:
                    self._open.discard(number)
                yield number, update

    def cancel(self, number: int) -> None:
        """What more one of the requests would bring is not wanted."""
        if number in self._open:
            self._open.discard(number)
            self._worker.drop(self, number)
            self._wake()

    def close(self) -> None:
        """Cancel all that are not complete."""
        self.closed = True
        for number in list(self._open):
            self.cancel(number)
        self._worker.forget(self)

    def put(self, number: int, update: RequestOutput) -> None:
        """Called on the event loop, with what the thread has brought."""
        self._updates.put_nowait((number, update))

    def _wake(self) -> None:
        self._updates.put_nowait((-1, RequestOutput(request_id=-1)))


class EngineThread:
    """Runs an engine in a thread of its own, which sleeps while there is nothing to do.

    Everything but the thread itself belongs to the event loop on which `start` was called. What the engine raises in
    a step ends all requests with that error, and `state` is "failed" from then on.

    **Arguments:**

    - `engine`: whose thread this is.
    - `patience`: seconds that a step may take; one that takes longer `hangs`.
    """

    def __init__(self, engine: EngineLike, patience: int | float = 300.0):
        self._engine, self._patience = engine, patience
        self._step_begun: float | None = None  # by `time.monotonic`
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[RequestOutputs] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tickets: dict[int, tuple[RequestOutputs, int]] = {}  # the thread's: of each request whose it is
        self._ending = False
        self.state: State = "new"
        self.error = ""
        self.counts = EngineStats()  # after the last step

    @property
    def hangs(self) -> bool:
        """Whether a step takes longer than any should: a device does not answer."""
        begun = self._step_begun
        return begun is not None and time.monotonic() - begun > self._patience

    def start(self) -> None:
        """Begin; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = "running"
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> RequestOutputs:
        """Hand over requests, all or none.

        Raises QueueFull and ConfigError as the engine does, and NotServing. If this is cancelled, so are they.
        """
        if self.state != "running":
            raise NotServing(self.error or "The server is stopping: no new requests are taken.")
        if self.hangs:
            raise NotServing(f"A step of the engine has taken more than {self._patience} s: its device may hang.")
        assert self._loop is not None
        answers, done = RequestOutputs(self, len(requests)), self._loop.create_future()
        self._open.add(answers)
        self._idle.clear()
        self._commands.put(lambda: self._admit(answers, list(requests), done))
        try:
            await done
        except BaseException:
            answers.close()
            raise
        return answers

    def drop(self, answers: RequestOutputs, number: int) -> None:
        """Cancel one of the requests; on the event loop."""
        self._commands.put(lambda: self._cancel(answers, number))

    def forget(self, answers: RequestOutputs) -> None:
        """Nobody waits for these any more; on the event loop."""
        self._open.discard(answers)
        if not self._open:
            self._idle.set()

    async def stop(self, drain_seconds: int | float = 10.0, end_seconds: int | float = 3.0) -> bool:
        """Take no new requests, wait for those that are open, cancel what is left, and end the thread.

        Returns whether the thread has ended: a step that hangs cannot be interrupted.
        """
        if self.state == "running":
            self.state = "draining"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        self._commands.put(self._end)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, end_seconds)
        if self.state != "failed":
            self.state = "stopped"
        return not self._thread.is_alive()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending:
                self._take_commands(wait=not self._engine.has_work)
                if not self._ending and self._engine.has_work:
                    self._step_begun = time.monotonic()
                    updates = self._engine.step()
                    self._step_begun = None
                    self._publish(updates)
                self.counts = self._engine.counts()
        except BaseException as error:
            _log.exception("the engine has failed")
            self.error = f"The engine has failed ({type(error).__name__}): the server must be started again."
            self.state = "failed"
        self._publish(
            RequestOutput(
                request_id=number, finish_reason="error" if self.error else "cancelled", error=self.error or None
            )
            for number in list(self._tickets)
        )
        while not self._ending:  # what still comes is refused, until the end
            self._take_commands(wait=True)

    def _take_commands(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            if wait:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()

    def _admit(self, answers: RequestOutputs, requests: list[Request], done: asyncio.Future[None]) -> None:
        error: Exception | None = NotServing(self.error) if self.error else None
        if error is None and not answers.closed:
            try:
                self._engine.check_together(requests)
                for request in requests:
                    answers.ids.append(self._engine.submit(request))
            except Exception as found:  # of this request: what breaks the engine shows in its steps
                error = found
                for number in answers.ids:
                    self._engine.cancel(number)
            else:
                self._tickets |= {ticket: (answers, number) for number, ticket in enumerate(answers.ids)}
        self._on_loop(lambda: _settle(done, error))

    def _cancel(self, answers: RequestOutputs, number: int) -> None:
        if number < len(answers.ids) and self._tickets.pop(answers.ids[number], None) is not None and not self.error:
            self._engine.cancel(answers.ids[number])

    def _end(self) -> None:
        self._ending = True

    def _publish(self, updates: Iterable[RequestOutput]) -> None:
        """Hand all updates of a step to the event loop, in one call."""
        found = []
        for update in updates:
            owner = self._tickets.get(update.request_id)
            if owner is not None:
                found.append((*owner, update))
                if update.finish_reason is not None:
                    del self._tickets[update.request_id]
        if found:
            self._on_loop(lambda: _deliver(found))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there
            self._loop.call_soon_threadsafe(call)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _deliver(found: list[tuple[RequestOutputs, int, RequestOutput]]) -> None:
    for answers, number, update in found:
        answers.put(number, update)
