"""Files elsewhere, in fsspec's memory: found, read from any place, and again after errors that pass.

Compressed files are read as streams; what was cut off or is no such file is named.
"""

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


fsspec = pytest.importorskip("fsspec")
CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def memory(monkeypatch):
    """fsspec's file system of this process, emptied afterwards."""
    monkeypatch.setattr(data_files, "PAUSES", (0.0, 0.0))
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.fixture
def file(memory):
    memory.pipe_file("/a/b.bin", CONTENT)
    return RemoteFile("memory://a/b.bin")


def test_a_web_server_that_sends_whole_files_only(tmp_path, monkeypatch):
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


def test_names_are_those_of_paths():
    file = RemoteFile("https://host.org/a/b.jsonl.gz?download=true")
    assert (file.name, file.stem, file.suffix) == ("b.jsonl.gz", "b.jsonl", ".gz")
    assert str(file) == "https://host.org/a/b.jsonl.gz?download=true"


def test_it_is_read_from_any_place(file):
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


def test_what_is_compressed_is_read_too(memory, tmp_path):
    memory.pipe_file("/a.txt.gz", gzip.compress(CONTENT))
    with open_stream(RemoteFile("memory://a.txt.gz")) as stream:
        assert stream.read() == CONTENT


def failing(monkeypatch, memory, times, kind=ConnectionResetError, cut=None):
    """Reads fail so many times, at every other attempt; `cut` ends them early without a word instead."""
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
    """As the errors of aiohttp and botocore, which are no OSErrors."""


@pytest.mark.parametrize("options", [{}, {"kind": OtherError}, {"cut": True}])
def test_errors_that_pass_are_tried_again(file, memory, monkeypatch, options):
    failing(monkeypatch, memory, 5, **options)
    monkeypatch.setattr(data_files, "BUFFER", 1 << 18)
    with file.open() as stream:
        assert stream.read(100) + stream.read() == CONTENT


def test_errors_that_stay_are_named(file, memory, monkeypatch):
    calls = []

    def lost(*_, **__):
        calls.append(1)
        raise ConnectionResetError("lost")

    monkeypatch.setattr(type(memory), "open", lost)
    sentence = r"memory://a/b\.bin cannot be read, tried 3 times: .*lost"
    with file.open() as stream, pytest.raises(DataError, match=sentence):
        stream.read(1)
    assert len(calls) == 3
    with pytest.raises(DataError, match="memory://nowhere cannot be read: FileNotFoundError"):
        RemoteFile("memory://nowhere").open()


def test_a_stream_without_places_goes_on_where_it_was(file, memory, monkeypatch):
    """A server that tells no size: what was read is read again, and passed over."""
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
)
def test_checksums_of_file_systems(monkeypatch, info, checksum):
    file = RemoteFile("memory://a")
    monkeypatch.setattr(RemoteFile, "_info", lambda self: {"size": 3, **info})
    assert file.checksum == checksum


def test_what_is_found(memory):
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
    with pytest.raises(DataError, match=r"--data.*h\.org/\*\.txt'"):
        find_remote("https://h.org/*.txt", "--data")
    assert find_remote("https://h.org/a.txt?x=1", "--data") == (None, [RemoteFile("https://h.org/a.txt?x=1")])


def test_unknown_schemes_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(DataError, match=r"nothing://a cannot be opened .*: it must be a local path or begin with"):
        file_system("nothing://a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"'gcsfs'.*eqx_decoders\[data\]"):
        file_system("gs://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"'fsspec'.*eqx_decoders\[train\]"):
        file_system("memory://a")


def test_an_etag_of_a_web_server_is_of_one_file(monkeypatch):
    """Servers make them of sizes and times; what is a hash of the content serves for all addresses."""
    urls = ["https://h.org/a.txt", "https://h.org/b.txt"]
    for info, same in (({"ETag": '"x"'}, False), ({"ETag": '"x"', "Content-MD5": "y"}, True)):
        monkeypatch.setattr(RemoteFile, "_info", lambda self, info=info: {"size": 3, **info})
        one, other = (RemoteFile(url).checksum for url in urls)
        assert (one == other) == same and one == RemoteFile(urls[0]).checksum


def test_a_copy_is_where_it_is_wanted_and_goes(file, tmp_path):
    with local_copy(file, tmp_path / "copy") as path:
        assert path == tmp_path / "copy" and path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == []


# --- compressed files -------------------------------------------------------------------------------------------------

LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(50_000))


def test_endings_of_compressed_files():
    names = ["a.jsonl", "a.jsonl.gz", "b.c.TXT.ZST", "a.gz", "a", ".gz"]
    assert [plain_suffix(Path(name)) for name in names] == [".jsonl", ".jsonl", ".txt", "", "", ""]
    assert [is_compressed(Path(name)) for name in names] == [False, True, True, True, False, False]


def test_gzip_is_read_line_by_line_and_whole(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(LINES[:1000]) + gzip.compress(LINES[1000:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), next(stream), stream.read()]) == LINES
    file.write_bytes(gzip.compress(LINES)[:-200])
    sentence = r"a\.jsonl\.gz cannot be decompressed: .*end-of-stream.*Download it again"
    with pytest.raises(DataError, match=sentence), open_stream(file) as stream:
        stream.read()
    file.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be decompressed"), open_stream(file) as stream:
        stream.read()


def test_all_frames_of_zstandard_are_read(tmp_path):
    compress = zstandard.compress
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(compress(LINES[:777]) + compress(b"") + compress(LINES[777:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), stream.read()]) == LINES
    for broken in (compress(LINES)[:-200], compress(LINES) + b"x" * 50, b"no frame of any kind"):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst"), open_stream(file) as stream:
            stream.read()


def test_frames_of_another_writer_with_a_long_window_are_read(tmp_path):
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
def test_what_unpacks_to_much_is_read_piece_by_piece(tmp_path, kind):
    """The first line of a few kilobytes that are 200 MB takes a few MB."""
    blank = b" " * (1 << 20) + b"\n"
    with (
        gzip.open(tmp_path / "a.gz", "wb", compresslevel=1)
        if kind == "gz"
        else (zstandard.open(tmp_path / "a.zst", "wb")) as out
    ):
        for _ in range(200):
            out.write(blank)
    tracemalloc.start()
    with open_stream(tmp_path / f"a.{kind}") as stream:
        next(stream)
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"")
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"backports.zstd.*eqx_decoders\[train\]"), open_stream(tmp_path / "a.zst"):
        pass
