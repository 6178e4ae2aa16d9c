"""Corpus: a stream of documents, the split into training and held-out documents, and the counts of each split."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from eqx_decoders.data.sources.documents import Document, ReadReport
from eqx_decoders.data.sources.readers import ReadOptions, read_source
from eqx_decoders.data.sources.sources import DATA, Paths, find_sources
from eqx_decoders.io.text.tokenizer import Tokenizer


SPLITS = ("train", "held_out")


class CorpusStats(NamedTuple):
    """Counts of one split of a corpus.

    **Attributes:**

    - `documents`, `tokens`: number of documents, and of their tokens with separators.
    - `targets`: number of tokens that are targets: all tokens except the first one of each document or, in documents
        with spans, the tokens in the spans.
    - `bytes`: number of bytes of UTF-8 in the targets. None if some training documents were given as tokens.
    - `gzip_nats_per_byte`: compression of the held-out text by `gzip -9`, a baseline for the loss.
    - `gzip_bytes`: number of bytes that were compressed: all held-out text or, in a corpus above a gigabyte, the text
        in its first gigabyte.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    gzip_nats_per_byte: float | None = None
    gzip_bytes: int | None = None


def read_documents(
    path: Paths,
    *,
    text_field: str = "text",
    tokenizer: Tokenizer | None = None,
    flag: str = DATA,
    report: ReadReport | None = None,
) -> Iterator[Document]:
    """Yield all documents at `path` in a fixed order, read lazily (see `find_sources` and `read_source`).

    Raises DataError with file and line for documents that cannot be read.
    """
    for source in find_sources(path, flag):
        yield from read_source(source, ReadOptions(text_field, tokenizer, report=report))


def held_out_rule(documents: Iterable[Document], fraction: float) -> Callable[[Document], bool]:
    """Return a function that returns whether a document is held out: its split hash is below `fraction`.

    Equal documents are in the same split, so no text is in both. If one split would be empty (with few documents), only
    the document with the smallest hash is held out. A single document is never held out.
    """
    smallest, largest = 1.0, 0.0
    for split_hash in (document.split_hash() for document in documents) if fraction > 0 else ():
        smallest, largest = min(smallest, split_hash), max(largest, split_hash)
        if smallest < fraction <= largest:  # usually after a few documents
            break
    below, equal = held_out_hashes(fraction, smallest, largest)
    return lambda document: document.split_hash() < below or document.split_hash() == equal


def held_out_hashes(fraction: float, smallest: float, largest: float) -> tuple[float, float | None]:
    """Return `(below, equal)`: documents are held out if their split hash is below the first or equals the second.

    `smallest` and `largest` are the extreme hashes of the documents. With a fraction of 1 all documents are held out.
    """
    if fraction <= 0 or fraction >= 1 or smallest < fraction <= largest:
        return fraction, None
    return 0.0, None if smallest >= largest else smallest


class Gzip:
    """Compressor `gzip -9` of a stream of texts that keeps only the compressed size."""

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
