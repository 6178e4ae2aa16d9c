"""Locks of shards: each is made by one process, also of several hosts and after a kill."""

import contextlib
import secrets
from pathlib import Path

from eqx_decoders.io.file_lock import file_lock


class ShardLock:
    """Lock by which one process makes a shard. The next one to take it deletes what a killed process has left.

    `partial` is a file of this lock alone, to be written and moved away when it is complete; `copy_path(partial)` is
    another one, for the copy of a remote source.
    """

    def __init__(self, shard: Path):
        self._shard, self._path = shard, shard.with_suffix(".lock")
        self._lock = file_lock(self._path)
        self.partial = shard.with_name(f"{shard.stem}.{secrets.token_hex(6)}.partial")

    def take(self) -> bool:
        """Take the lock; return False if another process, or another part of this one, has it."""
        try:
            self._lock.acquire(blocking=False)
        except TimeoutError:
            return False
        self._delete_unfinished()
        return True

    def release(self) -> None:
        """Release the lock, and delete its files."""
        self._delete_unfinished()
        with contextlib.suppress(PermissionError):  # Windows: a file that is open stays
            self._path.unlink(missing_ok=True)  # before the release: who has opened it already notices, and tries again
        self._lock.release()

    def _delete_unfinished(self) -> None:
        for partial in self._shard.parent.glob(f"{self._shard.stem}.*.partial"):
            partial.unlink(missing_ok=True)
            copy_path(partial).unlink(missing_ok=True)


def copy_path(partial: Path) -> Path:
    """Return the path of the copy of a remote source, of which the shard in `partial` is made."""
    return partial.with_suffix(".copy")


def delete_unfinished(folder: Path) -> None:
    """Delete the files of processes that were killed while they made shards in `folder`."""
    for path in folder.glob("*.lock"):
        lock = ShardLock(path.with_suffix(".tokens"))
        if lock.take():
            lock.release()
