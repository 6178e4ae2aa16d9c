"""Test remote files with fsspec's memory file system, retries, and streams of compressed files."""

import functools
import gzip
import http.server
import io
import random
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from eqx_decoders.data.sources import data_files
from eqx_decoders.data.sources.data_files import (
    RemoteFile,
    file_system,
    find_remote,
    is_compressed,
    local_copy,
    open_stream,
    plain_suffix,
)
from eqx_decoders.errors import DataError
from tests.errors import refused


fsspec = pytest.importorskip("fsspec")
CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def memory(monkeypatch):
    """Return fsspec's in-memory file system, which is cleared afterwards."""
    monkeypatch.setattr(data_files, "RETRY_DELAYS", (0.0, 0.0))
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def file(memory):
    memory.pipe_file("/a/b.bin", CONTENT)
    return RemoteFile("memory://a/b.bin")


def test_web_server_without_range_requests(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    (tmp_path / "a.bin").write_bytes(CONTENT * 4)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = RemoteFile(f"http://localhost:{server.server_port}/a.bin")
        assert file.size is None and find_remote(file.url, "--data") == (None, [file])
        with file.open() as stream:
            assert stream.read(10) + stream.read() == CONTENT * 4
        server.shutdown()


def test_names_from_urls():
    file = RemoteFile("https://host.org/a/b.jsonl.gz?download=true")
    assert (file.name, file.stem, file.suffix) == ("b.jsonl.gz", "b.jsonl", ".gz")
    assert str(file) == "https://host.org/a/b.jsonl.gz?download=true"


def test_remote_file_is_seekable(file):
    assert file.size == len(CONTENT) and file.checksum is None
    with file.open() as stream, io.BytesIO(CONTENT) as want:
        assert stream.read() == CONTENT
        for place, whence in ((5, 0), (-7, 2), (1_500_000, 0), (10, 1), (0, 0)):
            assert stream.seek(place, whence) == want.seek(place, whence) == stream.tell()
            assert stream.read(100) == want.read(100)
            assert stream.readline() == want.readline()
    with local_copy(file) as path:
        assert path.read_bytes() == CONTENT and path.name == "b.bin"
    assert not path.exists()


def test_compressed_remote_file_is_read(memory):
    memory.pipe_file("/a.txt.gz", gzip.compress(CONTENT))
    with open_stream(RemoteFile("memory://a.txt.gz")) as stream:
        assert stream.read() == CONTENT


def failing(monkeypatch, memory, times, kind=ConnectionResetError, cut=None):
    """Make every second read fail, up to `times` reads. With `cut`, failing reads return no bytes."""
    real, left = memory.open, iter(range(times))

    class Handle(io.BytesIO):
        def read(self, size=-1):
            if next(left, 1) % 2 == 0:
                if cut is None:
                    raise kind("lost")
                return b""
            return super().read(size)

    def opened(path, mode="rb", **_):
        with real(path, mode) as stream:
            return Handle(stream.read())

    monkeypatch.setattr(type(memory), "open", lambda self, *rest, **more: opened(*rest, **more))


class OtherError(Exception):
    """Stands for errors of aiohttp and botocore, which are not subclasses of OSError."""


@pytest.mark.parametrize("options", [{}, {"kind": OtherError}, {"cut": True}], ids=["lost", "other", "cut"])
def test_transient_errors_are_retried(file, memory, monkeypatch, options):
    failing(monkeypatch, memory, 5, **options)
    monkeypatch.setattr(data_files, "BUFFER_BYTES", 1 << 18)
    with file.open() as stream:
        assert stream.read(100) + stream.read() == CONTENT


def test_persistent_errors_are_raised(file, memory, monkeypatch):
    calls = []

    def lost(*_, **__):
        calls.append(1)
        raise ConnectionResetError("lost")

    monkeypatch.setattr(type(memory), "open", lost)
    with file.open() as stream, refused(DataError, "memory://a/b.bin", "3", "lost"):
        stream.read(1)
    assert len(calls) == 3
    with refused(DataError, "memory://nowhere", "FileNotFoundError"):
        RemoteFile("memory://nowhere").open()


def test_non_seekable_stream_resumes_after_an_error(file, memory, monkeypatch):
    """The server reports no sizes. Bytes that were read before the error are read again and skipped."""
    failing(monkeypatch, memory, 3)
    info = memory.info
    monkeypatch.setattr(type(memory), "info", lambda self, path, **_: {**info(path), "size": None})
    with file.open() as stream:
        assert not stream.seekable() and stream.read(10) + stream.read() == CONTENT


@pytest.mark.parametrize(
    "info, checksum",
    [
        ({"ETag": '"x"'}, '3 ETag "x"'),
        ({"etag": "y", "md5Hash": "z"}, "3 md5Hash z"),
        ({"ETag": 'W/"x"'}, None),
        ({}, None),
    ],
    ids=["etag", "md5", "weak-etag", "none"],
)
def test_checksums_of_file_systems(monkeypatch, info, checksum):
    file = RemoteFile("memory://a")
    monkeypatch.setattr(RemoteFile, "_info", lambda self: {"size": 3, **info})
    assert file.checksum == checksum


def test_directories_and_patterns(memory):
    for name in ("/d/b.txt", "/d/a.txt", "/d/e/c.txt", "/f.txt"):
        memory.pipe_file(name, b"x")
    root = "memory://"
    assert find_remote(root + "d", "--data") == (
        *(root + "/d",),
        [RemoteFile(root + name) for name in ("/d/a.txt", "/d/b.txt", "/d/e/c.txt")],
    )
    assert find_remote(root + "d/*.txt", "--data") == (None, [RemoteFile(root + f"/d/{name}.txt") for name in "ab"])
    assert find_remote(root + "f.txt", "--data") == (None, [RemoteFile(root + "f.txt")])
    assert find_remote(root + "nowhere", "--data") == (None, [])
    with refused(DataError, "--data", "h.org/*.txt'"):
        find_remote("https://h.org/*.txt", "--data")
    assert find_remote("https://h.org/a.txt?x=1", "--data") == (None, [RemoteFile("https://h.org/a.txt?x=1")])


def test_unknown_schemes_and_missing_packages_are_named(monkeypatch):
    with refused(DataError, "nothing://a"):
        file_system("nothing://a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with refused(ImportError, "'gcsfs'", "[data]"):
        file_system("gs://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with refused(ImportError, "'fsspec'", "[train]"):
        file_system("memory://a")


def test_etag_of_a_web_server_is_valid_for_one_url(monkeypatch):
    """Servers may derive ETags from sizes and times. A content hash is valid for all URLs."""
    urls = ["https://h.org/a.txt", "https://h.org/b.txt"]
    for info, same in (({"ETag": '"x"'}, False), ({"ETag": '"x"', "Content-MD5": "y"}, True)):
        monkeypatch.setattr(RemoteFile, "_info", lambda self, info=info: {"size": 3, **info})
        one, other = (RemoteFile(url).checksum for url in urls)
        assert (one == other) == same and one == RemoteFile(urls[0]).checksum


def test_local_copy_is_deleted(file, tmp_path):
    with local_copy(file, tmp_path / "copy") as path:
        assert path == tmp_path / "copy" and path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == []


# --- compressed files -------------------------------------------------------------------------------------------------

LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(50_000))


def test_file_extensions_of_compressed_files():
    names = ["a.jsonl", "a.jsonl.gz", "b.c.TXT.ZST", "a.gz", "a", ".gz"]
    assert [plain_suffix(Path(name)) for name in names] == [".jsonl", ".jsonl", ".txt", "", "", ""]
    assert [is_compressed(Path(name)) for name in names] == [False, True, True, True, False, False]


def test_gzip_is_read_by_line_and_at_once(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), next(stream), stream.read()]) == LINES
    for broken in (gzip.compress(LINES)[:-200], b"no gzip"):
        file.write_bytes(broken)
        with refused(DataError, "a.jsonl.gz"), open_stream(file) as stream:
            stream.read()


def test_all_zstandard_frames_are_read(tmp_path):
    compress = zstandard.compress
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(compress(LINES[:777]) + compress(b"") + compress(LINES[777:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), stream.read()]) == LINES
    for broken in (compress(LINES)[:-200], compress(LINES) + b"x" * 50, b"no frame of any kind"):
        file.write_bytes(broken)
        with refused(DataError, "a.jsonl.zst"), open_stream(file) as stream:
            stream.read()


def test_zstandard_frames_with_a_long_window_are_read(tmp_path):
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    with (
        (tmp_path / "a.zst").open("wb") as file,
        zstandard.ZstdCompressor(compression_params=options).stream_writer(file) as out,
    ):
        out.write(LINES)
    with open_stream(tmp_path / "a.zst") as stream:
        assert stream.read() == LINES


@pytest.mark.slow(fast=("gz",))
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_reading_the_first_line_needs_little_memory(tmp_path, kind):
    """The file is small and decompresses to 200 MB."""
    blank = b" " * (1 << 20) + b"\n"
    packer = gzip if kind == "gz" else zstandard
    with packer.open(tmp_path / f"a.{kind}", "wb") as out:
        for _ in range(200):
            out.write(blank)
    tracemalloc.start()
    with open_stream(tmp_path / f"a.{kind}") as stream:
        next(stream)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"")
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with refused(ImportError, "backports.zstd", "[train]"), open_stream(tmp_path / "a.zst"):
        pass
