"""Packing of documents into rows. A plan lists the piece of a document at each place of a row, in a few arrays.

`sizes` are the numbers of tokens of the documents, with separators. `documents` and `sizes` are in the order of the
epoch.
"""

import bisect
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from eqx_decoders.errors import DataError, check


class PackingPlan(NamedTuple):
    """Plan of rows: piece `i` is `documents[i][starts[i]:stops[i]]`, the next piece in row `rows[i]`.

    `rows` is ascending. `order[k]` is the row at index `k`.
    """

    rows: Int[np.ndarray, "pieces"]
    documents: Int[np.ndarray, "pieces"]
    starts: Int[np.ndarray, "pieces"]
    stops: Int[np.ndarray, "pieces"]
    order: Int[np.ndarray, "rows"]

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, start, stop) for each piece of the row at an index."""
        first, last = np.searchsorted(self.rows, [self.order[index], self.order[index] + 1])
        for piece in range(first, last):
            yield int(self.documents[piece]), int(self.starts[piece]), int(self.stops[piece])

    def compact(self) -> "PackingPlan":
        """Return the same plan in int32, if the numbers are small enough."""
        return PackingPlan(*(x.astype(np.int32) if x.max(initial=0) < 2**31 - 1 else x for x in self))


def count_rows(plan: Callable[..., PackingPlan], sizes: Int[np.ndarray, "docs"], seq_len: int) -> int:
    """Return the number of rows of `plan` for documents of these sizes, without making the plan if possible."""
    if len(sizes) == 0:
        return 0
    if plan is plan_packed:
        return -(-int(sizes.sum()) // seq_len)
    if plan is plan_padded:
        return int(_count_pieces(sizes, seq_len).sum())
    if plan is plan_whole:
        return _count_whole(sizes, seq_len)
    return len(plan(np.arange(len(sizes)), sizes, seq_len).order)


def plan_packed(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Concatenate documents, then cut their tokens every `seq_len`. Only the last row can have padding."""
    ends = np.cumsum(sizes)
    begins = ends - sizes
    cuts = np.union1d(begins, np.arange(0, ends[-1], seq_len))
    which = np.searchsorted(begins, cuts, "right") - 1
    rows = cuts // seq_len
    stops = np.append(cuts[1:], ends[-1])
    return PackingPlan(rows, documents[which], cuts - begins[which], stops - begins[which], np.arange(rows[-1] + 1))


def plan_padded(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Put one piece into each row. Pieces of a document overlap by one token, so each token is a target once."""
    counts = _count_pieces(sizes, seq_len)
    which = np.repeat(np.arange(len(documents)), counts)
    rows = np.arange(len(which))
    starts = (rows - (np.cumsum(counts) - counts)[which]) * (seq_len - 1)
    return PackingPlan(rows, documents[which], starts, np.minimum(starts + seq_len, sizes[which]), rows)


def _count_pieces(sizes: Int[np.ndarray, "docs"], seq_len: int) -> Int[np.ndarray, "docs"]:
    """Return the number of pieces of each document: up to `seq_len` tokens, which overlap by one token."""
    return np.maximum(1, -(-(sizes - 1) // (seq_len - 1)))


def plan_overlapping(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Pack as `plan_packed`, but let the pieces of a document overlap by one token, as in `plan_padded`."""
    pieces, row, used = [], 0, 0
    for document, size in zip(documents.tolist(), sizes.tolist(), strict=True):
        start = 0
        while start < size - 1:
            if used > seq_len - 2:  # a piece of one token has no target
                row, used = row + 1, 0
            stop = min(size, start + seq_len - used)
            pieces.append((row, document, start, stop))
            used += stop - start
            start = stop - 1
    rows, which, starts, stops = np.array(pieces, np.int64).reshape(-1, 4).T
    return PackingPlan(rows, which, starts, stops, np.arange(row + 1))


def plan_whole(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Fit complete documents into rows; documents of more than `seq_len` tokens become pieces as in `plan_padded`.

    Best-fit decreasing: each piece, the largest first, is placed into the row with the smallest sufficient space.
    Pieces of equal size are placed together, in the order of the epoch, so that a million documents take about a
    second. The number of rows follows from the sizes alone.
    """
    cut = plan_padded(documents, sizes, seq_len)
    lengths = cut.stops - cut.starts
    rows = np.zeros(len(lengths), np.int64)
    rooms: list[int] = []  # free space of rows, ascending
    with_room: dict[int, list[np.ndarray]] = {}
    count = 0

    def open_rows(room: int, numbers: np.ndarray) -> None:
        if len(numbers) and room not in with_room:
            bisect.insort(rooms, room)
        if len(numbers):
            with_room.setdefault(room, []).append(numbers)

    largest_first = np.argsort(-lengths, kind="stable")
    for group in np.split(largest_first, np.flatnonzero(np.diff(lengths[largest_first])) + 1):
        size = int(lengths[group[0]])
        while len(group):
            index = bisect.bisect_left(rooms, size)
            if index < len(rooms):
                room = rooms.pop(index)
                candidates = np.concatenate(with_room.pop(room))
            else:
                room, candidates = seq_len, np.arange(count, count + -(-len(group) // (seq_len // size)))
                count += len(candidates)
            each = room // size
            used, rest = np.split(candidates, [-(-len(group) // each)])
            placed, group = np.split(group, [len(used) * each])
            rows[placed] = np.repeat(used, each)[: len(placed)]
            last = len(placed) - (len(used) - 1) * each
            open_rows(room, rest)
            open_rows(room - each * size, used[:-1])
            open_rows(room - last * size, used[-1:])
    order = np.argsort(rows, kind="stable")
    return PackingPlan(rows[order], cut.documents[order], cut.starts[order], cut.stops[order], np.arange(count))


def _count_whole(sizes: Int[np.ndarray, "docs"], seq_len: int) -> int:
    """Return the number of rows of `plan_whole`. Takes the same steps, with counts instead of lists."""
    before = _count_pieces(sizes, seq_len) - 1  # pieces of a document except the last: each fills a row
    counts = np.bincount(sizes - before * (seq_len - 1), minlength=seq_len + 1)
    counts[seq_len] += before.sum()
    rooms, with_room, rows = list[int](), dict[int, int](), 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left > 0:
            index = bisect.bisect_left(rooms, size)
            room = rooms.pop(index) if index < len(rooms) else seq_len
            each = room // size
            candidates = with_room.pop(room) if room in with_room else -(-left // each)
            rows += candidates if room == seq_len else 0
            used = min(candidates, -(-left // each))
            last = min(left - (used - 1) * each, each)
            left -= (used - 1) * each + last
            for rest, many in ((room, candidates - used), (room - each * size, used - 1), (room - last * size, 1)):
                if many > 0 and rest not in with_room:
                    bisect.insort(rooms, rest)
                if many > 0:
                    with_room[rest] = with_room.get(rest, 0) + many
    return rows


def permutation(size: int, seed: str) -> Int[np.ndarray, "size"]:
    """Return the numbers below `size` in an order that follows from `seed` alone.

    The numbers are sorted by their splitmix64 hashes (Steele et al. 2014). Unlike the order of NumPy's generators, this
    order does not depend on the version of a package, so a run resumes on the same data with newer packages.
    """
    key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
    mixed = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def check_same_data(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise DataError unless the `state` of an iterator has the data and settings of `identity`."""
    changes = [f"{key} was {state.get(key)!r} and is {now!r}" for key, now in identity.items() if state.get(key) != now]
    check(
        not changes,
        f"the data differ from the data of the checkpoint: {'; '.join(changes)}. Restore the data and settings to "
        "resume this run, or choose another run directory.",
        DataError,
    )
