"""Locks of shards: each is made by one process, also of several hosts and after a kill.

A lock saves work, and that is all: a shard is written to a file of one process alone and moved into place when it is
complete. Where locks do not reach other hosts, a shard is made twice and stays whole.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path

from eqx_decoders.io.file_lock import FileLock


UNFINISHED = 600.0  # seconds without a change, after which a file that no lock guards is one of a killed process
_SUFFIXES = (".lock", ".partial", ".copy", ".claim", ".clock", ".beside")  # the last three are of older versions


class ShardLock:
    """Lock by which one process makes a shard: of a file beside it, which is there only as long as the lock is held.

    `partial` is a file of this lock alone, to be written and moved away when it is complete; `copy_path(partial)` is
    another one, for the copy of a remote source.
    """

    def __init__(self, shard: Path):
        self._lock = FileLock(shard.with_suffix(".lock"))
        self.partial = shard.with_name(f"{shard.stem}.{secrets.token_hex(6)}.partial")

    def take(self) -> bool:
        """Take the lock; return False if another process, or another part of this one, has it.

        A lock that cannot be had, of another user or of a host that is gone, counts as held as long as something of its
        shard changes: making a shard twice does no harm, waiting for ever does.
        """
        folder = self._lock.path.parent
        try:
            is_free = self._lock.take()
        except PermissionError:
            if not os.access(folder, os.W_OK):
                raise
            is_free = False
        if not is_free:
            files = _unfinished(folder, self._lock.path.stem)
            return _are_old(files)
        with contextlib.suppress(OSError):  # another user's file
            self._lock.sign()
        return True

    def holder(self) -> str:
        """Name the process that has the lock."""
        return self._lock.holder()

    def release(self) -> None:
        """Release the lock, and delete its files."""
        try:
            _delete(self.partial, copy_path(self.partial))
        finally:
            self._lock.release(delete=True)


def copy_path(partial: Path) -> Path:
    """Return the path of the copy of a remote source, of which the shard in `partial` is made."""
    return partial.with_suffix(".copy")


def delete_unfinished(folder: Path) -> None:
    """Delete what processes that were killed left in `folder`: files that nobody changes, under locks that are free."""
    shards: dict[str, list[Path]] = {}
    for file in _unfinished(folder):
        shards.setdefault(file.name.partition(".")[0], []).append(file)
    for name, files in shards.items():
        lock = FileLock(folder / f"{name}.lock")
        with contextlib.suppress(OSError):  # another user's
            if _are_old(files) and lock.take():
                try:
                    _delete(*(file for file in files if file != lock.path))
                finally:
                    lock.release(delete=True)


def _unfinished(folder: Path, shard: str = "") -> list[Path]:
    """Return the files in a folder, or of one shard, that are there while a shard is made."""
    names = [name for name in os.listdir(folder) if name.endswith(_SUFFIXES) and ".documents." not in name]
    return [folder / name for name in names if not shard or name.partition(".")[0] == shard]


def _are_old(files: list[Path]) -> bool:
    """Return whether the files of a shard that are still there were not changed lately."""
    newest = None
    for file in files:
        with contextlib.suppress(OSError):  # deleted at this moment
            newest = max(newest or 0.0, file.stat().st_mtime)
    return newest is not None and time.time() - newest > UNFINISHED


def _delete(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # another user's, or deleted by another host
            file.unlink(missing_ok=True)
