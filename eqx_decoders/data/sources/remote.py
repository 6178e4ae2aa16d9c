"""Remote files (`gs://`, `s3://`, `https://`, …), read through fsspec, with retries.

A `RemoteFile` has the members of `pathlib.Path` that reading needs (`name`, `stem`, `suffix`, `open`): readers take
both.
"""

import contextlib
import dataclasses
import functools
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from eqx_decoders.errors import DataError, EqxDecodersError, check, need_extra


PAUSES = (0.5, 2.0, 8.0)  # seconds before what failed is tried again
BUFFER = 1 << 20
WITHOUT_LISTS = ("http", "https")  # servers that do not list their files

# Entries that identify a content, by the names that file systems give them.
ETAGS = ("ETag", "etag")
CHECKSUMS = ("md5Hash", "Content-MD5", "crc32c", *ETAGS, "blob_id")

# Errors that a retry does not mend: the file, or the request for it, is not as it must be.
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, NotImplementedError)
_LASTING += (TypeError, ValueError, AttributeError, EqxDecodersError)
_PACKAGES = {
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "s3": "s3fs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
}

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
    def size(self) -> int | None:
        """Number of bytes; None for a server that doesn't send it, or that doesn't send parts of files."""
        info = self._info()
        size = info.get("size")
        in_parts = info.get("partial", urlsplit(self.url).scheme not in WITHOUT_LISTS)
        return int(size) if size is not None and in_parts else None

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
        where = f"{self.url} " if urlsplit(self.url).scheme in WITHOUT_LISTS and name in ETAGS else ""
        return f"{where}{info.get('size')} {name} {value}"

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file as a stream, which is seekable where the size is known."""
        check(mode == "rb", f"mode={mode!r}: remote files are only read, as 'rb'.")
        return io.BufferedReader(_RangeReader(self), BUFFER)

    def _info(self) -> dict[str, Any]:
        system, path = file_system(self.url)
        return try_again(lambda: system.info(path), self.url)


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
    scheme = urlsplit(url).scheme
    try:
        import fsspec
    except ImportError as error:
        raise need_extra("fsspec", "data") from error
    try:
        return _opened(url)
    except ImportError as error:
        raise need_extra(_PACKAGES.get(scheme, scheme), "data") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in ("gs", "s3", "https", "hf"))
        rule = f"must be a local path or begin with one of {known} or another scheme of fsspec {fsspec.__version__}"
        raise DataError(f"{url} cannot be opened ({error}): it {rule}.") from error


@functools.lru_cache(1024)
def _opened(url: str) -> tuple[Any, str]:
    import fsspec.core

    return fsspec.core.url_to_fs(url)


def find_remote(path: str, flag: str) -> tuple[str | None, list[RemoteFile]]:
    """Find the files of a pattern, below a directory or at an address, in order; return the directory's address, too.

    Raises DataError for addresses that cannot be read, and for patterns on servers that do not list their files.
    """
    system, inside = file_system(path)
    lists = urlsplit(path).scheme not in WITHOUT_LISTS
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
def local_copy(file: "Path | RemoteFile", target: Path | None = None) -> Iterator[Path]:
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


class _RangeReader(io.RawIOBase):
    """Stream of a remote file that is opened anew at the same position after an error."""

    def __init__(self, file: RemoteFile):
        self._file, self._position, self._handle = file, 0, None
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
        content = try_again(lambda: self._read(len(buffer)), str(self._file))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        if self._size is not None and self._position >= self._size:
            return b""
        try:
            handle = self._at_position()
            content = handle.read(size)
            if not content and self._size is not None:
                raise ConnectionError(f"it ended at byte {self._position} of {self._size}")
            return content
        except Exception:
            self._drop()
            raise

    def _at_position(self) -> Any:
        if self._handle is None:
            system, path = file_system(self._file.url)
            whole = self._size is None and urlsplit(self._file.url).scheme in WITHOUT_LISTS
            self._handle = system.open(path, "rb", **({"block_size": 0} if whole else {}))
        position = self._handle.tell()
        if position != self._position and self._size is not None:
            self._handle.seek(self._position)
        elif position > self._position:
            raise ConnectionError("it can't be read from the middle")
        while self._size is None and (left := self._position - self._handle.tell()) > 0:
            if not self._handle.read(min(left, BUFFER)):
                raise ConnectionError(f"it ended before byte {self._position}, which was read earlier")
        return self._handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()

    def close(self) -> None:
        self._drop()
        super().close()
