"""Decoding of images, videos and audio that clients send, in processes that can be killed
(`io.processors.decode_worker`).

A few processes are started ahead. A process that takes too long or too much memory, or whose client has disconnected,
is killed, and another one started: the request that it worked for gets an error, and no other notices. Clients take
turns, and videos leave one process to images.
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

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, PositiveInt
from eqx_decoders.io.text.chat_template import ENVIRONMENT
from eqx_decoders.media_files.base import ProcessedFile
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.fair_semaphore import FairSemaphore


GRACE = 0.3  # seconds that work may take to end after its client has gone: a new process takes longer to start
PART = 1 << 20  # characters of a file that are sent at once
KINDS = "iufb"  # dtype kinds that a process may return
_WORKER = Path(__file__).parents[2] / "io" / "processors" / "decode_worker.py"

_log = logging.getLogger("eqx_decoders.serving")


class Upload(NamedTuple):
    """File as a client sent it: base64 in `text`, from `begin` on; `where` names its field in errors."""

    where: str
    text: str
    begin: int = 0

    @property
    def size(self) -> int:
        """Number of base64 characters."""
        return len(self.text) - self.begin


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaFilesConfig(CheckedFields):
    """Limits on the files of clients.

    **Arguments:**

    - `limits`: limits on the media decoded for one request.
    - `processes`: decoding processes; None: two, or one for each four processors, at most four.
    - `seconds`: processor time for all files of a request.
    - `wall_seconds`: time for all files of a request and the start of a process: longer, since other programs may keep
        the machine busy.
    - `memory`: bytes of one process.
    - `max_request_bytes`: bytes of the arrays decoded for one request.
    - `max_bytes`: bytes of the arrays decoded for all open requests. Beyond it no files are decoded, except for clients
        that hold none, up to twice as much.
    - `max_waiting`, `max_waiting_bytes`: requests that may wait for a process, and base64 characters of their files;
        twice as many with those of clients that have one request each.
    """

    limits: MediaLimits = MediaLimits(
        max_pixels=40_000_000,
        max_total_pixels=200_000_000,
        max_video_pixels=1 << 26,
        max_decoded_pixels=1 << 32,
        max_seconds=600.0,
        max_files=64,
    )
    processes: PositiveInt | None = None
    seconds: PositiveFloat = 60.0
    wall_seconds: PositiveFloat = 180.0
    memory: PositiveInt = 3 << 30
    max_request_bytes: PositiveInt = 1 << 29
    max_bytes: PositiveInt = 1 << 30
    max_waiting: PositiveInt = 256
    max_waiting_bytes: PositiveInt = 1 << 28

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.processes or min(4, max(2, (os.cpu_count() or 1) // 4))


class MediaFiles:
    """Decoder of the files of requests. It belongs to one event loop.

    **Arguments:**

    - `directory`: directory of the model, with the settings of its processor.
    - `max_tokens`: maximum tokens that the files of one request may become.
    """

    def __init__(self, directory: str | Path, max_tokens: int, config: MediaFilesConfig = MediaFilesConfig()):
        self.config = config
        self._decoded, self._waiting = _ClientBytes(config.max_bytes), _ClientBytes(config.max_waiting_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task = dict(
            path=sys.path,
            directory=str(directory),
            limits=dataclasses.asdict(config.limits),
            seconds=config.seconds,
            memory=config.memory,
            max_bytes=config.max_request_bytes,
            max_tokens=max_tokens,
        )
        self._semaphore = FairSemaphore("files", config.count, config.max_waiting, self._decoded.has_room)
        self._video_semaphore = FairSemaphore("videos", max(1, config.count - 1), config.max_waiting)
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
        """Decode files by kind, with `FileReader.read`; the process is free for others when the block has ended.

        Raises ApiError 400 for files that cannot be read or take too much, and 429 where too many wait. If this is
        cancelled, the work ends.
        """
        size = sum(file.size for uploads in files.values() for file in uploads)
        if self._waiting.total > 0 and not self._waiting.has_room(client, size):
            waiting, limit = self._waiting.total, self.config.max_waiting_bytes
            message = f"The files of other requests have {waiting:,} bytes, and at most {limit:,} may wait"
            raise ApiError(429, f"{message}: come again later.", code="busy", retry_after=1)
        self._waiting.add(client, size)
        try:
            video = self._video_semaphore.acquire(client) if files.get("video") else contextlib.nullcontext()
            async with video, self._semaphore.acquire(client):
                yield await self._read(files)
        finally:
            self._waiting.add(client, -size)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays that open requests hold."""
        return self._decoded.total

    def hold(self, arrays: Any, client: str = "") -> None:
        """Count the memory of arrays for a client until they are freed."""
        self._loop = asyncio.get_running_loop()
        for array in jax.tree.leaves(arrays):
            if isinstance(array, np.ndarray):
                self._decoded.add(client, array.nbytes)
                weakref.finalize(array, self._drop, array.nbytes, client).atexit = False

    def close(self) -> None:
        """Kill all processes."""
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
            uploads = [upload for of_kind in files.values() for upload in of_kind]
            field = next((upload.where for upload in uploads if str(error).startswith(upload.where)), None)
            raise ApiError(400, str(error), param=field) from error
        except asyncio.CancelledError as error:
            if work.cancelled():  # before a thread has started
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
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieves the exception
        self._add()

    def _add(self) -> None:
        """Add a process, which starts in the background: no request should wait for that."""
        process = DecodingProcess(self._task)
        self._idle.insert(0, process)
        self._all.add(process)
        if not self._closed:
            self._threads.submit(process.start)

    def _drop(self, size: int, client: str) -> None:
        """Count freed memory; called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._count_dropped, size, client)

    def _count_dropped(self, size: int, client: str) -> None:
        self._decoded.add(client, -size)
        self._semaphore.wake()


class _ClientBytes:
    """Bytes by client, bounded so that one client cannot keep out the others."""

    def __init__(self, limit: int):
        self._limit, self.total = limit, 0
        self._by_client: collections.Counter[str] = collections.Counter()

    def has_room(self, client: str, size: int = 1) -> bool:
        """Return whether a client may add so many bytes. Clients without any may add up to twice the limit."""
        return self.total + size <= (self._limit if self._by_client[client] else 2 * self._limit)

    def add(self, client: str, size: int) -> None:
        """Add bytes of a client; they may be negative."""
        self.total += size
        self._by_client[client] += size
        if not self._by_client[client]:
            del self._by_client[client]


class DecodingProcess:
    """One process of `io.processors.decode_worker`. `end` may be called in any thread, the rest in one."""

    def __init__(self, task: Mapping[str, Any]):
        self._task, self._lock, self._ended = task, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """True where it takes work, or will when it has started."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    def start(self) -> None:
        """Start the process, unless it has started."""
        with self._lock:
            if self._process is not None or self._ended:
                return
            environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            command = [sys.executable, "-I", str(_WORKER), json.dumps(self._task)]
            platform = {"JAX_PLATFORMS": "cpu"}  # it computes nothing with JAX, and must not take a device
            self._process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment | platform
            )

    def read(self, files: Mapping[str, Sequence[Upload]]) -> dict[str, list[ProcessedFile]]:
        """Decode files. Raises DataError with the process's error, and ApiError if it ends before it has answered.

        To interrupt this, call `end` in another thread.
        """
        self.start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise ApiError(503, "The server is stopping.", retry_after=1)
        try:
            if not self._started:
                self._check_started(process.stdout)
            uploads = [(kind, file) for kind, group in files.items() for file in group]
            process.stdin.write(json.dumps([[kind, file.size, file.where] for kind, file in uploads]).encode() + b"\n")
            for _, file in uploads:
                for begin in range(file.begin, len(file.text), PART):  # encoding holds the interpreter
                    process.stdin.write(file.text[begin : begin + PART].encode("ascii", "replace"))
            process.stdin.flush()
            return self._answer(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            self.discard()
            raise self._failure(process.returncode) from error

    _started = False

    def _check_started(self, answers: Any) -> None:
        message = json.loads(_read_line(answers))
        if "error" in message:
            self.end()
            _log.error("files cannot be read: %s", message["error"])
            raise ApiError(500, "The server cannot read files: its log tells why.")
        self._started = True

    def _answer(self, answers: Any) -> dict[str, list[ProcessedFile]]:
        message = json.loads(_read_line(answers))
        if "last" in message:
            self.end()
        if "error" in message:
            raise DataError(message["error"])
        return _read_arrays(answers, message["read"], self._task["max_bytes"])

    def _failure(self, code: int) -> ApiError:
        if code in (-27, -24):  # SIGPROF, SIGXCPU
            return ApiError(400, f"The files take more than {self._task['seconds']:g} s of processor time: send less.")
        _log.warning("the process that decoded a client's files has ended with %d", code)
        return ApiError(500, f"The process that decoded the files has ended ({code}): are they damaged, or too large?")

    def end(self) -> None:
        """Kill the process; a `read` that waits for it returns."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def discard(self) -> None:
        """Kill the process and close its pipes; no other thread may be reading."""
        self.end()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # with unsent data
                    _ = pipe is None or pipe.close()


def _read_line(answers: Any) -> bytes:
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _read_arrays(answers: Any, results: Sequence[Any], bytes_left: int) -> dict[str, list[ProcessedFile]]:
    """Read the arrays after an answer. The process may be compromised: its data is checked, and never executed."""
    decoded = dict[str, list[ProcessedFile]]()
    for kind, text, specs in results:
        arrays = {}
        for name, dtype, shape in specs:
            array_dtype = np.dtype(dtype)
            bytes_left -= math.prod(shape) * array_dtype.itemsize
            if array_dtype.kind not in KINDS or bytes_left < 0 or min(shape, default=0) < 0:
                raise ValueError(f"array of {dtype}, {shape}")
            arrays[name] = np.empty(shape, array_dtype)
            view = memoryview(arrays[name]).cast("B") if arrays[name].size else b""
            while len(view):
                count = answers.readinto(view)
                if not count:
                    raise EOFError
                view = view[count:]
        decoded.setdefault(kind, []).append(ProcessedFile(arrays, text))
    return decoded
