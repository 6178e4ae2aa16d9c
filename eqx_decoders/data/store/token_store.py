"""Tokens of a corpus in the shards of a cache, of which a manifest says which they are."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.store.corpus_stats import CorpusStats
from eqx_decoders.data.store.length_index import DOCUMENT, open_length_index
from eqx_decoders.data.store.shards import Shard, checksum
from eqx_decoders.errors import DataError
from eqx_decoders.io.status import StatusLine


MOST_OPEN = 1024  # shards that are mapped into memory at a time; a corpus of more has an index of its documents
AT_ONCE = 1 << 20  # documents whose sizes are read together
TRAIN, OWN = "train:", "held_out:"  # before the names of sources


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
        return self._over(start, stop, lambda number, begin, end: self.shard(number).has_media(begin, end), np.bool_)

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
        if self._index is not None:
            return self._indexed(self._index["size"], start, stop)
        return self._over(start, stop, lambda number, begin, end: self.shard(number).sizes(begin, end), np.int64)

    def is_held_out(self, start: int, stop: int) -> np.ndarray:
        """Return which of the documents from `start` up to `stop` are held out."""
        if self._index is None:
            draws = self._over(start, stop, self._draws_of, np.float64)
        else:
            draws = self._indexed(self._index["draw"], start, stop)
        below, equal = self._draws
        return (draws < below) | (draws == equal) if equal is not None else draws < below

    @property
    def content_hash(self) -> str:
        """Hash of the settings, the tokenizer and the sources; the order of the sources does not matter.

        The settings are the text field, the choice of held-out documents and, where there are conversations, the chat
        template. Names and contents of the sources count.
        """
        return self.manifest["fingerprint"]

    @property
    def order_hash(self) -> str:
        """Hash of the contents of the sources in their order."""
        names = dict.fromkeys(name for name, _, _ in self._shards)
        return checksum(" ".join(self.manifest["sources"][name]["hash"] for name in names).encode())

    def counts(self, split: str) -> CorpusStats:
        """Return the counts of `split`, "train" or "held_out"."""
        return CorpusStats(**self.manifest["counts"][split])

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

    def _draws_of(self, number: int, begin: int, end: int) -> np.ndarray:
        """Return the draws of some documents of a shard; -1, below all others, for held-out data of its own."""
        is_own = self._shards[number][0].startswith(OWN)
        return np.full(end - begin, -1.0) if is_own else self.shard(number).draws[begin:end]

    @functools.cached_property
    def _index(self) -> np.ndarray | None:
        """Sizes and draws of all documents, where there are too many shards to read each of them; otherwise None."""
        if len(self._shards) <= MOST_OPEN:
            return None
        content = json.dumps([(name[:1], key) for name, key, _ in self._shards])
        file = self._folder / f"{checksum(content.encode())}.documents"
        return open_length_index(file, len(self), map(self._documents_in, range(len(self._shards))))

    def _documents_in(self, number: int) -> np.ndarray:
        entries = np.empty(self._shards[number][2], DOCUMENT)
        entries["size"] = self.shard(number).sizes(0, len(entries))
        entries["draw"] = self._draws_of(number, 0, len(entries))
        return entries

    def _indexed(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        return np.array(values[start:stop])

    def _find(self, document: int | np.integer) -> tuple[Shard, int]:
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        number = int(np.searchsorted(self._ends, document, "right"))
        return self.shard(number), int(document) - self._begin(number)

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number][2]

    def _over(self, start: int, stop: int, read: Callable[[int, int, int], np.ndarray], dtype: Any) -> np.ndarray:
        """Concatenate `read(shard, begin, end)` of the shards that hold the documents."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        parts, number = [np.zeros(0, dtype)], int(np.searchsorted(self._ends, start, "right"))
        while start < stop:
            begin, end = self._begin(number), min(stop, int(self._ends[number]))
            if end > start:
                parts.append(read(number, start - begin, end - begin))
            start, number = max(start, end), number + 1
        return np.concatenate(parts)
