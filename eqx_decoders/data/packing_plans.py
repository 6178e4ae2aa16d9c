"""Pack documents into rows of `seq_len` tokens.

A plan lists the pieces of documents in each row, in a few arrays. The functions `plan_*` have these arguments:

- `documents`: indices of the documents, in the order of the epoch.
- `sizes`: number of tokens of each document, including separators.
- `seq_len`: number of tokens of a row.
"""

import bisect
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from eqx_decoders.errors import DataError, check


class PackingPlan(NamedTuple):
    """The pieces of documents in each row.

    Piece `i` has the tokens `starts[i]:stops[i]` of document `documents[i]` and is in row `rows[i]`, after the earlier
    pieces of this row. `rows` is ascending. `order` is a permutation of the rows: `order[k]` is the k-th row of the
    epoch.
    """

    rows: Int[np.ndarray, "pieces"]
    documents: Int[np.ndarray, "pieces"]
    starts: Int[np.ndarray, "pieces"]
    stops: Int[np.ndarray, "pieces"]
    order: Int[np.ndarray, "rows"]

    def pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (document, start, stop) for each piece of the row `order[index]`."""
        first, last = np.searchsorted(self.rows, [self.order[index], self.order[index] + 1])
        for piece in range(first, last):
            yield int(self.documents[piece]), int(self.starts[piece]), int(self.stops[piece])

    def compact(self) -> "PackingPlan":
        """Return the plan with int32 arrays where all values are small enough."""
        return PackingPlan(*(x.astype(np.int32) if x.max(initial=0) < 2**31 - 1 else x for x in self))


def count_rows(plan: Callable[..., PackingPlan], sizes: Int[np.ndarray, "docs"], seq_len: int) -> int:
    """Return the number of rows of `plan`, one of the functions `plan_*`, for documents of these sizes.

    The plan itself is made only for `plan_overlapping`, where the number of rows cannot be computed otherwise.
    """
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
    """Concatenate the documents and split the tokens into rows. Only the last row can have padding."""
    ends = np.cumsum(sizes)
    begins = ends - sizes
    cuts = np.union1d(begins, np.arange(0, ends[-1], seq_len))
    indices = np.searchsorted(begins, cuts, "right") - 1
    rows = cuts // seq_len
    stops = np.append(cuts[1:], ends[-1])
    order = np.arange(rows[-1] + 1)
    return PackingPlan(rows, documents[indices], cuts - begins[indices], stops - begins[indices], order)


def plan_padded(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Put one piece of a document into each row, and pad the row.

    The pieces of a document overlap by one token, so that every token except the first is a target exactly once.
    """
    counts = _count_pieces(sizes, seq_len)
    indices = np.repeat(np.arange(len(documents)), counts)
    rows = np.arange(len(indices))
    starts = (rows - (np.cumsum(counts) - counts)[indices]) * (seq_len - 1)
    return PackingPlan(rows, documents[indices], starts, np.minimum(starts + seq_len, sizes[indices]), rows)


def _count_pieces(sizes: Int[np.ndarray, "docs"], seq_len: int) -> Int[np.ndarray, "docs"]:
    """Return the number of pieces of each document, with up to `seq_len` tokens and an overlap of one token."""
    return np.maximum(1, -(-(sizes - 1) // (seq_len - 1)))


def plan_overlapping(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Pack as `plan_packed`, but let the pieces of a document overlap by one token, as in `plan_padded`."""
    pieces = []
    row = 0
    used = 0  # tokens of the row
    for document, size in zip(documents.tolist(), sizes.tolist(), strict=True):
        start = 0
        while start < size - 1:
            if used > seq_len - 2:  # a piece of one token has no target
                row, used = row + 1, 0
            stop = min(size, start + seq_len - used)
            pieces.append((row, document, start, stop))
            used += stop - start
            start = stop - 1
    rows, indices, starts, stops = np.array(pieces, np.int64).reshape(-1, 4).T
    return PackingPlan(rows, indices, starts, stops, np.arange(row + 1))


def plan_whole(documents: Int[np.ndarray, "docs"], sizes: Int[np.ndarray, "docs"], seq_len: int) -> PackingPlan:
    """Put documents into rows without splitting them, by best-fit decreasing bin packing.

    Each document, the largest first, is placed into the row with the smallest sufficient space. Documents of more than
    `seq_len` tokens are first split into pieces, as in `plan_padded`. Pieces of equal size are placed together, in the
    order of the epoch, so that planning a million documents takes about a second. The number of rows depends only on
    the sizes, not on the order.
    """
    pieces = plan_padded(documents, sizes, seq_len)
    lengths = pieces.stops - pieces.starts
    rows = np.zeros(len(lengths), np.int64)
    spaces: list[int] = []  # distinct numbers of free tokens in rows, ascending
    rows_by_space: dict[int, list[np.ndarray]] = {}
    num_rows = 0

    def add_rows(space: int, new_rows: np.ndarray) -> None:
        if len(new_rows) == 0:
            return
        if space not in rows_by_space:
            bisect.insort(spaces, space)
        rows_by_space.setdefault(space, []).append(new_rows)

    largest_first = np.argsort(-lengths, kind="stable")
    for remaining in np.split(largest_first, np.flatnonzero(np.diff(lengths[largest_first])) + 1):
        size = int(lengths[remaining[0]])  # all remaining pieces have this size
        while len(remaining):
            index = bisect.bisect_left(spaces, size)
            if index < len(spaces):
                space = spaces.pop(index)
                candidates = np.concatenate(rows_by_space.pop(space))
            else:
                space = seq_len
                candidates = np.arange(num_rows, num_rows + -(-len(remaining) // (seq_len // size)))
                num_rows += len(candidates)
            per_row = space // size
            used, unused = np.split(candidates, [-(-len(remaining) // per_row)])
            placed, remaining = np.split(remaining, [len(used) * per_row])
            rows[placed] = np.repeat(used, per_row)[: len(placed)]
            in_last_row = len(placed) - (len(used) - 1) * per_row
            add_rows(space, unused)
            add_rows(space - per_row * size, used[:-1])
            add_rows(space - in_last_row * size, used[-1:])
    order = np.argsort(rows, kind="stable")
    starts, stops = pieces.starts[order], pieces.stops[order]
    return PackingPlan(rows[order], pieces.documents[order], starts, stops, np.arange(num_rows))


def _count_whole(sizes: Int[np.ndarray, "docs"], seq_len: int) -> int:
    """Return the number of rows of `plan_whole`: the same algorithm with numbers of rows instead of row indices."""
    full_pieces = _count_pieces(sizes, seq_len) - 1  # pieces of a document except the last; each of them fills a row
    num_pieces = np.bincount(sizes - full_pieces * (seq_len - 1), minlength=seq_len + 1)  # by size
    num_pieces[seq_len] += full_pieces.sum()
    spaces = list[int]()
    rows_by_space = dict[int, int]()
    num_rows = 0

    def add_rows(space: int, count: int) -> None:
        if count <= 0:
            return
        if space not in rows_by_space:
            bisect.insort(spaces, space)
        rows_by_space[space] = rows_by_space.get(space, 0) + count

    for size in np.flatnonzero(num_pieces)[::-1].tolist():
        remaining = int(num_pieces[size])
        while remaining > 0:
            index = bisect.bisect_left(spaces, size)
            space = spaces.pop(index) if index < len(spaces) else seq_len
            per_row = space // size
            candidates = rows_by_space.pop(space) if space in rows_by_space else -(-remaining // per_row)
            num_rows += candidates if space == seq_len else 0
            used = min(candidates, -(-remaining // per_row))
            in_last_row = min(remaining - (used - 1) * per_row, per_row)
            remaining -= (used - 1) * per_row + in_last_row
            add_rows(space, candidates - used)
            add_rows(space - per_row * size, used - 1)
            add_rows(space - in_last_row * size, 1)
    return num_rows


def permutation(size: int, seed: str) -> Int[np.ndarray, "size"]:
    """Return a pseudorandom permutation of `range(size)` that depends only on `seed`.

    The numbers are sorted by their splitmix64 hashes (Steele et al. 2014). Unlike permutations of NumPy's generators,
    the result does not depend on the version of a package, so a run resumes on the same data with newer packages.
    """
    key = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little")
    mixed = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")


def check_same_data(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise DataError unless `state`, the saved state of an iterator, has the data and settings of `identity`."""
    changes = [f"{key} was {state.get(key)!r} and is {now!r}" for key, now in identity.items() if state.get(key) != now]
    check(
        not changes,
        f"the data differ from the data of the checkpoint: {'; '.join(changes)}. Restore the data and settings to "
        "resume this run, or use another run directory.",
        DataError,
    )
