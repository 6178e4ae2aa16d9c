"""Compressed files, `.gz` and `.zst`, read as streams."""

import contextlib
import gzip
import importlib.util
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eqx_decoders.data.sources.remote import RemoteFile
from eqx_decoders.errors import DataError, need_extra


COMPRESSED = (".gz", ".zst")
MOST_WINDOW_LOG = 31  # `zstd --long=31` looks 2 GB back; the library's own limit is 128 MB


def plain_suffix(file: Path | RemoteFile) -> str:
    """Return the suffix in lower case, without `.gz` or `.zst`: `.jsonl` for `a.jsonl.gz`."""
    return Path(file.stem if is_compressed(file) else file.name).suffix.lower()


def is_compressed(file: Path | RemoteFile) -> bool:
    """Return whether the suffix is `.gz` or `.zst`."""
    return file.suffix.lower() in COMPRESSED


@contextlib.contextmanager
def open_stream(file: Path | RemoteFile) -> Iterator[Any]:
    """Open a file as a binary stream, decompressed if needed. Raises DataError for a damaged or incomplete file."""
    if not is_compressed(file):
        with file.open("rb") as stream:
            yield stream
        return
    kinds: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors())
    try:
        with _open_gzip(file) if file.suffix.lower() == ".gz" else _open_zstd(file) as stream:
            yield stream
    except kinds as error:
        raise DataError(f"{file} cannot be decompressed: {error}. Download it again.") from error


@contextlib.contextmanager
def _open_gzip(file: Path | RemoteFile) -> Iterator[Any]:
    with file.open("rb") as inner, gzip.open(inner, "rb") as stream:
        yield stream


def _zstd() -> Any:
    """Import the standard library's module (Python 3.14), else the package `backports.zstd`; None without both."""
    name = next((name for name in ("compression.zstd", "backports.zstd") if _is_there(name)), None)
    return None if name is None else importlib.import_module(name)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _zstd_errors() -> tuple[type[Exception], ...]:
    return () if (zstd := _zstd()) is None else (zstd.ZstdError,)


def _open_zstd(file: Path | RemoteFile) -> contextlib.AbstractContextManager[Any]:
    zstd = _zstd()
    if zstd is None:
        raise need_extra("backports.zstd", "train")
    return _open_frames(zstd, file)


@contextlib.contextmanager
def _open_frames(zstd: Any, file: Path | RemoteFile) -> Iterator[Any]:
    options = {zstd.DecompressionParameter.window_log_max: MOST_WINDOW_LOG}
    with file.open("rb") as inner, zstd.open(inner, "rb", options=options) as stream:
        yield stream
