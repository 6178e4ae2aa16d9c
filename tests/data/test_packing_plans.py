"""Test packing plans of an epoch: every token is included, and orders depend only on the seed."""

import collections
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.data.packing_plans import permutation, plan_overlapping, plan_packed, plan_padded, plan_whole
from tests.compare import assert_allclose


SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@pytest.mark.slow(fast=("plan_packed-0",))
@pytest.mark.parametrize("plan, overlap", [(plan_packed, 0), (plan_padded, 1), (plan_overlapping, 1)])
@given(sizes=SIZES, seq_len=st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_plans_cover_every_document(plan, overlap, sizes, seq_len):
    found = plan(np.arange(len(sizes)) + 100, np.array(sizes), seq_len)
    room = collections.Counter()
    next_start = dict.fromkeys(range(100, 100 + len(sizes)), 0)
    for place in range(len(found.order)):
        for document, start, stop in found.pieces(place):
            assert start == next_start[document] and stop > start + overlap
            next_start[document] = stop - overlap
            room[place] += stop - start
    assert [end + overlap for end in next_start.values()] == sizes
    assert set(room) == set(range(len(found.order))) and max(room.values()) <= seq_len
    if plan is plan_packed:
        assert len(room) == math.ceil(sum(sizes) / seq_len)
    if plan is plan_overlapping:
        assert all(room[place] >= seq_len - 1 for place in range(len(room) - 1))


def test_permutations_are_stable():
    assert permutation(8, "0/0/rows").tolist() == [1, 2, 6, 5, 3, 0, 7, 4]
    assert sorted(permutation(1000, "x")) == list(range(1000))
    assert permutation(1000, "x").tolist() != permutation(1000, "y").tolist()
    middle = np.mean([permutation(10, str(seed)) for seed in range(300)], axis=0)
    assert_allclose(middle, 4.5, atol=0.8)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), seq_len=st.integers(2, 20), seed=st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_documents_are_packed_into_rows_without_splitting(sizes, seq_len, seed):
    order = permutation(len(sizes), str(seed))
    plan = plan_whole(order + 100, np.array(sizes)[order], seq_len)
    pieces = [list(plan.pieces(place)) for place in range(len(plan.order))]
    assert all(0 < sum(stop - start for _, start, stop in row) <= seq_len for row in pieces)
    found = collections.defaultdict(list)
    for document, start, stop in sorted(itertools.chain(*pieces)):
        found[document - 100].append((start, stop))
    for document, size in enumerate(sizes):
        if size <= seq_len:
            assert found[document] == [(0, size)], "whole"
        else:
            assert found[document] == [(s, min(s + seq_len, size)) for s in range(0, size - 1, seq_len - 1)]
    other = permutation(len(sizes), f"other {seed}")
    assert len(plan_whole(other, np.array(sizes)[other], seq_len).order) == len(plan.order), (
        "in every epoch as many rows"
    )
    again = plan_whole(order + 100, np.array(sizes)[order], seq_len)
    assert all(np.array_equal(one, two) for one, two in zip(plan, again, strict=True))


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_packing_is_best_fit_decreasing(sizes):
    """The reference implementation places a single document at a time."""
    plan, rooms = plan_whole(np.arange(len(sizes)), np.array(sizes), 20), []
    for size in sorted(sizes, reverse=True):
        best = min((room for room in rooms if room >= size), default=20)
        if best in rooms:
            rooms.remove(best)
        rooms.append(best - size)
    used = [sum(stop - start for _, start, stop in plan.pieces(place)) for place in range(len(plan.order))]
    assert sorted(20 - one for one in used) == sorted(rooms)


@pytest.mark.slow
def test_million_documents_are_packed_in_seconds():
    sizes = np.clip(np.random.default_rng(0).lognormal(6, 0.9, 1_000_000), 2, 8000).astype(np.int64)
    begun = time.process_time()
    plan = plan_whole(np.arange(len(sizes)), sizes, 2048)
    assert time.process_time() - begun < 10
    assert (plan.stops - plan.starts).sum() > 0.99 * 2048 * len(plan.order)
