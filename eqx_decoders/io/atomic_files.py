"""Files and directories that are written completely or not at all; paths, and the cache directory."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from eqx_decoders.errors import DataError, check


CACHE = "EQX_DECODERS_CACHE"  # the variable that names the directory of `cache_directory`
FULL = (errno.ENOSPC, errno.EDQUOT)


def expanded(path: str | Path) -> str:
    """Replace a `~` at the begin of a path, or behind a `name=` in front of it, by the user's directory.

    A shell leaves it as it is in `--flag=~/x`, and so does YAML.
    """
    name, separator, rest = str(path).partition("=~")
    if separator and re.fullmatch(r"[\w.-]+", name):
        return f"{name}={os.path.expanduser(f'~{rest}')}"
    return os.path.expanduser(path)


def expand_paths(settings: Any, *fields: str) -> None:
    """Expand the paths in fields of a frozen dataclass: one path, several or None in each."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None:
            whole = expanded(value) if isinstance(value, str | Path) else tuple(map(expanded, value))
            object.__setattr__(settings, field, whole)


@contextlib.contextmanager
def atomic_stream(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for the block to write, which is flushed to the disk and moved into place when the block ends.

    The directory is made if needed. After an error nothing remains.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # others may write it, too
    try:
        with partial.open("wb", buffering=1 << 20) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file completely or not at all (see `atomic_stream`)."""
    with atomic_stream(path) as stream:
        stream.write(content)


def write_json(path: Path, content: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """Write indented JSON by `write_atomically`."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=sort_keys) + "\n").encode())


@contextlib.contextmanager
def writing_to(cache: Path) -> Iterator[None]:
    """Raise DataError with a remedy if the block fails to write into `cache`, or a folder in it."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or "")
        if error.errno not in FULL and not where.startswith(str(cache)):
            raise
        message = f"{where or cache} cannot be written: {error.strerror or error}"
        remedy = "Make room there, or give a directory that you may write: --data.cache-dir (DataConfig.cache_dir)"
        raise DataError(f"{message}. {remedy}.") from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Make a directory for the block to fill, and move it to `path` when the block ends without an error."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cache_directory(path: str | Path | None = None) -> Path:
    """Return the directory that all runs share: `path`, $EQX_DECODERS_CACHE, or one in the user's folder for caches."""
    chosen, name = path or os.environ.get(CACHE), "DataConfig.cache_dir" if path else f"${CACHE}"
    local = "://" not in str(chosen)
    check(local, f"{name}={str(chosen)!r} must be a directory of a file system: tokens are mapped from it.")
    if chosen:
        return Path(chosen).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqx_decoders"
