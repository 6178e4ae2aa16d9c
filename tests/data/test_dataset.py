"""Test batches: every token occurs once, resuming is exact, and any number of processes gives equal batches."""

import collections
import itertools
import json
import math
import random
import threading
import time

import numpy as np
import pytest

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset, training_texts
from eqx_decoders.data.store.corpus import Gzip
from eqx_decoders.errors import ConfigError, DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused
from tests.stores import documents_of


SEQ_LEN, BATCH = 16, 4
FIELDS = ("tokens", "segment_ids", "positions", "loss_mask")


class NumberTokenizer:
    """Tokenizer that encodes texts of numbers as token ids. Id 0 separates documents."""

    vocab_size, bos_id, eos_id, content_hash = 10_000, 0, 0, "numbers"

    def encode(self, text):
        return np.array(text.split(), np.int32)

    def encode_many(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids if i)

    def save(self, directory):
        pass


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return documents of 1 to 70 tokens, with sizes near multiples of 16. Token ids 1, 2, 3, … do not repeat."""
    folder = tmp_path_factory.mktemp("corpus")
    sizes = [1, 2, 12, 13, 14, 15, 16, 17, 18, 29, 30, 31, 70, 3, 3, 45, 1, 64, 5, 8, 9, 33, 27, 1]
    numbers = itertools.count(1)
    texts = [" ".join(str(next(numbers)) for _ in range(size)) for size in sizes]
    for name, kept in (("train", texts), ("held_out", texts[::-1])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in kept))
    return folder


@pytest.fixture
def make(corpus):
    made = []

    def build(split="train", share=None, **settings):
        settings = {"batch_size": BATCH, "seq_len": SEQ_LEN, "seed": 7, **settings}
        paths = {"path": str(corpus / "train.jsonl"), "held_out_path": str(corpus / "held_out.jsonl")}
        config = DataConfig(**{**paths, **settings})
        made.append(make_dataset(config, NumberTokenizer(), folder=corpus / "cache", split=split, rows=share))
        return made[-1]

    yield build
    for batches in made:
        batches.close()


def take(batches, count):
    return [next(batches) for _ in range(count)]


def rows(batches):
    """Return a dictionary of arrays for each row."""
    return [{name: getattr(batch, name)[i] for name in FIELDS} for batch in batches for i in range(len(batch.tokens))]


def assert_equal_batches(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        for name in FIELDS:
            assert_array_equal(getattr(one, name), getattr(other, name))


def used(row):
    return row["tokens"][row["segment_ids"] > 0]


@pytest.mark.slow(fast=("unpacked",))
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
def test_epoch_contains_every_token(make, pack):
    batches = make(pack=pack)
    epoch = batches.rows_per_epoch
    assert epoch % BATCH, "the test wants a batch across the end of an epoch"
    found = rows(take(batches, 3 * epoch // BATCH + 1))
    everything = collections.Counter(
        np.concatenate([batches.store[i] for i in documents_of(batches.store, "train")]).tolist()
    )
    orders = []
    for start in (0, epoch, 2 * epoch):
        tokens = [used(row)[0 if pack else int(row["tokens"][0] != 0) :] for row in found[start : start + epoch]]
        assert collections.Counter(np.concatenate(tokens).tolist()) == everything
        orders.append([row["tokens"].tolist() for row in found[start : start + epoch]])
    assert orders[0] != orders[1] != orders[2]
    assert sorted(orders[0]) != sorted(orders[1]) or not pack, "documents are packed anew in each epoch"


@pytest.mark.parametrize("split, pack", list(itertools.product(["train", "held_out"], [True, False])))
def test_segments_positions_and_mask(make, split, pack):
    batches = make(split, pack=pack)
    found = rows(take(batches, -(-batches.rows_per_epoch // BATCH)))
    most = 0
    for row in found:
        segments = row["segment_ids"]
        count = int(segments.max())
        most = max(most, count)
        size = int((segments > 0).sum())
        assert np.all(segments[size:] == 0) and np.all(np.diff(segments[:size]) >= 0)
        assert set(segments[:size]) == set(range(1, count + 1))
        assert not row["tokens"][size:].any() and not row["loss_mask"][size:].any()
        for segment in range(1, count + 1):
            here = segments == segment
            assert_array_equal(row["positions"][here], np.arange(here.sum()))
            assert_array_equal(row["loss_mask"][here], np.arange(here.sum()) > 0)
            inner = row["tokens"][here]
            inner = inner[inner > 0]  # a piece of a document has consecutive ids
            assert_array_equal(inner, np.arange(len(inner)) + (inner[0] if len(inner) else 0))
    assert most > 1 if pack else most == 1


@pytest.mark.slow(fast=("2-held_out-True", "2-held_out-False", "2-train-False"))
@pytest.mark.parametrize("split, pack", [("held_out", True), ("held_out", False), ("train", False)])
@pytest.mark.parametrize("seq_len", [2, 3, 16, 300])
def test_every_token_is_a_target_once(make, split, pack, seq_len):
    batches = make(split, pack=pack, seq_len=seq_len)
    found = rows(take(batches, -(-batches.rows_per_epoch // BATCH)))[: batches.rows_per_epoch]
    targets = collections.Counter()
    for row in found:  # targets of the loss: next tokens in the same segment
        same = (row["segment_ids"][1:] == row["segment_ids"][:-1]) & (row["segment_ids"][1:] > 0)
        assert_array_equal(same, row["loss_mask"][1:])
        targets.update(row["tokens"][1:][same].tolist())
    counts = batches.store.counts(split)
    assert targets.pop(0) == counts.documents == 24, "the end of each document"
    assert set(targets.values()) == {1} and len(targets) == max(targets) == counts.tokens - 2 * counts.documents
    assert counts.targets == len(targets) + counts.documents


def test_held_out_batches_are_one_epoch(make):
    batches = make("held_out")
    found = list(batches)
    assert len(found) == math.ceil(batches.rows_per_epoch / BATCH) and batches.rows_per_epoch % BATCH
    assert all(batch.tokens.shape == (BATCH, SEQ_LEN) for batch in found)
    assert not found[-1].segment_ids[batches.rows_per_epoch % BATCH :].any()
    assert list(batches) == []
    assert_equal_batches(list(batches.rewind()), found)


def test_packing_wastes_only_the_last_row(make):
    batches = make()
    found = rows(take(batches, batches.rows_per_epoch))[: batches.rows_per_epoch]
    gaps = sorted(int((row["segment_ids"] == 0).sum()) for row in found)
    assert gaps[:-1] == [0] * (len(gaps) - 1)


@pytest.mark.parametrize("split, pack", [("train", True), ("train", False), ("held_out", True)])
def test_resume_is_exact_everywhere(make, split, pack):
    straight = make(split, pack=pack)
    length = straight.rows_per_epoch // BATCH + 1
    total = 2 * length + 5 if split == "train" else length
    states, found = [], []
    for _ in range(total):
        states.append(json.loads(json.dumps(straight.get_state())))
        found.append(next(straight))
    for point in sorted({0, 1, length - 2, length - 1, total - 1}):
        resumed = make(split, pack=pack)
        next(resumed)
        resumed.set_state(states[point])
        assert resumed.get_state() == states[point]
        assert_equal_batches(take(resumed, min(5, total - point)), found[point : point + 5])
        if split == "held_out" and point + 5 >= total:
            assert list(resumed) == []


def test_state_can_be_set_backwards_and_after_close(make):
    batches = make()
    state, first = batches.get_state(), take(batches, 3)
    batches.set_state(state)
    assert_equal_batches(take(batches, 2), first[:2])
    batches.close()
    assert_equal_batches([next(batches)], first[2:])


def test_resume_with_other_batches(make):
    few, many = make(batch_size=2), make(batch_size=6)
    straight = rows(take(make(batch_size=2), 9))
    taken = rows(take(few, 3))
    many.set_state(few.get_state())
    taken += rows(take(many, 2))
    for one, other in zip(straight, taken, strict=True):
        assert_array_equal(one["tokens"], other["tokens"])


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("share", [[0, 1], [2], [0, 3], [3, 1, 2]], ids=["01", "2", "03", "312"])
def test_processes_get_their_rows_of_the_global_batch(make, split, share):
    alone = make(split)
    whole = take(alone, alone.rows_per_epoch // BATCH + 1)
    rows = [Batch(**{name: getattr(batch, name)[share] for name in FIELDS}) for batch in whole]
    assert_equal_batches(take(make(split, share), len(whole)), rows)


def test_seeds_give_different_orders(make):
    one, other = rows(take(make(seed=1), 2)), rows(take(make(seed=2), 2))
    assert [row["tokens"].tolist() for row in one] != [row["tokens"].tolist() for row in other]


@pytest.mark.parametrize("name, value", [("seed", 8), ("seq_len", 8), ("pack", False), ("split", "held_out")])
def test_state_of_other_data_is_refused(make, name, value):
    state = make().get_state()
    with refused(DataError, name, state[name], value):
        make(**{name: value}).set_state(state)


def test_state_of_other_text_is_refused(make, corpus, tmp_path):
    config = DataConfig(path=str(corpus / "held_out.jsonl"), batch_size=BATCH, seq_len=SEQ_LEN, seed=7)
    state = make().get_state()
    with make_dataset(config, NumberTokenizer(), folder=tmp_path) as other, refused(DataError, "data", state["data"]):
        other.set_state(state)


@pytest.mark.parametrize(
    "settings, names",
    [
        pytest.param({"batch_size": 0}, ["DataConfig.batch_size=0", "1"], id="batch_size"),
        pytest.param({"seq_len": 1}, ["DataConfig.seq_len=1", "2"], id="seq_len"),
        pytest.param({"seed": -1}, ["DataConfig.seed=-1"], id="seed"),
        pytest.param({"held_out_fraction": 1.0}, ["held_out_fraction=1.0", "0"], id="fraction-1"),
        pytest.param({"held_out_fraction": -0.1}, ["held_out_fraction=-0.1"], id="fraction-negative"),
        pytest.param({"share": [0, 4]}, ["rows=(0, 4)", "0 to 3", "DataConfig.batch_size=4"], id="rows"),
        pytest.param({"share": []}, ["rows=()", "0 to 3"], id="no-rows"),
        pytest.param({"split": "heldout"}, ["'heldout'", "'held_out'"], id="split"),
    ],
)
def test_invalid_settings_are_refused(make, settings, names):
    with refused(ConfigError, *names):
        make(**settings)


def test_empty_split_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("only one document")
    config = DataConfig(path=str(tmp_path / "one.txt"))
    with refused(DataError, "'held_out'", "--held-out"):
        make_dataset(config, ByteTokenizer(), folder=tmp_path / "cache", split="held_out")
    with make_dataset(config, ByteTokenizer(), folder=tmp_path / "cache") as batches:
        row = next(batches)
    assert ByteTokenizer().decode(row.tokens[0][row.segment_ids[0] > 0]) == "only one document"
    assert row.tokens[0, 0] == 256 and row.tokens[0, 18] == 257 and row.loss_mask.sum() == 8 * 18


def test_bytes_and_gzip_of_the_held_out_text(make, corpus):
    texts = [json.loads(line)["text"] for line in (corpus / "held_out.jsonl").read_text().splitlines()]
    counts = make().store.counts("held_out")
    assert counts.bytes == sum(len(text.encode()) for text in texts)
    gzip = Gzip()
    gzip.add("".join(texts).encode())
    assert_allclose(counts.gzip_nats_per_byte, gzip.nats_per_byte(), rtol=1e-12)


def test_tokenizer_training_texts_exclude_held_out_documents(corpus):
    config = DataConfig(path=str(corpus / "train.jsonl"), held_out_fraction=0.3)
    texts = [json.loads(line)["text"] for line in (corpus / "train.jsonl").read_text().splitlines()]
    seen = list(training_texts(config))
    assert 5 < len(seen) < len(texts) and set(seen) < set(texts)
    assert list(training_texts(config, max_bytes=len(seen[0] + seen[1]))) == seen[:2]
    own = DataConfig(path=config.path, held_out_path=str(corpus / "held_out.jsonl"))
    assert list(training_texts(own)) == texts


def test_reader_threads_stop_after_close(make):
    batches = make()
    next(batches)
    batches.close()
    until = time.monotonic() + 10
    while any(one.name.startswith("batches") for one in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(one.name.startswith("batches") for one in threading.enumerate())


def test_failed_batch_is_retried(make, monkeypatch):
    """Prefetched batches after the failed batch are also retried."""
    want = [batch.tokens for batch in itertools.islice(make(), 4)]
    batches, real, rows = make(), Batches._fill, []

    def fill(self, row, *arrays):
        rows.append(row)
        if row == 2 * BATCH and rows.count(row) == 1:
            raise DataError("torn")
        return real(self, row, *arrays)

    monkeypatch.setattr(Batches, "_fill", fill)
    got = [next(batches).tokens for _ in range(2)]
    with refused(DataError, "torn"):
        next(batches)
    got += [next(batches).tokens for _ in range(2)]
    for one, other in zip(got, want, strict=True):
        assert_array_equal(one, other)


def test_tokenizer_training_texts_equal_the_training_split(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in range(40)))
    config, tokenizer = DataConfig(path=str(tmp_path / "a.jsonl"), held_out_fraction=0.2), ByteTokenizer()
    with make_dataset(config, tokenizer, folder=tmp_path / "cache") as batches:
        store = batches.store
    seen = list(training_texts(config))
    assert seen == [tokenizer.decode(store[i]) for i in documents_of(store, "train")]
    held_out = {tokenizer.decode(store[i]) for i in documents_of(store, "held_out")}
    assert held_out and held_out.isdisjoint(seen) and len(held_out) + len(seen) == 40


# --- conversations ----------------------------------------------------------------------------------------------------

TALK = ChatTemplate(source="{% for m in messages %}{{ m.content }} {% endfor %}")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Return conversations of 2 to 50 different tokens, in turns of any length, and a few pairs and texts."""
    folder, numbers, generator = tmp_path_factory.mktemp("chats"), itertools.count(1), random.Random(0)
    records = []
    for size in [2, 3, 15, 16, 17, 30, 31, 32, 50, 8, 8, 8, 5, 4, 12, 13, 14, 2, 9, 10]:
        texts = [str(next(numbers)) for _ in range(size)]
        cuts = sorted({0, size, *generator.sample(range(1, size), min(3, size - 1))})
        parts = [" ".join(texts[a:b]) for a, b in itertools.pairwise(cuts)]
        roles = itertools.cycle(["user", "assistant"])
        records.append({"messages": [{"role": next(roles), "content": part} for part in parts]})
    records += [{"prompt": f"{next(numbers)} ", "completion": f"{next(numbers)} {next(numbers)}"} for _ in range(3)]
    records += [{"text": f"{next(numbers)} {next(numbers)}"} for _ in range(3)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return folder


@pytest.fixture
def make_chats(chats):
    made = []

    def build(split="train", share=None, **settings):
        settings = {"batch_size": BATCH, "seq_len": SEQ_LEN, "seed": 7, "held_out_fraction": 0.3, **settings}
        config = DataConfig(path=str(chats / "a.jsonl"), **settings)
        cache = chats / f"cache {config.held_out_fraction}"
        made.append(make_dataset(config, NumberTokenizer(), folder=cache, split=split, template=TALK, rows=share))
        return made[-1]

    yield build
    for batches in made:
        batches.close()


def targets_of(found):
    """Return how often each token is a target of the loss."""
    seen = collections.Counter()
    for row in found:
        same = (row["segment_ids"][1:] == row["segment_ids"][:-1]) & (row["segment_ids"][1:] > 0)
        assert not (row["loss_mask"][1:] & ~same).any() and not row["loss_mask"][0]
        seen.update(row["tokens"][1:][row["loss_mask"][1:]].tolist())
    return seen


@pytest.mark.slow(fast=("5-train-True",))
@pytest.mark.parametrize("split, pack", list(itertools.product(["train", "held_out"], [True, False])))
@pytest.mark.parametrize("seq_len", [5, 16, 64])
def test_conversation_targets_occur_once_per_epoch(make_chats, split, pack, seq_len):
    batches = make_chats(split, pack=pack, seq_len=seq_len, batch_size=1)
    store, epoch = batches.store, batches.rows_per_epoch
    want = collections.Counter()
    for document in documents_of(store, split):
        want.update(store[document][store.targets(document)].tolist())
    assert sum(want.values()) == store.counts(split).targets
    found = rows(take(batches, epoch * (2 if split == "train" else 1)))
    for start in range(0, len(found), epoch):
        assert targets_of(found[start : start + epoch]) == want


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_conversation_that_fits_is_never_split(make_chats, split):
    batches = make_chats(split)
    found, whole = rows(take(batches, -(-batches.rows_per_epoch // BATCH))), collections.Counter()
    for row in found[: batches.rows_per_epoch]:
        for segment in range(1, int(row["segment_ids"].max()) + 1):
            here = row["segment_ids"] == segment
            whole[tuple(row["tokens"][here].tolist())] += 1
            assert_array_equal(row["positions"][here], np.arange(here.sum()))
    store, cut = batches.store, 0
    for document in documents_of(store, split):
        tokens = tuple(store[document].tolist())
        assert (whole[tokens] == 1) == (len(tokens) <= SEQ_LEN), document
        cut += len(tokens) > SEQ_LEN
    assert cut > 0 and max(int(row["segment_ids"].max()) for row in found) > 1


def test_conversations_resume_exactly_at_any_row(make_chats):
    straight = rows(take(make_chats(batch_size=1), 40))
    for point in (1, 7, 23):
        first = make_chats(batch_size=1)
        taken = rows(take(first, point))
        again = make_chats(batch_size=2)
        again.set_state(json.loads(json.dumps(first.get_state())))
        taken += rows(take(again, 5))
        for one, other in zip(straight, taken, strict=False):
            for name in FIELDS:
                assert_array_equal(one[name], other[name])


def test_processes_share_the_batches_of_conversations(make_chats):
    for share in ([0, 2], [1, 3]):
        for batch, part in zip(take(make_chats(), 6), take(make_chats("train", share), 6), strict=True):
            for name in FIELDS:
                assert_array_equal(getattr(batch, name)[share], getattr(part, name))
