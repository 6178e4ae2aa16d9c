"""One writer for each run directory, signals that end a run between two steps, and exit codes."""

import datetime
import json
import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from eqx_decoders.errors import CheckpointError, ConfigError, DataError
from eqx_decoders.io.lock import lock_file


EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_SIGTERM = 143  # 128 + 15, what a shell reports of a process that SIGTERM ended


def exit_code(error: BaseException) -> int:
    """The exit status of a program that ends by `error`: 2 configuration, 3 data, 4 checkpoint, otherwise 1."""
    codes = {ConfigError: EXIT_CONFIG, DataError: EXIT_DATA, CheckpointError: EXIT_CHECKPOINT}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


class RunLock:
    """Holds `<run_dir>/.lock` while open, so that no second process writes there; makes the directory if needed.

    The file stays when its process ends, the lock does not. In a run of several processes the first takes it for all.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir).expanduser().resolve() / ".lock"
        self._file: int | None = None
        self._before: set[str] | None = None

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise CheckpointError with who has it."""
        there = {path for path in (self.path.parent, self.path) if path.exists()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"run directory {self.path.parent} cannot be written: {error}.") from error
        try:
            lock_file(file, wait=False)
        except BlockingIOError as error:
            os.close(file)
            owner = _owner(self.path.read_bytes())
            raise CheckpointError(
                f"run directory {self.path.parent} is in use by {owner}: stop that run or choose another directory."
            ) from error
        except OSError as error:
            os.close(file)
            raise CheckpointError(f"run directory {self.path.parent} cannot be locked: {error}.") from error
        if not self.path.exists() or not os.path.samestat(os.fstat(file), self.path.stat()):
            os.close(file)  # of a start that failed meanwhile, and took its directory away
            return self.acquire()
        names = {path.name for path in self.path.parent.iterdir() if path != self.path or path in there}
        self._before = names if names or self.path.parent in there else None
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps(who).encode() + b"\n")
        self._file = file

    def undo(self) -> None:
        """Delete what came into the directory since the lock was taken, and the directory if it is new."""
        if self._before is None:
            shutil.rmtree(self.path.parent, ignore_errors=True)
            return
        for path in self.path.parent.iterdir():
            if path.name not in self._before:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock. The file stays: another process may be opening it at this moment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _owner(content: bytes) -> str:
    try:
        who = json.loads(content)
        return f"pid {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # one that has the lock and has not written its name yet


class Interrupt:
    """While open, SIGTERM, SIGUSR1 and the first SIGINT only set `requested`; a second SIGINT interrupts at once.

    with Interrupt() as interrupt:
        for batch in batches:
            ...
            if interrupt.requested:
                save, then exit with interrupt.exit_code

    Python handles signals in the main thread only: opened in another thread it never reports one.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._old: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, as shells have it; 143 for SIGTERM, 0 if there was none."""
        return 128 + self.signal if self.signal is not None else 0

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
