"""Test rows of corpora of any size, with a single block or many blocks: every token occurs once per epoch."""

import collections
import io
import itertools
import os
import pathlib
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.data import row_index as module
from eqx_decoders.data.packing_plans import (
    count_rows,
    permutation,
    plan_overlapping,
    plan_packed,
    plan_padded,
    plan_whole,
)
from eqx_decoders.data.row_index import CHUNK_SIZE, DocumentChunks, HeldOutRows, TrainingRows


MAKES = [plan_packed, plan_padded, plan_whole]


class Corpus:
    """Fake corpus with documents of the given sizes. Records the requested ranges."""

    def __init__(self, sizes, held_out=None):
        self.all = np.array(sizes, np.int64)
        self.held = np.zeros(len(self.all), bool) if held_out is None else np.array(held_out, bool)
        self.content_hash = f"{self.all.tolist()} {self.held.tolist()}"
        self.asked = []

    def __len__(self):
        return len(self.all)

    def sizes(self, start, stop):
        assert 0 <= start < stop <= len(self)
        self.asked.append((start, stop))
        return self.all[start:stop]

    def is_held_out(self, start, stop):
        assert 0 <= start < stop <= len(self)
        return self.held[start:stop]


def training(corpus, make, seq_len=8, size=4, seed="7", folder=None):
    folder = tempfile.mkdtemp() if folder is None else folder
    return TrainingRows(DocumentChunks(corpus, False, make, seq_len, size), seed, pathlib.Path(folder))


def taken(rows, start, stop):
    return [list(rows.pieces(row)) for row in range(start, stop)]


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(module, "WINDOW_SIZE", 60)


@pytest.mark.parametrize("make", MAKES)
def test_single_block_equals_the_plan_of_the_corpus(make):
    """The order equals the recorded order."""
    generator = np.random.default_rng(0)
    corpus = Corpus(generator.integers(1, 40, 50), generator.random(50) < 0.2)
    documents = np.flatnonzero(~corpus.held)
    for size in (CHUNK_SIZE, 50):
        rows = training(corpus, make, size=size)
        for epoch in (0, 1, 5):
            order = permutation(len(documents), f"7/{epoch}/documents")
            plan = make(documents[order], corpus.all[documents][order], 8)
            plan = plan._replace(order=permutation(len(plan.order), f"7/{epoch}/rows"))
            assert rows.per_epoch == len(plan.order)
            start = epoch * rows.per_epoch
            want = [list(plan.pieces(place)) for place in range(rows.per_epoch)]
            assert taken(rows, start, start + rows.per_epoch) == want
    documents = np.flatnonzero(corpus.held)
    for make in (plan_overlapping, plan_padded, plan_whole):
        plan = make(documents, corpus.all[documents], 8)
        rows = HeldOutRows(DocumentChunks(corpus, True, make, 8, CHUNK_SIZE))
        assert rows.per_epoch == len(plan.order)
        assert taken(rows, 0, rows.per_epoch) == [list(plan.pieces(place)) for place in range(rows.per_epoch)]


DOCUMENTS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=40)


def check_tiling(pieces, corpus, held_out, overlap):
    """Check that the pieces contain all tokens of the split with the given overlap."""
    found = collections.defaultdict(list)
    for document, start, stop in itertools.chain(*pieces):
        found[document].append((start, stop))
    for document, size in enumerate(corpus.all.tolist()):
        cuts = sorted(found.pop(document, []))
        if corpus.held[document] != held_out or (held_out and size == 1 and not cuts):  # such a document has no target
            assert not cuts
            continue
        assert cuts[0][0] == 0 and cuts[-1][1] == size
        assert all(one[1] - overlap == two[0] and two[0] < two[1] for one, two in itertools.pairwise(cuts))
    assert not found


@pytest.mark.slow(fast=("plan_packed",))
@pytest.mark.parametrize("make", MAKES)
@given(documents=DOCUMENTS, seq_len=st.integers(2, 12), size=st.integers(1, 9), window=st.integers(1, 50))
@settings(max_examples=30)
def test_epoch_of_many_blocks_contains_every_token_once(make, documents, seq_len, size, window):
    corpus = Corpus(*zip(*documents, strict=True))
    if corpus.held.all():
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_SIZE", window)
        rows = training(corpus, make, seq_len, size)
        epochs = [taken(rows, n * rows.per_epoch, (n + 1) * rows.per_epoch) for n in range(2)]
        for pieces in epochs:
            assert all(0 < sum(stop - start for _, start, stop in row) <= seq_len for row in pieces)
            check_tiling(pieces, corpus, held_out=False, overlap=0 if make is plan_packed else 1)
        both = [*epochs[0], *epochs[1]]
        for row in (
            np.random.default_rng(0).integers(0, len(both), 5).tolist()
        ):  # rows are found without the previous rows
            assert taken(training(corpus, make, seq_len, size), row, row + 1) == both[row : row + 1]
    if make is plan_whole:
        whole = {
            document for document, start, stop in itertools.chain(*epochs[0]) if stop - start == corpus.all[document]
        }
        assert whole == set(np.flatnonzero(~corpus.held & (corpus.all <= seq_len)).tolist())


@pytest.mark.slow(fast=("plan_overlapping",))
@pytest.mark.parametrize("make", [plan_overlapping, plan_padded, plan_whole])
@given(documents=DOCUMENTS, seq_len=st.integers(2, 12), size=st.integers(1, 9))
@settings(max_examples=30)
def test_held_out_blocks_contain_every_token_once(make, documents, seq_len, size):
    corpus = Corpus(*zip(*documents, strict=True))
    rows = HeldOutRows(DocumentChunks(corpus, True, make, seq_len, size))
    last = rows.per_epoch
    assert not rows.exists(last) and (last == 0 or rows.exists(last - 1)) and taken(rows, last, last + 2) == [[], []]
    pieces = taken(rows, 0, last)
    check_tiling(pieces, corpus, held_out=True, overlap=1)
    for row in range(last):
        assert taken(HeldOutRows(rows._chunks), row, row + 1) == pieces[row : row + 1]


def test_only_needed_blocks_are_read():
    corpus = Corpus([10] * 400, [False] * 200 + [True] * 200)
    rows = HeldOutRows(DocumentChunks(corpus, True, plan_overlapping, 16, 10))
    assert rows.exists(0) and max(stop for _, stop in corpus.asked) == 210
    list(rows.pieces(12))
    assert max(stop for _, stop in corpus.asked) == 220
    assert rows.per_epoch == 20 * len(plan_overlapping(np.arange(10), np.full(10, 10), 16).order)


@given(sizes=st.lists(st.integers(1, 50), max_size=40), seq_len=st.integers(2, 20))
@settings(max_examples=60)
def test_rows_are_counted_without_a_plan(sizes, seq_len):
    sizes = np.array(sizes, np.int64)
    for make in (*MAKES, plan_overlapping):
        rows = len(make(np.arange(len(sizes)), sizes, seq_len).order) if len(sizes) else 0
        assert count_rows(make, sizes, seq_len) == rows


def test_blocks_are_planned_once_before_their_window(small_windows):
    corpus, planned = Corpus([5] * 203), []

    def make(documents, sizes, seq_len):
        planned.append(int(documents.min()) // 4)
        return plan_packed(documents, sizes, seq_len)

    rows = TrainingRows(DocumentChunks(corpus, False, make, 8, 4), "7", pathlib.Path(tempfile.mkdtemp()))
    planned.clear()  # plan again and count the plans
    begins = rows._epoch(0).first_rows
    assert len(begins) == 6, "windows"
    for row in range(2 * rows.per_epoch - 1):
        before = len(planned)
        list(rows.pieces(row))
        assert len(planned) - before <= (2 if row < begins[1] else 1)
        if begins[1] <= row < begins[5]:
            here = rows._window(0, int(np.searchsorted(begins, row, "right")) - 1).chunks
            assert not set(planned[before:]) & set(here)
    assert len(set(planned)) == 51 and len(planned) < 2 * 51 + 9, "and some of the third epoch"


def test_epochs_and_seeds_have_different_orders(small_windows):
    corpus = Corpus(range(1, 60))
    rows = training(corpus, plan_packed)
    one, two, other = taken(rows, 0, rows.per_epoch), taken(rows, rows.per_epoch, 2 * rows.per_epoch), None
    other = taken(training(corpus, plan_packed, seed="8"), 0, rows.per_epoch)
    assert one != two and one != other and sorted(one) != sorted(two)


def test_block_orders_are_stable(monkeypatch):
    """A run with many blocks resumes with the same rows after an update of the library."""
    monkeypatch.setattr(module, "WINDOW_SIZE", 16)
    rows = training(Corpus([3, 9, 4, 12, 7, 5, 8, 2, 11, 6, 1, 10, 13]), plan_packed, size=3)
    assert rows.per_epoch == 13
    assert taken(rows, 9, 15) == FIXED


FIXED = [
    [(1, 8, 9), (0, 0, 3), (2, 0, 4)],
    [(8, 6, 11), (6, 0, 3)],
    [(7, 0, 2), (8, 0, 6)],
    [(1, 0, 8)],
    [(12, 0, 8)],
    [(12, 8, 13)],
]  # the end of an epoch and the start of the next epoch


@pytest.mark.parametrize("count, parts", [(1, 1), (2, 1), (2, 2), (7, 3), (100, 10), (101, 10), (64, 7)])
def test_consecutive_blocks_come_from_all_parts_of_the_corpus(count, parts):
    order = module._spread(count, parts, "x")
    assert sorted(order.tolist()) == list(range(count))
    for start in range(0, count - parts + 1 - count % parts, parts):
        assert len(set((order[start : start + parts] * parts // count).tolist())) == parts
    if count > 9:
        assert order.tolist() != module._spread(count, parts, "y").tolist()


def test_row_counts_are_saved_and_repaired(tmp_path):
    corpus = Corpus(range(1, 50))
    rows = training(corpus, plan_packed, folder=tmp_path)
    (file,) = tmp_path.iterdir()
    corpus.asked.clear()
    assert training(corpus, plan_packed, folder=tmp_path).per_epoch == rows.per_epoch and not corpus.asked
    short = io.BytesIO()
    np.save(short, np.ones(3, int))
    for content in (b"", b"x" * 300, file.read_bytes()[:-9], short.getvalue()):
        file.write_bytes(content)
        assert training(corpus, plan_packed, folder=tmp_path).per_epoch == rows.per_epoch and corpus.asked
    other = training(Corpus(range(50, 1, -1)), plan_packed, folder=tmp_path)
    assert other._num_rows.tolist() != rows._num_rows.tolist() and len(os.listdir(tmp_path)) == 2, (
        "of other data: another file"
    )
    training(corpus, plan_packed, seq_len=9, folder=tmp_path)
    training(corpus, plan_whole, folder=tmp_path)
    assert len(os.listdir(tmp_path)) == 4
    training(corpus, plan_packed, size=100, folder=tmp_path)
    assert len(os.listdir(tmp_path)) == 4, "none for one block"
