"""Test the token store: sharing between runs, repair after damage, and changed data."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import open_tokens
from eqx_decoders.data.sources import sources
from eqx_decoders.data.store import shards, store as store_module, tokenize
from eqx_decoders.data.store.corpus import Gzip, held_out_rule, read_documents
from eqx_decoders.data.store.store import open_store
from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.compare import assert_array_equal
from tests.errors import refused
from tests.stores import all_tokens, documents_of


BYTES = ByteTokenizer()
FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"document {i} 🙂\n" * (i + 1))
    return folder


def build(corpus, run="run", **settings):
    settings = {"path": str(corpus), "cache_dir": corpus.parent / "cache", **settings}
    return open_store(corpus.parent / run, settings.pop("tokenizer", BYTES), **settings)


@pytest.fixture
def made(monkeypatch):
    """Return the list of names of sources as they are tokenized."""
    found, real = [], tokenize.make_shard

    def noted(folder, job, *rest):
        real(folder, job, *rest)
        found.append(job.source.name)

    monkeypatch.setattr(tokenize, "make_shard", noted)
    return found


def test_store_has_the_documents_in_order(corpus):
    store = build(corpus, held_out_fraction=0.3)
    assert [BYTES.decode(store[i]) for i in range(len(store))] == [
        document.text for document in read_documents(str(corpus))
    ]
    assert all(store[i][0] == BYTES.bos_id and store[i][-1] == BYTES.eos_id for i in range(len(store)))
    counts, sizes = [store.counts(split) for split in ("train", "held_out")], store.sizes(0, len(store))
    for split, count in zip(("train", "held_out"), counts, strict=True):
        chosen = documents_of(store, split)
        assert count.documents == len(chosen) > 0
        assert count.tokens == sizes[chosen].sum() == count.bytes + 2 * count.documents
        assert count.targets == count.bytes + count.documents
    assert counts[0].documents + counts[1].documents == 12
    assert set(os.listdir(corpus.parent / "run")) == {"manifest.json", "lock"}


def test_ranges_of_documents(corpus):
    (corpus / "05.txt").write_text("")  # a source without documents
    (corpus / "06.txt").write_text("")
    store = build(corpus, held_out_fraction=0.3)
    sizes, held_out = store.sizes(0, 10), store.is_held_out(0, 10)
    assert sizes.dtype == np.int64 and held_out.dtype == bool and 0 < held_out.sum() < 10
    assert sizes.tolist() == [len(store[i]) for i in range(10)]
    for start in range(11):
        for stop in range(start, 11):
            assert_array_equal(store.sizes(start, stop), sizes[start:stop])
            assert_array_equal(store.is_held_out(start, stop), held_out[start:stop])
    for wrong in (-1, 10):
        with pytest.raises(IndexError):
            store[wrong]
    for wrong in ((0, 11), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            store.sizes(*wrong)
    assert len(list(store)) == 10


def test_number_of_open_files_is_bounded(corpus, monkeypatch):
    monkeypatch.setattr("eqx_decoders.data.store.store.MAX_OPEN_SHARDS", 3)
    store = build(corpus)
    assert all_tokens(store) == all_tokens(build(corpus)) and store.shard.cache_info().currsize == 3


@pytest.mark.parametrize("own", [False, True], ids=["fraction", "path"])
def test_list_of_documents_equals_the_shards(corpus, tmp_path, monkeypatch, own):
    (corpus / "05.txt").write_text("")
    lines = "".join(json.dumps({"text": f"record {number}"}) + "\n" for number in range(7))
    (tmp_path / "v.jsonl").write_text(lines)
    held_out = {"held_out_path": str(tmp_path / "v.jsonl")} if own else {"held_out_fraction": 0.3}
    first = build(corpus, **held_out)
    sizes, chosen = (each(0, len(first)).tolist() for each in (first.sizes, first.is_held_out))
    assert chosen == [False] * 11 + [True] * 7 or not own
    monkeypatch.setattr("eqx_decoders.data.store.store.MAX_OPEN_SHARDS", 3)
    held_out["cache_dir"] = tmp_path / "another"
    store = build(corpus, "other", **held_out)
    (file,) = (tmp_path / "another" / "tokens").glob("*/*.documents")
    assert store.manifest["counts"] == first.manifest["counts"] and len(store) == (18 if own else 11)
    again = build(corpus, "other", **held_out)
    monkeypatch.setattr("eqx_decoders.data.store.store.Shard", None)  # no shard is opened
    for start, stop in ((0, 11), (3, 9), (4, 4), (10, 11), (0, len(sizes))):
        assert again.sizes(start, stop).tolist() == sizes[start:stop]
        assert again.is_held_out(start, stop).tolist() == chosen[start:stop]
    for wrong in ((0, 99), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            again.sizes(*wrong)
    monkeypatch.undo()
    monkeypatch.setattr("eqx_decoders.data.store.store.MAX_OPEN_SHARDS", 3)
    file.write_bytes(file.read_bytes()[:-3])
    assert build(corpus, "other", **held_out).sizes(0, 11).tolist() == sizes[:11]


def test_hashes_are_stable(corpus, tmp_path):
    """If hashes changed, existing runs could not be resumed."""
    assert build(corpus).content_hash == "f0dd11016b4d8a2fc1bbf1793d0e7b7c"
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    template = ChatTemplate(source="no conversation")
    options = dict(path=[str(tmp_path / "a.jsonl")], held_out_path=str(corpus), template=template)
    assert build(corpus, "s", **options).content_hash == "2088aff65430f83544dd45969892ed9a"


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
        return open_store(tmp_path / "run", BYTES, cache_dir=tmp_path / "run", **options)

    return build


def test_targets_are_stored(mixed):
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
    assert counts.tokens == store.sizes(0, 5).sum() and counts.bytes == 3 + 3 + 6 + 1 + 5  # bytes of targets


def test_special_tokens_of_prompts_are_not_repeated(tmp_path):
    tokenizer = load_tokenizer(FIXTURES / "chat_llama")
    pairs = [{"prompt": "<|begin|>hello", "completion": " there<|end|>"}, {"prompt": "hello", "completion": " there"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    store = open_store(tmp_path / "run", tokenizer, path=str(tmp_path / "a.jsonl"), held_out_fraction=0.0)
    assert store[0].tolist() == store[1].tolist() and store.targets(0).tolist() == store.targets(1).tolist()
    there = tokenizer.encode(" there")
    assert store[0].tolist()[-len(there) - 1 :] == [*there.tolist(), tokenizer.eos_id]
    assert store.targets(0).sum() == len(there) + 1


def test_store_of_conversations_has_one_template(mixed, tmp_path, made):
    first = mixed()
    for other in (CHATML + " ", None):
        with refused(DataError, "--chat-template"):
            mixed(other)
    assert mixed().content_hash == first.content_hash and made == ["a.jsonl"]
    shutil.rmtree(tmp_path / "run")
    assert mixed(CHATML + " ").content_hash != first.content_hash and made == ["a.jsonl"] * 2


def test_store_of_the_first_documents(mixed, tmp_path):
    config = DataConfig(path=str(tmp_path / "a.jsonl"), held_out_fraction=0.0)
    whole = mixed()
    store = open_tokens(config, BYTES, tmp_path / "sample", template=ChatTemplate(source=CHATML), max_documents=3)[""]
    assert len(store) == 3 and store.counts("train").documents == 3 and store.manifest["sources"] == {}
    assert all_tokens(store) == all_tokens(whole)[:3] and store.has_targets
    assert store.targets(2).tolist() == whole.targets(2).tolist()


def test_cache_directory(corpus, tmp_path, monkeypatch):
    def made_in(cache_dir, **environment):
        for name in ("EQX_DECODERS_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        config = DataConfig(path=str(corpus), cache_dir=None if cache_dir is None else str(cache_dir))
        store = open_tokens(config, BYTES, tmp_path / "run")[""]
        (folder,) = {file.parents[2] for file in tmp_path.glob("**/tokens/*/*.tokens")}
        shutil.rmtree(folder)
        return folder if len(store) == 12 else None

    own, users = {"EQX_DECODERS_CACHE": tmp_path / "own"}, {"XDG_CACHE_HOME": tmp_path / "users"}
    assert made_in(tmp_path / "given", **own, **users) == tmp_path / "given"
    assert made_in(None, **own, **users) == tmp_path / "own"
    assert made_in(None, **users) == tmp_path / "users" / "eqx_decoders"
    assert made_in(None, HOME=tmp_path / "home") == tmp_path / "home" / ".cache" / "eqx_decoders"
    with refused(ConfigError, "DataConfig.cache_dir='gs://x'"):
        made_in("gs://x")
    with refused(ConfigError, "EQX_DECODERS_CACHE='gs://y'"):
        made_in(None, EQX_DECODERS_CACHE="gs://y")


# --- made once --------------------------------------------------------------------------------------------------------


def test_corpora_are_tokenized_once_for_all_runs(corpus, made, monkeypatch):
    first = build(corpus)
    assert made == [f"{i:02}.txt" for i in range(12)]
    assert build(corpus, "other").content_hash == first.content_hash and len(made) == 12
    for file in corpus.iterdir():  # old enough that file times are trusted
        os.utime(file, (1, 1))
    build(corpus, "third")
    monkeypatch.setattr(sources, "_hash", None)  # unchanged files are not read again
    assert all_tokens(build(corpus, "fourth")) == all_tokens(first) == all_tokens(build(corpus, "third"))
    assert len(made) == 12


def test_changed_file_rewrites_one_shard(corpus, made):
    old = all_tokens(build(corpus))
    (corpus / "03.txt").write_text("new words")
    new = all_tokens(build(corpus, "other"))
    assert made[12:] == ["03.txt"] and new[3] != old[3] and new[:3] + new[4:] == old[:3] + old[4:]
    (corpus / "03.txt").rename(corpus / "99.txt")
    assert all_tokens(build(corpus, "third")) == [*new[:3], *new[4:], new[3]] and len(made) == 13


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": load_tokenizer(FIXTURES / "chat_llama")},
        {"text_field": "body"},
        {"template": ChatTemplate(source="x")},
    ],
    ids=["tokenizer", "text_field", "template"],
)
def test_different_tokenization_settings_use_different_shards(corpus, made, change):
    build(corpus)
    build(corpus, "other", **change)
    assert len(made) == 24


def test_changed_held_out_fraction_reuses_tokens(corpus, made):
    texts = [document.text for document in read_documents(str(corpus))]
    for fraction in (0.05, 0.3, 0.6, 0.0, 1e-9, 0.999):
        store = build(corpus, f"run {fraction}", held_out_fraction=fraction)
        rule = held_out_rule(list(read_documents(str(corpus))), fraction)
        held_out = [rule(document) for document in read_documents(str(corpus))]
        assert store.is_held_out(0, 12).tolist() == held_out
        counts, gzip = store.counts("held_out"), Gzip()
        text = "".join(text for text, chosen in zip(texts, held_out, strict=True) if chosen).encode()
        gzip.add(text)
        assert (counts.documents, counts.bytes, counts.gzip_nats_per_byte) == (
            *(sum(held_out), len(text)),
            gzip.nats_per_byte(),
        )
    assert len(made) == 12


def test_equal_content_with_other_file_types_is_not_shared(tmp_path, made):
    line = '{"text": "one"}\n'
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text(line)
    store = open_store(tmp_path / "run", BYTES, path=[str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])
    assert [BYTES.decode(store[i]) for i in range(2)] == [line, "one"]


def test_touched_and_moved_files_are_unchanged_data(corpus, tmp_path):
    first = build(corpus)
    for file in corpus.iterdir():
        os.utime(file, (1, 1))
    assert build(corpus).content_hash == first.content_hash
    moved = corpus.rename(tmp_path / "elsewhere")
    assert build(moved).content_hash == first.content_hash
    shutil.rmtree(tmp_path / "run")
    assert build(moved).content_hash == first.content_hash


def test_unrelated_files_are_not_changed(corpus):
    mine = {name: name.encode() for name in ("tokens.bin", "targets.bin", "offsets.npy", "held_out.npy")}
    run = corpus.parent / "run"
    run.mkdir()
    for name, content in mine.items():
        (run / name).write_bytes(content)
    build(corpus)
    assert {name: (run / name).read_bytes() for name in mine} == mine
    (run / "manifest.json").write_text('{"name": "my page"}')
    with refused(DataError, "manifest.json"):
        build(corpus)
    assert (run / "manifest.json").read_text() == '{"name": "my page"}'


class Other(ByteTokenizer):
    content_hash = "other"


@pytest.mark.slow(fast=("same-size", "longer", "new", "deleted"))
@pytest.mark.parametrize(
    "change, names",
    [
        pytest.param(("03.txt", "document 7 🙂\n" * 4), ["train:03.txt"], id="same-size"),
        pytest.param(("03.txt", "longer " * 40), ["train:03.txt"], id="longer"),
        pytest.param(("99.txt", "new"), ["train:99.txt"], id="new"),
        pytest.param(("00.txt", None), ["train:00.txt"], id="deleted"),
        pytest.param({"tokenizer": Other()}, ["--tokenizer", "'bytes-1'", "'other'"], id="tokenizer"),
        pytest.param(
            {"held_out_fraction": 0.5},
            ["--held-out-fraction 0.05", "--held-out-fraction 0.5"],
            id="held-out-fraction",
        ),
        pytest.param({"text_field": "body"}, ["--text-field", "'text'", "'body'"], id="text-field"),
    ],
)
def test_changed_data_are_refused_by_name(corpus, change, names):
    build(corpus)
    settings = change if isinstance(change, dict) else {}
    if not settings:
        name, text = change
        (corpus / name).unlink(missing_ok=True)
        if text is not None:
            (corpus / name).write_text(text)
    with refused(DataError, corpus.parent / "run", *names):
        build(corpus, **settings)


def test_many_changes_are_counted(corpus):
    build(corpus)
    for file in corpus.iterdir():
        file.rename(file.with_name(f"new{file.name}"))
    with refused(DataError, "00.txt", "16"):
        build(corpus)


@pytest.mark.slow(fast=("cut", "flipped", "gone"))
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "no manifest", "half a manifest"])
def test_damaged_stores_are_repaired(corpus, made, damage):
    first = build(corpus)
    want, manifest = all_tokens(first), corpus.parent / "run" / "manifest.json"
    shard = next((corpus.parent / "cache" / "tokens").glob("*/*.tokens"))
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-3])
    elif damage == "flipped":
        content = shard.read_bytes()
        shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "gone":
        shard.unlink()
    else:
        manifest.write_bytes(manifest.read_bytes()[: 100 * (damage == "half a manifest")])
    again = build(corpus)
    assert all_tokens(again) == want and again.content_hash == first.content_hash
    assert len(made) == 12 + (damage in ("cut", "flipped", "gone"))


@pytest.mark.parametrize("moment", ["writing", "moving", "manifest"])
def test_interrupted_store_is_completed(corpus, made, monkeypatch, moment):
    """After an exception at the fifth shard or at the manifest, only the finished shards are left."""
    calls, replace = iter(range(100)), os.replace

    class Stop(BaseException):
        pass

    def stop(*arguments):
        if (next(calls) == 4 and moment == "moving") or (moment == "manifest" and arguments[1].name == "manifest.json"):
            raise Stop
        return replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        if moment == "writing":
            writer, real = tokenize.write_shard, iter(range(100))
            patch.setattr(
                tokenize, "write_shard", lambda *rest, **options: stop_at(next(real) == 4, writer, *rest, **options)
            )

        def stop_at(now, function, *rest, **options):
            if now:
                rest[0].write_bytes(b"half")
                raise Stop
            return function(*rest, **options)

        with pytest.raises(Stop):
            build(corpus)
    finished = 12 if moment == "manifest" else len(made)
    assert 0 < finished <= 12 and not (corpus.parent / "run" / "manifest.json").exists()
    assert {file.suffix for file in (corpus.parent / "cache" / "tokens").glob("*/*")} == {".tokens"}
    again = build(corpus)
    assert len(made) == 12 and len(set(made)) == 12
    assert all_tokens(again) == all_tokens(build(corpus, "other", cache_dir=corpus.parent / "another"))


def test_concurrent_threads_write_one_store(corpus, made):
    stores = []
    threads = [threading.Thread(target=lambda run=run: stores.append(build(corpus, run))) for run in "aabb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [f"{i:02}.txt" for i in range(12)]
    assert len(stores) == 4 and len({store.content_hash for store in stores}) == 1


def test_tokenizer_without_separators_is_refused(corpus):
    class Endless(ByteTokenizer):
        bos_id = eos_id = None

    with refused(DataError, "bos", "eos"):
        build(corpus, tokenizer=Endless())


def test_tokenizer_with_neither_eos_nor_written_bos_is_refused(monkeypatch):
    class Half(ByteTokenizer):
        eos_id = None

    assert shards.separators(Half()) == ((256,), None)
    monkeypatch.setattr(shards, "start_ids", lambda tokenizer: ())
    with refused(DataError, "bos_id=256"):
        shards.separators(Half())


@pytest.mark.parametrize("bos, eos", [(None, 257), (256, None)])
def test_one_separator_is_enough(corpus, bos, eos):
    """Documents start with bos or without a separator, never with eos as a substitute."""

    class Half(ByteTokenizer):
        bos_id, eos_id = bos, eos

    store = build(corpus, tokenizer=Half())
    assert all_tokens(build(corpus, "other")) != all_tokens(store)
    assert {int(store[i][0]) == 256 for i in range(len(store))} == {bos is not None}
    assert {int(store[i][-1]) for i in range(len(store))} == {ord("\n") if eos is None else eos}
    assert not any(257 in store[i][:-1] for i in range(len(store)))


@pytest.mark.parametrize("fraction", [0.3, 1.0])
def test_held_out_tokens_count_their_bytes(tmp_path, fraction):
    packed = np.concatenate([np.append(BYTES.encode(f"naïve text {i} 🙂"), 257) for i in range(30)])
    np.save(tmp_path / "a.npy", packed.astype(np.uint16))
    store = open_store(tmp_path / "run", BYTES, path=str(tmp_path / "a.npy"), held_out_fraction=fraction)
    counts = store.counts("held_out")
    assert counts.bytes == sum(len(BYTES.decode(store[i]).encode()) for i in documents_of(store, "held_out")) > 0
    assert counts.gzip_nats_per_byte > 0 and store.counts("train").bytes == (None if fraction < 1 else 0)


def test_held_out_documents_without_text_have_no_baseline(tmp_path):
    """The tokens decode to an empty text."""
    np.save(tmp_path / "a.npy", np.array([258, 257] * 4, np.uint16))
    held_out = str(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("text")
    store = open_store(tmp_path / "run", BYTES, path=str(tmp_path / "a.txt"), held_out_path=held_out)
    counts = store.counts("held_out")
    assert (counts.documents, counts.bytes, counts.gzip_nats_per_byte) == (4, 0, None)


# --- all held out -----------------------------------------------------------------------------------------------------


def test_all_documents_can_be_held_out(corpus, tmp_path):
    trained, held_out = build(corpus, held_out_fraction=0.0), build(corpus, "set", held_out_fraction=1.0)
    assert held_out.is_held_out(0, 12).all() and not trained.is_held_out(0, 12).any()
    assert held_out.content_hash == trained.content_hash  # the hash does not depend on the split
    counts = held_out.counts("held_out")
    assert counts[:4] == trained.counts("train")[:4] and counts.gzip_nats_per_byte > 0
    assert (
        held_out.counts("train").documents == 0 == build(corpus, "third", held_out_fraction=0.0).counts("held_out")[0]
    )
    one = tmp_path / "one.txt"
    one.write_text("a single one")
    assert build(one, "single", held_out_fraction=1.0).is_held_out(0, 1).all()


def test_documents_are_recounted_for_another_split(corpus, made):
    old = build(corpus, held_out_fraction=0.0)
    manifest = corpus.parent / "run" / "manifest.json"
    content = json.loads(manifest.read_bytes()) | {"fingerprint": "as it was"}
    manifest.write_text(json.dumps(content))
    new = build(corpus, held_out_fraction=1.0)
    assert new.content_hash == "as it was" and new.counts("held_out").documents == 12 and len(made) == 12
    assert all_tokens(build(corpus, held_out_fraction=1.0)) == all_tokens(old)


def test_gzip_baseline_uses_the_start_of_large_corpora(corpus, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_COMPRESSED", 300)
    monkeypatch.setattr(tokenize, "_worker_settings", lambda *_: contextlib.nullcontext())  # tokenize in this process
    real = store_module.make_task
    monkeypatch.setattr(store_module, "make_task", lambda *rest: real(*rest)._replace(size=None))
    counts = build(corpus, held_out_fraction=1.0).counts("held_out")
    sizes = [len(file.read_bytes()) for file in sorted(corpus.iterdir())]
    assert counts.bytes == sum(sizes)
    assert counts.gzip_bytes == next(total for total in itertools.accumulate(sizes) if total >= 300)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unwritable_cache_is_named(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with refused(DataError, tmp_path / "file", "--cache-dir (DataConfig.cache_dir)"):
        build(corpus, cache_dir=tmp_path / "file")

    def full(*_, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenize, "write_shard", full)
    with refused(DataError, tmp_path / "cache" / "tokens", "No space left on device"):
        build(corpus)
    assert not list((tmp_path / "cache").glob("tokens/*/*"))
    monkeypatch.setattr(sources, "_hash", lambda *_: (tmp_path / "nowhere").read_bytes())
    with refused(DataError, "corpus/00.txt"):
        build(corpus)


def test_token_files_with_equal_bytes_and_different_extensions(tmp_path):
    """In a .bin file, the header of an .npy file would be read as tokens."""

    class Wide(ByteTokenizer):
        vocab_size = 1 << 16

    np.save(tmp_path / "a.npy", np.array([1, 2, 257], np.uint16))
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.npy").read_bytes())
    paths = [str(tmp_path / name) for name in ("a.npy", "b.bin")]
    store = open_store(tmp_path / "run", Wide(), path=paths, held_out_fraction=0.0)
    assert len(store) == 2 and store[0].tolist() == [256, 1, 2, 257] and len(store[1]) > 60


def test_manifest_with_other_shard_keys_is_accepted(corpus):
    """Keys change if the images of the documents are moved."""
    first = build(corpus)
    manifest = corpus.parent / "run" / "manifest.json"
    content = json.loads(manifest.read_bytes())
    content["shards"][3]["key"] = "of another folder"
    manifest.write_text(json.dumps(content))
    again = build(corpus)
    assert all_tokens(again) == all_tokens(first) and again.order_hash == first.order_hash


def test_new_held_out_path_is_reported_as_one_change(corpus, tmp_path):
    build(corpus)
    (tmp_path / "v.txt").write_text("v")
    with refused(DataError, "--held-out-fraction 0.05", "--held-out") as caught:
        build(corpus, held_out_path=str(tmp_path / "v.txt"))
    assert "v.txt" not in str(caught.value)


def test_token_ids_above_the_model_s_vocabulary_are_refused(corpus):
    """A tokenizer may have more ids than the model (Gemma 3), as long as documents do not use them."""
    np.save(corpus / "x.npy", np.array([5, 6, 300, 7], np.uint16))
    tokenizer = load_tokenizer(FIXTURES / "chat_llama")
    store = build(corpus, tokenizer=tokenizer, held_out_fraction=0.0)
    store.check_ids(tokenizer.vocab_size)
    store.check_ids(301)
    store.check_ids(300, placeholders=(299, 300))
    with refused(DataError, "train:", "x.npy", "300"):
        store.check_ids(300, placeholders=(299,))
