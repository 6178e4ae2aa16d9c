"""Decoding of images, videos and audio that clients send, in processes that can be killed
(`io.processors.decode_worker`).

The server starts a few processes. It kills a process that takes too long or too much memory, or whose client has
disconnected, and starts another one. Only the request of that process gets an error. Videos leave one process free for
images.
"""

import asyncio
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
from eqx_decoders.media_files.base import ProcessedFile
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.serving.frontend.api_errors import ApiError


GRACE = 0.3  # seconds to wait for the end of a decoding whose client has disconnected, before its process is killed
PART = 1 << 20  # characters of a file that are written to a process at once
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")  # of the processes: no keys, no passwords
DTYPE_KINDS = "iufb"  # of arrays that a process may return
_WORKER = Path(__file__).parents[2] / "io" / "processors" / "decode_worker.py"

_log = logging.getLogger("eqx_decoders.serving")


class Upload(NamedTuple):
    """File as a client sent it: base64 in `text[start:]`. `where` is the path of the field, for error messages."""

    where: str
    text: str
    start: int = 0

    @property
    def size(self) -> int:
        """Number of base64 characters."""
        return len(self.text) - self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaFilesConfig(CheckedFields):
    """Limits on the files of clients.

    **Arguments:**

    - `limits`: limits on the media of one request.
    - `processes`: number of decoding processes. None: one per four processors, at least two and at most four.
    - `seconds`: processor time for all files of a request.
    - `wall_seconds`: wall time for all files of a request and the start of a process. It is longer, because other
        programs may keep the machine busy.
    - `memory`: bytes of one process.
    - `max_request_bytes`: bytes of the arrays decoded for one request.
    - `max_bytes`: bytes of the arrays of all open requests from which on decoding waits.
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
        self._num_bytes, self._has_memory = 0, asyncio.Event()
        self._has_memory.set()
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
        self._semaphore = asyncio.Semaphore(config.count)
        self._video_semaphore = asyncio.Semaphore(max(1, config.count - 1))
        self._threads = concurrent.futures.ThreadPoolExecutor(config.count, "files")
        self._idle: list[DecodingProcess] = []
        self._all: set[DecodingProcess] = set()
        self._closed = False
        for _ in range(config.count):
            self._add()

    @contextlib.asynccontextmanager
    async def read(self, files: Mapping[str, Sequence[Upload]]) -> AsyncIterator[dict[str, list[ProcessedFile]]]:
        """Decode files by kind, with `FileReader.read`. The process is free for other requests after the block.

        Raises ApiError 400 for files that cannot be read or exceed a limit. If this is cancelled, the work ends.
        """
        async with self._video_semaphore if files.get("video") else contextlib.nullcontext(), self._semaphore:
            await self._has_memory.wait()
            yield await self._read(files)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays of open requests."""
        return self._num_bytes

    def hold(self, arrays: Any) -> None:
        """Count the memory of arrays until they are freed."""
        self._loop = asyncio.get_running_loop()
        for array in jax.tree.leaves(arrays):
            if isinstance(array, np.ndarray):
                self._add_bytes(array.nbytes)
                weakref.finalize(array, self._on_freed, array.nbytes).atexit = False

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
        while not process.alive:  # it ended while it was idle
            process.discard()
            self._all.discard(process)
            self._add()
            process = self._idle.pop()
        work = self._loop.run_in_executor(self._threads, process.read, files)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise ApiError(
                400, f"Decoding the files takes more than {seconds:g} s. Send fewer or smaller files."
            ) from error
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
        """Add a process. It starts in the background, so that no request waits for it."""
        process = DecodingProcess(self._task)
        self._idle.insert(0, process)
        self._all.add(process)
        if not self._closed:
            self._threads.submit(process.start)

    def _on_freed(self, size: int) -> None:
        """Count freed memory; called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._add_bytes, -size)

    def _add_bytes(self, size: int) -> None:
        self._num_bytes += size
        if self._num_bytes < self.config.max_bytes:
            self._has_memory.set()
        else:
            self._has_memory.clear()


class DecodingProcess:
    """Process of `io.processors.decode_worker`. `end` may be called in any thread, the other methods in one thread."""

    def __init__(self, task: Mapping[str, Any]):
        self._task, self._lock, self._ended = task, threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process takes work, or will take work when it has started."""
        return not self._ended and (self._process is None or self._process.poll() is None)

    def start(self) -> None:
        """Start the process, unless it has started."""
        with self._lock:
            if self._process is not None or self._ended:
                return
            environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            command = [sys.executable, "-I", str(_WORKER), json.dumps(self._task)]
            platform = {"JAX_PLATFORMS": "cpu"}  # it does not compute with JAX, and must not occupy a device
            self._process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment | platform
            )

    def read(self, files: Mapping[str, Sequence[Upload]]) -> dict[str, list[ProcessedFile]]:
        """Decode files. Raises DataError with the error of the process, and ApiError if the process ends early.

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
                for start in range(file.start, len(file.text), PART):  # `encode` holds the interpreter lock
                    process.stdin.write(file.text[start : start + PART].encode("ascii", "replace"))
            process.stdin.flush()
            return self._read_result(process.stdout)
        except (OSError, EOFError, ValueError) as error:
            self.discard()
            raise self._failure(process.returncode) from error

    _started = False

    def _check_started(self, stream: Any) -> None:
        message = json.loads(_read_line(stream))
        if "error" in message:
            self.end()
            _log.error("the decoding process cannot start: %s", message["error"])
            raise ApiError(500, "The server cannot decode files. The reason is in the log of the server.")
        self._started = True

    def _read_result(self, stream: Any) -> dict[str, list[ProcessedFile]]:
        message = json.loads(_read_line(stream))
        if "last" in message:
            self.end()
        if "error" in message:
            raise DataError(message["error"])
        return _read_arrays(stream, message["read"], self._task["max_bytes"])

    def _failure(self, code: int) -> ApiError:
        if code in (-27, -24):  # SIGPROF, SIGXCPU
            return ApiError(
                400,
                f"Decoding the files takes more than {self._task['seconds']:g} s of processor time. "
                "Send fewer or smaller files.",
            )
        _log.warning("the process that decoded the files of a request has ended with code %d", code)
        return ApiError(
            500,
            f"The process that decoded the files has ended with code {code}. The files may be damaged or too large.",
        )

    def end(self) -> None:
        """Kill the process. A `read` in another thread returns."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def discard(self) -> None:
        """Kill the process and close its pipes. No other thread may be in `read`."""
        self.end()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):  # with unsent data
                    _ = pipe is None or pipe.close()


def _read_line(stream: Any) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _read_arrays(stream: Any, results: Sequence[Any], bytes_left: int) -> dict[str, list[ProcessedFile]]:
    """Read the arrays of a result. The process may be compromised: its data is checked, and never executed."""
    decoded = dict[str, list[ProcessedFile]]()
    for kind, text, specs in results:
        arrays = {}
        for name, dtype, shape in specs:
            array_dtype = np.dtype(dtype)
            bytes_left -= math.prod(shape) * array_dtype.itemsize
            if array_dtype.kind not in DTYPE_KINDS or bytes_left < 0 or min(shape, default=0) < 0:
                raise ValueError(f"array of {dtype}, {shape}")
            arrays[name] = np.empty(shape, array_dtype)
            view = memoryview(arrays[name]).cast("B") if arrays[name].size else b""
            while len(view):
                count = stream.readinto(view)
                if not count:
                    raise EOFError
                view = view[count:]
        decoded.setdefault(kind, []).append(ProcessedFile(arrays, text))
    return decoded
