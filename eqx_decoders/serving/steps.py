"""Which slots a step of answers computes together."""

from collections.abc import Collection, Sequence


ALONE = 2  # answers whose tokens take less time one by one, by products of one row, than in eight rows (measured)
LEAST_ROWS = 8


def row_counts(slots: int) -> tuple[int, ...]:
    """Of how many slots there are programs, so that a few answers are not computed in the rows of many: of one, of
    eight and twice as many as long as there are more, and of all.
    """
    counts, rows = [1], LEAST_ROWS
    while rows < slots:
        counts.append(rows)
        rows *= 2
    return tuple(counts) if slots == 1 else (*counts, slots)


def together(slots: Collection[int], counts: Sequence[int]) -> list[range]:
    """What each program of a step computes, for the answers in these slots; there are programs of so many rows."""
    if counts[0] == 1 and len(slots) <= ALONE:
        return [range(slot, slot + 1) for slot in slots]
    first, last, every = min(slots), max(slots), counts[-1]
    for rows in counts[:-1]:
        begin = min(first, every - rows)
        if last < begin + rows:
            return [range(begin, begin + rows)]
    return [range(every)]
