"""Run directories: one writer for each, and none that holds anything else."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.file_lock import FileLock, is_owner, read_json, read_owner


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
    if is_of_a_run(folder):
        return
    present = [name for name in names if (folder / name).exists() or os.path.islink(folder / name)]
    foreign = [name for name in present if name not in (".lock", OWNER) or not is_owner(_content(folder / name))]
    foreign = [name for name in foreign if name != ".lock" or _content(folder / name)]  # an empty one is being written
    rule = f"but not from a run of this program, which would write over it. Choose another {field}, a new or empty one"
    check(not foreign, f"{field}={str(value)!r} has {', '.join(foreign)} in {folder}, {rule}.")


def is_of_a_run(folder: Any) -> bool:
    """Return whether a folder (a path of any kind) is a run directory."""
    return read_json(_content(folder / "settings.json")).keys() >= _OWN_SETTINGS


def _content(path: Any) -> bytes:
    if path.name == ".lock":
        return read_owner(path)
    return path.read_bytes() if path.is_file() else b""


def has_owner(folder: Any) -> bool:
    """Return whether a run has claimed a folder (a path of any kind)."""
    return is_owner(_content(folder / OWNER))


class RunLock:
    """Lock on `<run_dir>/.lock` that keeps a second process from writing there; makes the directory if needed.

    The file stays when its process ends, the lock does not. In a run of several processes the first takes it for all.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir).expanduser().resolve() / ".lock"
        self._lock = FileLock(self.path)
        self._before: set[str] | None = None

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock. Raises CheckpointError that names its holder."""
        directory = self.path.parent
        existing = {path for path in (directory, self.path) if path.exists()}
        try:
            is_free = self._lock.take()
        except OSError as error:
            raise CheckpointError(f"run directory {directory} cannot be written or locked: {error}.") from error
        if not is_free:
            rule = "stop that run or choose another directory"
            raise CheckpointError(f"run directory {directory} is in use by {self._lock.holder()}: {rule}.")
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            previous = self._lock.previous
            rule = f"{self.path} is no lock of a run: choose another run directory"
            check(not previous or is_owner(previous) or is_of_a_run(directory), f"{rule}.", CheckpointError)
            names = {path.name for path in directory.iterdir() if path != self.path or path in existing}
            self._before = names if names or directory in existing else None
            try:
                self._lock.sign()
            except OSError as error:
                raise CheckpointError(f"run directory {directory} cannot be written: {error}.") from error
            stack.pop_all()

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
        self._lock.release()
