"""File locks of the package filelock, whose lock file names the process that holds the lock."""

import datetime
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eqx_decoders.errors import missing_package


if TYPE_CHECKING:
    from filelock import BaseFileLock


HOLDER_SIZE = 512  # bytes of a lock file with the name of its holder


def file_lock(path: Path, on_acquired: Callable[[int], None] | None = None) -> "BaseFileLock":
    """Return an exclusive lock of the file `path`, which `acquire()` creates with its directory; `with` waits for it.

    The operating system releases the lock when the process ends, even if it is killed. The file stays. Acquiring the
    lock raises OSError if the file cannot be written or the file system has no locks.

    on_acquired: function to call with the file descriptor after the lock was acquired; if it raises an error, the lock
    is released.
    """
    try:
        from filelock import UnixFileLock
    except ImportError as error:
        raise missing_package("filelock>=3.30", "train") from error
    # no soft lock where the file system has no locks: the lock of a killed process would remain
    return UnixFileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=on_acquired)


def try_acquire(lock: "BaseFileLock") -> bool:
    """Acquire a lock without waiting; return False if another process, or another part of this one, holds it."""
    from filelock import Timeout

    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def write_holder(descriptor: int) -> None:
    """Write the name of this process into a lock file."""
    content = json.dumps(own_process()).encode().ljust(HOLDER_SIZE - 1) + b"\n"
    os.pwrite(descriptor, content, 0)  # one write of a constant size: a killed process leaves no mixture of two names
    os.ftruncate(descriptor, len(content))


def own_process() -> dict[str, Any]:
    """Return the pid and host of this process, and the current time."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def read_holder(path: Path) -> bytes:
    """Return the content of a lock file, or nothing if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def is_holder(content: bytes) -> bool:
    """Return whether the content of a file names a process."""
    return {"pid", "host", "since"} <= read_json(content).keys()


def holder_text(content: bytes) -> str:
    """Return the name of the process in the content of a lock file, for error messages."""
    if not is_holder(content):
        return "another process"  # which has not written its name yet
    holder = read_json(content)
    return f"pid {holder['pid']} on {holder['host']} since {holder['since']}"


def read_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the content is not a JSON object."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
