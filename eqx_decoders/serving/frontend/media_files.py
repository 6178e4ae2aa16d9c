"""Images, videos and audio that clients send, decoded in processes that can be ended (`io.processors.decode_worker`).

There are a few, started ahead. A process that takes too long, too much memory, or whose client has gone, is ended, and
another one started: the request that it worked for gets an error, and no other notices. Clients take turns, and videos
leave one process to images.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.errors import DataError, check_integer, check_number
from eqx_decoders.io.processors.base import ProcessedFile
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.text.chat_template import ENVIRONMENT
from eqx_decoders.serving.frontend.fair_turns import FairTurns
from eqx_decoders.serving.http.json_fields import ApiError


GRACE = 0.3  # seconds in which work may end whose client has gone: another process takes longer to start
PART = 1 << 20  # letters of a file that are sent at once
KINDS = "iufb"  # of the numbers that a process may hand back
_WORKER = Path(__file__).parents[2] / "io" / "processors" / "decode_worker.py"

_log = logging.getLogger("eqx_decoders.serving")


class Upload(NamedTuple):
    """A file as a client sent it: base64 in `text`, from `begin` on; `where` is how errors call it."""

    where: str
    text: str
    begin: int = 0

    @property
    def size(self) -> int:
        """Letters of it."""
        return len(self.text) - self.begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaFilesConfig:
    """What files of clients may take.

    **Arguments:**

    - `limits`: bounds on what is decoded for one request.
    - `processes`: that decode; None: two, or as many as there are groups of four processors, at most four.
    - `seconds`: of processor time, for all files of a request.
    - `wall_seconds`: that these may take, and the start of a process: longer, since other programs may keep the machine
        busy.
    - `memory`: bytes that one process may take.
    - `max_request_bytes`: of what the files of one request become.
    - `max_bytes`: of what those of all requests have become that are not yet answered: while they have more, no further
        ones are decoded, but for clients of whose files nothing is kept, up to twice as much.
    - `max_waiting`, `max_waiting_bytes`: requests that wait for a process, and letters of their files in base64, twice
        as many with those of clients that have one request each.
    """

    limits: MediaLimits = MediaLimits(
        max_pixels=40_000_000,
        max_total_pixels=200_000_000,
        max_video_pixels=1 << 26,
        max_decoded_pixels=1 << 32,
        max_seconds=600.0,
        max_files=64,
    )
    processes: int | None = None
    seconds: int | float = 60.0
    wall_seconds: int | float = 180.0
    memory: int = 3 << 30
    max_request_bytes: int = 1 << 29
    max_bytes: int = 1 << 30
    max_waiting: int = 256
    max_waiting_bytes: int = 1 << 28

    def __post_init__(self):
        for name in ("memory", "max_request_bytes", "max_bytes", "max_waiting", "max_waiting_bytes"):
            check_integer(f"FilesConfig.{name}", getattr(self, name))
        if self.processes is not None:
            check_integer("MediaFilesConfig.processes", self.processes)
        for name in ("seconds", "wall_seconds"):
            check_number(f"FilesConfig.{name}", getattr(self, name), above=0)

    @property
    def count(self) -> int:
        """Processes."""
        return self.processes or min(4, max(2, (os.cpu_count() or 1) // 4))


class MediaFiles:
    """Decodes files of requests. All of it belongs to one event loop.

    **Arguments:**

    - `directory`: of the model, whose settings say what becomes of files.
    - `max_tokens`: the most that the files of one request may become.
    """

    def __init__(self, directory: str | Path, max_tokens: int, config: MediaFilesConfig = MediaFilesConfig()):
        self.config, self._kept, self._sent = config, _Share(config.max_bytes), _Share(config.max_waiting_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task = dict(
            path=sys.path,
            directory=str(directory),
            limits=dataclasses.asdict(config.limits),
            seconds=config.seconds,
            memory=config.memory,
            most_bytes=config.max_request_bytes,
            most_tokens=max_tokens,
        )
        self._turns = FairTurns("files", config.count, config.max_waiting, self._kept.has_room)
        self._videos = FairTurns("videos", max(1, config.count - 1), config.max_waiting)
        self._threads = concurrent.futures.ThreadPoolExecutor(config.count, "files")
        self._idle: list[DecodingProcess] = []
        self._all: set[DecodingProcess] = set()
        self._closed = False
        for _ in range(config.count):
            self._add()

    @contextlib.asynccontextmanager
    async def read(
        self, files: Mapping[str, Sequence[Upload]], client: str = ""
    ) -> AsyncIterator[dict[str, list[ProcessedFile]]]:
        """What `FileReader.read` gives for files by kind; others take their turn when the block has ended.

        Raises ApiError 400 for files that cannot be read or take too much, and 429 where too many wait. If this is
        cancelled, the work ends.
        """
        size, most = sum(file.size for given in files.values() for file in given), self.config.max_waiting_bytes
        if self._sent.total > 0 and not self._sent.has_room(client, size):
            told = f"The files of other requests have {self._sent.total:,} bytes, and at most {most:,} may wait"
            raise ApiError(429, f"{told}: come again later.", code="busy", retry_after=1)
        self._sent.add(client, size)
        try:
            video = self._videos.turn(client) if files.get("video") else contextlib.nullcontext()
            async with video, self._turns.turn(client):
                yield await self._read(files)
        finally:
            self._sent.add(client, -size)

    @property
    def bytes(self) -> int:
        """Of what files have become, for requests that are not yet answered."""
        return self._kept.total

    def hold(self, arrays: Any, client: str = "") -> None:
        """Count the memory of these arrays as this client's until they are gone."""
        for array in jax.tree.leaves(arrays):
            if isinstance(array, np.ndarray):
                self._kept.add(client, array.nbytes)
                weakref.finalize(array, self._drop, array.nbytes, client).atexit = False

    def close(self) -> None:
        """End all processes, whatever they do."""
        self._closed = True
        for process in self._all:
            process.end()
        for process in self._idle:
            process.discard()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, files: Mapping[str, Sequence[Upload]]) -> dict[str, list[ProcessedFile]]:
        if self._closed:
            raise ApiError(503, "The server is stopping.", retry_after=1)
        self._loop = asyncio.get_running_loop()
        process, seconds = self._idle.pop(), self.config.wall_seconds
        while not process.alive:  # it has ended while nobody used it
            process.discard()
            self._all.discard(process)
            self._add()
            process = self._idle.pop()
        work = self._loop.run_in_executor(self._threads, process.read, files)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise ApiError(400, f"The files take longer than {seconds:g} s to read: send fewer, or smaller.") from error
        except DataError as error:
            raise ApiError(400, str(error)) from error
        except asyncio.CancelledError as error:
            if work.cancelled():  # before a thread had begun
                raise ApiError(503, "The server is stopping.", retry_after=1) from error
            raise
        finally:
            try:
                if not work.done():
                    await asyncio.wait({work}, timeout=GRACE)
            finally:
                self._take_back(process, work)

    def _take_back(self, process: "DecodingProcess", work: asyncio.Future[Any]) -> None:
        if work.done() and process.alive:
            self._idle.append(process)
            return
        process.end()
        self._all.discard(process)
        if not work.done():
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is there to hear it
        self._add()

    def _add(self) -> None:
        """Another process, which starts meanwhile: no request should wait for that."""
        process = DecodingProcess(self._task)
        self._idle.insert(0, process)
        self._all.add(process)
        if not self._closed:
            self._threads.submit(process.start)

    def _drop(self, size: int, client: str) -> None:
        """Whichever thread has let go of an array."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._dropped, size, client)

    def _dropped(self, size: int, client: str) -> None:
        self._kept.add(client, -size)
        self._turns.wake()


class _Share:
    """Bytes of clients, bounded so that what one of them has keeps nobody else out."""

    def __init__(self, most: int):
        self._most, self.total = most, 0
        self._of: collections.Counter[str] = collections.Counter()

    def has_room(self, client: str, size: int = 1) -> bool:
        """Whether this client may have so many more: within the bound, or within its double who has none."""
        return self.total + size <= (self._most if self._of[client] else 2 * self._most)

    def add(self, client: str, size: int) -> None:
        """This client has so many more."""
        self.total += size
        self._of[client] += size
        if not self._of[client]:
            del self._of[client]


class DecodingProcess:
    """One process of `io.processors.decode_worker`. `end` may be called from any thread, the rest from one."""

    def __init__(self, task: Mapping[str, Any]):
        self._task, self._lock, self._ended = task, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether it takes work, or will when it has started."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    def start(self) -> None:
        """Start it, if it has not been."""
        with self._lock:
            if self._process is not None or self._ended:
                return
            environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            command = [sys.executable, "-I", str(_WORKER), json.dumps(self._task)]
            more = {"JAX_PLATFORMS": "cpu"}  # it computes nothing with JAX, and must not take a device
            self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment | more)

    def read(self, files: Mapping[str, Sequence[Upload]]) -> dict[str, list[ProcessedFile]]:
        """What becomes of files. Raises DataError for what it says of them, ApiError if it ends before it has answered.

        It must be ended from another thread to let it go before.
        """
        self.start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ApiError(503, "The server is stopping.", retry_after=1)
        try:
            if not self._greeted:
                self._greet(process.stdout)
            given = [(kind, file) for kind, many in files.items() for file in many]
            process.stdin.write(json.dumps([[kind, file.size, file.where] for kind, file in given]).encode() + b"\n")
            for _, file in given:
                for begin in range(file.begin, len(file.text), PART):  # encoding holds the interpreter
                    process.stdin.write(file.text[begin : begin + PART].encode("ascii", "replace"))
            process.stdin.flush()
            return self._answer(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            self.discard()
            raise self._failure(process.returncode) from error

    _greeted = False

    def _greet(self, answers: Any) -> None:
        said = json.loads(_line(answers))
        if "error" in said:
            self.end()
            _log.error("files cannot be read: %s", said["error"])
            raise ApiError(500, "The server cannot read files: its log tells why.")
        self._greeted = True

    def _answer(self, answers: Any) -> dict[str, list[ProcessedFile]]:
        said = json.loads(_line(answers))
        if "last" in said:
            self.end()
        if "error" in said:
            raise DataError(said["error"])
        return _arrays(answers, said["read"], self._task["most_bytes"])

    def _failure(self, code: int) -> ApiError:
        if code in (-27, -24):  # SIGPROF, SIGXCPU
            return ApiError(400, f"The files take more than {self._task['seconds']:g} s of processor time: send less.")
        _log.warning("the process that decoded a client's files has ended with %d", code)
        return ApiError(500, f"The process that decoded the files has ended ({code}): are they damaged, or too large?")

    def end(self) -> None:
        """End it; what waits for it in `read` comes back."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def discard(self) -> None:
        """End it, and close its pipes; by whoever uses it, or nobody does."""
        self.end()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # what could not be sent
                    _ = pipe is None or pipe.close()


def _line(answers: Any) -> bytes:
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _arrays(answers: Any, read: Sequence[Any], most: int) -> dict[str, list[ProcessedFile]]:
    """What follows. The process may have been taken over: what it says is looked at, and never run."""
    found = dict[str, list[ProcessedFile]]()
    for kind, text, told in read:
        arrays = {}
        for name, dtype, shape in told:
            form = np.dtype(dtype)
            most -= math.prod(shape) * form.itemsize
            if form.kind not in KINDS or most < 0 or min(shape, default=0) < 0:
                raise ValueError(f"array of {dtype}, {shape}")
            arrays[name] = np.empty(shape, form)
            view = memoryview(arrays[name]).cast("B") if arrays[name].size else b""
            while len(view):
                count = answers.readinto(view)
                if not count:
                    raise EOFError
                view = view[count:]
        found.setdefault(kind, []).append(ProcessedFile(arrays, text))
    return found
