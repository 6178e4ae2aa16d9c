"""Test text sources: files and their order, splits, and invalid data."""

import gzip
import hashlib
import json
import math

import numpy as np
import pytest

from eqx_decoders.data.sources.documents import Document
from eqx_decoders.data.sources.readers import MAX_WHOLE_TEXT_BYTES
from eqx_decoders.data.sources.sources import find_sources
from eqx_decoders.data.store.corpus import Gzip, held_out_rule, read_documents
from eqx_decoders.data.store.store import open_store
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from tests.errors import refused


BYTES = ByteTokenizer()
TEXTS = ["first document", "second\none, naïve 🙂", "x"]


def texts(path, **settings):
    return [document.text for document in read_documents(str(path), **settings)]


def write_parquet(path, columns, **settings):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, **settings)


def test_directory_of_texts(tmp_path):
    for name, text in {
        "b.txt": "B",
        "a/z.md": "A",
        "a/empty.txt": "",
        ".hidden/c.txt": "no",
        "d.png": "no",
        "e.py": "E",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [source.name for source in find_sources(str(tmp_path))] == ["a/empty.txt", "a/z.md", "b.txt", "e.py"]
    assert texts(tmp_path) == ["A", "B", "E"]
    assert texts(tmp_path / "**" / "*.txt") == ["B"]
    with refused(DataError, "--data", "d.png'", ".jsonl"):
        texts(tmp_path / "d.png")
    (tmp_path / "records.jsonl").write_text('{"text": "R"}')
    assert texts(tmp_path) == ["R"]  # text files in a directory with records are ignored


def test_linked_files_of_a_directory_are_read_once(tmp_path):
    data = tmp_path / "data.v2"
    for name in ("data.v2/a.jsonl", "data.v2/deep/er/b.jsonl", "data.v2/.kept/c.jsonl", "other/d.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}))
    links = {"latest": ".", "parent": "..", "again": "deep", "deep/up": "../..", "hidden": ".kept", "out": "../other"}
    links |= {"deep/er/same.jsonl": "../../a.jsonl", "e.jsonl": "raw"}
    for name, target in links.items():
        (data / name).symlink_to(target)
    (tmp_path / "other/back").symlink_to("../data.v2")
    (data / "raw").write_text('{"text": "of no known ending"}')
    names = ["a.jsonl", "deep/er/b.jsonl", "e.jsonl", "hidden/c.jsonl", "out/d.jsonl"]
    assert [source.name for source in find_sources(str(data))] == names
    found = [source.name for source in find_sources(f"{data}/**/*.jsonl")]
    assert found == [f"{data}/{name}" for name in names]


def test_several_paths_are_read_one_after_another(tmp_path):
    for name in ("a/x.txt", "b/x.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / one) for one in ("c.txt", "b", "a/*.txt", "a/x.txt")]
    assert [one.text for one in read_documents(paths)] == ["c.txt", "b/x.txt", "a/x.txt", "a/x.txt"]
    names = [source.name for source in find_sources(paths)]
    assert names[:2] == ["c.txt", "x.txt"] and names[3] == "x.txt (2)" and names[2].endswith("a/x.txt")
    assert find_sources([paths[1]]) == find_sources(paths[1])
    with refused(DataError, "--data", "nowhere'"):
        find_sources([paths[0], str(tmp_path / "nowhere")])


def test_compressed_files_are_read_by_their_inner_extension(tmp_path):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    contents = {"a.jsonl.gz": lines, "b.json.gz": json.dumps([{"text": "list"}]), "c.txt.gz": "plain", "d.gz": "none"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    assert texts(tmp_path / "*.gz") == [*TEXTS, "list", "plain", "none"]
    long = "".join(f"line {i}\n" for i in range(MAX_WHOLE_TEXT_BYTES // 4))
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(long.encode()))
    assert len(texts(tmp_path / "e.txt.gz")) > 4 and "".join(texts(tmp_path / "e.txt.gz")) == long
    (tmp_path / "f.npy.gz").write_bytes(b"")
    with refused(DataError, "f.npy.gz'"):
        texts(tmp_path / "f.npy.gz")


def test_corpus_of_a_directory_has_a_single_file_type(tmp_path):
    """The preferred file type is used. Settings and copies are ignored."""
    for name in ("notes.txt.gz", "settings.json", "readme.md", "a.jsonl.gz", "b.jsonl", "c.xyz"):
        (tmp_path / name).write_bytes(b"")
    for best in (["b.jsonl"], ["a.jsonl.gz"], ["readme.md"], ["settings.json"], ["notes.txt.gz"]):
        assert [source.name for source in find_sources(str(tmp_path))] == best
        (tmp_path / best[0]).unlink()
    with refused(DataError, tmp_path):
        find_sources(str(tmp_path))


def test_file_without_an_extension_is_text(tmp_path):
    (tmp_path / "LICENSE").write_text("permission")
    (tmp_path / "DATA.JSONL").write_text('{"text": "capitals"}')
    assert texts(tmp_path / "LICENSE") == ["permission"] and texts(tmp_path / "DATA.JSONL") == ["capitals"]


def test_line_endings_are_preserved(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert texts(tmp_path / "a.txt") == ["one\r\ntwo\rthree\n"]


def test_long_file_is_read_in_pieces(tmp_path):
    text = "".join(f"line {i} naïve 🙂\n" for i in range(MAX_WHOLE_TEXT_BYTES // 16))
    (tmp_path / "long.txt").write_text(text)
    found = texts(tmp_path / "long.txt")
    assert len(found) > 4 and "".join(found) == text and all(piece.endswith("\n") for piece in found)


def test_json_lines(tmp_path):
    lines = [json.dumps({"text": text, "content": text[::-1]}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + '\n{"text": "", "content": ""}\n')
    assert texts(tmp_path) == TEXTS
    assert texts(tmp_path / "a.jsonl", text_field="content")[:3] == [text[::-1] for text in TEXTS]


def test_parquet(tmp_path):
    many = [f"{text} {i}" for i in range(30) for text in TEXTS]
    write_parquet(tmp_path / "a.parquet", {"text": many, "id": list(range(90))}, row_group_size=7)
    assert texts(tmp_path) == many


@pytest.mark.parametrize("kind", ["npy16", "npy32", "bin"])
def test_packed_tokens(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("eqx_decoders.data.sources.readers.TOKENS_PER_CHUNK", 5)
    documents = [np.arange(n, dtype=np.uint16) for n in (1, 4, 5, 6, 13, 2)]
    parts = [
        np.concatenate([[256], tokens, [257]]) if i % 2 else np.append(tokens, 257)
        for i, tokens in enumerate(documents)
    ]
    packed = np.concatenate([*parts, [257], [7, 8]])
    if kind == "bin":
        packed.astype("<u2").tofile(tmp_path / "a.bin")
    else:
        np.save(tmp_path / "a.npy", packed.astype(np.uint16 if kind == "npy16" else np.uint32))
    found = [document.tokens.tolist() for document in read_documents(str(tmp_path), tokenizer=BYTES)]
    assert found == [*(tokens.tolist() for tokens in documents), [7, 8]]


def test_packed_tokens_of_a_large_vocabulary_are_uint32(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 70_000

    np.array([5, 69_999, 257], "<u4").tofile(tmp_path / "a.bin")
    (found,) = read_documents(str(tmp_path / "a.bin"), tokenizer=Large())
    assert found.tokens.tolist() == [5, 69_999]
    store = open_store(tmp_path / "cache", Large(), path=str(tmp_path / "a.bin"))
    assert store[0].tolist() == [256, 5, 69_999, 257] and store.counts("train").bytes is None


FAULTS = {  # file name, content, and names in the error message
    "missing": (None, {}, ["nowhere.txt'"]),
    "nothing": ("d", {}, ["/d", ".jsonl"]),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text": \n', ["a.jsonl:2", "JSON"]),
    "list": ("a.jsonl", b"[1]", ["a.jsonl:1", "list"]),
    "deep": ("a.jsonl", b"[" * 100_000, ["a.jsonl:1", "JSON"]),
    "field": (
        "a.jsonl",
        b'\n{"body": "a", "id": 1}',
        ["a.jsonl:2", "'text'", "body, id", "--text-field (DataConfig.text_field)"],
    ),
    "number": ("a.jsonl", b'{"text": 3}', ["a.jsonl:1", "'text'", "int"]),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', ["a.jsonl:1", "'text'", "Unicode"]),
    "latin": ("a.txt", b"na\xefve", ["a.txt", "UTF-8"]),
    "latin json": ("a.jsonl", b'{"text": "na\xefve"}', ["a.jsonl:1", "UTF-8"]),
    "no parquet": ("a.parquet", b"PAR1 no", ["a.parquet", "Parquet"]),
    "odd": ("a.bin", b"abc", ["a.bin", "3 bytes", "uint16", "vocab_size=259"]),
    "ids": ("a.bin", np.array([1, 2, 259], "<u2").tobytes(), ["a.bin", "259", "2", "vocab_size=259"]),
    "no npy": ("a.npy", b"text", ["a.npy", ".npy"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_data_are_refused(tmp_path, fault):
    name, content, names = FAULTS[fault]
    path = tmp_path / (name or "nowhere.txt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name:
        path.mkdir()
    with refused(DataError, *names):
        list(read_documents(str(path), tokenizer=BYTES))
    with refused(DataError, *names):
        open_store(tmp_path / "cache", BYTES, path=str(path))
    assert not (tmp_path / "cache" / "manifest.json").exists() and not (tmp_path / "cache" / "partial").exists()


def test_invalid_columns_and_arrays_are_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["a"]})
    with refused(DataError, "'text'", "--text-field"):
        texts(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", {"text": ["a", None]})
    assert texts(tmp_path / "b.parquet") == ["a"]  # nulls are dropped and counted
    np.save(tmp_path / "c.npy", np.zeros((2, 3), np.int64))
    with refused(DataError, "c.npy", "int64", "(2, 3)", "uint16"):
        texts(tmp_path / "c.npy", tokenizer=BYTES)
    with refused(DataError, "c.npy", "tokenizer"):
        texts(tmp_path / "c.npy")
    (tmp_path / "empty.txt").write_text("")
    with refused(DataError, "empty.txt"):
        open_store(tmp_path / "cache", BYTES, path=str(tmp_path / "empty.txt"))


def test_held_out_split_depends_on_the_hash():
    documents = [Document(str(i), f"text {i}") for i in range(400)]
    rule = held_out_rule(documents, 0.2)
    chosen = [document.text for document in documents if rule(document)]
    assert 50 < len(chosen) < 110
    draws = [
        int.from_bytes(hashlib.blake2b(f"text {i}".encode(), digest_size=6).digest(), "big") / 2**48 for i in range(400)
    ]
    assert chosen == [f"text {i}" for i in range(400) if draws[i] < 0.2]
    rule = held_out_rule(documents[::-1], 0.2)
    assert chosen == [document.text for document in documents if rule(document)]  # in any order


@pytest.mark.parametrize("count, fraction, held", [(1, 0.5, 0), (2, 0.01, 1), (3, 0.99, 1), (5, 0.0, 0)])
def test_small_corpora_have_documents_in_both_splits(count, fraction, held):
    documents = [Document(str(i), f"text {i}") for i in range(count)]
    rule = held_out_rule(iter(documents), fraction)
    assert sum(map(rule, documents)) == held


def test_standard_library_is_the_default_corpus():
    sources = find_sources(None)
    names = [source.name for source in sources]
    assert names == sorted(names) and len(names) > 300 and {"argparse.py", "asyncio/tasks.py"} <= set(names)
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages", "__pycache__"})
    documents = [Document(name, "x", key=name) for name in names]
    rule = held_out_rule(documents, 0.05)
    assert 0.02 < sum(map(rule, documents)) / len(documents) < 0.10
    size = sum(source.file.stat().st_size for source in sources)
    assert 5e6 < size < 3e7


def test_gzip_rate_is_that_of_the_concatenated_texts():
    texts = ["the cat ", "sat on the mat ", "naïve 東京 " * 20]
    baseline = Gzip()
    for text in texts:
        baseline.add(text.encode())
    whole = "".join(texts).encode()
    assert baseline.nats_per_byte() == pytest.approx(8 * math.log(2) * len(gzip.compress(whole, 9)) / len(whole))


def test_gzip_rate_without_texts_is_none():
    assert Gzip().nats_per_byte() is None
