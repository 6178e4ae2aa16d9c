"""Files that are read as streams and decompressed on the way: `.gz` and `.zst`."""

import contextlib
import gzip
import importlib.util
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eqx_decoders.errors import DataError, need_extra
from eqx_decoders.io.remote import RemoteFile


COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 20
MOST_WINDOW = 1 << 31  # `zstd --long=31` looks that far back; the package's own limit is 128 MB


def plain_suffix(file: Path | RemoteFile) -> str:
    """The ending in lower case, without that of a compression: `.jsonl` of `a.jsonl.gz`."""
    return Path(file.stem if is_compressed(file) else file.name).suffix.lower()


def is_compressed(file: Path | RemoteFile) -> bool:
    """Whether the name says so."""
    return file.suffix.lower() in COMPRESSED


@contextlib.contextmanager
def open_stream(file: Path | RemoteFile) -> Iterator[Any]:
    """The content of a file as a binary stream, decompressed. Raises DataError if it can't be, or ends early."""
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
    """The standard library's module (Python 3.14), else the package `zstandard`, else None."""
    name = next((name for name in ("compression.zstd", "zstandard") if _is_there(name)), None)
    return None if name is None else importlib.import_module(name)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _zstd_errors() -> tuple[type[Exception], ...]:
    return () if (zstd := _zstd()) is None else (zstd.ZstdError,)


def _open_zstd(file: Path | RemoteFile) -> Any:
    zstd = _zstd()
    if zstd is None:
        raise need_extra("zstandard", "train")
    if hasattr(zstd, "DecompressionParameter"):
        return zstd.open(file.open("rb"), "rb", options={zstd.DecompressionParameter.window_log_max: 31})
    return io.BufferedReader(_Frames(file, zstd.ZstdDecompressor(max_window_size=MOST_WINDOW)), CHUNK)


class _Frames(io.RawIOBase):
    """All frames of a file. The package's own readers take a file that was cut off for a shorter one."""

    def __init__(self, file: Path | RemoteFile, decompressor: Any):
        self._file = file.open("rb")
        self._decompressor = decompressor
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._file.read(CHUNK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends before its end-of-stream marker")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
