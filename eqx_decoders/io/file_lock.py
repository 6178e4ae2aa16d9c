"""Locks of files that name their holder, which the system releases when the process ends, however it ends."""

import contextlib
import datetime
import errno
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eqx_decoders.errors import missing_package


PAUSES = (0.01, 0.1, 0.5)  # seconds before a file that was deleted at this moment is opened once more
POLL = 0.05, 1.0  # seconds between two tries of one that waits, at first and at most
SIGNED = 512  # bytes of a signed file, blanks at its end
GONE = (errno.ENOENT, errno.ESTALE)  # errors of a file that another process, or host, has deleted


class FileLock:
    """Exclusive lock of the file `path`, which is made if needed; `with` waits for it.

    with FileLock(path):
        ...

    lock = FileLock(path)
    if lock.take():
        try:
            ...
        finally:
            lock.release()

    The file stays, unless it is released with `delete=True`: a lock on a file that is no longer at `path` is none. On
    file systems of several hosts a lock may hold for one host alone: what it guards must stay whole without it.

    **Attributes:**

    - `previous`: content of the file when the lock was taken.
    """

    def __init__(self, path: Path):
        self.path, self.previous = path, b""
        self._file: int | None = None
        self._may_write = False

    def __enter__(self) -> "FileLock":
        pause, longest = POLL
        while not self.take():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> bool:
        """Take the lock; return False if another process, or another part of this one, has it.

        Raises OSError where the file can be neither written nor read, or the file system has no locks.
        """
        for pause in PAUSES:
            try:
                return self._take()
            except OSError as error:
                if error.errno is None:
                    raise
                if error.errno not in GONE and not isinstance(error, PermissionError):
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
            time.sleep(pause)
        try:
            return self._take()
        except FileNotFoundError:  # others take and delete it all the time; a link to nowhere, or no directory, stays
            if self.path.is_symlink() or not self.path.parent.is_dir():
                raise
        return False

    def sign(self) -> None:
        """Write this process into the file as the holder of the lock. Raises OSError where it cannot be written."""
        assert self._file is not None, "the lock is not taken"
        if not self._may_write:
            raise self._denied()
        content = b"\n" + json.dumps(own_process()).encode().ljust(SIGNED - 2) + b"\n"  # see `read_owner`
        # of one size and in one piece: a kill leaves no mixture of two, and ext4 need not flush a file that was cut
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, content)
        os.ftruncate(self._file, len(content))

    def holder(self) -> str:
        """Name the process that has signed the file, for messages."""
        return owner_text(read_owner(self.path))

    def release(self, *, delete: bool = False) -> None:
        """Release the lock, if it is taken. `delete` the file as well, unless another one has taken its place."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if delete and os.name != "nt" and self._is_there(file):
                self._delete()  # before the release, so that who has opened it already notices
        finally:
            os.close(file)
        if delete and os.name == "nt":  # where a file that is open cannot be deleted
            self._delete()

    def _take(self) -> bool:
        lock_descriptor = _lock_function()
        with contextlib.ExitStack() as stack:
            file = self._open()
            stack.callback(os.close, file)
            try:
                if not lock_descriptor(file, blocking=False):
                    return False
            except OSError as error:
                if error.errno != errno.EBADF:  # NFS: no exclusive locks of files that are open for reading
                    raise
                raise self._denied() from error
            if not self._is_there(file):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            self.previous = os.read(file, 1 << 16)
            self._file = file
            stack.pop_all()
        return True

    def _open(self) -> int:
        """Open the file: for reading only where it is another user's, which is enough for most locks."""
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True, exist_ok=True)
        denied = self._denied()
        for access in (os.O_RDWR | os.O_CREAT, os.O_RDWR, os.O_RDONLY):
            try:
                file = os.open(self.path, access, 0o666)
                self._may_write = access != os.O_RDONLY
                return file
            except PermissionError as error:
                denied = error
            except FileNotFoundError:
                if access & os.O_CREAT:
                    raise
                break  # the directory cannot be written
        raise denied

    def _denied(self) -> PermissionError:
        return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))

    def _is_there(self, file: int) -> bool:
        """Return whether the open file is still the one at the path."""
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except OSError:
            return False

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


def own_process() -> dict[str, Any]:
    """Return what identifies this process as an owner: its number, its host, and the time."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def read_owner(path: Path) -> bytes:
    """Read a file that names an owner; empty if it cannot be read.

    On Windows nobody else can read the first byte of a locked file: it is the end of an empty line.
    """
    for begin in (0, 1):
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            file.seek(begin)
            return file.read()
    return b""


def is_owner(content: bytes) -> bool:
    """Return whether a content names an owner."""
    return {"pid", "host", "since"} <= read_json(content).keys()


def owner_text(content: bytes) -> str:
    """Name the owner in a content, for messages."""
    if not is_owner(content):
        return "another process"  # one that has not written its name yet
    who = read_json(content)
    return f"pid {who['pid']} on {who['host']} since {who['since']}"


def read_json(content: bytes) -> dict[str, Any]:
    """Parse a JSON object; empty if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _lock_function() -> Callable[..., bool]:
    try:
        from filelock import lock_descriptor  # since 3.30
    except ImportError as error:
        raise missing_package("filelock>=3.30", "train") from error
    return lock_descriptor
