"""Batches for training and evaluation, read from token stores; exactly resumable, for any number of processes.

Rows are planned, not streamed: the pieces of documents in each row follow from the seed alone (see `row_index`). So a
row is found by its number, the state of the iterator is that number, and each process makes only the rows of the same
global batches that its devices hold. A thread makes the next batches in advance.

**Packing** concatenates documents, then splits them: the documents of an epoch, in an order that follows from the seed,
are one long text that is cut into rows of `seq_len`. Only the end of the last row is padding (in large corpora, the end
of the last row of each 16,384 documents). Fitting whole documents into rows would leave gaps, and long documents would
be cut anyway. Segment ids separate the documents.

**Mixtures.** Each source is a corpus with its own epochs. `mixture` determines the source of the n-th row.

**Targets.** Token `t` is predicted from token `t-1` of its segment; the loss finds the targets in `tokens` itself.
`loss_mask[t]` says that token `t` is a target: all tokens except padding and the first token of a segment. In training
a cut costs one target (another one in each epoch, since the order changes). Held-out pieces, and pieces with
`pack=False`, overlap by one token. So every token after the leading separator of a document, including the closing
separator, is a target exactly once, and `total loss / bytes` are exact nats per byte.

**Conversations, and prompts with completions,** have some tokens that are targets; all other tokens are context. In a
corpus with such documents, documents of up to `seq_len` tokens are never cut: whole documents are fitted into rows.
Longer ones are cut into pieces that overlap by one token. A piece may have no target.
"""

import collections
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.mixture import Mixture
from eqx_decoders.data.packing_plans import check_same_data, plan_overlapping, plan_packed, plan_padded, plan_whole
from eqx_decoders.data.row_index import BLOCK, Blocks, HeldOutRows, TrainingRows
from eqx_decoders.data.store.corpus import SPLITS, CorpusStats
from eqx_decoders.data.store.store import TokenStore
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.protocols import HasMedia
from eqx_decoders.errors import DataError
from eqx_decoders.io.status import quantity


AHEAD = 4  # batches that are made in advance


class Corpus(NamedTuple):
    """One split of a corpus. folder: folder in the run's directory with the manifest of the tokens."""

    name: str
    store: TokenStore
    held_out: bool
    folder: Path

    @property
    def counts(self) -> CorpusStats:
        """Counts of this split."""
        return self.store.counts(SPLITS[self.held_out])


class Batches:
    """Iterator over `Batch`es of NumPy arrays. Close it (or use `with`) to end its thread.

    **Arguments:**

    - `parts`: one corpus, or the sources of a mixture with their `weights`.
    - `split`: "train" never ends, "held_out" is one pass over one corpus.
    - `rows`: indices of the rows to make of each batch of `batch_size` (see `host_rows`).

    Raises DataError if a part is empty.
    """

    def __init__(
        self,
        parts: Sequence[Corpus],
        *,
        split: str,
        rows: Sequence[int],
        batch_size: int,
        seq_len: int,
        seed: int,
        pack: bool,
        weights: Sequence[Fraction] = (),
        media: tuple[HasMedia, MediaReader] | None = None,
        groups: int = 1,
    ):
        for part in parts:
            if part.counts.documents == 0:
                few = "give more documents, or --held-out (DataConfig.held_out_path)"
                remedy = few if split == "held_out" else "lower --held-out-fraction (DataConfig.held_out_fraction)"
                name = f" {part.name!r}" if part.name else ""
                raise DataError(f"the split {split!r} of the data{name} is empty: {remedy}.")
            if media is not None:
                _check_images(part, seq_len)
        self.parts = tuple(parts)
        self.mixture = Mixture.of_weights(weights) if weights else None
        self._split, self._rows, self._batch_size = split, rows, batch_size
        self._media, self._groups = media, groups
        self._seq_len, self._seed, self._pack = seq_len, seed, pack
        self._since = 0  # row of the last change of weights
        self._before = [0] * len(parts)  # rows of each source before that change
        self._planning = threading.Lock()
        self._row = 0
        self.complete: Callable[[Batch], Batch] = lambda batch: batch  # adds signals that a training method stores
        self._prefetch: _Prefetch | None = None
        self._plan_in_blocks(BLOCK)

    def _plan_in_blocks(self, size: int) -> None:
        """Plan rows in blocks of `size` documents."""
        self._block_size, self._plans = size, list[TrainingRows | HeldOutRows]()
        for number, part in enumerate(self.parts):
            pieces = plan_overlapping if self._split == "held_out" else plan_packed
            make = (plan_whole if part.store.has_targets else pieces) if self._pack else plan_padded
            blocks = Blocks(part.store, part.held_out, make, self._seq_len, size)
            seed = str(self._seed) if self.mixture is None else f"{self._seed}/source {number}"
            held_out = self._split == "held_out"
            self._plans.append(HeldOutRows(blocks) if held_out else TrainingRows(blocks, seed, part.folder))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._split == "held_out" and not self._is_left():
            raise StopIteration
        if self._prefetch is None:
            first_row = self._row
            self._prefetch = _Prefetch(lambda number: self._batch(first_row + number * self._batch_size))
        try:
            arrays = next(self._prefetch)
        except BaseException:
            self.close()  # so that the next call makes this batch again
            raise
        self._row += self._batch_size
        return self.complete(Batch(**arrays, contiguous=True))

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. The next batch starts another one."""
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = None

    def rewind(self) -> "Batches":
        """Go back to the first batch: `for batch in held_out.rewind(): …` is one pass."""
        self.close()
        self._row = 0
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the state as plain JSON: the number of sequences so far, and everything that they depend on."""
        state = {"row": self._row, "block": self._block_size, **self._identity()}
        if self.mixture is not None:
            state |= {"parts": self.mixture.parts, "since": self._since, "before": self._before}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume exactly where `get_state` was called. `batch_size` and the number of processes may differ.

        With other weights, each source of a mixture resumes where it was. Raises DataError if the data or settings of
        `state` differ.
        """
        check_same_data(state, self._identity())
        self.close()
        self._row = int(state["row"])
        if self.mixture is not None:
            self._since, self._before = int(state["since"]), list(state["before"])
            if state["parts"] != self.mixture.parts:
                old = Mixture(state["parts"])
                self._before = self._taken(old)
                self._since = self._row
        if state["block"] != self._block_size:
            self._plan_in_blocks(state["block"])

    @property
    def store(self) -> TokenStore:
        """Tokens of the corpus, if the data are not a mixture."""
        (part,) = self.parts
        return part.store

    @property
    def rows_per_epoch(self) -> int:
        """Number of sequences of one pass over the data; for a mixture, over each source once."""
        counted = self._split == "train"  # it is needed after each step, and must not wait for a plan
        with contextlib.nullcontext() if counted else self._planning:
            return sum(plan.per_epoch for plan in self._plans)

    @property
    def epochs(self) -> float:
        """Number of passes over the data so far; for a mixture, over all sources together."""
        return self._row / self.rows_per_epoch

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps that pass over the data `epochs` times; at least 1."""
        return max(1, math.ceil(epochs * self.rows_per_epoch / self._batch_size))

    def source_epochs(self, rows: int | None = None) -> Mapping[str, float]:
        """Return the passes over each source of a mixture by its name, now or after `rows` sequences of training."""
        if self.mixture is None:
            return {}
        taken = self._taken(self.mixture, rows)
        pairs = zip(self.parts, taken, self._plans, strict=True)
        return {part.name: count / plan.per_epoch for part, count, plan in pairs}

    def describe(self, start: int, steps: int) -> str:
        """Describe the data of a training run at step `start` of `steps`, one line for each corpus.

        The lines of a mixture contain the weights, and the number of epochs at the end of the run.
        """
        lines, mixture = [], self.mixture
        ends = self.source_epochs(self._row + (steps - start) * self._batch_size)
        for number, (part, plan) in enumerate(zip(self.parts, self._plans, strict=True)):
            counts = part.counts
            line = f"{quantity(counts.documents, 'document')}, {quantity(counts.tokens, 'token')}"
            if part.store.has_targets:
                line += f", {counts.targets:,} of them targets"
            line += f", {quantity(plan.per_epoch, 'sequence')} an epoch"
            if mixture is not None:
                share = mixture.parts[number] / sum(mixture.parts)
                line = f"{part.name}: {line}; weight {share:.3g}, {ends[part.name]:.3g} epochs in {steps:,} steps"
            lines.append(line)
            lines += part.store.report()
        return "\n".join(lines)

    def _taken(self, mixture: Mixture, rows: int | None = None) -> list[int]:
        """Count the sequences of each source among the first `rows`."""
        since = mixture.taken((self._row if rows is None else rows) - self._since)
        return [old + new for old, new in zip(self._before, since, strict=True)]

    def _identity(self) -> dict[str, Any]:
        hashes = {
            "data": [part.store.content_hash for part in self.parts],
            "order": [part.store.order_hash for part in self.parts],
        }
        settings = {"seed": self._seed, "seq_len": self._seq_len, "pack": self._pack}
        named = {name: parts[0] if self.mixture is None else parts for name, parts in hashes.items()}
        return {"split": self._split, **named, **settings}

    def _is_left(self) -> bool:
        """Return whether a held-out pass has more rows."""
        with self._planning:
            return any(isinstance(plan, HeldOutRows) and plan.reach(self._row) for plan in self._plans)

    def _batch(self, start: int) -> dict[str, Any]:
        """Make the batch whose first row is `start`."""
        shape = (len(self._rows), self._seq_len)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions")}
        batch["loss_mask"] = np.zeros(shape, bool)
        references: list[str] = []
        for index, row in enumerate(self._rows):
            references += self._fill(start + row, *(array[index] for array in batch.values()))
        if self._media is None:
            return batch
        return batch | {"media": self._read_media(batch, references)}

    def _read_media(self, batch: Mapping[str, np.ndarray], references: Sequence[str]) -> Media:
        """Read the images, videos and audio of a batch."""
        assert self._media is not None
        config, reader = self._media
        arrays = reader.arrays(references) if references else {}
        options: dict[str, Any] = dict(segment_ids=batch["segment_ids"], groups=self._groups)
        return Media.create(config, batch["tokens"], **options, **arrays)

    def _fill(
        self, row: int, tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray, targets: np.ndarray
    ) -> list[str]:
        """Write one sequence into arrays of zeros; return the references to the media files of its documents."""
        source, number = self._find(row)
        store, used = self.parts[source].store, 0
        references: list[str] = []
        with self._planning:  # else two threads might make the same plan
            pieces = self._plans[source].pieces(number)
        for segment, (document, start, stop) in enumerate(pieces, 1):
            span = slice(used, used + stop - start)
            tokens[span] = store[document][start:stop]
            segments[span] = segment
            positions[span] = np.arange(stop - start)
            targets[span] = store.targets(document)[start:stop] if store.has_targets else True
            targets[used] = False  # no token of its piece predicts it
            used = span.stop
            if self._media is not None:
                references += store.media(document)
        return references

    def _find(self, row: int) -> tuple[int, int]:
        """Return the index of the part that a row is from, and the index of the row in that part."""
        if self.mixture is None:
            return 0, row
        source, number = self.mixture.find(row - self._since)
        return source, self._before[source] + number


def _check_images(part: Corpus, seq_len: int) -> None:
    """Raise DataError if a document with images, videos or audio, which cannot be cut, is longer than a sequence."""
    for start, stop in part.store.ranges():
        longer = (part.store.sizes(start, stop) > seq_len) & (part.store.is_held_out(start, stop) == part.held_out)
        if longer.any() and (longer := longer & part.store.has_media(start, stop)).any():
            sizes, first = part.store.sizes(start, stop)[longer], start + int(np.argmax(longer))
            documents = "1 document" if len(sizes) == 1 else f"{len(sizes):,} documents"
            raise DataError(
                f"{part.store.name(first)} has {len(part.store[first]):,} tokens with its images, but documents with "
                f"images must fit into a sequence of --seq-len {seq_len}. Raise it to {sizes.max():,}, set the "
                f"processor to fewer tokens per image, or remove the {documents} of that length."
            )


class _Prefetch:
    """Iterator over `make(0)`, `make(1)`, …, which one thread calls in order, `AHEAD` results in advance."""

    def __init__(self, make: Callable[[int], dict[str, Any]]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._make, self._numbers = make, itertools.count()
        self._results = collections.deque[Future[dict[str, Any]]]()

    def __next__(self) -> dict[str, Any]:
        while len(self._results) <= AHEAD:
            self._results.append(self._thread.submit(self._make, next(self._numbers)))
        return self._results.popleft().result()

    def close(self) -> None:
        """End the thread, after the batch that it is making."""
        self._thread.shutdown(cancel_futures=True)
