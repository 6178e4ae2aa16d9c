"""The repeating structure of a list of layers."""

import functools
from collections.abc import Hashable
from typing import Any, TypeVar


Block = TypeVar("Block", bound=Hashable)  # a `BlockConfig`


def find_repeats(blocks: tuple[Block, ...]) -> tuple[tuple[tuple[Block, ...], int], ...]:
    """Cut a list of blocks into `(unit, repeats)` runs so that as few blocks as possible have to be traced.

    `(local,) * 5 + (full,)` ten times and two locals more are `((local x5, full), 10), ((local,), 2)`. Of two cuts
    with as many blocks the one with fewer runs is taken, and the remainder comes last. A dynamic programme over the
    ends of runs, O(n^2 log n).
    """
    return _find_repeats(blocks)


@functools.lru_cache(maxsize=256)
def _find_repeats(blocks: tuple[Any, ...]) -> Any:
    index: dict[Any, int] = {}
    kinds = [index.setdefault(block, len(index)) for block in blocks]
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]  # blocks traced, runs, -(begin of the last run), its unit
    for end in range(1, len(kinds) + 1):
        options = []
        for unit in range(1, end + 1):
            begin = end - unit
            while begin >= 0 and kinds[begin : begin + unit] == kinds[end - unit : end]:
                options.append((best[begin][0] + unit, best[begin][1] + 1, -begin, unit))
                begin -= unit
        best.append(min(options))
    cuts, end = [], len(kinds)
    while end > 0:
        begin, unit = -best[end][2], best[end][3]
        cuts.append((blocks[begin : begin + unit], (end - begin) // unit))
        end = begin
    return tuple(reversed(cuts))
