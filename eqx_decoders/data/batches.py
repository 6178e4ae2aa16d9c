"""Batches for training and evaluation, read by grain from a token store; exactly resumable, for any process count.

Rows are planned, not streamed: the pieces of documents in each row follow from the seed alone (see `row_index`). So a
row is found by its number, the state of the iterator is that number, and each process makes just those rows of the
same global batches that its devices hold. grain reads and prefetches the batches; its own packing and shuffling are
not used, since they are streams, whose rows cannot be found by number.

**Packing** is concatenate, then split: the documents of an epoch, in an order drawn from the seed, are one long text
that is cut into rows of `seq_len`. Only the end of the last row is wasted (in large corpora of the last one of each
16,384 documents), whereas fitting whole documents into rows leaves gaps and has to cut long documents anyway. Segment
ids separate the documents.

**Mixtures.** Each source is a corpus with its own epochs; `mixture` gives the source of the n-th row.

**Targets.** Token `t` is predicted from token `t-1` of its segment; the loss finds the targets in `tokens` itself.
`loss_mask[t]` says that token `t` is a target: all but padding and the first token of a segment. In training a cut
costs one target (another one in each epoch, since the order changes). Held-out pieces, and those of `pack=False`,
overlap by one token, so that every token of a document behind its leading separator, the closing one included, is a
target exactly once, and `total loss / bytes` are honest nats per byte.

**Conversations, and prompts with completions,** are trained on in part, the rest is context. In a
corpus that has any, documents of up to `seq_len` tokens are never cut: whole documents are fitted into rows. Longer
ones are cut into pieces that overlap by one token; a piece may hold no target at all.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from eqx_decoders.errors import DataError, check, missing_package
from eqx_decoders.io.status import quantity


class Corpus(NamedTuple):
    """One split of a corpus. folder: of the run, with the manifest of its tokens."""

    name: str
    store: TokenStore
    held_out: bool
    folder: Path

    @property
    def counts(self) -> CorpusStats:
        """Counts of this split."""
        return self.store.counts(SPLITS[self.held_out])


class Batches:
    """Iterator over `Batch`es of NumPy arrays. Close it (or use `with`) to end its reading thread.

    parts: one corpus, or the sources of a mixture with their `weights`. split: "train" never ends, "held_out" is one
    pass over one corpus. rows: numbers of the rows of each batch of `batch_size` that are made.

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
        few = "give more documents, or --held-out (DataConfig.held_out_path)"
        remedy = few if split == "held_out" else "lower --held-out-fraction (DataConfig.held_out_fraction)"
        for part in parts:
            where = f"the split {split!r} of the data{part.name and f' {part.name!r}'} is empty"
            check(part.counts.documents > 0, f"{where}: {remedy}.", DataError)
            if media is not None:
                _check_images(part, seq_len)
        self.parts = tuple(parts)
        self.mixture = Mixture.of_weights(weights) if weights else None
        self._split, self._rows, self._batch_size = split, rows, batch_size
        self._media, self._groups = media, groups
        self._seq_len, self._seed, self._pack = seq_len, seed, pack
        self._since, self._before = 0, [0] * len(parts)  # row of the last change of weights; rows of each source before
        self._planning = threading.Lock()
        self._row = 0
        self.complete: Callable[[Batch], Batch] = lambda batch: batch  # adds what a method keeps of these tokens
        self._iterator: Any = None
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
        if self._iterator is None:
            self._iterator = self._start()
        batch = Batch(**next(self._iterator), contiguous=True)
        self._row += self._batch_size
        return self.complete(batch)

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading thread; the next batch starts another one."""
        if self._iterator is not None:
            self._iterator.close()
        self._iterator = None

    def rewind(self) -> "Batches":
        """Go back to the first batch: `for batch in held_out.rewind(): …` is one pass."""
        self.close()
        self._row = 0
        return self

    def get_state(self) -> dict[str, Any]:
        """Return the iterator's state as plain JSON: the number of sequences taken, and all that they depend on."""
        state = {"row": self._row, "block": self._block_size, **self._identity()}
        if self.mixture is not None:
            state |= {"parts": self.mixture.parts, "since": self._since, "before": self._before}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue exactly where `get_state` was called; `batch_size` and the number of processes may differ.

        With other weights each source of a mixture continues where it was. Raises DataError if the sequences of `state`
        differ from these.
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
        """Tokens of the corpus, for data that are no mixture."""
        (part,) = self.parts
        return part.store

    @property
    def rows_per_epoch(self) -> int:
        """Number of sequences of one pass over the data; for a mixture, over each source once."""
        counted = self._split == "train"  # from the start: it is needed after each step, and must not wait for a plan
        with contextlib.nullcontext() if counted else self._planning:
            return sum(plan.per_epoch for plan in self._plans)

    @property
    def epochs(self) -> float:
        """Number of passes over the data so far; for a mixture, over all sources together."""
        return self._row / self.rows_per_epoch

    def source_epochs(self, rows: int | None = None) -> Mapping[str, float]:
        """Return the passes over each source of a mixture by its name, now or after `rows` sequences of training."""
        if self.mixture is None:
            return {}
        taken = self._taken(self.mixture, rows)
        pairs = zip(self.parts, taken, self._plans, strict=True)
        return {part.name: count / plan.per_epoch for part, count, plan in pairs}

    def describe(self, start: int, steps: int) -> str:
        """Describe the data of a training that has taken `start` of its `steps` batches, a line for each corpus.

        For the sources of a mixture also their weights, and the passes over them at the end of the training.
        """
        lines, mixture = [], self.mixture
        ends = self.source_epochs(self._row + (steps - start) * self._batch_size)
        for number, (part, plan) in enumerate(zip(self.parts, self._plans, strict=True)):
            counts = part.counts
            line = f"{quantity(counts.documents, 'document')}, {quantity(counts.tokens, 'token')}"
            line += f", {counts.targets:,} of them targets" * part.store.has_targets
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

    def _start(self) -> Any:
        try:
            import grain
        except ImportError as error:
            raise missing_package("grain", "train") from error
        make = functools.partial(self._batch, self._row)
        # One thread that reads ahead; worker processes would only copy what is mapped into memory anyway.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        return iter(grain.MapDataset.range(sys.maxsize).map(make).to_iter_dataset(options))

    def _is_left(self) -> bool:
        """Return whether a held-out pass has a row that was not taken."""
        with self._planning:
            return any(isinstance(plan, HeldOutRows) and plan.reach(self._row) for plan in self._plans)

    def _batch(self, first_row: int, number: int) -> dict[str, Any]:
        start, shape = first_row + number * self._batch_size, (len(self._rows), self._seq_len)
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions")}
        batch["loss_mask"] = np.zeros(shape, bool)
        references: list[str] = []
        for number, row in enumerate(self._rows):
            references += self._fill(start + row, *(array[number] for array in batch.values()))
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
        """Write one sequence into arrays of zeros, and return the references of its documents to their files."""
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
        """Return the number of the part that a row is from, and the row's number in that part."""
        if self.mixture is None:
            return 0, row
        source, number = self.mixture.find(row - self._since)
        return source, self._before[source] + number


def _check_images(part: Corpus, seq_len: int) -> None:
    """Raise DataError for a document with images, videos or audio that is longer than a sequence: it cannot be cut."""
    for start, stop in part.store.ranges():
        longer = (part.store.sizes(start, stop) > seq_len) & (part.store.is_held_out(start, stop) == part.held_out)
        if longer.any() and (longer := longer & part.store.has_media(start, stop)).any():
            sizes, first = part.store.sizes(start, stop)[longer], start + int(np.argmax(longer))
            what = f"{part.store.name(first)} has {len(part.store[first]):,} tokens with its images"
            rule = f"which must stand in one sequence of --seq-len {seq_len} tokens"
            remedy = f"raise it to {sizes.max():,}, have the processor make fewer tokens of an image, or leave out"
            raise DataError(f"{what}, {rule}: {remedy} {_documents(len(sizes))} of that length.")


def _documents(count: int) -> str:
    return "the one document" if count == 1 else f"the {count:,} documents"
