"""Compressed files are read as streams; what was cut off or is no such file is named."""

import gzip
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from eqx_decoders.data.sources import compressed
from eqx_decoders.data.sources.compressed import is_compressed, open_stream, plain_suffix
from eqx_decoders.errors import DataError


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


def test_all_frames_of_zstandard_are_read(tmp_path):
    compress = compressed._zstd().compress
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(compress(CONTENT[:777]) + compress(b"") + compress(CONTENT[777:]))
    with open_stream(file) as stream:
        assert b"".join([next(stream), stream.read()]) == CONTENT
    for broken in (compress(CONTENT)[:-200], compress(CONTENT) + b"x" * 50, b"no frame of any kind"):
        file.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be decompressed"), open_stream(file) as stream:
            stream.read()


def test_frames_of_another_writer_with_a_long_window_are_read(tmp_path):
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    with (
        (tmp_path / "a.zst").open("wb") as file,
        zstandard.ZstdCompressor(compression_params=options).stream_writer(file) as out,
    ):
        out.write(CONTENT)
    with open_stream(tmp_path / "a.zst") as stream:
        assert stream.read() == CONTENT


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
    monkeypatch.setattr(compressed, "_is_there", lambda module: False)
    with pytest.raises(ImportError, match=r"backports.zstd.*eqx_decoders\[train\]"), open_stream(tmp_path / "a.zst"):
        pass
    monkeypatch.undo()
    assert compressed._is_there("gzip") and not compressed._is_there("no.such") and "no" not in sys.modules
