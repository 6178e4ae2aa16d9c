"""Which pieces of which documents stand in row n of a corpus of any size: planned in blocks, when they are needed.

The documents stand in blocks of `BLOCK` consecutive ones. Each block is planned by itself (see `packing`), so half of
its last row is padding, on average. How many rows a block has follows from the sizes of its documents alone: it is the
same in every epoch, and all that is kept of a whole corpus.

Each epoch of a training takes the blocks in another order and cuts them into windows of about `WINDOW` pieces. The rows
of a window are shuffled together; its plans and those of the next one are all that is in memory. So a row stands among
those of some forty blocks, not among all. They come evenly from all parts of the corpus, so that windows are alike
where its parts are not. What is smaller than a window is shuffled as a whole.
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

from eqx_decoders.data.packing import PackingPlan, count_rows, permutation
from eqx_decoders.io.atomic_files import write_atomically
from eqx_decoders.io.status import StatusLine


# Documents that are planned together: a run keeps this number in its state, and goes on with its own. WINDOW has to
# stay as it is, or the runs that there are would go on in another order.
BLOCK = 1 << 14
WINDOW = 1 << 20  # pieces whose rows are shuffled together, of some 20 bytes each

Pieces = Iterator[tuple[int, int, int]]  # document, start, stop
MakePlan = Callable[[np.ndarray, np.ndarray, int], PackingPlan]


@runtime_checkable
class Documents(Protocol):
    """What is asked of a corpus: the sizes of its documents, in tokens, and which of them are held out."""

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def sizes(self, start: int, stop: int) -> np.ndarray: ...

    def is_held_out(self, start: int, stop: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The documents of one split, in blocks of `size` documents of the corpus, and how they are planned."""

    corpus: Documents
    held_out: bool
    make: MakePlan
    seq_len: int
    size: int

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-len(self.corpus) // self.size)

    def plan(self, block: int, seed: str | None = None) -> PackingPlan:
        """The plan of a block, which must have rows, with its documents in the order that `seed` gives them."""
        documents, sizes = self._documents(block)
        order = slice(None) if seed is None else permutation(len(documents), seed)
        return self.make(documents[order], sizes[order], self.seq_len).compact()

    def rows(self, block: int) -> int:
        """How many rows a block has; none where no document of it is of the split."""
        return count_rows(self.make, self._documents(block)[1], self.seq_len)

    def _documents(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the split's documents in `block`, and their sizes."""
        start, stop = block * self.size, min((block + 1) * self.size, len(self.corpus))
        chosen = np.flatnonzero(self.corpus.is_held_out(start, stop) == self.held_out)
        return start + chosen, self.corpus.sizes(start, stop)[chosen]


class HeldOutRows:
    """The rows of one pass, in the order of the documents. Blocks are looked at when a row is asked for."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self._ends = [0]  # of each block looked at so far, the row behind its last one
        self._plan = functools.lru_cache(2)(blocks.plan)

    def reach(self, row: int) -> bool:
        """Whether there is a row of this number."""
        while row >= self._ends[-1] and len(self._ends) <= self._blocks.count:
            self._ends.append(self._ends[-1] + self._blocks.rows(len(self._ends) - 1))
        return row < self._ends[-1]

    @property
    def per_epoch(self) -> int:
        """How many rows there are: this looks at all blocks."""
        while self.reach(self._ends[-1]):
            pass
        return self._ends[-1]

    def pieces(self, row: int) -> Pieces:
        """What stands in a row: nothing behind the last one."""
        if not self.reach(row):
            return iter(())
        block = bisect.bisect_right(self._ends, row) - 1
        return self._plan(block).pieces(row - self._ends[block])


class TrainingRows:
    """The rows of a training without an end: each epoch has all of them, in an order that follows from `seed`.

    folder: there the numbers of rows are kept where there are many blocks, since counting them reads all sizes.
    """

    def __init__(self, blocks: Blocks, seed: str, folder: Path):
        rows = _rows_of_all(blocks, folder)
        self._blocks, self._seed = blocks, seed
        self._filled = np.flatnonzero(rows)  # a block may have nothing of the split
        self._rows = rows[self._filled]
        self._pieces = self._rows + blocks.size  # at most
        self.per_epoch = int(rows.sum())
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._window = functools.lru_cache(2)(self._make_window)

    def pieces(self, row: int) -> Pieces:
        """What stands in a row, counted from the first one of the training."""
        epoch, place = divmod(row, self.per_epoch)
        _, _, begins = self._epoch(epoch)
        number = int(np.searchsorted(begins, place, "right")) - 1
        window, place = self._window(epoch, number), place - int(begins[number])
        self._plan_ahead(epoch, number, 2 * place - len(window.order), len(window.order))
        return window.pieces(place)

    def _plan_ahead(self, epoch: int, number: int, done: int, of: int) -> None:
        """In the second half of a window, plan a block of the next one now and then: its rows needn't wait for all."""
        if done < 0:
            return
        last = number + 1 == len(self._epoch(epoch)[2])
        window = self._window(epoch + 1, 0) if last else self._window(epoch, number + 1)
        window.plan(done * len(window.blocks) // of)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The blocks (numbers among those with rows) in their order; of each window its first block and first row."""
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

        def plan(place: int) -> PackingPlan:
            block = blocks[place]
            return self._blocks.plan(block, f"{self._seed}/{epoch}/documents{_suffix(block)}")

        return _Window(blocks, ends, rows, functools.cache(plan))


class _Window(NamedTuple):
    """Blocks whose rows are shuffled together: `order[k]` is the row that is used as the `k`-th.

    `ends[i]`: the row behind the last one of `blocks[i]`, whose plan is `plan(i)`.
    """

    blocks: list[int]
    ends: np.ndarray
    order: np.ndarray
    plan: Callable[[int], PackingPlan]

    def pieces(self, place: int) -> Pieces:
        row = self.order[place]
        block = int(np.searchsorted(self.ends, row, "right"))
        return self.plan(block).pieces(int(row - (self.ends[block - 1] if block else 0)))


def _suffix(number: int) -> str:
    """The first is called as it was before there were several."""
    return f"/{number}" if number else ""


def _spread(count: int, parts: int, seed: str) -> np.ndarray:
    """The numbers below `count` in an order in which any `parts` that follow each other come from all over the range.

    The range is cut into `parts`. One of each part, drawn by `seed`, then a second one of each, and so on.
    """
    shuffled = permutation(count, seed)
    part = shuffled * parts // count
    by_part = np.argsort(part, kind="stable")
    turns = np.empty(count, np.int64)
    turns[by_part] = np.arange(count) - np.searchsorted(part[by_part], part[by_part])
    return shuffled[np.argsort(turns, kind="stable")]


def _rows_of_all(blocks: Blocks, folder: Path) -> np.ndarray:
    """How many rows each block has, from a file in `folder` if they were counted before."""
    if blocks.count == 1:
        return np.array([blocks.rows(0)])
    how = (blocks.held_out, blocks.make.__name__, blocks.seq_len, blocks.size)
    what = f"{blocks.corpus.content_hash} {how}"
    file = folder / f"rows-{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}.npy"
    try:
        found = np.load(file, allow_pickle=False)
        if found.shape == (blocks.count,):
            return found
    except (OSError, ValueError, EOFError):
        pass
    with StatusLine("counting sequences", kept="the tokens are kept"):
        found = np.array([blocks.rows(block) for block in range(blocks.count)])
    stream = io.BytesIO()
    np.save(stream, found)
    write_atomically(file, stream.getvalue())
    return found
