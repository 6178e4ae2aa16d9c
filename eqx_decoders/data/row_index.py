"""Row index: the pieces of documents in row n of a corpus of any size, planned in blocks when they are needed.

A block has `BLOCK` consecutive documents. Each block is planned by itself (see `packing_plans`), so half of its last
row is padding, on average. The number of rows of a block follows from the sizes of its documents alone: it is the same
in every epoch, and the only thing that is kept for a whole corpus.

Each epoch of a training takes the blocks in another order and cuts them into windows of about `WINDOW` pieces. The rows
of a window are shuffled together; only its plans and those of the next one are in memory. So a row is shuffled among
those of some forty blocks, not among all. They come evenly from all parts of the corpus, so that windows are alike
where its parts are not. A corpus that is smaller than a window is shuffled as a whole.
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


# Documents that are planned together: a run keeps this number in its state, and goes on with its own. WINDOW has to
# stay as it is, or existing runs would go on in another order.
BLOCK = 1 << 14
WINDOW = 1 << 20  # pieces whose rows are shuffled together, of some 20 bytes each

Pieces = Iterator[tuple[int, int, int]]  # document, start, stop
MakePlan = Callable[[np.ndarray, np.ndarray, int], PackingPlan]


@runtime_checkable
class Documents(Protocol):
    """Corpus to be planned: the sizes of its documents, in tokens, and which of them are held out."""

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def sizes(self, start: int, stop: int) -> np.ndarray: ...

    def is_held_out(self, start: int, stop: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of `size` documents of a corpus, of which one split is planned by `make`."""

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
        """Plan a block, which must have rows, with its documents in their order or in one that `seed` gives."""
        documents, sizes = self._documents(block)
        order = slice(None) if seed is None else permutation(len(documents), seed)
        return self.make(documents[order], sizes[order], self.seq_len).compact()

    def rows(self, block: int) -> int:
        """Count the rows of a block: 0 where none of its documents is in the split."""
        return count_rows(self.make, self._documents(block)[1], self.seq_len)

    def _documents(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and sizes of the split's documents in `block`."""
        start, stop = block * self.size, min((block + 1) * self.size, len(self.corpus))
        chosen = np.flatnonzero(self.corpus.is_held_out(start, stop) == self.held_out)
        return start + chosen, self.corpus.sizes(start, stop)[chosen]


class HeldOutRows:
    """Rows of one pass, in the order of the documents. Blocks are planned when one of their rows is needed."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._ends = [0]  # the row behind the last one of each block counted so far
        self._plan = functools.lru_cache(2)(blocks.plan)

    def reach(self, row: int) -> bool:
        """Count blocks up to a row, and return whether it exists."""
        while row >= self._ends[-1] and len(self._ends) <= self._blocks.count:
            self._ends.append(self._ends[-1] + self._blocks.rows(len(self._ends) - 1))
        return row < self._ends[-1]

    @property
    def per_epoch(self) -> int:
        """Number of rows, for which all blocks are counted."""
        while self.reach(self._ends[-1]):
            pass
        return self._ends[-1]

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row; none behind the last one."""
        if not self.reach(row):
            return iter(())
        block = bisect.bisect_right(self._ends, row) - 1
        return self._plan(block).pieces(row - self._ends[block])


class TrainingRows:
    """Rows of a training that never ends: each epoch has all of them, in an order that follows from `seed`.

    folder: directory for the numbers of rows of many blocks, since counting them reads all sizes.
    """

    def __init__(self, blocks: Blocks, seed: str, folder: Path):
        rows = _rows_of_all(blocks, folder)
        self._blocks, self._seed = blocks, seed
        self._filled = np.flatnonzero(rows)  # a block may have no document of the split
        self._rows = rows[self._filled]
        self._pieces = self._rows + blocks.size  # at most
        self.per_epoch = int(rows.sum())
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._window = functools.lru_cache(2)(self._make_window)

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row, counted from the first one of the training."""
        epoch, index = divmod(row, self.per_epoch)
        _, _, begins = self._epoch(epoch)
        number = int(np.searchsorted(begins, index, "right")) - 1
        window, index = self._window(epoch, number), index - int(begins[number])
        self._plan_ahead(epoch, number, 2 * index - len(window.order), len(window.order))
        return window.pieces(index)

    def _plan_ahead(self, epoch: int, number: int, done: int, of: int) -> None:
        """Plan blocks of the next window during the second half of a window, so that its first row waits for few."""
        if done < 0:
            return
        last = number + 1 == len(self._epoch(epoch)[2])
        window = self._window(epoch + 1, 0) if last else self._window(epoch, number + 1)
        window.plan(done * len(window.blocks) // of)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the order of the blocks (numbers among those with rows), and each window's first block and row."""
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

    `ends[i]`: the row behind the last one of `blocks[i]`, whose plan is `plan(i)`.
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
    """Return the end of a seed: none for number 0, which keeps the seeds of versions that had a single block."""
    return f"/{number}" if number else ""


def _spread(count: int, parts: int, seed: str) -> np.ndarray:
    """Order the numbers below `count` so that any `parts` consecutive ones come from all over the range.

    The range is cut into `parts`. The order has one number of each part, drawn by `seed`, then a second one, and so on.
    """
    shuffled = permutation(count, seed)
    part = shuffled * parts // count
    by_part = np.argsort(part, kind="stable")
    turns = np.empty(count, np.int64)
    turns[by_part] = np.arange(count) - np.searchsorted(part[by_part], part[by_part])
    return shuffled[np.argsort(turns, kind="stable")]


def _rows_of_all(blocks: Blocks, folder: Path) -> np.ndarray:
    """Return the number of rows of each block, from a file in `folder` if they were counted before."""
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
