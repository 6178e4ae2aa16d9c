"""One writer for each run directory, signals that end a run between two steps, and exit codes."""

import contextlib
import datetime
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from eqx_decoders.errors import CheckpointError, ConfigError, ConversionError, DataError, check
from eqx_decoders.io.coordination import leave
from eqx_decoders.io.file_lock import lock_file
from eqx_decoders.io.status import ON_ENTER, delete_partial, stopped_text


# What a run writes into its directory before its first step, or brings back from where its checkpoints are.
RUN_FILES = ("settings.json", "model.json", "source", "tokenizer", "data", "checkpoints", "owner.json", ".lock")
RUN_FILES += ("metrics.jsonl", "trackers.json", "tensorboard", "wandb", "mlflow.db")
LATER_FILES = ("loss.png", "expert_load.png", "answers.png", "profile")
OWNER = "owner.json"
_OWN_SETTINGS = {"run_dir", "model", "steps"}  # of every run's settings.json

EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_SIGTERM = 143  # 128 + 15, what a shell reports of a process that SIGTERM ended


def exit_code(error: BaseException) -> int:
    """The exit status of a program that ends by `error`: 2 configuration, 3 data, 4 checkpoint, otherwise 1."""
    checkpoint = (CheckpointError, ConversionError)
    codes = {ConfigError: EXIT_CONFIG, DataError: EXIT_DATA, checkpoint: EXIT_CHECKPOINT}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


def check_run_dir(run_dir: str | Path) -> None:
    """Raise ConfigError if a directory has something under a name that a run writes to, and is not a run's."""
    check_own(Path(run_dir), RUN_FILES + LATER_FILES, "run_dir", run_dir)


def check_own(folder: Any, names: Sequence[str], field: str, value: str | Path) -> None:
    """Raise ConfigError if there is any of `names` in a folder (a path of any kind) that no run wrote into.

    That a run did is told by the content of `settings.json`, the first that it writes but for its marks (`.lock` and
    `owner.json`, which say nothing of what else is there, and are told by their content, too).
    """
    if _json(_content(folder / "settings.json")).keys() >= _OWN_SETTINGS:
        return
    found = [name for name in names if (folder / name).exists() or os.path.islink(folder / name)]
    foreign = [name for name in found if name not in (".lock", OWNER) or not _is_lock(_content(folder / name))]
    foreign = [name for name in foreign if name != ".lock" or _content(folder / name)]  # an empty one is being written
    rule = f"but not from a run of this program, which would write over it. Choose another {field}, a new or empty one"
    check(not foreign, f"{field}={str(value)!r} has {', '.join(foreign)} in {folder}, {rule}.")


def _content(path: Any) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _json(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def has_owner(folder: Any) -> bool:
    """Whether a start of a run has said that it writes into a folder (a path of any kind)."""
    return _is_lock(_content(folder / OWNER))


def _is_lock(content: bytes) -> bool:
    return {"pid", "host", "since"} <= _json(content).keys()


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
        if (before := os.read(file, 1 << 16)) and not _is_lock(before):
            os.close(file)
            raise CheckpointError(f"{self.path} is no lock of a run: choose another run directory.")
        names = {path.name for path in self.path.parent.iterdir() if path != self.path or path in there}
        self._before = names if names or self.path.parent in there else None
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps(who).encode() + b"\n")
        self._file = file

    def undo(self) -> None:
        """Delete what the run put into the directory since the lock was taken, and the directory if it is new."""
        for path in self.path.parent.iterdir():
            if path.name in RUN_FILES and path.name not in (self._before or ()):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if self._before is None:
            with contextlib.suppress(OSError):  # there is something of others by now
                self.path.parent.rmdir()

    def release(self) -> None:
        """Release the lock. The file stays: another process may be opening it at this moment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _owner(content: bytes) -> str:
    if not _is_lock(content):
        return "another process"  # one that has the lock and has not written its name yet
    who = _json(content)
    return f"pid {who['pid']} on {who['host']} since {who['since']}"


class Stopped(KeyboardInterrupt):
    """Raised by a signal where there is nothing to save; the text says what was being done, and what is kept."""

    def __init__(self, number: int):
        super().__init__(stopped_text())
        self.exit_code = 128 + number  # as shells have it


class Interrupt:
    """While open, SIGTERM, SIGUSR1 and the first SIGINT only set `requested`; a second SIGINT interrupts at once.

    with Interrupt() as interrupt:
        for batch in batches:
            ...
            if interrupt.requested:
                save, then exit with interrupt.exit_code

    As long as `at_once` is set, every one of them raises `Stopped`. The innermost one that is open counts.

    Python handles signals in the main thread only: opened in another thread it never reports one.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
    opened: ClassVar[list["Interrupt"]] = []

    def __init__(self, *, at_once: bool = False):
        self.at_once = at_once
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
            self.opened.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._old = {}
        if self in self.opened:
            self.opened.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.at_once or (number == signal.SIGINT and self.signal == signal.SIGINT):
            raise Stopped(number)
        self.signal = signal.Signals(number)


class Watch:
    """While open, a signal that is to stop the program at once does so within `patience` seconds.

    `Stopped` unwinds the program where Python runs. Calls that do not return to Python (the compiler's, a tokenizer's
    training) would keep it waiting: a thread hears of the signal, deletes what is unfinished, says so and ends the
    process. It ends without Python's last rites in either case: a compiler that was interrupted crashes in them.
    """

    def __init__(self, patience: float = 1.0):
        self._patience, self._left, self._number = patience, threading.Event(), 0
        self._thread = threading.Thread(target=self._hear, daemon=True)

    def __enter__(self) -> "Watch":
        if threading.current_thread() is threading.main_thread():
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._old = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
            ON_ENTER.append(self._listen)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Stopped) or (error is not None and self._number):
            code = error.exit_code if isinstance(error, Stopped) else 128 + self._number
            _end(str(error) if isinstance(error, Stopped) else stopped_text(), code)
        if self._thread.ident is not None:
            ON_ENTER.remove(self._listen)
            sys.unraisablehook = self._hook
            signal.set_wakeup_fd(self._old)
            self._left.set()
            self._sender.close()  # ends the thread
            self._thread.join()
            self._receiver.close()

    def _listen(self) -> None:
        """Again: event loops take the signals for themselves, and uvloop does not give them back."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)

    def _unraisable(self, lost: Any) -> None:
        """A `Stopped` that was raised while Python collected garbage goes no further; the thread ends the process."""
        if not isinstance(lost.exc_value, Stopped):
            self._hook(lost)

    def _hear(self) -> None:
        while number := self._receiver.recv(1):
            at_once = any(each.at_once for each in Interrupt.opened[-1:])
            if number[0] in Interrupt.SIGNALS and at_once:
                text, self._number = stopped_text(), number[0]
                if not self._left.wait(self._patience):
                    delete_partial()
                    _end(text, 128 + number[0])


def _end(text: str, code: int) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    leave(text, code)
    os._exit(code)
