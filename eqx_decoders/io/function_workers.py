"""Calls of functions in a user's Python file, in worker processes, each call with a deadline.

Graders of answers may hang or crash: `sympy`, regular expressions, and programs that a model wrote. Threads cannot be
interrupted, so each worker is a process without JAX. It is killed and replaced if a call exceeds its deadline.
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


START_SECONDS = 120.0  # deadline for importing the user's file
_WORKER = Path(__file__).with_name("function_worker.py")


class CallResult(NamedTuple):
    """Result of one call.

    **Arguments:**

    - `value`: return value of the function as plain JSON. Numbers that are not finite are converted by `str`.
    - `error`: error message; None if there is a value.
    - `timed_out`: whether the call exceeded its deadline.
    - `seconds`: duration of the call.
    - `lost`: whether the object of the call no longer exists, because its process was killed.
    """

    value: Any = None
    error: str | None = None
    timed_out: bool = False
    seconds: float = 0.0
    lost: bool = False


class FunctionWorkers:
    """Worker processes that call one function of a user's file, several calls at a time.

        with FunctionWorkers("rewards.py:exact", workers=4, seconds=10.0) as workers:
            results = workers.map([({"answer": "42"}, "It is 42.")])

    Arguments and results are plain JSON. A call that raises an error, hangs or ends its process returns an error. Other
    calls are not affected.

    **Arguments:**

    - `function`: `file.py:function` or `module:function`.
    - `workers`: number of processes.
    - `seconds`: deadline of one call.
    - `flag`: name of the user's setting, for error messages.
    - `methods`: names of methods; if there are any, the function must be a class that has them.
    - `arguments`: names of the arguments of each call, if they are always the same.

    Raises ConfigError with the reason if the function cannot be imported or does not accept the arguments.
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
        file, _, name = function.rpartition(":")
        check(bool(file and name), f"{flag}={function!r} must be file.py:function, such as rewards.py:exact.")
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
        """Start a call in any worker. The future never raises an error."""
        return self._put(self._queues[-1], list(arguments))

    def call_method(self, number: int, method: str, *arguments: Any, new: bool = True) -> "Future[CallResult]":
        """Start a call of a method of object `number`. The first call creates the object; the method `close` ends it.

        All calls of an object run in the same worker. If the worker is killed, its objects are lost: the next call
        creates a new object, or returns an error with `new=False`.
        """
        task = {"object": number, "new": new, "method": method, "arguments": list(arguments)}
        return self._put(self._queues[number % len(self._threads)], task)

    def map(self, calls: Iterable[Sequence[Any]]) -> list[CallResult]:
        """Run all calls, and return their results in order."""
        return [future.result() for future in [self.submit(*arguments) for arguments in calls]]

    def close(self) -> None:
        """End the processes. Running calls return an error."""
        for own in self._queues[:-1]:
            own.put(None)
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
        """Notify workers of a call in the shared queue."""
        if where is self._queues[-1]:
            for own in self._queues[:-1]:
                own.put(())

    def _serve(self, number: int, process: "_Process | None") -> None:
        """Run the calls of one worker until `close`."""
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
    """Worker process, and a thread that reads its answers."""

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
        """True while the process is running."""
        return self._process.poll() is None

    def start_error(self) -> str | None:
        """Wait until the function is imported; return an error message, or None."""
        answer = self._answer(START_SECONDS)
        if answer is None or "error" in answer:
            self.close()
            return f"it took more than {START_SECONDS:g} s" if answer is None else answer["error"]
        return None

    def call(self, task: Any, seconds: float) -> CallResult:
        """Run one call. A process that does not answer in time is killed."""
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
        """Return the next answer, or None if there is none within `seconds`."""
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
        with self._process:  # closes the pipes and waits for the process
            pass


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, bool | int | float) and math.isfinite(value)


def numbers_by_name(value: Any, name: str) -> dict[str, float] | None:
    """Return the numbers in a result by name: a dict of numbers, or one number as `name`; None for other results."""
    named = value if isinstance(value, dict) else {name: value}
    if not named or not all(map(is_number, named.values())):
        return None
    return {key: float(number) for key, number in named.items()}
