"""Exclusive locks on files, which the system releases when their process ends, however it ends."""

from pathlib import Path
from typing import Any

from eqx_decoders.errors import need_extra


def file_lock(path: Path) -> Any:
    """Make the lock of the file `path` (a `filelock.FileLock`), and the directory of the file; `with` waits for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _package().FileLock(path, thread_local=False, preserve_lock_file=True)


def lock_descriptor(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another process, or another descriptor, has its lock."""
    return _package().lock_descriptor(descriptor, blocking=False)


def _package() -> Any:
    try:
        import filelock
    except ImportError as error:
        raise need_extra("filelock", "train") from error
    return filelock
