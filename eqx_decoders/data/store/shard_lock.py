"""Locks of shards: a shard is written by one process at a time, of all hosts that share the cache.

A lock only saves work. Each process writes a shard to its own file, and moves it into place when it is complete. Where
locks do not reach other hosts, a shard is written twice and stays complete.
"""

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path

from eqx_decoders.io.file_lock import file_lock, holder_text, read_holder, try_acquire, write_holder


UNFINISHED = 600.0  # seconds without a change after which unlocked files count as files of a killed process
GONE = (errno.ENOENT, errno.ESTALE)  # errors for a file that another process or host has deleted
_SUFFIXES = (".lock", ".partial", ".copy")


class ShardLock:
    """Lock for writing one shard. The lock file exists only while the lock is held.

    **Attributes:**

    - `partial`: file for this lock's holder, to be written and moved into place when it is complete.
        `copy_path(partial)` is another one, for the copy of a remote source.
    """

    def __init__(self, shard: Path):
        self._path = shard.with_suffix(".lock")
        self._lock = file_lock(self._path, on_acquired=write_holder)
        self.partial = shard.with_name(f"{shard.stem}.{secrets.token_hex(6)}.partial")

    def take(self) -> bool:
        """Take the lock without waiting; return False if it is held.

        A lock that cannot be acquired (of another user, or of a host that is gone) counts as held only as long as the
        files of its shard change: writing a shard twice does no harm, and waiting would not end.
        """
        folder = self._path.parent
        try:
            if try_acquire(self._lock):
                return True
        except OSError as error:
            if error.errno not in GONE and (not isinstance(error, PermissionError) or not os.access(folder, os.W_OK)):
                raise
        return _are_old(_unfinished(folder, self._path.stem))

    def holder(self) -> str:
        """Return the name of the process that holds the lock."""
        return holder_text(read_holder(self._path))

    def release(self) -> None:
        """Release the lock, and delete its files."""
        _delete(self.partial, copy_path(self.partial))
        if self._lock.is_locked:
            _delete(self._path)  # before the release: a process that has opened the file notices that it is deleted
        self._lock.release()


def copy_path(partial: Path) -> Path:
    """Return the path for the copy of a remote source while the shard `partial` is written from it."""
    return partial.with_suffix(".copy")


def delete_unfinished(folder: Path) -> None:
    """Delete the files that killed processes have left in `folder`: old ones whose lock is free."""
    shards: dict[str, list[Path]] = {}
    for file in _unfinished(folder):
        shards.setdefault(file.name.partition(".")[0], []).append(file)
    for name, files in shards.items():
        path = folder / f"{name}.lock"
        lock = file_lock(path)
        with contextlib.suppress(OSError):  # files of another user
            if _are_old(files) and try_acquire(lock):
                _delete(*files, path)
                lock.release()


def _unfinished(folder: Path, shard: str = "") -> list[Path]:
    """Return the files in a folder, or the files of one shard, that exist only while a shard is written."""
    names = [name for name in os.listdir(folder) if name.endswith(_SUFFIXES) and ".documents." not in name]
    return [folder / name for name in names if not shard or name.partition(".")[0] == shard]


def _are_old(files: list[Path]) -> bool:
    """Return whether some of the files exist and none of them has changed recently."""
    newest = None
    for file in files:
        with contextlib.suppress(OSError):  # deleted at this moment
            newest = max(newest or 0.0, file.stat().st_mtime)
    return newest is not None and time.time() - newest > UNFINISHED


def _delete(*files: Path) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # a file of another user, or deleted by another host
            file.unlink(missing_ok=True)
