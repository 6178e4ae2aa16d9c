"""Test readers: parts of local and remote sources, and datasets."""

import contextlib
import gzip
import itertools
import json
import random
import sys

import numpy as np
import pytest

from eqx_decoders.data.sources import data_files, hub_datasets, readers
from eqx_decoders.data.sources.hub_datasets import HubDataset
from eqx_decoders.data.sources.readers import ReadOptions, read_source, split_into_parts
from eqx_decoders.data.sources.sources import Source, describe, find_sources, is_as_described, parse_location
from eqx_decoders.data.store.corpus import read_documents
from eqx_decoders.data.store.store import open_store
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from tests.errors import refused
from tests.stores import all_tokens


BYTES = ByteTokenizer()


def words(count, seed=0):
    generator = random.Random(seed)
    return ["naïve 🙂 "[: generator.randrange(9)] * generator.choice([0, 1, 1, 2, 30]) + str(i) for i in range(count)]


def write_array_record(path, records, group=1):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), f"group_size:{group}")
    for record in records:
        writer.write(record.encode())
    writer.close()


def write(folder, kind, texts):
    """Write a file or a dataset directory of the given kind."""
    records = [{"text": text, "id": number} for number, text in enumerate(texts)]
    lines = "".join(
        json.dumps(record, ensure_ascii=False) + "\n" + "\n" * (i % 3 == 1) for i, record in enumerate(records)
    )
    path = folder / kind
    if kind == "saved":
        datasets = pytest.importorskip("datasets")
        datasets.Dataset.from_list(records).save_to_disk(path, num_shards=2)
    elif kind == "a.parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
    elif kind.endswith("record"):
        write_array_record(path, [json.dumps(record) for record in records] if kind[0] == "j" else texts)
    else:
        path.write_bytes((lines if kind.endswith(".jsonl") else "\n".join(texts)).encode())
    return Source(kind, path)


def document_texts(source, part=None):
    return [one.text for one in read_source(source, ReadOptions(), part)]


KINDS = ["a.txt", "a.jsonl", "a.parquet", "t.arrayrecord", "j.array_record", "saved"]


@pytest.mark.parametrize("most", [1, 50, 400, 10**6])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_documents_of_the_source(tmp_path, monkeypatch, kind, most):
    for name, value in {
        "MAX_WHOLE_TEXT_BYTES": 64,
        "PIECE_BYTES": 16,
        "MIN_PART_BYTES": most,
        "TARGET_PARTS": 10**9,
    }.items():
        monkeypatch.setattr(readers, name, value)
    source = write(tmp_path, kind, words(60))
    parts = split_into_parts(source, describe(source.file)["size"])
    whole = document_texts(source)
    assert [text for part in parts for text in document_texts(source, part)] == whole
    if kind != "a.txt":
        assert whole == words(60)
    assert (len(parts) > 1 or most > 1) and (parts == [None] or most < 10**6)
    if len(parts) > 1:
        assert parts[0][0] == 0 and all(one[1] == other[0] for one, other in itertools.pairwise(parts))


def test_lines_at_the_edge_of_a_part_are_read_once(tmp_path):
    lines = [json.dumps({"text": "x" * size}) for size in (1, 2, 3, 300, 1)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))  # the last line has no newline
    source, size = Source("a.jsonl", tmp_path / "a.jsonl"), len("\n".join(lines))
    want = document_texts(source)
    for cut in range(size + 1):
        assert document_texts(source, (0, cut)) + document_texts(source, (cut, size)) == want, cut


def test_error_in_a_part_names_the_position(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n')
    with refused(DataError, "a.jsonl, byte 16", "'text'"):
        document_texts(Source("a.jsonl", tmp_path / "a.jsonl"), (16, 28))


def test_compressed_and_small_files_have_one_part(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    assert split_into_parts(Source("a.jsonl.gz", tmp_path / "a.jsonl.gz"), 10**12) == [None]
    assert split_into_parts(Source("a.jsonl", tmp_path / "a.jsonl"), 2 * readers.MIN_PART_BYTES) == [None]


def test_parts_depend_only_on_the_file_size():
    source = Source("a.jsonl", parse_location("a.jsonl"))
    for size, count in ((33_554_433, 3), (1 << 30, 32), (1 << 40, 4096)):
        parts = split_into_parts(source, size)
        assert len(parts) == count and parts[-1][1] == size


# --- ArrayRecord ------------------------------------------------------------------------------------------------------


def test_array_records_are_texts_or_objects(tmp_path):
    texts = ["one", '{"no": "record"}', "{", "three"]
    write_array_record(tmp_path / "a.arrayrecord", texts, group=3)
    assert [one.text for one in read_documents(str(tmp_path))] == texts
    chat = {"messages": [{"role": "user", "content": "x"}]}
    write_array_record(tmp_path / "b.arrayrecord", [json.dumps(one) for one in (chat, {"text": "two"})])
    found = list(read_documents(str(tmp_path / "b.arrayrecord")))
    assert found[0].chat.messages == chat["messages"] and found[1].text == "two"
    write_array_record(tmp_path / "c.arrayrecord", ['{"text": "x"}', "no JSON"])
    with refused(DataError, "c.arrayrecord, record 1", "JSON"):
        list(read_documents(str(tmp_path / "c.arrayrecord")))
    write_array_record(tmp_path / "d.arrayrecord", [])
    assert list(read_documents(str(tmp_path / "d.arrayrecord"))) == []


def test_invalid_array_records_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.arrayrecord").write_bytes(b"no records " * 20_000)
    with refused(DataError, "a.arrayrecord", "ArrayRecord"):
        list(read_documents(str(tmp_path)))
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with refused(ImportError, "'array_record'", "[data]"):
        list(read_documents(str(tmp_path)))


# --- remote files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(data_files, "RETRY_DELAYS", (0.0,))
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_remote_files_are_the_same_corpus(tmp_path, memory):
    """Remote files have the documents, order and hash of local files, and share their shards."""
    for kind in ("a.jsonl", "b.jsonl", "c.parquet", "d.arrayrecord"):
        write(tmp_path, kind if kind[0] != "c" else "a.parquet", words(9, ord(kind[0])))
    packed = b"".join(bytes([number, 0]) for number in (5, 6, 7)) + b"\1\1"
    (tmp_path / "f.bin").write_bytes(packed)
    for file in tmp_path.iterdir():
        memory.pipe_file(f"/corpus/{file.name}", file.read_bytes())
    memory.pipe_file("/corpus/.hidden/x.jsonl", b"no")
    memory.pipe_file("/corpus/notes.txt", b"records go before texts")
    options = dict(cache_dir=tmp_path / "cache")
    local = open_store(tmp_path / "local", BYTES, path=str(tmp_path), **options)
    there = open_store(tmp_path / "there", BYTES, path="memory://corpus", **options)
    assert [source.name for source in find_sources("memory://corpus")] == [
        one.name for one in find_sources(str(tmp_path))
    ]
    assert there.content_hash == local.content_hash and all_tokens(there) == all_tokens(local) and len(local) > 30
    assert len(list((tmp_path / "cache" / "tokens").glob("*/*"))) == 5
    memory.pipe_file("/e.txt.gz", gzip.compress(b"compressed"))
    paths = [f"memory://{name}" for name in ("corpus/a*.jsonl", "corpus/notes.txt", "e.txt.gz")]
    one = open_store(tmp_path / "one", BYTES, path=paths, **options)
    assert [BYTES.decode(text) for text in one] == [*words(9, ord("a")), "records go before texts", "compressed"]
    memory.pipe_file("/corpus/a.jsonl", b'{"text": "other"}\n')
    with refused(DataError, "a.jsonl"):
        open_store(tmp_path / "there", BYTES, path="memory://corpus", **options)
    with refused(DataError, "--data", "'memory://nowhere'"):
        find_sources("memory://nowhere")
    memory.pipe_file("/d.png", b"x")
    with refused(DataError, "'memory://d.png'"):
        find_sources("memory://d.png")


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.txt"])
def test_parts_of_remote_files(tmp_path, memory, monkeypatch, kind):
    for name, value in {"MAX_WHOLE_TEXT_BYTES": 64, "PIECE_BYTES": 16, "MIN_PART_BYTES": 50}.items():
        monkeypatch.setattr(readers, name, value)
    local = write(tmp_path, kind, words(60))
    memory.pipe_file(f"/{kind}", local.file.read_bytes())
    source = Source(kind, parse_location(f"memory://{kind}"))
    parts = split_into_parts(source, source.file.size)
    assert (len(parts) > 1) == (kind != "a.txt")  # documents in a text file are found only by reading the file
    assert [text for part in parts for text in document_texts(source, part)] == document_texts(local)


# --- datasets ---------------------------------------------------------------------------------------------------------


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": text, "id": i} for i, text in enumerate(words(20))]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk(tmp_path / "one")
    assert [one.text for one in read_documents(str(tmp_path / "one"))] == words(20)
    first = open_store(tmp_path / "run", BYTES, path=str(tmp_path / "one"))
    assert open_store(tmp_path / "run", BYTES, path=str(tmp_path / "one")).content_hash == first.content_hash
    whole.select([3, 1, 7]).save_to_disk(tmp_path / "chosen")
    assert [one.text for one in read_documents(str(tmp_path / "chosen"))] == [words(20)[i] for i in (3, 1, 7)]
    datasets.DatasetDict(train=whole.select(range(5)), test=whole).save_to_disk(tmp_path / "splits")
    assert [one.text for one in read_documents(str(tmp_path / "splits"))] == words(20)[:5]
    assert len(list(read_documents(str(tmp_path / "splits" / "test")))) == 20
    datasets.DatasetDict(dev=whole, test=whole).save_to_disk(tmp_path / "other")
    with refused(DataError, "'train'"):
        find_sources(str(tmp_path / "other"))
    whole.rename_column("text", "body").save_to_disk(tmp_path / "body")
    with refused(DataError, "'text'", "body, id", "--text-field"):
        list(read_documents(str(tmp_path / "body")))
    assert len(list(read_documents(str(tmp_path / "body"), text_field="body"))) == 20
    whole.select(range(19)).save_to_disk(tmp_path / "less")
    (tmp_path / "one").rename(tmp_path / "gone")
    (tmp_path / "less").rename(tmp_path / "one")
    with refused(DataError, "train:one"):
        open_store(tmp_path / "run", BYTES, path=str(tmp_path / "one"))


def test_hub_dataset_urls():
    spelled = {
        "hf://datasets/org/name": HubDataset("org/name"),
        "hf://datasets/org/name:test": HubDataset("org/name", split="test"),
        "hf://datasets/org/na.me/20220301.en:validation": HubDataset("org/na.me", None, "20220301.en", "validation"),
        "hf://datasets/org/name@abc/config": HubDataset("org/name", "abc", "config"),
    }
    for path, dataset in spelled.items():
        (source,) = find_sources(path)
        assert source.file == dataset == parse_location(str(dataset)) and source.name == str(dataset)
    for file in ("hf://datasets/org/name/train.parquet", "hf://datasets/org/name/data/a.jsonl.gz"):
        assert parse_location(file) == data_files.RemoteFile(file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Fake hub with a dataset of three files. Returns the recorded calls and the commits."""
    datasets = pytest.importorskip("datasets")
    for number in range(3):
        rows = [json.dumps({"text": text}) for text in words(5, number)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
    asked, commits = [], ["c1"]

    def load(name, config, *, revision, split, streaming):
        asked.append((name, config, revision, split))
        files = {"train": [str(tmp_path / f"{number}.jsonl") for number in range(3)]}
        return datasets.load_dataset("json", data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(hub_datasets, "_package", lambda: type("package", (), {"load_dataset": staticmethod(load)}))
    monkeypatch.setattr(hub_datasets, "_commit", lambda dataset: dataset.revision or commits[-1])
    monkeypatch.setattr(data_files, "RETRY_DELAYS", (0.0,))
    return asked, commits


def test_datasets_of_the_hub_are_streamed_file_by_file(tmp_path, hub, monkeypatch):
    asked, commits = hub
    texts = [text for number in range(3) for text in words(5, number)]
    assert [one.text for one in read_documents("hf://datasets/o/n/c")] == texts
    assert split_into_parts(Source("x", parse_location("hf://datasets/o/n")), None) == [(0, 1), (1, 2), (2, 3)]
    monkeypatch.setattr("eqx_decoders.data.store.tokenize._worker_settings", lambda *_: contextlib.nullcontext())
    options = dict(path="hf://datasets/o/n/c", cache_dir=tmp_path / "cache")
    store = open_store(tmp_path / "run", BYTES, **options)
    assert [BYTES.decode(store[i]) for i in range(15)] == texts and {one[2] for one in asked[-3:]} == {"c1"}
    commits.append("c2")
    count = len(asked)
    assert open_store(tmp_path / "run", BYTES, **options).content_hash == store.content_hash
    assert len(asked) == count  # a run uses a fixed commit, and does not access the hub if its tokens are cached
    assert open_store(tmp_path / "new", BYTES, **options).content_hash != store.content_hash
    with refused(DataError, "hf://datasets/o/n:test", "ValueError: Bad split: test"):
        list(read_documents("hf://datasets/o/n:test"))


def test_connection_errors_of_the_hub(monkeypatch, tmp_path):
    def lost(dataset):
        raise ConnectionError("no route")

    monkeypatch.setattr(hub_datasets, "_commit", lost)
    monkeypatch.setattr(data_files, "RETRY_DELAYS", (0.0,))
    with refused(DataError, "hf://datasets/o/n:train", "2", "ConnectionError"):
        open_store(tmp_path / "run", BYTES, path="hf://datasets/o/n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(ImportError, "'datasets'", "[data]"):
        list(read_documents("hf://datasets/o/n"))


def test_errors_of_packages_become_data_errors(tmp_path, monkeypatch):
    def broken(*_):
        yield from ()
        raise KeyError("of its own")

    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setitem(readers._READERS, "text", readers._SourceReader(broken, lambda *_: []))
    with refused(DataError, "a.txt", "KeyError"):
        list(read_documents(str(tmp_path)))


def test_local_copies_of_remote_files_are_deleted(tmp_path, memory):
    write_array_record(tmp_path / "a.arrayrecord", ["one", "two"])
    memory.pipe_file("/a.arrayrecord", (tmp_path / "a.arrayrecord").read_bytes())
    np.save(tmp_path / "b.npy", np.array([5, 257], np.uint16))
    memory.pipe_file("/b.npy", (tmp_path / "b.npy").read_bytes())
    copy = tmp_path / "x.beside"
    for name in ("a.arrayrecord", "b.npy"):
        found = read_source(Source(name, parse_location(f"memory://{name}")), ReadOptions(tokenizer=BYTES, copy=copy))
        next(found)
        assert copy.exists()
        found.close()
        assert not copy.exists()


def test_changed_checksum_means_changed_remote_file(memory, monkeypatch):
    memory.pipe_file("/a.txt", b"x")
    file, checksums = data_files.RemoteFile("memory://a.txt"), ["one"]
    monkeypatch.setattr(data_files.RemoteFile, "checksum", property(lambda self: checksums[-1]))
    digest = describe(file)["hash"]
    assert is_as_described(file, digest, None)
    checksums.append("two")
    assert not is_as_described(file, digest, None)
    checksums.append(None)  # without a checksum, the file counts as unchanged
    assert is_as_described(file, digest, None)
