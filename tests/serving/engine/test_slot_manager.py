"""Selection of the slots that a step computes."""

import random

import pytest

from eqx_decoders.serving.engine.slot_manager import batch_sizes, padded_slots


@pytest.mark.parametrize("slots", [1, 2, 7, 8, 9, 24])
def test_selects_the_smallest_sufficient_program(slots):
    pick, counts = random.Random(slots), batch_sizes(slots)
    assert {1, slots} <= {*counts} and max(counts) == slots and sorted({*counts}) == [*counts]
    for _ in range(300):
        taken = pick.sample(range(slots), pick.randint(1, slots))
        found = padded_slots(taken, counts)
        assert {*taken} <= {*found} <= {*range(slots)} and sorted({*found}) == found
        assert len(found) == min(count for count in counts if count >= len(taken))


def test_computes_all_slots_if_there_is_no_smaller_program():
    assert padded_slots([3], (16,)) == padded_slots([3, 4, 5], (16,)) == [*range(16)]
    assert batch_sizes(16) == (1, 2, 4, 8, 16) and batch_sizes(40) == (1, 2, 4, 8, 16, 32, 40)
