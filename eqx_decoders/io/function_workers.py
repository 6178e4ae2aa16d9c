"""Functions of a user's Python file, called in processes of their own, each call with a deadline.

Graders of answers hang and crash: `sympy`, regular expressions and programs that a model wrote. Signals do not reach
threads, so each worker is a process, without JAX, which is killed and started anew when a call takes too long.
"""

import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

from eqx_decoders.errors import ConfigError, check, check_integer


START_SECONDS = 120.0  # to import the user's file
_WORKER = Path(__file__).with_name("function_worker.py")


class CallResult(NamedTuple):
    """Result of one call.

    **Arguments:**

    - `value`: what the function returned, as plain JSON; numbers that are not finite are the texts of `str`.
    - `error`: why there is no value; None if there is one.
    - `timed_out`: whether the call took too long.
    - `seconds`: how long it took.
    - `lost`: whether its object is not there: it was that of a process that was killed since.
    """

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
    lost: bool = False


class FunctionWorkers:
    """Processes that call one function of a user's file, several calls at once.

        with FunctionWorkers("rewards.py:exact", workers=4, seconds=10.0) as workers:
            results = workers.map([({"answer": "42"}, "It is 42.")])

    Arguments and results are plain JSON. A call that raises, hangs or ends its process has an error, the others none.

    **Arguments:**

    - `function`: `file.py:function` or `module:function`.
    - `workers`: number of processes.
    - `seconds`: deadline of one call.
    - `flag`: what the user gave the function by, for errors.
    - `methods`: what the function must have, a class then.
    - `arguments`: names of what it is called with, if that is always the same.

    Raises ConfigError with the reason where the function cannot be imported, or does not take these.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int = 2,
        seconds: float = 10.0,
        flag: str = "function",
        methods: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ):
        check_integer("workers", workers)
        check(math.isfinite(seconds) and seconds > 0, f"seconds={seconds} must be a positive number.")
        whole = bool(function.rpartition(":")[0]) and bool(function.rpartition(":")[2])
        check(whole, f"{flag}={function!r} must be file.py:function, such as rewards.py:exact.")
        self._command = dict(
            function=function, path=[os.getcwd(), *sys.path], methods=[*methods], arguments=[*arguments]
        )
        self._flag, self._seconds = f"{flag}={function!r}", seconds
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(workers + 1)]
        first = _Process(self._command)
        error = first.start_error()
        if error is not None:
            first.close()
            raise ConfigError(f"{self._flag} cannot be imported: {error}.")
        processes = [first, *(None for _ in range(workers - 1))]
        self._threads = [
            threading.Thread(target=self._serve, args=(number, process), daemon=True)
            for number, process in enumerate(processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, *arguments: Any) -> "Future[CallResult]":
        """Start a call in any worker; its future never raises."""
        return self._put(self._queues[-1], list(arguments))

    def call_method(self, number: int, method: str, *arguments: Any, new: bool = True) -> "Future[CallResult]":
        """Start a call of a method of object `number`, which the first call makes with `function()`; `close` ends it.

        All calls of an object are of one worker. Where that is killed, its objects are lost: with `new=False` the next
        call is an error then, otherwise there is a new one.
        """
        task = {"object": number, "new": new, "method": method, "arguments": list(arguments)}
        return self._put(self._queues[number % len(self._threads)], task)

    def map(self, calls: Iterable[Sequence[Any]]) -> list[CallResult]:
        """Make all calls, and return their results in order."""
        return [future.result() for future in [self.submit(*arguments) for arguments in calls]]

    def close(self) -> None:
        """End the processes; open calls have an error."""
        for each in self._queues[:-1]:
            each.put(None)
        self._queues[-1].put(None)
        for thread in self._threads:
            thread.join(timeout=self._seconds + 5.0)

    def __enter__(self) -> "FunctionWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, where: Any, task: Any) -> "Future[CallResult]":
        future: Future[CallResult] = Future()
        where.put((task, future))
        self._wake(where)
        return future

    def _wake(self, where: Any) -> None:
        """Tell workers of a call in the shared queue."""
        if where is self._queues[-1]:
            for each in self._queues[:-1]:
                each.put(())

    def _serve(self, number: int, process: "_Process | None") -> None:
        """Make the calls of one worker, until `close`."""
        own, shared = self._queues[number], self._queues[-1]
        while (item := own.get()) is not None:
            if item == ():
                try:
                    item = shared.get_nowait()
                except queue.Empty:
                    continue
                if item is None:
                    break
            task, future = item
            if process is None or not process.alive:
                process = _Process(self._command)
                error = process.start_error()
                if error is not None:
                    future.set_result(CallResult(error=error))
                    continue
            future.set_result(process.call(task, self._seconds))
        if process is not None:
            process.close()


class _Process:
    """One process, and a thread that reads its answers."""

    def __init__(self, command: dict[str, Any]):
        started = [sys.executable, "-I", str(_WORKER), json.dumps(command)]
        self._process = subprocess.Popen(started, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8")
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    @property
    def alive(self) -> bool:
        """True while the process can be asked."""
        return self._process.poll() is None

    def start_error(self) -> str | None:
        """Wait until the function is imported; return why it could not be."""
        answer = self._answer(START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            return f"it took more than {START_SECONDS:g} s" if answer is None else answer["error"]
        return None

    def call(self, task: Any, seconds: float) -> CallResult:
        """Make one call; a process that does not answer in time is killed."""
        started = time.perf_counter()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
            answer = self._answer(seconds)
        except OSError as error:
            answer = {"error": f"its process ended: {error}"}
        took = time.perf_counter() - started
        if answer is None:
            self.close()
            return CallResult(error=f"it took more than {seconds:g} s", timed_out=True, seconds=took)
        return CallResult(answer.get("value"), answer.get("error"), seconds=took, lost=bool(answer.get("lost")))

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None if it does not come in time."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            return None
        if not line:
            return {"error": f"its process ended with {self._process.wait()}"}
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with self._process:  # which closes the pipes and waits
            pass


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def numbers_by_name(value: Any, name: str) -> dict[str, float] | None:
    """Return the numbers that a function returned, several by name or one under `name`; None if it is none of these."""
    named = value if isinstance(value, dict) else {name: value}
    if not named or not all(map(is_number, named.values())):
        return None
    return {key: float(each) for key, each in named.items()}
