"""Row index: look up the pieces of documents in row n of a corpus of any size, without planning the complete corpus.

The corpus is divided into chunks of `CHUNK_SIZE` consecutive documents. Each chunk is planned separately when one of
its rows is needed (see `packing_plans`), so on average half of the last row of a chunk is padding. The number of rows
of a chunk depends only on the sizes of its documents and is the same in every epoch. Only these numbers are stored for
the complete corpus.

In training, each epoch shuffles the chunks and splits their order into windows of about `WINDOW_SIZE` pieces. The rows
of a window are shuffled together. Only the plans of the current and the next window are in memory. So a row is shuffled
among the rows of about forty chunks, which are spread evenly over the corpus. A corpus that is smaller than a window is
shuffled completely.
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


CHUNK_SIZE = 1 << 14  # documents per chunk; the state of a run contains this number, and a resumed run uses it
# Pieces per window, whose rows are shuffled together; a piece takes about 20 bytes. Do not change this number: existing
# runs would resume with another order.
WINDOW_SIZE = 1 << 20

Pieces = Iterator[tuple[int, int, int]]  # (document, start, stop)
PlanFunction = Callable[[np.ndarray, np.ndarray, int], PackingPlan]  # (documents, sizes, seq_len) -> plan


@runtime_checkable
class Documents(Protocol):
    """Corpus that is packed into rows: the sizes of the documents in tokens, and a mask of the held-out documents."""

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def sizes(self, start: int, stop: int) -> np.ndarray: ...

    def is_held_out(self, start: int, stop: int) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class DocumentChunks:
    """Chunks of `size` consecutive documents of a corpus, each of which is packed into rows separately.

    **Arguments:**

    - `held_out`: whether to pack the held-out documents or the training documents.
    - `plan_function`: function of `packing_plans` that packs the documents of a chunk.
    - `size`: number of documents per chunk, of both splits.
    """

    corpus: Documents
    held_out: bool
    plan_function: PlanFunction
    seq_len: int
    size: int

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-len(self.corpus) // self.size)

    def plan(self, chunk: int, seed: str | None = None) -> PackingPlan:
        """Plan a chunk with at least one document of the split.

        `seed` determines the order of the documents; None: the order of the corpus.
        """
        documents, sizes = self._documents(chunk)
        order = slice(None) if seed is None else permutation(len(documents), seed)
        return self.plan_function(documents[order], sizes[order], self.seq_len).compact()

    def num_rows(self, chunk: int) -> int:
        """Return the number of rows of a chunk; 0 if the chunk has no documents of the split."""
        _, sizes = self._documents(chunk)
        return count_rows(self.plan_function, sizes, self.seq_len)

    def _documents(self, chunk: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and sizes of the split's documents in a chunk."""
        start, stop = chunk * self.size, min((chunk + 1) * self.size, len(self.corpus))
        in_split = np.flatnonzero(self.corpus.is_held_out(start, stop) == self.held_out)
        return start + in_split, self.corpus.sizes(start, stop)[in_split]


class HeldOutRows:
    """Rows of one pass over the held-out documents, in the order of the corpus."""

    def __init__(self, chunks: DocumentChunks):
        self._chunks = chunks
        self._row_ends = [0]  # 0, then the end of the rows of each chunk whose rows have been counted
        self._plan = functools.lru_cache(2)(chunks.plan)

    def exists(self, row: int) -> bool:
        """Return whether the row exists. Counts the rows of chunks only as far as necessary."""
        while row >= self._row_ends[-1] and len(self._row_ends) <= self._chunks.num_chunks:
            self._row_ends.append(self._row_ends[-1] + self._chunks.num_rows(len(self._row_ends) - 1))
        return row < self._row_ends[-1]

    @property
    def per_epoch(self) -> int:
        """Number of rows. Counts the rows of all chunks."""
        while self.exists(self._row_ends[-1]):
            pass
        return self._row_ends[-1]

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row; no pieces if the row does not exist."""
        if not self.exists(row):
            return iter(())
        chunk = bisect.bisect_right(self._row_ends, row) - 1
        return self._plan(chunk).pieces(row - self._row_ends[chunk])


class TrainingRows:
    """Infinite rows of training: each epoch has all rows, in an order that depends on `seed` and the epoch.

    **Arguments:**

    - `folder`: directory in which the numbers of rows of all chunks are cached, because counting reads all sizes.
    """

    def __init__(self, chunks: DocumentChunks, seed: str, folder: Path):
        num_rows = _count_rows_of_chunks(chunks, folder)
        self._chunks = chunks
        self._seed = seed
        self._nonempty = np.flatnonzero(num_rows)  # chunks with documents of the split
        self._num_rows = num_rows[self._nonempty]  # by index in `_nonempty`
        self._max_pieces = self._num_rows + chunks.size  # upper bound of the number of pieces of each chunk
        self.per_epoch = int(num_rows.sum())
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._window = functools.lru_cache(2)(self._make_window)

    def pieces(self, row: int) -> Pieces:
        """Return the pieces in a row. Rows are counted from the start of training."""
        epoch, index = divmod(row, self.per_epoch)
        first_rows = self._epoch(epoch).first_rows
        number = int(np.searchsorted(first_rows, index, "right")) - 1
        window = self._window(epoch, number)
        index -= int(first_rows[number])
        self._plan_ahead(epoch, number, index, len(window.order))
        return window.pieces(index)

    def _plan_ahead(self, epoch: int, number: int, index: int, num_rows: int) -> None:
        """Plan one chunk of the next window at a time, while the second half of the current window is read.

        Otherwise the first row of the next window would wait for several plans.

        **Arguments:**

        - `number`: index of the current window in the epoch.
        - `index`: index of the current row in the window, which has `num_rows` rows.
        """
        progress = 2 * index - num_rows  # 0 to num_rows in the second half of the window
        if progress < 0:
            return
        is_last = number + 1 == len(self._epoch(epoch).first_rows)
        window = self._window(epoch + 1, 0) if is_last else self._window(epoch, number + 1)
        window.plan(progress * len(window.chunks) // num_rows)

    def _make_epoch(self, epoch: int) -> "_Epoch":
        num_chunks = len(self._num_rows)
        num_pieces = int(self._max_pieces.sum())
        num_windows = max(1, round(num_pieces / WINDOW_SIZE))
        order = _spread(num_chunks, max(1, round(num_chunks / num_windows)), f"{self._seed}/{epoch}/blocks")
        pieces_before = np.cumsum(self._max_pieces[order]) - self._max_pieces[order]
        _, first_chunks = np.unique(pieces_before * num_windows // num_pieces, return_index=True)
        first_rows = np.append(0, np.cumsum(self._num_rows[order]))[first_chunks]
        return _Epoch(order, first_chunks, first_rows)

    def _make_window(self, epoch: int, number: int) -> "_Window":
        order, first_chunks, _ = self._epoch(epoch)
        stop = first_chunks[number + 1] if number + 1 < len(first_chunks) else None
        indices = order[first_chunks[number] : stop]
        row_ends = np.cumsum(self._num_rows[indices])
        chunks = self._nonempty[indices].tolist()
        rows = permutation(int(row_ends[-1]), f"{self._seed}/{epoch}/rows{_suffix(number)}")

        def plan(index: int) -> PackingPlan:
            chunk = chunks[index]
            return self._chunks.plan(chunk, f"{self._seed}/{epoch}/documents{_suffix(chunk)}")

        return _Window(chunks, row_ends, rows, functools.cache(plan))


class _Epoch(NamedTuple):
    """Order of the chunks in an epoch, and its windows.

    - `order`: permutation of the nonempty chunks.
    - `first_chunks`: index in `order` of the first chunk of each window.
    - `first_rows`: index in the epoch of the first row of each window.
    """

    order: np.ndarray
    first_chunks: np.ndarray
    first_rows: np.ndarray


class _Window(NamedTuple):
    """Chunks whose rows are shuffled together.

    - `chunks`: indices of the chunks.
    - `row_ends`: `row_ends[i]` is the end of the rows of `chunks[i]`, before shuffling.
    - `order`: permutation of the rows.
    - `plan`: returns the plan of `chunks[i]` for an index `i`.
    """

    chunks: list[int]
    row_ends: np.ndarray
    order: np.ndarray
    plan: Callable[[int], PackingPlan]

    def pieces(self, index: int) -> Pieces:
        row = self.order[index]
        chunk = int(np.searchsorted(self.row_ends, row, "right"))
        return self.plan(chunk).pieces(int(row - (self.row_ends[chunk - 1] if chunk else 0)))


def _suffix(number: int) -> str:
    """Return the suffix of a seed; empty for 0, so that the seed of a corpus of one chunk has no suffix."""
    return f"/{number}" if number else ""


def _spread(count: int, num_parts: int, seed: str) -> np.ndarray:
    """Return a permutation of `range(count)` in which consecutive numbers are spread over the range.

    The range is divided into `num_parts` parts of equal size. The permutation has one number of each part, chosen by
    `seed`, then a second number of each part, and so on.
    """
    shuffled = permutation(count, seed)
    parts = shuffled * num_parts // count
    by_part = np.argsort(parts, kind="stable")
    index_in_part = np.empty(count, np.int64)
    index_in_part[by_part] = np.arange(count) - np.searchsorted(parts[by_part], parts[by_part])
    return shuffled[np.argsort(index_in_part, kind="stable")]


def _count_rows_of_chunks(chunks: DocumentChunks, folder: Path) -> np.ndarray:
    """Return the number of rows of each chunk, cached in a file in `folder`."""
    if chunks.num_chunks == 1:
        return np.array([chunks.num_rows(0)])
    settings = (chunks.held_out, chunks.plan_function.__name__, chunks.seq_len, chunks.size)
    key = f"{chunks.corpus.content_hash} {settings}"
    file = folder / f"rows-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.npy"
    try:
        counts = np.load(file, allow_pickle=False)
        if counts.shape == (chunks.num_chunks,):
            return counts
    except (OSError, ValueError, EOFError):
        pass
    with StatusLine("counting sequences", remains="the tokens are kept"):
        counts = np.array([chunks.num_rows(chunk) for chunk in range(chunks.num_chunks)])
    stream = io.BytesIO()
    np.save(stream, counts)
    write_atomically(file, stream.getvalue())
    return counts
