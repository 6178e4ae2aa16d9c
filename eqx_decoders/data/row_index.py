"""Row index: the pieces of documents in row n of a corpus of any size, planned block by block when they are needed.

A block has `BLOCK` consecutive documents. Each block is planned separately (see `packing_plans`), so on average half of
its last row is padding. The number of rows of a block follows from the sizes of its documents alone. It is the same in
every epoch, and it is all that is stored for the complete corpus.

Each epoch of training takes the blocks in another order and cuts this order into windows of about `WINDOW` pieces. The
rows of a window are shuffled together. Only the plans of one window and of the next one are in memory. So a row is
shuffled among the rows of about forty blocks, which come evenly from all parts of the corpus. A corpus that is smaller
than a window is shuffled completely.
"""

import bisect
import dataclasses
import functools
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.data.packing_plans import PackingPlan, count_rows, permutation
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.status import StatusLine


# Documents that are planned together. A run stores this number in its state and resumes with it. WINDOW must not
# change: existing runs would resume with another order.
BLOCK = 1 << 14
WINDOW = 1 << 20  # pieces whose rows are shuffled together; a piece takes about 20 bytes

Pieces = Iterator[tuple[int, int, int]]  # document, start, stop
MakePlan = Callable[[np.ndarray, np.ndarray, int], PackingPlan]


@runtime_checkable
class Documents(Protocol):
    """Corpus to be planned: the sizes of its documents in tokens, and a mask of the held-out documents."""

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def sizes(self, start: int, stop: int) -> np.ndarray: ...

    def is_held_out(self, start: int, stop: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of `size` documents of a corpus. `make` plans the documents of one split."""

    corpus: Documents
    held_out: bool
    make: MakePlan
    seq_len: int
    size: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return -(-len(self.corpus) // self.size)

    def plan(self, block: int, seed: str | None = None) -> PackingPlan:
        """Plan a block, which must have rows. seed: determines the order of documents; None: the corpus's order."""
        documents, sizes = self._documents(block)
        order = slice(None) if seed is None else permutation(len(documents), seed)
        return self.make(documents[order], sizes[order], self.seq_len).compact()

    def rows(self, block: int) -> int:
        """Return the number of rows of a block, which is 0 if no document is in the split."""
        return count_rows(self.make, self._documents(block)[1], self.seq_len)

    def _documents(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and sizes of the split's documents in `block`."""
        start, stop = block * self.size, min((block + 1) * self.size, len(self.corpus))
        chosen = np.flatnonzero(self.corpus.is_held_out(start, stop) == self.held_out)
        return start + chosen, self.corpus.sizes(start, stop)[chosen]


class HeldOutRows:
    """Rows of one pass over the held-out documents in their order. Blocks are planned when their rows are needed."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._ends = [0]  # end of the rows of each block counted so far
        self._plan = functools.lru_cache(2)(blocks.plan)

    def reach(self, row: int) -> bool:
        """Count blocks up to a row, and return whether the row exists."""
        while row >= self._ends[-1] and len(self._ends) <= self._blocks.count:
            self._ends.append(self._ends[-1] + self._blocks.rows(len(self._ends) - 1))
        return row < self._ends[-1]

    @property
    def per_epoch(self) -> int:
        """Number of rows. Counts all blocks."""
        while self.reach(self._ends[-1]):
            pass
        return self._ends[-1]

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row. A row after the last one has no pieces."""
        if not self.reach(row):
            return iter(())
        block = bisect.bisect_right(self._ends, row) - 1
        return self._plan(block).pieces(row - self._ends[block])


class TrainingRows:
    """Rows of training, which never end: each epoch has all rows, in an order that follows from `seed`.

    folder: directory in which the numbers of rows of all blocks are stored, since counting them reads all sizes.
    """

    def __init__(self, blocks: Blocks, seed: str, folder: Path):
        rows = _rows_of_all(blocks, folder)
        self._blocks, self._seed = blocks, seed
        self._filled = np.flatnonzero(rows)  # blocks with documents of the split
        self._rows = rows[self._filled]
        self._pieces = self._rows + blocks.size  # upper bound
        self.per_epoch = int(rows.sum())
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._window = functools.lru_cache(2)(self._make_window)

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row, counted from the start of training."""
        epoch, index = divmod(row, self.per_epoch)
        _, _, begins = self._epoch(epoch)
        number = int(np.searchsorted(begins, index, "right")) - 1
        window, index = self._window(epoch, number), index - int(begins[number])
        self._plan_ahead(epoch, number, 2 * index - len(window.order), len(window.order))
        return window.pieces(index)

    def _plan_ahead(self, epoch: int, number: int, done: int, of: int) -> None:
        """Plan blocks of the next window during the second half of a window, so that its first row need not wait."""
        if done < 0:
            return
        last = number + 1 == len(self._epoch(epoch)[2])
        window = self._window(epoch + 1, 0) if last else self._window(epoch, number + 1)
        window.plan(done * len(window.blocks) // of)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of the blocks with rows, and the first block and first row of each window."""
        count, total = len(self._rows), int(self._pieces.sum())
        windows = max(1, round(total / WINDOW))
        order = _spread(count, max(1, round(count / windows)), f"{self._seed}/{epoch}/blocks")
        before = np.cumsum(self._pieces[order]) - self._pieces[order]
        _, firsts = np.unique(before * windows // total, return_index=True)
        begins = np.append(0, np.cumsum(self._rows[order]))[firsts]
        return order, firsts, begins

    def _make_window(self, epoch: int, number: int) -> "_Window":
        order, firsts, _ = self._epoch(epoch)
        chosen = order[firsts[number] :][: firsts[number + 1] - firsts[number] if number + 1 < len(firsts) else None]
        ends, blocks = np.cumsum(self._rows[chosen]), self._filled[chosen].tolist()
        rows = permutation(int(ends[-1]), f"{self._seed}/{epoch}/rows{_suffix(number)}")

        def plan(index: int) -> PackingPlan:
            block = blocks[index]
            return self._blocks.plan(block, f"{self._seed}/{epoch}/documents{_suffix(block)}")

        return _Window(blocks, ends, rows, functools.cache(plan))


class _Window(NamedTuple):
    """Window of blocks whose rows are shuffled together: `order[k]` is the row at index `k`.

    `ends[i]` is the end of the rows of `blocks[i]`, whose plan is `plan(i)`.
    """

    blocks: list[int]
    ends: np.ndarray
    order: np.ndarray
    plan: Callable[[int], PackingPlan]

    def pieces(self, index: int) -> Pieces:
        row = self.order[index]
        block = int(np.searchsorted(self.ends, row, "right"))
        return self.plan(block).pieces(int(row - (self.ends[block - 1] if block else 0)))


def _suffix(number: int) -> str:
    """Return the suffix of a seed; it is empty for block 0, so that a corpus of one block has a seed without suffix."""
    return f"/{number}" if number else ""


def _spread(count: int, parts: int, seed: str) -> np.ndarray:
    """Return the numbers below `count` in an order in which `parts` consecutive ones come from all parts of the range.

    The range is cut into `parts`. The order has one number of each part, chosen by `seed`, then a second one of each
    part, and so on.
    """
    shuffled = permutation(count, seed)
    part = shuffled * parts // count
    by_part = np.argsort(part, kind="stable")
    turns = np.empty(count, np.int64)
    turns[by_part] = np.arange(count) - np.searchsorted(part[by_part], part[by_part])
    return shuffled[np.argsort(turns, kind="stable")]


def _rows_of_all(blocks: Blocks, folder: Path) -> np.ndarray:
    """Return the number of rows of each block. They are stored in a file in `folder`."""
    if blocks.count == 1:
        return np.array([blocks.rows(0)])
    settings = (blocks.held_out, blocks.make.__name__, blocks.seq_len, blocks.size)
    what = f"{blocks.corpus.content_hash} {settings}"
    file = folder / f"rows-{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}.npy"
    try:
        counts = np.load(file, allow_pickle=False)
        if counts.shape == (blocks.count,):
            return counts
    except (OSError, ValueError, EOFError):
        pass
    with StatusLine("counting sequences", remains="the tokens are kept"):
        counts = np.array([blocks.rows(block) for block in range(blocks.count)])
    stream = io.BytesIO()
    np.save(stream, counts)
    write_atomically(file, stream.getvalue())
    return counts
