"""Exclusive locks on files, which the system releases when their process ends, however it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eqx_decoders.errors import need_extra


def file_lock(path: Path, on_acquired: Callable[[int], None] | None = None) -> Any:
    """Make the lock of the file `path` (a `filelock.FileLock`), and the directory of the file.

    `with lock:` waits for it, `lock.acquire(timeout=…)` raises TimeoutError. The file stays, since another process may
    be opening it. `on_acquired` is called with the descriptor of the locked file.
    """
    try:
        from filelock import FileLock
    except ImportError as error:
        raise need_extra("filelock", "train") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False, preserve_lock_file=True, on_acquired=on_acquired)
