"""Exclusive locks on open files, on every system, which releases them when the process ends, however it ends."""

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path


_LOCKED_BYTE = 1 << 30  # behind the content of any lock file: on Windows no other process can read a locked byte


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made if needed, for a block that one process at a time may run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        lock_file(file.fileno(), wait=True)
        yield


def lock_file(descriptor: int, *, wait: bool) -> None:
    """Lock a file that is open for writing, until it is closed.

    Raises BlockingIOError if another process (or another descriptor of this one) holds the lock and `wait` is False,
    OSError for a file system without locks.
    """
    if sys.platform == "win32":
        _lock_on_windows(descriptor, wait)
        return
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_on_windows(descriptor: int, wait: bool) -> None:
    msvcrt = importlib.import_module("msvcrt")
    while True:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            return msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            if not wait:
                raise BlockingIOError(*error.args) from error
        time.sleep(0.1)
