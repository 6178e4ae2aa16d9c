"""Which slots a step of answers computes."""

from collections.abc import Collection, Sequence


def row_counts(slots: int) -> tuple[int, ...]:
    """Of how many slots there are programs, so that a few answers are not computed in the rows of many: 1, 2, 4 ...,
    and all.
    """
    counts = [1]
    while counts[-1] < slots:
        counts.append(min(2 * counts[-1], slots))
    return tuple(counts)


def rows_for(slots: Collection[int], counts: Sequence[int]) -> list[int]:
    """The slots of the smallest program that has room for these answers, in order; the others of them rest."""
    rows = next(count for count in counts if count >= len(slots))
    resting = (slot for slot in range(counts[-1]) if slot not in slots)
    return sorted([*slots, *(slot for slot, _ in zip(resting, range(rows - len(slots)), strict=False))])
