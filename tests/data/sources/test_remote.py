"""Files elsewhere, in fsspec's memory: found, read from any place, and again after errors that pass."""

import functools
import http.server
import io
import random
import sys
import threading

import pytest

from eqx_decoders.data.sources import remote
from eqx_decoders.data.sources.compressed import open_stream
from eqx_decoders.data.sources.remote import RemoteFile, file_system, find_remote, local_copy
from eqx_decoders.errors import DataError


fsspec = pytest.importorskip("fsspec")
CONTENT = random.Random(0).randbytes(3_000_000)


@pytest.fixture
def memory(monkeypatch):
    """fsspec's file system of this process, emptied afterwards."""
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.0))
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
    import gzip

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
    monkeypatch.setattr(remote, "BUFFER", 1 << 18)
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
    with pytest.raises(DataError, match=r"--data 'https://h\.org/\*\.txt' is a pattern, and such a server has no list"):
        find_remote("https://h.org/*.txt", "--data")
    assert find_remote("https://h.org/a.txt?x=1", "--data") == (None, [RemoteFile("https://h.org/a.txt?x=1")])


def test_unknown_schemes_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(DataError, match=r"nothing://a cannot be opened .*: it must be a local path or begin with"):
        file_system("nothing://a")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    remote._opened.cache_clear()
    with pytest.raises(ImportError, match=r"'gcsfs': pip install 'eqx_decoders\[data\]'"):
        file_system("gs://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"'fsspec': pip install 'eqx_decoders\[data\]'"):
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
