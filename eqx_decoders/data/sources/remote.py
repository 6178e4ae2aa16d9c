"""Files that lie elsewhere (`gs://`, `s3://`, `https://`, …), read through fsspec; what fails is tried again.

A `RemoteFile` has of `pathlib.Path` what reading needs (`name`, `stem`, `suffix`, `open`), so that readers take both.
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
WITHOUT_LISTS = ("http", "https")  # servers that do not say which files they have

# What says that the content is the same, by the names that file systems give it.
ETAGS = ("ETag", "etag")
CHECKSUMS = ("md5Hash", "Content-MD5", "crc32c", *ETAGS, "blob_id")

# Errors that another try does not help: the file, or the request for it, is not as it must be.
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
    """Whether a path is the address of something elsewhere: `scheme://…`."""
    return "://" in path


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file by its address."""

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
        """Bytes; None if the server doesn't tell, and then parts of the file can't be asked for either."""
        info = self._info()
        size = info.get("size")
        in_parts = info.get("partial", urlsplit(self.url).scheme not in WITHOUT_LISTS)
        return int(size) if size is not None and in_parts else None

    @property
    def checksum(self) -> str | None:
        """What its file system says of its content, with the size; None if it says nothing that can be relied on.

        An ETag of a web server tells versions of one file apart, not files: then the address is part of it.
        """
        info = self._info()
        given = ((name, str(info[name])) for name in CHECKSUMS if info.get(name))
        name, value = next(given, ("", "W/"))
        if value.startswith("W/"):  # only about the same
            return None
        where = f"{self.url} " if urlsplit(self.url).scheme in WITHOUT_LISTS and name in ETAGS else ""
        return f"{where}{info.get('size')} {name} {value}"

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Its bytes as a stream, which can be moved in where the size is known."""
        check(mode == "rb", f"mode={mode!r}: remote files are only read, as 'rb'.")
        return io.BufferedReader(_RangeReader(self), BUFFER)

    def _info(self) -> dict[str, Any]:
        system, path = file_system(self.url)
        return try_again(lambda: system.info(path), self.url)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path in it."""
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
    """The files of an address with `*`, below a directory, or at it, in order; and the address of the directory.

    Raises DataError for what isn't there, and for patterns on servers that have no lists.
    """
    system, inside = file_system(path)
    lists = urlsplit(path).scheme not in WITHOUT_LISTS
    pattern = any(letter in inside for letter in "*?[") if lists else "*" in inside
    rule = "such a server has no list of its files: name them one by one"
    check(lists or not pattern, f"{flag} {path!r} is a pattern, and {rule}.", DataError)
    if pattern:
        found, folder = try_again(lambda: system.glob(inside), path), None
    elif lists and try_again(lambda: system.isdir(inside), path):
        found, folder = try_again(lambda: system.find(inside), path), system.unstrip_protocol(inside).rstrip("/")
    else:
        there = not lists or try_again(lambda: system.isfile(inside), path)
        return None, [RemoteFile(path)] if there else []
    return folder, [RemoteFile(system.unstrip_protocol(one)) for one in sorted(found) if not one.endswith("/")]


@contextlib.contextmanager
def local_copy(file: "Path | RemoteFile", target: Path | None = None) -> Iterator[Path]:
    """The file on this machine, for readers that need it there; a copy of a remote one is deleted afterwards.

    target: the copy, where somebody will delete it if this process is killed; None: in the folder for temporary files.
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
    """`call()`, again after a pause if it fails by what may pass. Raises DataError with the last error."""
    for pause in (*PAUSES, None):
        try:
            return call()
        except EqxDecodersError:
            raise
        except _LASTING as error:
            raise DataError(f"{what} cannot be read: {type(error).__name__}: {error}.") from error
        except Exception as error:
            if pause is None:
                told = f"{what} cannot be read, tried {len(PAUSES) + 1} times: {type(error).__name__}: {error}"
                raise DataError(f"{told}. Start again when it can be reached.") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


class _RangeReader(io.RawIOBase):
    """The bytes of a remote file; after an error it is opened again at the same place."""

    def __init__(self, file: RemoteFile):
        self._file, self._place, self._handle = file, 0, None
        self._size = file.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if self._size is None:
            raise io.UnsupportedOperation(f"{self._file} has no known size")
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        content = try_again(lambda: self._read(len(buffer)), str(self._file))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        if self._size is not None and self._place >= self._size:
            return b""
        try:
            handle = self._at_place()
            content = handle.read(size)
            if not content and self._size is not None:
                raise ConnectionError(f"it ended at byte {self._place} of {self._size}")
            return content
        except Exception:
            self._drop()
            raise

    def _at_place(self) -> Any:
        if self._handle is None:
            system, path = file_system(self._file.url)
            whole = self._size is None and urlsplit(self._file.url).scheme in WITHOUT_LISTS
            self._handle = system.open(path, "rb", **({"block_size": 0} if whole else {}))
        place = self._handle.tell()
        if place != self._place and self._size is not None:
            self._handle.seek(self._place)
        elif place > self._place:
            raise ConnectionError("it can't be read from the middle")
        while self._size is None and (left := self._place - self._handle.tell()) > 0:
            if not self._handle.read(min(left, BUFFER)):
                raise ConnectionError(f"it ended before byte {self._place}, which was read earlier")
        return self._handle

    def _drop(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(Exception):
                handle.close()

    def close(self) -> None:
        self._drop()
        super().close()
