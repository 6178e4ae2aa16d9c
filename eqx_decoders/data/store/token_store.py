"""Tokens of a corpus in the shards of a cache, of which a manifest says which they are."""

import collections
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.sources.documents import ReadReport
from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.data.store.shards import Shard, checksum
from eqx_decoders.errors import DataError
from eqx_decoders.io.atomic_files import atomic_stream, writing_to
from eqx_decoders.io.status import StatusLine


MOST_OPEN = 1024  # shards that are mapped into memory at a time; a corpus of more has an index of its documents
AT_ONCE = 1 << 20  # documents whose sizes are read together
TRAIN, OWN = "train:", "held_out:"  # before the names of sources
DOCUMENT = np.dtype([("size", "<i8"), ("draw", "<f8")])


class TokenStore:
    """Tokens of a corpus: `store[i]` is the array of document `i`. Shards are opened, and tokens read, when needed."""

    def __init__(self, manifest: Mapping[str, Any], folder: Path):
        self.manifest, self._folder = manifest, folder
        self._shards: list[tuple[str, str, int]] = [
            (row["source"], row["key"], row["documents"]) for row in manifest["shards"]
        ]
        self._ends = np.cumsum([documents for _, _, documents in self._shards], dtype=np.int64)
        self._draws: tuple[float, float | None] = (manifest["held_out"]["below"], manifest["held_out"]["equal"])
        self.has_targets: bool = manifest["has_targets"]
        keys = [key for _, key, _ in self._shards]  # the cached function refers to these alone, and not to the store
        self.shard = functools.lru_cache(MOST_OPEN)(lambda number: Shard(folder / f"{keys[number]}.tokens"))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        shard, number = self._find(document)
        return shard[number]

    def targets(self, document: int | np.integer) -> np.ndarray:
        """Return which tokens of `document` are targets; the first never is."""
        shard, number = self._find(document)
        return shard.targets(number)

    def media(self, document: int | np.integer) -> tuple[str, ...]:
        """Return the references of `document` to its images, videos and audio."""
        shard, number = self._find(document)
        return shard.media(number)

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Return which of the documents from `start` up to `stop` have images, videos or audio."""
        parts = [self.shard(number).has_media(begin, end) for number, begin, end in self._parts(start, stop)]
        return np.concatenate([np.zeros(0, bool), *parts])

    def name(self, document: int | np.integer) -> str:
        """Return the name of `document` for messages: its number in its source, from 1, and the source."""
        self._find(document)
        number = int(np.searchsorted(self._ends, document, "right"))
        source = self._shards[number][0]
        first = next(shard for shard, (name, _, _) in enumerate(self._shards) if name == source)
        return f"document {int(document) - self._begin(first) + 1:,} of {source.partition(':')[2]}"

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of documents that together are all of them, for `sizes`, `has_media` and `is_held_out`."""
        for start in range(0, len(self), AT_ONCE):
            yield start, min(start + AT_ONCE, len(self))

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the numbers of tokens, with separators, of the documents from `start` up to `stop`, in int64."""
        return self._values("size", start, stop)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Return which of the documents from `start` up to `stop` are held out."""
        draws, (below, equal) = self._values("draw", start, stop), self._draws
        return (draws < below) | (draws == equal) if equal is not None else draws < below

    @property
    def content_hash(self) -> str:
        """Hash of the settings, the tokenizer and the sources; the order of the sources does not matter.

        The settings are the text field, the choice of held-out documents and, where there are conversations, the chat
        template. Names and contents of the sources count.
        """
        return self.manifest["fingerprint"]

    @functools.cached_property  # it is part of the iterator's state, which is read after each step
    def order_hash(self) -> str:
        """Hash of the contents of the sources in their order."""
        names = dict.fromkeys(name for name, _, _ in self._shards)
        return checksum(" ".join(self.manifest["sources"][name]["hash"] for name in names).encode())

    def counts(self, split: str) -> CorpusStats:
        """Return the counts of `split`, "train" or "held_out"."""
        return CorpusStats(**self.manifest["counts"][split])

    def report(self) -> list[str]:
        """Return sentences about the records that were left out and about warnings (see `ReadReport`)."""
        dropped, notes = (collections.Counter(self.manifest.get(name, {})) for name in ("dropped", "notes"))
        return ReadReport(dropped, notes).lines(len(self))

    def documents_of(self, kind: str) -> int:
        """Count the documents of the training data (TRAIN), some held out by share, or of held-out data (OWN)."""
        return sum(documents for source, _, documents in self._shards if source.startswith(kind))

    def check_ids(self, vocab_size: int, placeholders: Sequence[int] = ()) -> None:
        """Raise DataError for a document with an id that is not below `vocab_size`. Reads all tokens.

        placeholders: ids that features replace, so that they need no row of the model's table.
        """
        with StatusLine("looking for ids that the model does not have", remains="the tokens are kept"):
            for number, (source, _, _) in enumerate(self._shards):
                shard = self.shard(number)
                positions = np.flatnonzero(shard.tokens >= vocab_size)
                positions = positions[~np.isin(shard.tokens[positions], placeholders)]
                if len(positions) > 0:
                    position, beyond = int(positions[0]), int(shard.tokens[positions[0]])
                    document = int(np.searchsorted(shard.offsets, position, "right")) - 1
                    where = f"{source}: document {document} (from 0) of its shard {number} has the id {beyond}"
                    remedy = "leave such documents out, or choose a model with a larger table"
                    raise DataError(f"{where}, and the model only ids below {vocab_size}: {remedy}.")

    @property
    def shard_count(self) -> int:
        """Number of shards; `shard(number)` opens one."""
        return len(self._shards)

    def _values(self, field: str, start: int, stop: int) -> np.ndarray:
        """Return a field of DOCUMENT of the documents from `start` up to `stop`."""
        parts = self._parts(start, stop)
        if self._index is not None:
            return np.array(self._index[field][start:stop])
        return np.concatenate([np.zeros(0, DOCUMENT[field]), *(self._values_in(field, *part) for part in parts)])

    def _values_in(self, field: str, number: int, begin: int, end: int) -> np.ndarray:
        """Return a field of documents of a shard; held-out data of its own has the draw -1, below all others."""
        if field == "size":
            return self.shard(number).sizes(begin, end)
        is_own = self._shards[number][0].startswith(OWN)
        return np.full(end - begin, -1.0) if is_own else self.shard(number).draws[begin:end]

    @functools.cached_property
    def _index(self) -> np.ndarray | None:
        """Sizes and draws of all documents, mapped from a file that is written where there are too many shards.

        Rows are planned from them, thousands of documents at a time, which in many small sources are in as many files.
        None for few shards.
        """
        if len(self._shards) <= MOST_OPEN:
            return None
        content = json.dumps([(name[:1], key) for name, key, _ in self._shards])
        file = self._folder / f"{checksum(content.encode())}.documents"
        if not file.is_file() or file.stat().st_size != len(self) * DOCUMENT.itemsize:
            status = StatusLine("listing documents", remains="the tokens are kept")
            with status, writing_to(file.parent), atomic_stream(file) as stream:
                for number, (_, _, documents) in enumerate(self._shards):
                    listed = np.empty(documents, DOCUMENT)
                    for field in DOCUMENT.names or ():
                        listed[field] = self._values_in(field, number, 0, documents)
                    stream.write(listed.tobytes())
        return np.asarray(np.memmap(file, DOCUMENT, "r", shape=(len(self),)))

    def _find(self, document: int | np.integer) -> tuple[Shard, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        number = int(np.searchsorted(self._ends, document, "right"))
        return self.shard(number), int(document) - self._begin(number)

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number][2]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return (shard, begin, end) for the shards that hold the documents from `start` up to `stop`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        numbers = range(np.searchsorted(self._ends, start, "right"), np.searchsorted(self._ends, stop, "left") + 1)
        begins = ((number, self._begin(number)) for number in numbers if start < stop)
        parts = ((n, max(start - begin, 0), min(stop - begin, self._shards[n][2])) for n, begin in begins)
        return ((number, begin, end) for number, begin, end in parts if begin < end)
