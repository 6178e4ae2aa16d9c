"""Plans of an epoch: every token of every document stands somewhere, and orders are fixed by their seed."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_decoders.training.packing import permutation, plan_overlapping, plan_packed, plan_padded


SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=12)


@pytest.mark.parametrize("plan, overlap", [(plan_packed, 0), (plan_padded, 1), (plan_overlapping, 1)])
@given(sizes=SIZES, seq_len=st.integers(2, 20))
@settings(max_examples=60, deadline=None)
def test_plans_tile_every_document(plan, overlap, sizes, seq_len):
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


def test_permutations_are_fixed_for_all_times():
    assert permutation(8, "0/0/rows").tolist() == [1, 2, 6, 5, 3, 0, 7, 4]
    assert sorted(permutation(1000, "x")) == list(range(1000))
    assert permutation(1000, "x").tolist() != permutation(1000, "y").tolist()
    middle = np.mean([permutation(10, str(seed)) for seed in range(300)], axis=0)
    np.testing.assert_allclose(middle, 4.5, atol=0.8)
