"""Files and directories that are there whole or not at all."""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eqx_decoders.errors import DataError, check


CACHE = "EQX_DECODERS_CACHE"  # the variable that names the directory of `cache_directory`
FULL = (errno.ENOSPC, errno.EDQUOT)


def expanded(path: str | Path) -> str:
    """The path with the user's directory for a `~` at its begin, or behind the `name=` in front of it.

    A shell leaves it as it is in `--flag=~/x`, and so does YAML.
    """
    name, found, rest = str(path).partition("=~")
    if found and re.fullmatch(r"[\w.-]+", name):
        return f"{name}={os.path.expanduser(f'~{rest}')}"
    return os.path.expanduser(path)


def expand_paths(settings: Any, *fields: str) -> None:
    """Put `expanded` paths into these fields of a frozen dataclass: one, several or none in each."""
    for field in fields:
        value = getattr(settings, field)
        if value is not None:
            whole = expanded(value) if isinstance(value, str | Path) else tuple(map(expanded, value))
            object.__setattr__(settings, field, whole)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, flush it to the disk and move it into place; makes the directory if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # others may write it, too
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], *, sort_keys: bool = False) -> None:
    """`write_atomically` of indented JSON."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=sort_keys) + "\n").encode())


@contextlib.contextmanager
def writing_to(cache: Path) -> Iterator[None]:
    """Around what writes into `cache`, or a folder in it: DataError where that fails, with the remedy."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or "")
        if error.errno not in FULL and not where.startswith(str(cache)):
            raise
        told = f"{where or cache} cannot be written: {error.strerror or error}"
        remedy = "Make room there, or give a directory that you may write: --cache-dir (DataConfig.cache_dir)"
        raise DataError(f"{told}. {remedy}.") from error


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to be filled, which is moved to `path` when the block ends without an error."""
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def cache_directory(given: str | Path | None = None) -> Path:
    """Where this library keeps what all runs share: `given`, $EQX_DECODERS_CACHE, or the user's folder for caches."""
    own, named = given or os.environ.get(CACHE), "DataConfig.cache_dir" if given else f"${CACHE}"
    local = "://" not in str(own)
    check(local, f"{named}={str(own)!r} must be a directory of a file system: tokens are mapped from it.")
    if own:
        return Path(own).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqx_decoders"
