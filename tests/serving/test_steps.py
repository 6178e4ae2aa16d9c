"""Which slots a step computes together."""

import random

import pytest

from eqx_decoders.serving.steps import ALONE, row_counts, together


@pytest.mark.parametrize("slots", [1, 2, 7, 8, 9, 16, 24, 33])
def test_each_answer_is_computed_once_by_the_smallest_program_that_holds_all(slots):
    pick, counts = random.Random(slots), row_counts(slots)
    assert {1, slots} <= {*counts} and max(counts) == slots and sorted({*counts}) == [*counts]
    for _ in range(300):
        taken = pick.sample(range(slots), pick.randint(1, slots))
        found = together(taken, counts)
        assert all(0 <= each.start < each.stop <= slots and len(each) in counts for each in found)
        assert sorted(slot for each in found for slot in each if slot in taken) == sorted(taken)
        if len(taken) <= ALONE:
            assert [*map(len, found)] == [1] * len(taken)
        else:
            spread = max(taken) - min(taken) + 1
            assert len(found) == 1 and len(found[0]) == min(rows for rows in counts if rows >= spread)


def test_all_slots_are_computed_where_there_is_no_other_program():
    assert together([3], (16,)) == together([3, 4, 5], (16,)) == [range(16)]
    assert row_counts(16) == (1, 8, 16) and row_counts(40) == (1, 8, 16, 32, 40)
