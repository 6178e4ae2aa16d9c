"""Find the repeating structure of a list of layers."""

import functools
from collections.abc import Hashable
from typing import Any, TypeVar


Block = TypeVar("Block", bound=Hashable)  # a `BlockConfig`


def find_repeats(blocks: tuple[Block, ...]) -> tuple[tuple[tuple[Block, ...], int], ...]:
    """Split a list of blocks into runs `(unit, repeats)` so that the total number of blocks in the units is minimal.

    Only the blocks of the units are traced. Example: ten times `(local,) * 5 + (full,)`, followed by `(local,) * 2`, is
    split into `((local x5, full), 10), ((local,), 2)`. Among splits with equally many traced blocks, the one with
    the fewest runs is returned, with a remainder at the end. Uses dynamic programming over the ends of runs,
    O(n^2 log n).
    """
    return _find_repeats(blocks)


@functools.lru_cache(maxsize=256)
def _find_repeats(blocks: tuple[Any, ...]) -> Any:
    index: dict[Any, int] = {}
    kinds = [index.setdefault(block, len(index)) for block in blocks]
    # for each prefix of the list: traced blocks, number of runs, -(start of the last run), size of the last run's unit
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
    for end in range(1, len(kinds) + 1):
        options = []
        for unit in range(1, end + 1):
            start = end - unit
            while start >= 0 and kinds[start : start + unit] == kinds[end - unit : end]:
                options.append((best[start][0] + unit, best[start][1] + 1, -start, unit))
                start -= unit
        best.append(min(options))
    runs = []
    end = len(kinds)
    while end > 0:
        _, _, negative_start, unit = best[end]
        start = -negative_start
        runs.append((blocks[start : start + unit], (end - start) // unit))
        end = start
    return tuple(reversed(runs))
