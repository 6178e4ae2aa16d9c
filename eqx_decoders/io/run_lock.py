"""Run directories: one writer for each, and none that holds anything else."""

import contextlib
import datetime
import json
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.file_lock import lock_file


# Files that a run writes into its directory before its first step, or restores from where its checkpoints are.
RUN_FILES = ("settings.json", "model.json", "source", "tokenizer", "data", "checkpoints", "owner.json", ".lock")
RUN_FILES += ("metrics.jsonl", "trackers.json", "tensorboard", "wandb", "mlflow.db")
LATER_FILES = ("loss.png", "expert_load.png", "answers.png", "profile")
OWNER = "owner.json"
_OWN_SETTINGS = {"run_dir", "model", "steps"}  # of every run's settings.json


def check_run_dir(run_dir: str | Path) -> None:
    """Raise ConfigError for a directory that is not a run's and has a file under a name that a run writes to."""
    check_own(Path(run_dir), RUN_FILES + LATER_FILES, "run_dir", run_dir)


def check_own(folder: Any, names: Sequence[str], field: str, value: str | Path) -> None:
    """Raise ConfigError if a folder (a path of any kind) that no run wrote into has any of `names`.

    A run's folder is recognized by the content of `settings.json`, the first file that a run writes but for `.lock` and
    `owner.json`, which say nothing of the other files and are recognized by their content, too.
    """
    if _json(_content(folder / "settings.json")).keys() >= _OWN_SETTINGS:
        return
    present = [name for name in names if (folder / name).exists() or os.path.islink(folder / name)]
    foreign = [name for name in present if name not in (".lock", OWNER) or not _is_lock(_content(folder / name))]
    foreign = [name for name in foreign if name != ".lock" or _content(folder / name)]  # an empty one is being written
    rule = f"but not from a run of this program, which would write over it. Choose another {field}, a new or empty one"
    check(not foreign, f"{field}={str(value)!r} has {', '.join(foreign)} in {folder}, {rule}.")


def _content(path: Any) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def has_owner(folder: Any) -> bool:
    """Return whether a run has claimed a folder (a path of any kind)."""
    return _is_lock(_content(folder / OWNER))


def _is_lock(content: bytes) -> bool:
    return {"pid", "host", "since"} <= _json(content).keys()


class RunLock:
    """Lock on `<run_dir>/.lock` that keeps a second process from writing there; makes the directory if needed.

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
        """Take the lock. Raises CheckpointError that names its holder."""
        existing = {path for path in (self.path.parent, self.path) if path.exists()}
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
        names = {path.name for path in self.path.parent.iterdir() if path != self.path or path in existing}
        self._before = names if names or self.path.parent in existing else None
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.write(file, json.dumps(who).encode() + b"\n")
        self._file = file

    def undo(self) -> None:
        """Delete the files that the run has made since it took the lock, and the directory if it is new."""
        for path in self.path.parent.iterdir():
            if path.name in RUN_FILES and path.name not in (self._before or ()):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if self._before is None:
            with contextlib.suppress(OSError):  # others have put something into it
                self.path.parent.rmdir()

    def release(self) -> None:
        """Release the lock. The file stays, since another process may be opening it at this moment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _owner(content: bytes) -> str:
    if not _is_lock(content):
        return "another process"  # one that has the lock and has not written its name yet
    who = _json(content)
    return f"pid {who['pid']} on {who['host']} since {who['since']}"
