"""Compressed files are read as streams; what was cut off or is no such file is named."""

import gzip
import sys
from pathlib import Path

import pytest

from eqx_decoders.errors import DataError
from eqx_decoders.io import compressed
from eqx_decoders.io.compressed import is_compressed, open_stream, plain_suffix


CONTENT = b"".join(b'{"text": "line %d"}\n' % i for i in range(50_000))


def test_endings_of_compressed_files():
    names = ["a.jsonl", "a.jsonl.gz", "b.c.TXT.ZST", "a.gz", "a", ".gz"]
    assert [plain_suffix(Path(name)) for name in names] == [".jsonl", ".jsonl", ".txt", "", "", ""]
    assert [is_compressed(Path(name)) for name in names] == [False, True, True, True, False, False]


def test_gzip_is_read_line_by_line_and_whole(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(CONTENT[:1000]) + gzip.compress(CONTENT[1000:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), next(stream), stream.read()]) == CONTENT
    file.write_bytes(gzip.compress(CONTENT)[:-200])
    sentence = r"a\.jsonl\.gz cannot be decompressed: .*end-of-stream.*Download it again"
    with pytest.raises(DataError, match=sentence), open_stream(file) as stream:
        stream.read()
    file.write_bytes(b"no gzip")
    with pytest.raises(DataError, match="cannot be decompressed"), open_stream(file) as stream:
        stream.read()


class Frames:
    """The part of the package `zstandard` that is used, for gzip's frames."""

    ZstdError = gzip.zlib.error

    class ZstdDecompressor:
        def __init__(self, max_window_size):
            assert max_window_size == 1 << 31

        def decompressobj(self):
            return gzip.zlib.decompressobj(31)


@pytest.mark.parametrize("real", [False, True])
def test_all_frames_of_zstandard_are_read(tmp_path, monkeypatch, real):
    """With the package (or Python's module) where it is installed, and with a stand-in for it."""
    if real:
        zstd = compressed._zstd()
        if zstd is None:
            pytest.skip("zstandard is not installed")
        compress = zstd.compress
    else:
        monkeypatch.setattr(compressed, "_zstd", lambda: Frames)
        compress = gzip.compress
    monkeypatch.setattr(compressed, "CHUNK", 1000)
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(compress(CONTENT[:777]) + compress(b"") + compress(CONTENT[777:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), stream.read()]) == CONTENT
    for broken in (compress(CONTENT)[:-200], compress(CONTENT) + b"x" * 50, b"no frame of any kind"):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be decompressed"), open_stream(file) as stream:
            stream.read()


def test_the_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"")
    monkeypatch.setattr(compressed, "_is_there", lambda module: False)
    with pytest.raises(ImportError, match=r"zstandard.*eqx_decoders\[train\]"), open_stream(tmp_path / "a.zst"):
        pass
    monkeypatch.undo()
    assert compressed._is_there("gzip") and not compressed._is_there("no.such") and "no" not in sys.modules
