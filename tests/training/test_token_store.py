"""The token store: made once, atomically, by one process; changes of its data are named."""

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.errors import DataError
from eqx_decoders.io.chat import ChatTemplate
from eqx_decoders.io.tokenizer import ByteTokenizer, load_tokenizer
from eqx_decoders.training import token_store, token_writer
from eqx_decoders.training.corpus import read_documents
from eqx_decoders.training.token_store import open_store
from tests.stores import documents


BYTES = ByteTokenizer()
FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"document {i} 🙂\n" * (i + 1))
    return folder


def build(corpus, **settings):
    return open_store(corpus.parent / "cache", settings.pop("tokenizer", BYTES), path=str(corpus), **settings)


def test_the_store_holds_the_documents_in_order(corpus):
    store = build(corpus, held_out_fraction=0.3)
    assert [BYTES.decode(store[i]) for i in range(len(store))] == [
        document.text for document in read_documents(str(corpus))
    ]
    assert all(store[i][0] == BYTES.bos_id and store[i][-1] == BYTES.eos_id for i in range(len(store)))
    counts = [store.counts(split) for split in ("train", "held_out")]
    for split, count in zip(("train", "held_out"), counts, strict=True):
        chosen = documents(store, split)
        assert count.documents == len(chosen) > 0
        assert count.tokens == store.sizes(0, len(store))[chosen].sum() == count.bytes + 2 * count.documents
        assert count.targets == count.bytes + count.documents
    assert counts[0].documents + counts[1].documents == 12
    assert set(os.listdir(corpus.parent / "cache")) == {
        "tokens.bin",
        "offsets.npy",
        "held_out.npy",
        "manifest.json",
        "lock",
    }


def test_what_stores_were_made_of_earlier_is_known_by_the_same_hash(corpus, tmp_path):
    """As they were before there were conversations: with another hash their runs could not be resumed."""
    assert build(corpus).content_hash == "f0dd11016b4d8a2fc1bbf1793d0e7b7c"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    template = ChatTemplate(source="no conversation")
    options = dict(path=[str(tmp_path / "a.jsonl")], held_out_path=str(corpus), template=template)
    assert open_store(tmp_path / "s", BYTES, **options).content_hash == "2088aff65430f83544dd45969892ed9a"


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture
def mixed(tmp_path):
    """Two texts, a conversation, a prompt with its completion, and a text."""
    chat = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "groß"}]
    pair = {"prompt": "a b ", "completion": "c"}
    records = [{"text": "one"}, {"text": "two"}, {"messages": chat}, pair, {"text": "three"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))

    def build(source=CHATML, **options):
        template = None if source is None else ChatTemplate(source=source)
        options = dict(path=str(tmp_path / "a.jsonl"), held_out_fraction=0.0, template=template) | options
        return open_store(tmp_path / "cache", BYTES, **options)

    return build


def test_targets_are_stored_where_only_a_part_is_trained_on(mixed):
    store = mixed()
    bos, eos = BYTES.bos_id, BYTES.eos_id
    assert store.has_targets and [BYTES.decode(store[i][store.targets(i)]) for i in range(5)] == [
        *("one", "two", "groß\n", "c", "three")
    ]
    assert [(int(store[i][0]), int(store[i][-1])) for i in (0, 3, 4)] == [(bos, eos)] * 3
    assert BYTES.decode(store[2]) == "<user>Größe?\n<assistant>groß\n" and not {bos, eos} & set(store[2].tolist())
    assert [bool(store.targets(i)[-1]) for i in range(5)] == [True] * 5 and not any(
        store.targets(i)[0] for i in range(5)
    )
    counts = store.counts("train")
    assert counts.targets == sum(store.targets(i).sum() for i in range(5)) == 4 + 4 + 6 + 2 + 6
    assert counts.tokens == store.sizes(0, len(store)).sum() and counts.bytes == 3 + 3 + 6 + 1 + 5, (
        "bytes of what is trained on"
    )
    assert set(os.listdir(store.tokens.filename.parent)) >= {"targets.bin", "tokens.bin"}


def test_a_prompt_keeps_the_ends_that_it_has(tmp_path):
    tokenizer = load_tokenizer(FIXTURES / "chat_llama")
    pairs = [{"prompt": "<|begin|>hello", "completion": " there<|end|>"}, {"prompt": "hello", "completion": " there"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    store = open_store(tmp_path / "cache", tokenizer, path=str(tmp_path / "a.jsonl"), held_out_fraction=0.0)
    assert store[0].tolist() == store[1].tolist() and store.targets(0).tolist() == store.targets(1).tolist()
    there = tokenizer.encode(" there")
    assert store[0].tolist()[-len(there) - 1 :] == [*there.tolist(), tokenizer.eos_id]
    assert store.targets(0).sum() == len(there) + 1


def test_a_store_of_conversations_is_of_one_template(mixed, monkeypatch):
    first = mixed()
    with pytest.raises(DataError, match=r"--chat-template was '\w+' and is '\w+'"):
        mixed(CHATML + " ")
    with pytest.raises(DataError, match=r"--chat-template was '\w+' and is None"):
        mixed(None)
    monkeypatch.setattr(token_store, "write_store", None)
    assert mixed().content_hash == first.content_hash
    monkeypatch.undo()
    shutil.rmtree(first.tokens.filename.parent)
    assert mixed(CHATML + " ").content_hash != first.content_hash


def test_a_lost_file_of_targets_is_made_again(mixed):
    want = [mixed().targets(i).tolist() for i in range(5)]
    (mixed().tokens.filename.parent / "targets.bin").unlink()
    assert [mixed().targets(i).tolist() for i in range(5)] == want


def test_only_so_many_documents(mixed):
    store = mixed(most=3)
    assert len(store) == 3 and store.counts("train").documents == 3 and store.manifest["sources"] == {}


def test_tokens_are_made_once(corpus, monkeypatch):
    first = build(corpus)
    monkeypatch.setattr(token_store, "write_store", None)
    monkeypatch.setattr(token_store, "describe_file", None)  # nor are unchanged files read again
    assert build(corpus).content_hash == first.content_hash


def test_touched_and_moved_files_are_the_same_data(corpus, tmp_path):
    first = build(corpus)
    for file in corpus.iterdir():
        os.utime(file, (1, 1))
    assert build(corpus).content_hash == first.content_hash
    moved = corpus.rename(tmp_path / "elsewhere")
    assert build(moved).content_hash == first.content_hash
    shutil.rmtree(tmp_path / "cache")
    assert build(moved).content_hash == first.content_hash


class Other(ByteTokenizer):
    content_hash = "other"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda folder: (folder / "03.txt").write_text("document 7 🙂\n" * 4), "train:03.txt has other contents"),
        (lambda folder: (folder / "03.txt").write_text("longer " * 40), "train:03.txt has other contents"),
        (lambda folder: (folder / "99.txt").write_text("new"), "train:99.txt is new"),
        (lambda folder: (folder / "00.txt").unlink(), "train:00.txt is gone"),
        ({"tokenizer": Other()}, "--tokenizer was 'bytes-1' and is 'other'"),
        ({"held_out_fraction": 0.5}, "--held-out-fraction was 0.05 and is 0.5"),
        ({"text_field": "body"}, "--text-field was 'text' and is 'body'"),
    ],
)
def test_changed_data_are_refused_by_name(corpus, change, sentence):
    build(corpus)
    settings = change if isinstance(change, dict) else {}
    if not settings:
        change(corpus)
    with pytest.raises(
        DataError, match=f"the data are not those of the tokens in .*: {sentence}.*another run directory"
    ):
        build(corpus, **settings)


def test_many_changes_are_counted(corpus):
    build(corpus)
    for file in corpus.iterdir():
        file.rename(file.with_name(f"new{file.name}"))
    with pytest.raises(DataError, match=r"00.txt is gone; .*; and 16 more\."):
        build(corpus)


@pytest.mark.parametrize("call", range(1, 6))
def test_an_interrupted_store_is_made_again(corpus, monkeypatch, call):
    """Die at each rename and in the middle of the writing, leaving everything as it is."""
    want = build(corpus)
    want_tokens = np.array(want.tokens)
    tokens_file = corpus.parent / "cache" / "tokens.bin"
    tokens_file.write_bytes(b"damaged")
    calls, replace = iter(range(1, 100)), os.replace

    class Killed(BaseException):
        pass

    def die(*arguments):
        if next(calls) == call:
            raise Killed
        return replace(*arguments)

    def die_writing(writer, tokens, held_out):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(token_writer.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(os, "replace", die)
        if call == 5:
            patch.setattr(token_writer._Writer, "_write", die_writing)
        with pytest.raises(Killed):
            build(corpus)
    assert token_store._read_manifest(corpus.parent / "cache") is None
    again = build(corpus)
    np.testing.assert_array_equal(again.tokens, want_tokens)
    assert again.content_hash == want.content_hash and not (corpus.parent / "cache" / "partial").exists()


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "held_out.npy", "manifest.json"])
def test_a_shortened_store_is_made_again(corpus, name):
    want = np.array(build(corpus).tokens)
    file = corpus.parent / "cache" / name
    file.write_bytes(file.read_bytes()[:-3])
    np.testing.assert_array_equal(build(corpus).tokens, want)


def test_two_processes_make_one_store(corpus, monkeypatch):
    made, stores = [], []
    real = token_store.write_store

    def counted(*arguments):
        made.append(1)
        real(*arguments)

    monkeypatch.setattr(token_store, "write_store", counted)
    threads = [threading.Thread(target=lambda: stores.append(build(corpus))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len({store.content_hash for store in stores}) == 1 and len(stores) == 4


def test_a_tokenizer_without_ends_is_refused(corpus):
    class Endless(ByteTokenizer):
        bos_id = eos_id = None

    with pytest.raises(DataError, match="has neither bos nor eos"):
        build(corpus, tokenizer=Endless())


@pytest.mark.parametrize("bos, eos, first, last", [(None, 257, 257, 257), (256, None, 256, ord("\n"))])
def test_one_separator_is_enough(corpus, bos, eos, first, last):
    class Half(ByteTokenizer):
        bos_id, eos_id = bos, eos

    store = build(corpus, tokenizer=Half())
    assert {(int(store[i][0]), int(store[i][-1])) for i in range(len(store))} == {(first, last)}


def test_held_out_tokens_count_their_bytes(tmp_path):
    packed = np.concatenate([np.append(BYTES.encode(f"naïve text {i} 🙂"), 257) for i in range(30)])
    np.save(tmp_path / "a.npy", packed.astype(np.uint16))
    store = open_store(tmp_path / "cache", BYTES, path=str(tmp_path / "a.npy"), held_out_fraction=0.3)
    counts = store.counts("held_out")
    assert counts.bytes == sum(len(BYTES.decode(store[i]).encode()) for i in documents(store, "held_out")) > 0
    assert counts.gzip_nats_per_byte > 0 and store.counts("train").bytes is None


def test_held_out_documents_without_text_have_no_baseline(tmp_path):
    """Tokens that decode to nothing: no bytes, and no rate of compression."""
    np.save(tmp_path / "a.npy", np.array([258, 257] * 4, np.uint16))
    held_out = str(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("text")
    store = open_store(tmp_path / "cache", BYTES, path=str(tmp_path / "a.txt"), held_out_path=held_out)
    counts = store.counts("held_out")
    assert (counts.documents, counts.bytes, counts.gzip_nats_per_byte) == (4, 0, None)
