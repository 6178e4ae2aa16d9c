"""Files of a corpus as streams: here or elsewhere (`gs://`, `s3://`, `https://`, …) through fsspec; `.gz` and `.zst`.

A `RemoteFile` has the members of `pathlib.Path` that reading needs (`name`, `stem`, `suffix`, `open`): readers take
both.
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
MOST_WINDOW_LOG = 31  # `zstd --long=31` looks 2 GB back; the library's own limit is 128 MB
PAUSES = (0.5, 2.0, 8.0)  # seconds before what failed is tried again
BUFFER = 1 << 20
WITHOUT_LISTS = ("http", "https")  # servers that do not list their files

# Entries that identify a content, by the names that file systems give them.
ETAGS = ("ETag", "etag")
CHECKSUMS = ("md5Hash", "Content-MD5", "crc32c", *ETAGS, "blob_id")

# Errors that a retry does not mend: the file, or the request for it, is not as it must be.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, NotImplementedError)
_LASTING += (TypeError, ValueError, AttributeError)

T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Return whether a path is the address of a remote file: `scheme://…`."""
    return "://" in path


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """Remote file by its address."""

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
        """False for a file of a server that doesn't list its files."""
        return urlsplit(self.url).scheme not in WITHOUT_LISTS

    @property
    def size(self) -> int | None:
        """Number of bytes; None for a server that doesn't send it, or that doesn't send parts of files."""
        info = self._info()
        size = info.get("size")
        return int(size) if size is not None and info.get("partial", self.is_listed) else None

    @property
    def checksum(self) -> str | None:
        """Checksum of the content by its file system, with the size; None if there is no reliable one.

        An ETag of a web server distinguishes versions of one file, not files: then the address is part of it.
        """
        info = self._info()
        known = ((name, str(info[name])) for name in CHECKSUMS if info.get(name))
        name, value = next(known, ("", "W/"))
        if value.startswith("W/"):  # equal for contents that are only about the same
            return None
        where = f"{self.url} " if not self.is_listed and name in ETAGS else ""
        return f"{where}{info.get('size')} {name} {value}"

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file as a stream, which is seekable where the size is known."""
        check(mode == "rb", f"mode={mode!r}: remote files are only read, as 'rb'.")
        return io.BufferedReader(_RemoteStream(self), BUFFER)

    def _info(self) -> dict[str, Any]:
        system, path = file_system(self.url)
        return try_again(lambda: system.info(path), self.url)


File = Path | RemoteFile


class _RemoteStream(io.RawIOBase):
    """Stream of a remote file that is opened anew at the same position after an error."""

    def __init__(self, file: RemoteFile):
        self._position, self._handle = 0, None  # first, because `close` is also called after an error here
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
                raise ConnectionError(f"it ended at byte {self._position} of {self._size}")
            return content
        except Exception:
            self._drop()
            raise

    def _open(self) -> Any:
        """Open the file, and pass over what was read already where the server sends no parts."""
        system, path = file_system(self._file.url)
        whole = self._size is None and not self._file.is_listed
        handle = system.open(path, "rb", **({"block_size": 0} if whole else {}))
        left = self._position if self._size is None else 0
        while left > 0:
            passed = len(handle.read(min(left, BUFFER)))
            left -= passed
            if not passed:
                raise ConnectionError(f"it ended before byte {self._position}, which was read earlier")
        return handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
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
        rule = f"must be a local path or begin with one of {known} or another scheme of fsspec {fsspec.__version__}"
        raise DataError(f"{url} cannot be opened ({error}): it {rule}.") from error


def find_remote(path: str, flag: str) -> tuple[str | None, list[RemoteFile]]:
    """Find the files of a pattern, below a directory or at an address, in order; return the directory's address, too.

    Raises DataError for addresses that cannot be read, and for patterns on servers that do not list their files.
    """
    system, inside = file_system(path)
    lists = RemoteFile(path).is_listed
    pattern = any(letter in inside for letter in "*?[") if lists else "*" in inside
    rule = "such a server has no list of its files: name them one by one"
    check(lists or not pattern, f"{flag} {path!r} is a pattern, and {rule}.", DataError)
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
    """Copy a remote file to this machine, for readers that need it there, and delete the copy afterwards.

    target: path of the copy, which another process will delete if this one is killed; None: a temporary file.
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
    """Return `call()`, retried after pauses where its error may be temporary. Raises DataError with the last error."""
    for pause in (*PAUSES, None):
        try:
            return call()
        except EqxDecodersError:
            raise
        except _LASTING as error:
            raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}.") from error
        except Exception as error:
            if pause is None:
                message = f"{what} cannot be read, tried {len(PAUSES) + 1} times: {type(error).__name__}: {error}"
                raise DataError(f"{message}. Start again when it can be reached.") from error
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
    """Open a stream of gzip's; return the errors that it may raise, too."""
    return gzip.GzipFile(fileobj=inner), (EOFError, zlib.error, gzip.BadGzipFile)


def zstd_module() -> Any:
    """Return Python's module of zstd, or its backport."""
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError as error:
        raise missing_package("backports.zstd", "train") from error


def _zstd(inner: Any) -> tuple[Any, tuple[type[Exception], ...]]:
    zstd = zstd_module()
    options = {zstd.DecompressionParameter.window_log_max: MOST_WINDOW_LOG}
    return zstd.ZstdFile(inner, "rb", options=options), (EOFError, zstd.ZstdError)
