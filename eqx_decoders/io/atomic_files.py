"""Files and directories that are written completely or not at all; expansion of paths; the cache directory."""

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

from eqx_decoders.errors import ConfigError, DataError


CACHE = "EQX_DECODERS_CACHE"  # environment variable with the path of the cache directory
FULL = (errno.ENOSPC, errno.EDQUOT)


def expanded(path: str | Path) -> str:
    """Return a path with `~` replaced by the home directory, at the start of the path or after `name=`.

    Shells do not replace it in `--flag=~/x`, and neither does YAML.
    """
    name, separator, rest = str(path).partition("=~")
    if separator and re.fullmatch(r"[\w.-]+", name):
        return f"{name}={os.path.expanduser(f'~{rest}')}"
    return os.path.expanduser(path)


def expand_paths(settings: Any, *fields: str) -> None:
    """Replace `~` in fields of a frozen dataclass. A field is a path, a sequence of paths, or None."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None:
            paths = expanded(value) if isinstance(value, str | Path) else tuple(map(expanded, value))
            object.__setattr__(settings, field, paths)


@contextlib.contextmanager
def atomic_stream(path: Path) -> Iterator[IO[bytes]]:
    """Return a context manager that opens a new file, and moves it to `path` after the with block.

    The file is flushed to the disk before. The directory is created if it does not exist. After an error, the new file
    is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # other processes may write the same file
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
    """Write indented JSON completely or not at all."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=sort_keys) + "\n").encode())


@contextlib.contextmanager
def writing_to(cache: Path) -> Iterator[None]:
    """Return a context manager that converts errors of writing to the directory `cache` to DataError."""
    try:
        yield
    except OSError as error:
        file = str(error.filename or "")
        if error.errno not in FULL and not file.startswith(str(cache)):
            raise
        raise DataError(
            f"{file or cache} cannot be written: {error.strerror or error}. Free some space, or give a writable "
            "directory with --cache-dir (DataConfig.cache_dir)."
        ) from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Return a context manager that creates a directory, and moves it to `path` if the with block raises no error."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # from a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cache_directory(path: str | Path | None = None) -> Path:
    """Return the cache directory of all runs: `path`, or $EQX_DECODERS_CACHE, or a directory in the user's cache."""
    directory = path or os.environ.get(CACHE)
    if not directory:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqx_decoders"
    if "://" in str(directory):
        name = "DataConfig.cache_dir" if path else f"${CACHE}"
        raise ConfigError(
            f"{name}={str(directory)!r} must be a directory in a file system, because tokens are memory-mapped from it."
        )
    return Path(directory).expanduser().resolve()
