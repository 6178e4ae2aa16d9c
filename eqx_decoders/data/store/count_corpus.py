"""Counting of a corpus: documents, tokens, targets and bytes of each split, and the size that gzip gives its text."""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from eqx_decoders.data.chats import render_documents
from eqx_decoders.data.sources.readers import read_source
from eqx_decoders.data.store.corpus_stats import SPLITS, CorpusStats
from eqx_decoders.data.store.shard_tasks import Recipe, ShardTask
from eqx_decoders.data.store.shard_writer import separators, trained_text
from eqx_decoders.data.store.shards import Shard
from eqx_decoders.data.store.token_store import TokenStore
from eqx_decoders.io.text.tokenizer import Tokenizer


COMPRESSED = 1 << 30  # bytes of sources whose held-out text gzip gets: more would tell no more
DOCUMENTS_AT_ONCE = 1 << 20


def count_corpus(store: TokenStore, tasks: Sequence[ShardTask] | None, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the fields of the `CorpusStats` of each split.

    tasks: of the shards, by which the text is read for gzip; None for no gzip baseline.
    """
    totals = np.zeros((2, 3), np.int64)
    sizes: list[int | None] = [0, 0]
    gzip, read, start = Gzip(), 0, 0
    for number in range(store.shard_count):
        shard = store.shard(number)
        held_out = store.is_held_out(start, start + len(shard))
        start += len(shard)
        totals += _of_shard(shard, held_out)
        known, compressed = _known_bytes(shard, held_out), tasks is not None and read < COMPRESSED and held_out.any()
        texts: Iterable[bytes] = ()
        if tasks is not None and compressed:
            texts = _texts(tasks[number], recipe, held_out)
            read += tasks[number].size or shard.info.bytes or 4 * shard.info.tokens
        elif known[1] is None:
            texts = _decoded(shard, recipe.tokenizer, held_out)
        length = 0
        for text in texts:
            length += len(text)
            if compressed:
                gzip.add(text)
        known[1] = length if known[1] is None else known[1]
        sizes = [None if one is None or more is None else one + more for one, more in zip(sizes, known, strict=True)]
    baselines = [
        (None, None),
        (gzip.nats_per_byte(), gzip.read) if totals[1, 0] and tasks is not None else (None, None),
    ]
    rows = zip(SPLITS, totals.tolist(), sizes, baselines, strict=True)
    return {
        split: CorpusStats(documents, tokens, targets, size, *baseline)._asdict()
        for split, (documents, tokens, targets), size, baseline in rows
    }


def _of_shard(shard: Shard, held_out: np.ndarray) -> np.ndarray:
    """Return the numbers of documents, tokens and targets that are trained on, and of those that are held out."""
    info = shard.info
    out = np.zeros(3, np.int64)
    for begin in range(0, len(shard) if held_out.any() else 0, DOCUMENTS_AT_ONCE):
        end = min(begin + DOCUMENTS_AT_ONCE, len(shard))
        chosen = held_out[begin:end]
        counted = (each(begin, end)[chosen].sum() for each in (shard.sizes, shard.target_counts))
        out += np.array([chosen.sum(), *counted])
    return np.stack([np.array([info.documents, info.tokens, info.targets]) - out, out])


def _known_bytes(shard: Shard, held_out: np.ndarray) -> list[int | None]:
    """Return the numbers of bytes trained on and held out; None where some document came as tokens."""
    parts = (shard.bytes[~held_out], shard.bytes[held_out])
    return [None if (part < 0).any() else int(part.sum()) for part in parts]


def _texts(task: ShardTask, recipe: Recipe, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the held-out text, read once more from its source: some tokenizers don't keep every letter."""
    documents = render_documents(read_source(task.source, recipe.reading, task.part), recipe.template)
    for document, chosen in zip(documents, held_out, strict=True):
        if chosen:
            text = trained_text(document)
            yield (recipe.tokenizer.decode(np.asarray(document.tokens)) if text is None else text).encode()


def _decoded(shard: Shard, tokenizer: Tokenizer, held_out: np.ndarray) -> Iterator[bytes]:
    """Yield the text of held-out documents that came as tokens; for others as many zero bytes as they have."""
    start, end = separators(tokenizer)
    for document in np.flatnonzero(held_out).tolist():
        size = int(shard.bytes[document])
        tokens = shard[document][len(start) : None if end is None else -1]
        yield tokenizer.decode(tokens).encode() if size < 0 else bytes(size)


class Gzip:
    """Compressor `gzip -9` of one text after another, which keeps only the size."""

    def __init__(self):
        self._compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
        self.read = self._written = 0  # bytes

    def add(self, content: bytes) -> None:
        """Compress the next bytes."""
        self.read += len(content)
        self._written += len(self._compressor.compress(content))

    def nats_per_byte(self) -> float | None:
        """End the stream and return `8 ln 2 · compressed bytes / bytes`, or None if there were no bytes."""
        self._written += len(self._compressor.flush())
        return 8 * math.log(2) * self._written / self.read if self.read else None
