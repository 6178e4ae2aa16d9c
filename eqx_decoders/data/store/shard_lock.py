"""Locks of shards: each is made by one process, also of several hosts and after a kill."""

import contextlib
import os
import secrets
from pathlib import Path

from eqx_decoders.io.file_lock import lock_descriptor


class ShardLock:
    """Lock by which one process makes a shard: of a file beside it, which is there only as long as the lock is held.

    `partial` is a file of this lock alone, to be written and moved away when it is complete; `copy_path(partial)` is
    another one, for the copy of a remote source.
    """

    def __init__(self, shard: Path):
        self._path = shard.with_suffix(".lock")
        self._file: int | None = None
        self.partial = shard.with_name(f"{shard.stem}.{secrets.token_hex(6)}.partial")

    def take(self) -> bool:
        """Take the lock; return False if another process, or another part of this one, has it."""
        is_left = self._path.exists()
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        if not lock_descriptor(file) or os.fstat(file).st_nlink == 0:  # deleted by its holder at this moment
            os.close(file)
            return False
        self._file = file
        if is_left:  # by a process that was killed; looking for its files takes time in a large cache
            for partial in self._path.parent.glob(f"{self._path.stem}.*.partial"):
                _delete(partial)
        return True

    def release(self) -> None:
        """Release the lock, and delete its files."""
        _delete(self.partial)
        if os.name != "nt":  # before the release, so that who has opened it already notices
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        if os.name == "nt":  # where a file that is open cannot be deleted
            with contextlib.suppress(PermissionError):
                self._path.unlink(missing_ok=True)


def copy_path(partial: Path) -> Path:
    """Return the path of the copy of a remote source, of which the shard in `partial` is made."""
    return partial.with_suffix(".copy")


def delete_unfinished(folder: Path) -> None:
    """Delete the files of processes that were killed while they made shards in `folder`."""
    for path in folder.glob("*.lock"):
        lock = ShardLock(path.with_suffix(".tokens"))
        if lock.take():
            lock.release()


def _delete(partial: Path) -> None:
    for path in (partial, copy_path(partial)):
        path.unlink(missing_ok=True)
