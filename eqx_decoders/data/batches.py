"""Batches for training and evaluation, read from token stores. Exactly resumable, for any number of processes.

The rows of an epoch are planned in advance: the seed determines which pieces of documents are in row n (see
`row_index`). So the state of the iterator is the number of rows so far, and each process makes only the rows of its own
devices. A background thread makes the next batches.

**Packing** concatenates the documents of an epoch in shuffled order and splits the tokens into rows of `seq_len`. Only
the end of the last row is padding (in large corpora, the end of the last row of each 16,384 documents). Segment ids
separate the documents. Packing complete documents instead would leave gaps, and long documents would be split anyway.

**Mixtures.** Each source is a corpus with separate epochs. `mixture` determines the source of the n-th row.

**Targets.** Token `t` is predicted from token `t-1` of its segment; the loss finds the targets in `tokens` itself.
`loss_mask[t]` is True if token `t` is a target: all tokens except padding and the first token of a segment. In training
each split of a document loses one target (at another position in each epoch, because the order changes). Held-out
pieces, and pieces with `pack=False`, overlap by one token. So every token after the separator at the start of a
document, including the separator at the end, is a target exactly once, and `total loss / bytes` is the exact number of
nats per byte.

**Conversations, and prompts with completions,** have targets only in some tokens; the other tokens are context. If a
corpus has such documents, documents of up to `seq_len` tokens are never split: complete documents are packed into rows.
Longer documents are split into pieces that overlap by one token. A piece may have no targets.
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
from eqx_decoders.data.row_index import CHUNK_SIZE, DocumentChunks, HeldOutRows, TrainingRows
from eqx_decoders.data.store.corpus import SPLITS, CorpusStats
from eqx_decoders.data.store.store import TokenStore
from eqx_decoders.encoders.media import Media
from eqx_decoders.encoders.protocols import HasMedia
from eqx_decoders.errors import DataError
from eqx_decoders.io.status import quantity


MAX_PREFETCHED = 4  # batches that the background thread makes in advance


class Corpus(NamedTuple):
    """One split of a corpus.

    - `name`: name of the source in a mixture, or of the held-out set; may be empty.
    - `held_out`: whether this is the held-out split.
    - `folder`: folder with the manifest of the tokens, in the run's directory.
    """

    name: str
    store: TokenStore
    held_out: bool
    folder: Path

    @property
    def counts(self) -> CorpusStats:
        """Numbers of documents, tokens and targets of this split."""
        return self.store.counts(SPLITS[self.held_out])


class Batches:
    """Iterator over `Batch`es of NumPy arrays `[len(rows), seq_len]`.

    The iterator has a background thread: call `close`, or use the iterator in a `with` statement.

    **Arguments:**

    - `parts`: one corpus, or the sources of a mixture.
    - `split`: "train" never ends; "held_out" makes one pass over one corpus.
    - `rows`: indices, in a batch of `batch_size` rows, of the rows that this process makes (see `host_rows`).
    - `batch_size`: number of rows of the global batch.
    - `pack`: pack several documents into a row. False: pad each document.
    - `weights`: weights of the sources of a mixture; empty for one corpus.
    - `media`: configuration of the model and reader of images, videos and audio; None: batches without media.
    - `groups`: number of groups of rows in `Batch.media` (see `Media.create`).

    Raises DataError if a corpus is empty.
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
                name = f" {part.name!r}" if part.name else ""
                if split == "held_out":
                    remedy = "Use more documents, or set --held-out (DataConfig.held_out_path)."
                else:
                    remedy = "Lower --held-out-fraction (DataConfig.held_out_fraction)."
                raise DataError(f"the split {split!r} of the data{name} has no documents. {remedy}")
            if media is not None:
                _check_media_lengths(part, seq_len)
        self.parts = tuple(parts)
        self.mixture = Mixture.of_weights(weights) if weights else None
        self._split = split
        self._rows = rows
        self._batch_size = batch_size
        self._media = media
        self._groups = groups
        self._seq_len = seq_len
        self._seed = seed
        self._pack = pack
        self._row = 0  # number of rows of global batches so far
        self._mixture_start = 0  # row at which the weights of the mixture last changed
        self._rows_before_mixture = [0] * len(parts)  # rows of each source before that change
        self._plan_lock = threading.Lock()  # the plans are computed lazily, by this thread and the background thread
        self.complete: Callable[[Batch], Batch] = lambda batch: batch  # a training method adds its stored signals here
        self._prefetch: _Prefetcher | None = None
        self._set_chunk_size(CHUNK_SIZE)

    def _set_chunk_size(self, chunk_size: int) -> None:
        """Plan the rows of each source in chunks of `chunk_size` documents."""
        self._chunk_size = chunk_size
        self._plans = list[TrainingRows | HeldOutRows]()
        for number, part in enumerate(self.parts):
            if not self._pack:
                plan = plan_padded
            elif part.store.has_targets:
                plan = plan_whole
            else:
                plan = plan_overlapping if self._split == "held_out" else plan_packed
            chunks = DocumentChunks(part.store, part.held_out, plan, self._seq_len, chunk_size)
            if self._split == "held_out":
                self._plans.append(HeldOutRows(chunks))
            else:
                seed = str(self._seed) if self.mixture is None else f"{self._seed}/source {number}"
                self._plans.append(TrainingRows(chunks, seed, part.folder))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._split == "held_out" and not self._has_more_rows():
            raise StopIteration
        if self._prefetch is None:
            first_row = self._row
            self._prefetch = _Prefetcher(lambda number: self._batch(first_row + number * self._batch_size))
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
        """End the background thread. Reading another batch starts a new thread."""
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = None

    def rewind(self) -> "Batches":
        """Go back to the first batch; `for batch in held_out.rewind(): …` makes one pass."""
        self.close()
        self._row = 0
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON values: the number of rows so far, the hashes of the data, and the settings."""
        state = {"row": self._row, "block": self._chunk_size, **self._identity()}
        if self.mixture is not None:
            state["parts"] = self.mixture.per_period
            state["since"] = self._mixture_start
            state["before"] = self._rows_before_mixture
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume exactly where `get_state` was called.

        `batch_size`, the number of processes, and the weights of a mixture may differ. With other weights, each source
        resumes at its last row. Raises DataError if the data or other settings differ.
        """
        check_same_data(state, self._identity())
        self.close()
        self._row = int(state["row"])
        if self.mixture is not None:
            self._mixture_start, self._rows_before_mixture = int(state["since"]), list(state["before"])
            if state["parts"] != self.mixture.per_period:
                previous = Mixture(state["parts"])
                self._rows_before_mixture = self._rows_by_source(previous)
                self._mixture_start = self._row
        if state["block"] != self._chunk_size:
            self._set_chunk_size(state["block"])

    @property
    def store(self) -> TokenStore:
        """Token store of the corpus; not available for a mixture."""
        (part,) = self.parts
        return part.store

    @property
    def rows_per_epoch(self) -> int:
        """Number of rows of one pass over the data; for a mixture, the sum over all sources."""
        # The number of training rows is already known. Reading it after each step must not wait for a plan.
        with contextlib.nullcontext() if self._split == "train" else self._plan_lock:
            return sum(plan.per_epoch for plan in self._plans)

    @property
    def epochs(self) -> float:
        """Number of rows so far divided by `rows_per_epoch`."""
        return self._row / self.rows_per_epoch

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the number of steps that pass over the data `epochs` times; at least 1."""
        return max(1, math.ceil(epochs * self.rows_per_epoch / self._batch_size))

    def source_epochs(self, rows: int | None = None) -> Mapping[str, float]:
        """Return the number of passes over each source of a mixture by name; empty if the data are not a mixture.

        `rows`: number of rows of training; None: the rows so far.
        """
        if self.mixture is None:
            return {}
        sources = zip(self.parts, self._rows_by_source(self.mixture, rows), self._plans, strict=True)
        return {part.name: num_rows / plan.per_epoch for part, num_rows, plan in sources}

    def describe(self, start: int, steps: int) -> str:
        """Return a summary of the data of a training run at step `start` of `steps`, with a line for each corpus.

        The lines of a mixture contain the weights, and the number of epochs at the end of the run.
        """
        lines = []
        mixture = self.mixture
        final_epochs = self.source_epochs(self._row + (steps - start) * self._batch_size)
        for number, (part, plan) in enumerate(zip(self.parts, self._plans, strict=True)):
            counts = part.counts
            line = f"{quantity(counts.documents, 'document')}, {quantity(counts.tokens, 'token')}"
            if part.store.has_targets:
                line += f", including {quantity(counts.targets, 'target')}"
            line += f", {quantity(plan.per_epoch, 'sequence')} per epoch"
            if mixture is not None:
                share = mixture.per_period[number] / sum(mixture.per_period)
                epochs = final_epochs[part.name]
                line = f"{part.name}: {line}; weight {share:.3g}, {epochs:.3g} epochs in {steps:,} steps"
            lines.append(line)
            lines += part.store.report()
        return "\n".join(lines)

    def _rows_by_source(self, mixture: Mixture, rows: int | None = None) -> list[int]:
        """Return the number of rows of each source among the first `rows` rows (None: the rows so far)."""
        rows = self._row if rows is None else rows
        counts = mixture.count(rows - self._mixture_start)
        return [before + count for before, count in zip(self._rows_before_mixture, counts, strict=True)]

    def _identity(self) -> dict[str, Any]:
        hashes = {
            "data": [part.store.content_hash for part in self.parts],
            "order": [part.store.order_hash for part in self.parts],
        }
        settings = {"seed": self._seed, "seq_len": self._seq_len, "pack": self._pack}
        if self.mixture is None:
            return {"split": self._split, "data": hashes["data"][0], "order": hashes["order"][0], **settings}
        return {"split": self._split, **hashes, **settings}

    def _has_more_rows(self) -> bool:
        """Return whether a held-out pass has more rows."""
        with self._plan_lock:
            return any(isinstance(plan, HeldOutRows) and plan.exists(self._row) for plan in self._plans)

    def _batch(self, start: int) -> dict[str, Any]:
        """Return the arrays of the batch that starts at row `start`."""
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
        assert self._media is not None
        config, reader = self._media
        arrays = reader.arrays(references) if references else {}
        return Media.create(config, batch["tokens"], segment_ids=batch["segment_ids"], groups=self._groups, **arrays)

    def _fill(
        self, row: int, tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray, targets: np.ndarray
    ) -> list[str]:
        """Write a row into arrays of zeros `[seq_len]`; return the references to the media files of its documents."""
        source, row_of_source = self._find(row)
        store = self.parts[source].store
        references: list[str] = []
        used = 0  # tokens written so far
        with self._plan_lock:  # otherwise two threads might make the same plan
            pieces = self._plans[source].pieces(row_of_source)
        for segment, (document, start, stop) in enumerate(pieces, 1):
            span = slice(used, used + stop - start)
            tokens[span] = store[document][start:stop]
            segments[span] = segment
            positions[span] = np.arange(stop - start)
            targets[span] = store.targets(document)[start:stop] if store.has_targets else True
            targets[used] = False  # no token of the piece predicts the first token
            used = span.stop
            if self._media is not None:
                references += store.media(document)
        return references

    def _find(self, row: int) -> tuple[int, int]:
        """Return the index of the source of a row, and the index of the row among the rows of this source."""
        if self.mixture is None:
            return 0, row
        source, index = self.mixture.find(row - self._mixture_start)
        return source, self._rows_before_mixture[source] + index


def _check_media_lengths(part: Corpus, seq_len: int) -> None:
    """Raise DataError if a document with images, videos or audio, which cannot be split, is longer than a row."""
    for start, stop in part.store.ranges():
        too_long = (part.store.sizes(start, stop) > seq_len) & (part.store.is_held_out(start, stop) == part.held_out)
        if not too_long.any():
            continue
        too_long &= part.store.has_media(start, stop)
        if too_long.any():
            sizes = part.store.sizes(start, stop)[too_long]
            first = start + int(np.argmax(too_long))
            documents = "1 document" if len(sizes) == 1 else f"{len(sizes):,} documents"
            raise DataError(
                f"{part.store.name(first)} has {len(part.store[first]):,} tokens with its images, but documents with "
                f"images must fit into a sequence of --seq-len {seq_len}. Raise --seq-len to {sizes.max():,}, set the "
                f"processor to use fewer tokens per image, or remove the {documents} that are too long."
            )


class _Prefetcher:
    """Iterator over `make(0)`, `make(1)`, …, computed by a background thread, `MAX_PREFETCHED` results in advance."""

    def __init__(self, make: Callable[[int], dict[str, Any]]):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._make = make
        self._numbers = itertools.count()
        self._results = collections.deque[Future[dict[str, Any]]]()

    def __next__(self) -> dict[str, Any]:
        while len(self._results) <= MAX_PREFETCHED:
            self._results.append(self._thread.submit(self._make, next(self._numbers)))
        return self._results.popleft().result()

    def close(self) -> None:
        """Wait for the result that is being computed, and end the thread."""
        self._thread.shutdown(cancel_futures=True)
