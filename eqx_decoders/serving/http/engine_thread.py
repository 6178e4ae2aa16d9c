"""Thread that owns an engine, and its interface for the event loop."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.serving.engine.request import EngineStats, Request, RequestOutput


State = Literal["new", "running", "draining", "failed", "stopped"]

_log = logging.getLogger("eqx_decoders.serving")


@runtime_checkable
class EngineLike(Protocol):
    """Interface of an engine. Only the engine thread calls it."""

    @property
    def has_work(self) -> bool: ...
    def check_together(self, requests: Sequence[Request]) -> None: ...
    def submit(self, request: Request) -> int: ...
    def cancel(self, request_id: int) -> object: ...
    def step(self) -> list[RequestOutput]: ...
    def counts(self) -> EngineStats: ...


class NotServing(EqxDecodersError):
    """Error for a request while the server is stopping, or after its engine has failed."""


class RequestOutputs:
    """Asynchronous iterator over the outputs of requests that were submitted together.

        outputs = await engine_thread.submit(requests)
        try:
            async for index, output in outputs:
                ...
        finally:
            outputs.close()

    The iteration ends when all requests are complete. `close` cancels incomplete requests.
    """

    def __init__(self, engine_thread: "EngineThread", count: int):
        self._engine_thread = engine_thread
        self._queue: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()
        self._open = set(range(count))
        self.ids: list[int] = []  # request ids of the engine; only its thread uses them
        self.closed = False

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self._each()

    async def _each(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        while self._open:
            index, output = await self._queue.get()
            if index in self._open:
                if output.finish_reason is not None:
                    self._open.discard(index)
                yield index, output

    def cancel(self, index: int) -> None:
        """Cancel one of the requests."""
        if index in self._open:
            self._open.discard(index)
            self._engine_thread.drop(self, index)
            self._wake()

    def close(self) -> None:
        """Cancel all requests that are not complete."""
        self.closed = True
        for index in list(self._open):
            self.cancel(index)
        self._engine_thread.discard(self)

    def put(self, index: int, output: RequestOutput) -> None:
        """Add an output. Called on the event loop."""
        self._queue.put_nowait((index, output))

    def _wake(self) -> None:
        self._queue.put_nowait((-1, RequestOutput(request_id=-1)))


class EngineThread:
    """Thread that runs an engine, and sleeps while there are no requests.

    Attributes and methods may only be used on the event loop on which `start` was called. An error in a step of the
    engine ends all requests, and `state` is "failed" from then on.

    **Arguments:**

    - `engine`: the engine, which the thread owns.
    - `step_timeout`: seconds after which the engine counts as hanging in a step.
    """

    def __init__(self, engine: EngineLike, step_timeout: int | float = 300.0):
        self._engine, self._step_timeout = engine, step_timeout
        self._step_start: float | None = None  # by `time.monotonic`
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: set[RequestOutputs] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._owners: dict[int, tuple[RequestOutputs, int]] = {}  # by request id; only the thread uses it
        self._ending = False
        self.state: State = "new"
        self.error = ""
        self.counts = EngineStats()  # after the last step

    @property
    def hangs(self) -> bool:
        """Whether a step takes longer than `step_timeout`: the device does not respond."""
        start = self._step_start
        return start is not None and time.monotonic() - start > self._step_timeout

    def start(self) -> None:
        """Start the thread. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.state = "running"
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> RequestOutputs:
        """Submit all requests, or none of them if the engine refuses one.

        Raises QueueFull and ConfigError as the engine does, and NotServing. If this is cancelled, the requests are
        cancelled.
        """
        if self.state != "running":
            raise NotServing(self.error or "The server is stopping and refuses new requests.")
        if self.hangs:
            raise NotServing(f"A step of the engine takes more than {self._step_timeout} s. Its device may hang.")
        assert self._loop is not None
        outputs, done = RequestOutputs(self, len(requests)), self._loop.create_future()
        self._open.add(outputs)
        self._idle.clear()
        self._commands.put(lambda: self._admit(outputs, list(requests), done))
        try:
            await done
        except BaseException:
            outputs.close()
            raise
        return outputs

    async def call(self, work: Callable[[Any], None]) -> None:
        """Call `work` with the engine, between two steps.

        Raises the exceptions of `work`, and NotServing.
        """
        if self.state != "running":
            raise NotServing(self.error or "The server is stopping.")
        assert self._loop is not None
        done = self._loop.create_future()

        def run() -> None:
            error: Exception | None = NotServing(self.error) if self.error else None
            try:
                if error is None:
                    work(self._engine)
            except Exception as failure:
                error = failure
            self._on_loop(lambda: _resolve(done, error))

        self._commands.put(run)
        await done

    def drop(self, outputs: RequestOutputs, index: int) -> None:
        """Cancel one of the requests. Called on the event loop."""
        self._commands.put(lambda: self._cancel(outputs, index))

    def discard(self, outputs: RequestOutputs) -> None:
        """Remove outputs that are closed. Called on the event loop."""
        self._open.discard(outputs)
        if not self._open:
            self._idle.set()

    async def stop(self, drain_seconds: int | float = 10.0, end_seconds: int | float = 3.0) -> bool:
        """Refuse new requests, wait for open requests, cancel them after `drain_seconds`, and end the thread.

        Returns whether the thread has ended within `end_seconds`: a step that hangs cannot be interrupted.
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
                    self._step_start = time.monotonic()
                    outputs = self._engine.step()
                    self._step_start = None
                    self._dispatch(outputs)
                self.counts = self._engine.counts()
        except BaseException as error:
            _log.exception("the engine has failed")
            self.error = f"The engine has failed ({type(error).__name__}). Restart the server."
            self.state = "failed"
        self._dispatch(
            RequestOutput(
                request_id=request_id, finish_reason="error" if self.error else "cancelled", error=self.error or None
            )
            for request_id in list(self._owners)
        )
        while not self._ending:  # refuse later requests
            self._take_commands(wait=True)

    def _take_commands(self, *, wait: bool) -> None:
        with contextlib.suppress(queue.Empty):
            if wait:
                self._commands.get()()
            while True:
                self._commands.get_nowait()()

    def _admit(self, outputs: RequestOutputs, requests: list[Request], done: asyncio.Future[None]) -> None:
        error: Exception | None = NotServing(self.error) if self.error else None
        if error is None and not outputs.closed:
            try:
                self._engine.check_together(requests)
                for request in requests:
                    outputs.ids.append(self._engine.submit(request))
            except Exception as failure:  # an error of this request: an engine fails only in its steps
                error = failure
                for request_id in outputs.ids:
                    self._engine.cancel(request_id)
            else:
                self._owners |= {request_id: (outputs, index) for index, request_id in enumerate(outputs.ids)}
        self._on_loop(lambda: _resolve(done, error))

    def _cancel(self, outputs: RequestOutputs, index: int) -> None:
        if index < len(outputs.ids) and self._owners.pop(outputs.ids[index], None) is not None and not self.error:
            self._engine.cancel(outputs.ids[index])

    def _end(self) -> None:
        self._ending = True

    def _dispatch(self, outputs: Iterable[RequestOutput]) -> None:
        """Pass all outputs of a step to the event loop, in one call."""
        owned = []
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                owned.append((*owner, output))
                if output.finish_reason is not None:
                    del self._owners[output.request_id]
        if owned:
            self._on_loop(lambda: _put_all(owned))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _put_all(owned: list[tuple[RequestOutputs, int, RequestOutput]]) -> None:
    for outputs, index, output in owned:
        outputs.put(index, output)
