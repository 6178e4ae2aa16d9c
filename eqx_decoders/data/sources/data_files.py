"""Open the files of a corpus as streams: local files, remote files (with fsspec), and compressed files.

`RemoteFile` has the attributes of `pathlib.Path` that readers use (`name`, `stem`, `suffix`, `open`), so that readers
accept local and remote files.
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
RETRY_DELAYS = (0.5, 2.0, 8.0)  # seconds before each retry
BUFFER_BYTES = 1 << 20
SCHEMES_WITHOUT_LISTING = ("http", "https")  # web servers do not list their files

# Keys of checksums in the metadata of file systems.
ETAGS = ("ETag", "etag")
CHECKSUMS = ("md5Hash", "Content-MD5", "crc32c", *ETAGS, "blob_id")

# Errors after which there is no retry, because the file or the request is wrong.
_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
)

T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Return whether a path is a URL, `scheme://…`."""
    return "://" in path


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file at a URL that fsspec supports, such as `gs://…`, `s3://…` or `https://…`."""

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
        """Whether the server can list files. False for web servers."""
        return urlsplit(self.url).scheme not in SCHEMES_WITHOUT_LISTING

    @property
    def size(self) -> int | None:
        """Number of bytes; None if the server does not report the size, or does not support range requests."""
        info = self._info()
        size = info.get("size")
        return int(size) if size is not None and info.get("partial", self.is_listed) else None

    @property
    def checksum(self) -> str | None:
        """Checksum and size of the content, as reported by the file system; None if there is no reliable checksum.

        The ETag of a web server distinguishes only versions of the same file. So the URL is added to the ETag.
        """
        info = self._info()
        name = next((name for name in CHECKSUMS if info.get(name)), None)
        if name is None:
            return None
        value = str(info[name])
        if value.startswith("W/"):  # a weak ETag: different contents may have the same weak ETag
            return None
        prefix = f"{self.url} " if not self.is_listed and name in ETAGS else ""
        return f"{prefix}{info.get('size')} {name} {value}"

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file as a stream. The stream is seekable if the size is known."""
        check(mode == "rb", f"mode={mode!r} must be 'rb', because remote files cannot be written.")
        return io.BufferedReader(_RemoteStream(self), BUFFER_BYTES)

    def _info(self) -> dict[str, Any]:
        system, path = file_system(self.url)
        return retry(lambda: system.info(path), self.url)


File = Path | RemoteFile


class _RemoteStream(io.RawIOBase):
    """Stream of a remote file. After an error, the file is opened again at the same position."""

    def __init__(self, file: RemoteFile):
        self._position = 0
        self._handle = None  # before `file.size`, which may raise an error, after which `close` is called
        self._file = file
        self._size = file.size

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
        content = retry(lambda: self._read(len(buffer)), str(self._file))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def close(self) -> None:
        self._close_handle()
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
            self._close_handle()
            raise

    def _open(self) -> Any:
        """Open the file. If the server does not support range requests, skip the bytes before the current position."""
        system, path = file_system(self._file.url)
        is_sequential = self._size is None and not self._file.is_listed
        handle = system.open(path, "rb", **({"block_size": 0} if is_sequential else {}))
        to_skip = self._position if self._size is None else 0
        while to_skip > 0:
            skipped = len(handle.read(min(to_skip, BUFFER_BYTES)))
            to_skip -= skipped
            if not skipped:
                raise ConnectionError(f"the stream ended before byte {self._position}, which was read earlier")
        return handle

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system for a URL, and the path in the file system. Raises DataError for other URLs."""
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
            f"{url} cannot be opened ({error}). It must be a local path, or start with {known} or another scheme of "
            f"fsspec {fsspec.__version__}."
        ) from error


def find_remote(path: str, flag: str) -> tuple[str | None, list[RemoteFile]]:
    """Find the files at a URL. Returns the URL of the directory (None if it is not a directory), and the files, sorted.

    **Arguments:**

    - `path`: URL of a file or directory, or a glob.
    - `flag`: name of the setting in error messages.

    Raises DataError if the URL cannot be read, and for a glob on a server that cannot list files.
    """
    system, path_in_system = file_system(path)
    is_listed = RemoteFile(path).is_listed
    is_glob = any(letter in path_in_system for letter in "*?[") if is_listed else "*" in path_in_system
    check(
        is_listed or not is_glob,
        f"{flag} {path!r} is a glob, but web servers cannot list files. List the URL of each file.",
        DataError,
    )
    folder = None
    if is_glob:
        files = retry(lambda: system.glob(path_in_system), path)
    elif is_listed and retry(lambda: system.isdir(path_in_system), path):
        files = retry(lambda: system.find(path_in_system), path)
        folder = system.unstrip_protocol(path_in_system).rstrip("/")
    else:
        exists = not is_listed or retry(lambda: system.isfile(path_in_system), path)
        return None, [RemoteFile(path)] if exists else []
    return folder, [RemoteFile(system.unstrip_protocol(file)) for file in sorted(files) if not file.endswith("/")]


@contextlib.contextmanager
def local_copy(file: File, target: Path | None = None) -> Iterator[Path]:
    """Context manager that copies a remote file to a local file, and deletes the copy afterwards.

    A local file is not copied. `target`: path of the copy; None: a temporary file.
    """
    if isinstance(file, Path):
        yield file
        return
    with contextlib.ExitStack() as stack:
        if target is None:
            target = Path(stack.enter_context(tempfile.TemporaryDirectory()), file.name)
        stack.callback(target.unlink, missing_ok=True)
        with file.open() as stream, target.open("wb") as out:
            shutil.copyfileobj(stream, out, BUFFER_BYTES)
        yield target


def retry(call: Callable[[], T], what: str) -> T:
    """Return `call()`. Retry after errors that may be temporary.

    Raises DataError with the last error. `what`: name of the file in the error.
    """
    for delay in (*RETRY_DELAYS, None):
        try:
            return call()
        except EqxDecodersError:
            raise
        except _PERMANENT_ERRORS as error:
            raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}.") from error
        except Exception as error:
            if delay is None:
                raise DataError(
                    f"{what} cannot be read after {len(RETRY_DELAYS) + 1} attempts: {type(error).__name__}: {error}. "
                    "Start again when the server is available."
                ) from error
            time.sleep(delay)
    raise AssertionError("the last attempt returns or raises")


# --- compressed files -------------------------------------------------------------------------------------------------


def plain_suffix(file: File) -> str:
    """Return the suffix in lower case, without `.gz` or `.zst`: `.jsonl` for `a.jsonl.gz`."""
    return Path(file.stem if is_compressed(file) else file.name).suffix.lower()


def is_compressed(file: File) -> bool:
    """Return whether the suffix is `.gz` or `.zst`."""
    return file.suffix.lower() in COMPRESSED


@contextlib.contextmanager
def open_stream(file: File) -> Iterator[Any]:
    """Open a file as a binary stream, decompressed if necessary. Raises DataError for a damaged or incomplete file."""
    with file.open("rb") as raw:
        if not is_compressed(file):
            yield raw
            return
        decompressed, errors = _gzip(raw) if file.suffix.lower() == ".gz" else _zstd(raw)
        try:
            with decompressed as stream:
                yield stream
        except errors as error:
            raise DataError(f"{file} cannot be decompressed: {error}. Download the file again.") from error


def _gzip(raw: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a stream that decompresses gzip, and the errors that the stream may raise."""
    return gzip.GzipFile(fileobj=raw), (EOFError, zlib.error, gzip.BadGzipFile)


def zstd_module() -> Any:
    """Return the module `compression.zstd` of Python 3.14, or the package `backports.zstd`."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise missing_package("backports.zstd", "train") from error


def _zstd(raw: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    zstd = zstd_module()
    options = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
    return zstd.ZstdFile(raw, "rb", options=options), (EOFError, zstd.ZstdError)
