"""Run directories: one process at a time writes a run directory, and files of other programs are never overwritten."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eqx_decoders.errors import CheckpointError, check
from eqx_decoders.io.file_lock import (
    file_lock,
    holder_text,
    is_holder,
    read_holder,
    read_json,
    try_acquire,
    write_holder,
)


# Files that a run writes into its directory before its first step, or restores from where its checkpoints are.
RUN_FILES = ("settings.json", "model.json", "source", "tokenizer", "data", "checkpoints", "owner.json", ".lock")
RUN_FILES += ("metrics.jsonl", "trackers.json", "tensorboard", "wandb", "mlflow.db")
LATER_FILES = ("loss.png", "expert_load.png", "answers.png", "profile")
OWNER = "owner.json"
_OWN_SETTINGS = {"run_dir", "model", "steps"}  # of every run's settings.json


def check_run_dir(run_dir: str | Path) -> None:
    """Raise ConfigError if a directory that is not a run directory has a file with a name that a run writes."""
    check_own(Path(run_dir), RUN_FILES + LATER_FILES, "run_dir", run_dir)


def check_own(folder: Any, names: Sequence[str], field: str, value: str | Path) -> None:
    """Raise ConfigError if a folder (a path of any kind) that no run has written contains a file with one of `names`.

    A run directory is recognized by the content of `settings.json`, the first file that a run writes except `.lock` and
    `owner.json`. These two say nothing about the other files, and are recognized by their own content.
    """
    if is_of_a_run(folder):
        return
    present = [name for name in names if (folder / name).exists() or os.path.islink(folder / name)]
    foreign = [name for name in present if name not in (".lock", OWNER) or not is_holder(_content(folder / name))]
    foreign = [name for name in foreign if name != ".lock" or _content(folder / name)]  # an empty one is being written
    check(
        not foreign,
        f"{field}={str(value)!r}: {folder} contains {', '.join(foreign)}, which this program did not write and would "
        f"overwrite. Choose another {field}, a new or empty one.",
    )


def is_of_a_run(folder: Any) -> bool:
    """Return whether a folder (a path of any kind) is a run directory."""
    return read_json(_content(folder / "settings.json")).keys() >= _OWN_SETTINGS


def _content(path: Any) -> bytes:
    if path.name == ".lock":
        return read_holder(path)
    return path.read_bytes() if path.is_file() else b""


def has_owner(folder: Any) -> bool:
    """Return whether a run has claimed a folder (a path of any kind)."""
    return is_holder(_content(folder / OWNER))


class RunLock:
    """Lock on `<run_dir>/.lock` that keeps a second process from writing there. Creates the directory if needed.

    The file stays when its process ends, the lock does not. In a run of several processes, process 0 takes it for all.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir).expanduser().resolve() / ".lock"
        self._lock = file_lock(self.path, on_acquired=self._on_acquired)
        self._existing: set[Path] = set()
        self._before: set[str] | None = None

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock. Raises CheckpointError with the name of the process that holds it."""
        directory = self.path.parent
        self._existing = {path for path in (directory, self.path) if path.exists()}
        try:
            acquired = try_acquire(self._lock)
        except OSError as error:
            raise CheckpointError(f"run directory {directory} cannot be written or locked: {error}.") from error
        if not acquired:
            holder = holder_text(read_holder(self.path))
            raise CheckpointError(
                f"run directory {directory} is in use by {holder}: stop that run or choose another directory."
            )

    def _on_acquired(self, descriptor: int) -> None:
        """Write the name of this process into the lock file, unless it is a file of another program."""
        directory, previous = self.path.parent, os.pread(descriptor, 1 << 16, 0)
        check(
            not previous or is_holder(previous) or is_of_a_run(directory),
            f"{self.path} is not the lock file of a run: choose another run directory.",
            CheckpointError,
        )
        names = {path.name for path in directory.iterdir() if path != self.path or path in self._existing}
        self._before = names if names or directory in self._existing else None
        write_holder(descriptor)

    def undo(self) -> None:
        """Delete the files that the run has written since it took the lock, and the directory if it is new."""
        for path in self.path.parent.iterdir():
            if path.name in RUN_FILES and path.name not in (self._before or ()):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if self._before is None:
            with contextlib.suppress(OSError):  # other programs have written files into it
                self.path.parent.rmdir()

    def release(self) -> None:
        """Release the lock. The file stays, since another process may be opening it at this moment."""
        self._lock.release()
