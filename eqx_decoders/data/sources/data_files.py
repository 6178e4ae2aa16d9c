"""Files of a corpus as streams: local or remote (`gs://`, `s3://`, `https://`, …, by fsspec), also `.gz` and `.zst`.

A `RemoteFile` has the members of `pathlib.Path` that reading needs (`name`, `stem`, `suffix`, `open`), so that readers
accept both.
"""

import contextlib
import dataclasses
import gzip
import importlib
import io
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from eqx_decoders.errors import DataError, EqxDecodersError, check, missing_package


COMPRESSED = (".gz", ".zst")
MAX_WINDOW_LOG = 31  # `zstd --long=31` uses windows of 2 GB; the default limit of the decoder is 128 MB
PAUSES = (0.5, 2.0, 8.0)  # seconds before each retry
BUFFER = 1 << 20
WITHOUT_LISTS = ("http", "https")  # servers that do not list their files

# Names of checksums in the metadata of file systems.
ETAGS = ("ETag", "etag")
CHECKSUMS = ("md5Hash", "Content-MD5", "crc32c", *ETAGS, "blob_id")

# Errors for which a retry is useless, because the file or the request is wrong.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, NotImplementedError)
_LASTING += (TypeError, ValueError, AttributeError)

T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Return whether a path is the URL of a remote file: `scheme://…`."""
    return "://" in path


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """Remote file with its URL."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return PurePosixPath(urlsplit(self.url).path or urlsplit(self.url).netloc).name

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def is_listed(self) -> bool:
        """False for a file on a server that does not list its files."""
        return urlsplit(self.url).scheme not in WITHOUT_LISTS

    @property
    def size(self) -> int | None:
        """Number of bytes; None if the server does not send it, or does not support range requests."""
        info = self._info()
        size = info.get("size")
        return int(size) if size is not None and info.get("partial", self.is_listed) else None

    @property
    def checksum(self) -> str | None:
        """Checksum and size of the content from the file system; None if there is no reliable checksum.

        The ETag of a web server distinguishes versions of one file only, so the URL is added to it.
        """
        info = self._info()
        known = ((name, str(info[name])) for name in CHECKSUMS if info.get(name))
        name, value = next(known, ("", "W/"))
        if value.startswith("W/"):  # a weak ETag: different contents may have the same one
            return None
        where = f"{self.url} " if not self.is_listed and name in ETAGS else ""
        return f"{where}{info.get('size')} {name} {value}"

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file as a stream, which is seekable where the size is known."""
        check(mode == "rb", f"mode={mode!r}: remote files can only be opened with 'rb'.")
        return io.BufferedReader(_RemoteStream(self), BUFFER)

    def _info(self) -> dict[str, Any]:
        system, path = file_system(self.url)
        return try_again(lambda: system.info(path), self.url)


File = Path | RemoteFile


class _RemoteStream(io.RawIOBase):
    """Stream of a remote file. After an error, it is opened again at the same position."""

    def __init__(self, file: RemoteFile):
        self._position, self._handle = 0, None  # first, because `close` is called after an error in the next line
        self._file, self._size = file, file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if self._size is None:
            raise io.UnsupportedOperation(f"{self._file} has no known size")
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        content = try_again(lambda: self._read(len(buffer)), str(self._file))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        if self._size is not None and self._position >= self._size:
            return b""
        try:
            self._handle = handle = self._open() if self._handle is None else self._handle
            if self._size is not None:
                handle.seek(self._position)
            content = handle.read(size)
            if not content and self._size is not None:
                raise ConnectionError(f"the stream ended at byte {self._position} of {self._size}")
            return content
        except Exception:
            self._drop()
            raise

    def _open(self) -> Any:
        """Open the file. If the server does not support range requests, skip the bytes before the current position."""
        system, path = file_system(self._file.url)
        whole = self._size is None and not self._file.is_listed
        handle = system.open(path, "rb", **({"block_size": 0} if whole else {}))
        left = self._position if self._size is None else 0
        while left > 0:
            passed = len(handle.read(min(left, BUFFER)))
            left -= passed
            if not passed:
                raise ConnectionError(f"the stream ended before byte {self._position}, which was read earlier")
        return handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise missing_package("fsspec", "train") from error
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        missing = getattr(error.__cause__, "name", None) or urlsplit(url).scheme
        raise missing_package(missing, "data") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in ("gs", "s3", "https", "hf"))
        raise DataError(
            f"{url} cannot be opened ({error}): it must be a local path, or start with {known} or another scheme of "
            f"fsspec {fsspec.__version__}."
        ) from error


def find_remote(path: str, flag: str) -> tuple[str | None, list[RemoteFile]]:
    """Return the URL of the directory at `path` (None if it is not a directory), and the files in order.

    `path` is the URL of a file or directory, or a glob. Raises DataError for URLs that cannot be read, and for globs on
    servers that do not list their files.
    """
    system, inside = file_system(path)
    lists = RemoteFile(path).is_listed
    pattern = any(letter in inside for letter in "*?[") if lists else "*" in inside
    check(
        lists or not pattern,
        f"{flag} {path!r} is a glob, but its server does not list files: name each file.",
        DataError,
    )
    if pattern:
        files, folder = try_again(lambda: system.glob(inside), path), None
    elif lists and try_again(lambda: system.isdir(inside), path):
        files, folder = try_again(lambda: system.find(inside), path), system.unstrip_protocol(inside).rstrip("/")
    else:
        exists = not lists or try_again(lambda: system.isfile(inside), path)
        return None, [RemoteFile(path)] if exists else []
    return folder, [RemoteFile(system.unstrip_protocol(file)) for file in sorted(files) if not file.endswith("/")]


@contextlib.contextmanager
def local_copy(file: File, target: Path | None = None) -> Iterator[Path]:
    """Provide a local copy of a remote file, for readers that need one, and delete the copy afterwards.

    target: path of the copy, which another process deletes if this process is killed; None: a temporary file.
    """
    if isinstance(file, Path):
        yield file
        return
    with contextlib.ExitStack() as stack:
        if target is None:
            target = Path(stack.enter_context(tempfile.TemporaryDirectory()), file.name)
        stack.callback(target.unlink, missing_ok=True)
        with file.open() as stream, target.open("wb") as out:
            shutil.copyfileobj(stream, out, BUFFER)
        yield target


def try_again(call: Callable[[], T], what: str) -> T:
    """Return `call()`. Retries after errors that may be temporary, then raises DataError with the last error."""
    for pause in (*PAUSES, None):
        try:
            return call()
        except EqxDecodersError:
            raise
        except _LASTING as error:
            raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}.") from error
        except Exception as error:
            if pause is None:
                raise DataError(
                    f"{what} cannot be read after {len(PAUSES) + 1} attempts: {type(error).__name__}: {error}. Start "
                    "again when it is available."
                ) from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


# --- compressed files -------------------------------------------------------------------------------------------------


def plain_suffix(file: File) -> str:
    """Return the suffix in lower case, without `.gz` or `.zst`: `.jsonl` for `a.jsonl.gz`."""
    return Path(file.stem if is_compressed(file) else file.name).suffix.lower()


def is_compressed(file: File) -> bool:
    """Return whether the suffix is `.gz` or `.zst`."""
    return file.suffix.lower() in COMPRESSED


@contextlib.contextmanager
def open_stream(file: File) -> Iterator[Any]:
    """Open a file as a binary stream, decompressed if needed. Raises DataError for a damaged or incomplete file."""
    with file.open("rb") as inner:
        if not is_compressed(file):
            yield inner
            return
        opened, errors = _gzip(inner) if file.suffix.lower() == ".gz" else _zstd(inner)
        try:
            with opened as stream:
                yield stream
        except errors as error:
            raise DataError(f"{file} cannot be decompressed: {error}. Download it again.") from error


def _gzip(inner: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream that decompresses gzip, and the errors that it may raise."""
    return gzip.GzipFile(fileobj=inner), (EOFError, zlib.error, gzip.BadGzipFile)


def zstd_module() -> Any:
    """Return Python's module `compression.zstd`, or its backport."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise missing_package("backports.zstd", "train") from error


def _zstd(inner: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    zstd = zstd_module()
    options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
    return zstd.ZstdFile(inner, "rb", options=options), (EOFError, zstd.ZstdError)
