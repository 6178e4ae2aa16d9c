"""Test batches of mixtures, of several held-out sets and of corpora with many blocks, read from files."""

import collections
import itertools
import json
import threading

import numpy as np
import pytest

from eqx_decoders.data import batches as module, row_index as rows_module
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.dataset import make_dataset, make_held_out_sets, training_texts
from eqx_decoders.data.store import store as store_module
from eqx_decoders.errors import ConfigError, DataError
from tests.compare import assert_array_equal
from tests.data.test_dataset import FIELDS, NumberTokenizer, assert_equal_batches, rows, take, targets_of, used
from tests.errors import refused
from tests.stores import documents_of


SIZES = {"a": [3, 20, 7, 40, 1, 12, 30, 5, 9, 2, 2, 18], "b": [50, 4, 4, 4, 31, 6, 1, 1], "c": [9] * 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with sources a, b and c. Their token ids start at 1, 1001 and 2001."""
    folder = tmp_path_factory.mktemp("sources")
    for base, (name, sizes) in zip((1, 1001, 2001), SIZES.items(), strict=True):
        numbers = itertools.count(base)
        texts = [" ".join(str(next(numbers)) for _ in range(size)) for size in sizes]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


@pytest.fixture
def make(folder):
    made = []

    def build(*weights, sets=False, share=None, cache=None, **settings):
        paths = [f"{folder / name}.jsonl={weight}" for name, weight in zip("abc", weights, strict=False)]
        settings = {"batch_size": 4, "seq_len": 16, "seed": 7, "held_out_fraction": 0.3, "path": paths, **settings}
        config, where = DataConfig(**settings), folder / (cache or f"cache {len(weights)} {settings}"[:80])
        build = make_held_out_sets if sets else make_dataset
        found = build(config, NumberTokenizer(), folder=where, rows=share)
        made.extend(found.values() if sets else [found])
        return found

    yield build
    for batches in made:
        batches.close()


def source_of(row):
    return min(int(used(row).max()) // 1000, 2)


def test_mixture_follows_its_weights(make):
    batches = make(0.7, 0.2, 0.1)
    counts = collections.Counter(map(source_of, rows(take(batches, 25))))
    assert counts == {0: 70, 1: 20, 2: 10}
    alone = [part.counts.documents for part in batches.parts]
    assert [part.name for part in batches.parts] == ["a", "b", "c"] and all(alone)
    epochs = batches.source_epochs()
    sizes = dict(zip("abc", (plan.per_epoch for plan in batches._plans), strict=True))
    assert epochs == {"a": 70 / sizes["a"], "b": 20 / sizes["b"], "c": 10 / sizes["c"]}
    assert batches.epochs == 100 / batches.rows_per_epoch
    assert batches.source_epochs(200)["a"] == 2 * epochs["a"]


def test_sources_have_separate_epochs(make):
    """Each epoch contains every token once, in a new order."""
    batches = make(1, 2)
    found = rows(take(batches, 60))
    for source, part in enumerate(batches.parts):
        own, epoch = [row for row in found if source_of(row) == source], batches._plans[source].per_epoch
        chosen = documents_of(part.store, "train")
        everything = collections.Counter(np.concatenate([part.store[i] for i in chosen]).tolist())
        orders = []
        for start in range(0, len(own) - epoch + 1, epoch):
            tokens = [used(row).tolist() for row in own[start : start + epoch]]
            assert collections.Counter(itertools.chain(*tokens)) == everything
            orders.append(tokens)
        assert len(orders) > 2 and orders[0] != orders[1] != orders[2]


def test_sources_of_equal_sizes_have_different_orders(make, folder):
    for name, base in (("d", 1), ("e", 1001)):
        lines = [json.dumps({"text": str(number)}) for number in range(base, base + 40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    paths = [f"{folder / name}.jsonl=1" for name in "de"]
    found = rows(take(make(path=paths, held_out_fraction=0.0, cache="equal"), 4))
    orders = [np.concatenate([used(row) for row in found if source_of(row) == source]) % 1000 for source in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0].tolist() != orders[1].tolist()


@pytest.mark.slow(fast=("1",))
@pytest.mark.parametrize("share", [[1], [3, 0]], ids=["1", "3,0"])
def test_mixture_resumes_with_other_batch_sizes_and_processes(make, share):
    straight = rows(take(make(0.5, 0.3, 0.2, batch_size=1), 60))
    for point in (1, 7, 30):
        first = make(0.5, 0.3, 0.2, batch_size=1)
        take(first, point)
        again = make(0.5, 0.3, 0.2, share=share)
        again.set_state(json.loads(json.dumps(first.get_state())))
        for number, batch in enumerate(take(again, 4)):
            for place, row in enumerate(share):
                for name in FIELDS:
                    want = straight[point + 4 * number + row][name]
                    assert_array_equal(getattr(batch, name)[place], want)


@pytest.mark.slow
def test_sources_resume_with_other_weights(make):
    first, other = make(0.5, 0.3, 0.2), make(0.1, 0.2, 0.7)
    before = rows(take(first, 10))
    other.set_state(json.loads(json.dumps(first.get_state())))
    assert other.source_epochs() == first.source_epochs()
    after = rows(take(other, 10))
    assert collections.Counter(map(source_of, after)) == {0: 4, 1: 8, 2: 28}
    again = make(0.1, 0.2, 0.7)  # resumed a second time
    again.set_state(json.loads(json.dumps(other.get_state())))
    more = rows(take(again, 5))
    assert_equal_batches(take(other, 1), [make_batch(more[:4])])
    for source in range(3):
        mixed = [row["tokens"].tolist() for row in before + after + more if source_of(row) == source]
        weights = [1e-5] * 3
        weights[source] = 1
        alone = [row["tokens"].tolist() for row in rows(take(make(*weights), 40)) if source_of(row) == source]
        assert mixed == alone[: len(mixed)] and len(mixed) > 10


def make_batch(found):
    return module.Batch(**{name: np.stack([row[name] for row in found]) for name in FIELDS})


def test_states_of_other_sources_are_refused(make, folder):
    state = make(0.5, 0.5).get_state()
    for other in (make(0.4, 0.3, 0.3), make(path=str(folder / "a.jsonl"), cache="plain")):
        with refused(DataError, state["data"]):
            other.set_state(state)
    with refused(DataError, state["data"]):
        make(0.5, 0.5).set_state(make(path=str(folder / "a.jsonl"), cache="plain").get_state())


def test_held_out_parts_of_a_mixture_are_separate_sets(make, folder):
    sets = make(0.7, 0.3, sets=True, cache="same")
    assert list(sets) == ["a", "b"]
    train = make(0.7, 0.3, cache="same")
    for part, (name, batches) in zip(train.parts, sets.items(), strict=True):
        assert part.store.content_hash == batches.store.content_hash and batches.parts[0].folder.name == name
        found = targets_of(rows(list(batches)))
        held_out = collections.Counter()
        for document in documents_of(batches.store, "held_out"):
            held_out.update(batches.store[document][1:].tolist())
        assert found == held_out and sum(found.values()) == batches.parts[0].counts.targets > 0
    config = DataConfig(path=[f"{folder / name}.jsonl=1" for name in "ab"], held_out_fraction=0.3)
    with refused(ConfigError, "a, b", "make_held_out_sets"):
        make_dataset(config, NumberTokenizer(), folder=folder / "other", split="held_out")


@pytest.mark.parametrize("weights", [(), (1, 2)], ids=["one-source", "mixture"])
def test_held_out_sets_have_names(make, folder, weights):
    """With separate held-out sets, no part of the sources is held out."""
    paths = [f"x={folder / 'c.jsonl'}", f"yy={folder / 'b.jsonl'}", f"x={folder / 'a.jsonl'}"]
    options = {"held_out_path": paths, "cache": f"named {len(weights)}"}
    options |= {} if weights else {"path": str(folder / "a.jsonl")}
    sets = make(*weights, sets=True, **options)
    assert list(sets) == ["x", "yy"]
    assert set(targets_of(rows(list(sets["yy"])))) == {0, *range(1001, 1001 + sum(SIZES["b"]))}
    assert sum(targets_of(rows(list(sets["x"]))).values()) == sum(SIZES["a"] + SIZES["c"]) + 12 + 5
    train = make(*weights, **options)
    assert [part.counts.documents for part in train.parts] == ([12, 8] if weights else [12])
    again = sets["x"].rewind()
    assert next(again).tokens.max() > 2000  # c comes before a, as in `paths`


def test_unnamed_held_out_set_for_a_mixture(make, folder):
    sets = make(1, 2, sets=True, held_out_path=str(folder / "c.jsonl"), cache="unnamed")
    assert list(sets) == [""] and set(targets_of(rows(list(sets[""])))) == {0, *range(2001, 2046)}


def test_mixture_without_held_out_data(make, folder):
    assert make(1, 1, sets=True, held_out_fraction=0.0) == {}
    config = DataConfig(path=str(folder / "a.jsonl"), held_out_fraction=0.0)
    with refused(ConfigError, "DataConfig.held_out_fraction=0", "held_out_path"):
        make_dataset(config, NumberTokenizer(), folder=folder / "none", split="held_out")


def test_missing_data_are_reported_with_their_flag(make, folder):
    with refused(DataError, "--held-out", "'no/where'"):
        make(1, 1, sets=True, held_out_path=["x=no/where"], cache="none")
    with refused(DataError, "--data", "'no/where'"):
        make(path=["no/where=1", f"{folder / 'a.jsonl'}=1"], cache="none")
    (folder / "one.jsonl").write_text('{"text": "1 2"}')
    with refused(DataError, "'held_out'", "'one'"):
        make(sets=True, path=[f"{folder / 'one.jsonl'}=1", f"{folder / 'a.jsonl'}=1"], cache="empty")


def test_tokenizer_training_texts_follow_the_source_weights(folder):
    paths = [f"{folder / name}.jsonl={weight}" for name, weight in (("a", 0.25), ("b", 0.75))]
    texts = list(training_texts(DataConfig(path=paths, held_out_fraction=0.0), max_bytes=400))
    sizes = [0, 0]
    for text in texts:
        sizes[int(text.split()[0]) > 1000] += len(text)
    assert 50 < sizes[0] <= 100 and 200 < sizes[1] <= 300


# --- many blocks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_SIZE", 3)
    monkeypatch.setattr(rows_module, "WINDOW_SIZE", 20)


@pytest.mark.slow(fast=("packed",))
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "unpacked"])
def test_batches_of_many_blocks(make, small_blocks, folder, pack):
    """An epoch contains all tokens. Resuming and the rows of each process are exact."""
    options = {"path": str(folder / "a.jsonl"), "pack": pack, "cache": f"blocks {pack}"}
    batches = make(**options)
    epoch = batches.rows_per_epoch
    straight = rows(take(batches, 2 * epoch // 4 + 2))
    everything = np.concatenate([batches.store[i] for i in documents_of(batches.store, "train")]).tolist()
    for start in (0, epoch):
        tokens = np.concatenate([used(row) for row in straight[start : start + epoch]]).tolist()
        assert set(tokens) == set(everything) and (not pack or sorted(tokens) == sorted(everything))
    assert len(list(batches.parts[0].folder.glob("rows-*.npy"))) == 1
    for point in (1, epoch // 4 + 1):
        first, again = make(**options), make(**options, share=[2])
        take(first, point)
        again.set_state(first.get_state())
        for number, batch in enumerate(take(again, 3)):
            for name in FIELDS:
                assert_array_equal(getattr(batch, name)[0], straight[4 * (point + number) + 2][name])
    (held_out,) = make(sets=True, **options).values()
    counts = targets_of(rows(list(held_out)))
    assert counts.pop(0) == held_out.parts[0].counts.documents and set(counts.values()) == {1}


def test_resumed_run_keeps_its_block_size(make, monkeypatch, folder):
    options = {"path": str(folder / "a.jsonl"), "cache": "earlier"}
    straight = make(**options)
    take(straight, 2)
    state = straight.get_state()
    assert state["block"] == 1 << 14
    monkeypatch.setattr(module, "CHUNK_SIZE", 3)
    again = make(**options)
    again.set_state(state)
    assert_equal_batches(take(again, 9), take(straight, 9))
    third = make(**options)
    third.set_state(again.get_state())
    assert_equal_batches(take(third, 3), take(straight, 3))
    assert make(**options).rows_per_epoch != straight.rows_per_epoch


# --- reused sources, and states ---------------------------------------------------------------------------------------


def test_held_out_parts_reuse_the_sources(make, monkeypatch):
    options = {"cache": "once", "sets": False}
    train = make(0.7, 0.3, **options)
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "describe_sources", None)
        sets = make(0.7, 0.3, **options | {"sets": True})
    assert [one.store for one in sets.values()] == [part.store for part in train.parts]
    with refused(DataError, "--held-out-fraction 0.3", "--held-out-fraction 0.2"):
        make(0.7, 0.3, **options | {"sets": True, "held_out_fraction": 0.2})


def test_separate_held_out_sets_are_cached(make, folder):
    options = {"held_out_path": [f"x={folder / 'c.jsonl'}"], "cache_dir": str(folder / "given"), "cache": "given run"}
    (batches,) = make(path=str(folder / "a.jsonl"), sets=True, **options).values()
    assert len(list((folder / "given" / "tokens").glob("*/*.tokens"))) == 1
    counts = batches.parts[0].counts
    assert counts.documents == 5 and counts.gzip_nats_per_byte > 0 and counts.gzip_bytes == counts.bytes
    assert batches.store.counts("train").documents == 0
    (folder / "empty.jsonl").write_text("")
    with refused(DataError, "--held-out", "empty.jsonl"):
        make(path=str(folder / "a.jsonl"), sets=True, held_out_path=[f"x={folder / 'empty.jsonl'}"], cache="empty set")


def test_state_with_reordered_sources_is_refused(make, folder):
    paths = [str(folder / f"{name}.jsonl") for name in "ab"]
    one, other = make(path=paths, cache="ordered"), make(path=paths[::-1], cache="turned")
    assert one.store.content_hash == other.store.content_hash
    state = one.get_state()
    with refused(DataError, "order", repr(state["order"]), repr(other.get_state()["order"])):
        other.set_state(state)
    again = make(path=paths[::-1], cache="ordered")  # the manifest in the cache has the previous order
    again.set_state(one.get_state())
    assert_equal_batches(take(again, 2), take(one, 2))


def test_epochs_are_reported_while_planning(make):
    batches, found = make(1, 1), []
    with batches._plan_lock:
        thread = threading.Thread(target=lambda: found.append((batches.epochs, batches.source_epochs())), daemon=True)
        thread.start()
        thread.join(10)
    assert found == [(0.0, {"a": 0.0, "b": 0.0})]


@pytest.mark.slow
def test_weights_with_many_digits_resume_exactly(make):
    weights = ("0.123456789", "0.876543211", "1e-12")
    first, other = make(*weights), make(1, 1, 1)
    assert sum(first.mixture.per_period) == 100_001
    first._row = 10**9
    other.set_state(first.get_state())
    assert other._rows_before_mixture == first._rows_by_source(first.mixture)
