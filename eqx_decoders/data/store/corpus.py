"""Read the documents of a corpus, split them into training and held-out documents, and count each split."""

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

    - `documents`: number of documents.
    - `tokens`: number of tokens, including separators.
    - `targets`: number of tokens that are targets: all tokens except the first token of each document or, in documents
        with spans, the tokens in the spans.
    - `bytes`: number of UTF-8 bytes of the targets. None if some training documents were read as tokens.
    - `gzip_nats_per_byte`: compressed size of the held-out text with `gzip -9`, as a baseline for the loss.
    - `gzip_bytes`: number of bytes that were compressed: all held-out text or, in a corpus of more than a gigabyte, the
        held-out text in the first gigabyte.
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
    """Yield all documents at `path` lazily and in a fixed order (see `find_sources` and `read_source`).

    Raises DataError with file and line if a document cannot be read.
    """
    for source in find_sources(path, flag):
        yield from read_source(source, ReadOptions(text_field, tokenizer, report=report))


def held_out_rule(documents: Iterable[Document], fraction: float) -> Callable[[Document], bool]:
    """Return a function that decides whether a document is held out: whether the split hash is below `fraction`.

    Equal documents are in the same split, so the splits have no text in common. If one split would be empty (with few
    documents), only the document with the smallest hash is held out. A single document is never held out.
    """
    smallest, largest = 1.0, 0.0
    if fraction > 0:
        for document in documents:
            split_hash = document.split_hash()
            smallest, largest = min(smallest, split_hash), max(largest, split_hash)
            if smallest < fraction <= largest:  # usually after a few documents: both splits have documents
                break
    below, equal = held_out_hashes(fraction, smallest, largest)
    return lambda document: document.split_hash() < below or document.split_hash() == equal


def held_out_hashes(fraction: float, smallest: float, largest: float) -> tuple[float, float | None]:
    """Return `(below, equal)`: a document is held out if the split hash is less than `below` or equal to `equal`.

    **Arguments:**

    - `fraction`: share of the documents that is held out; 1: all documents.
    - `smallest`, `largest`: smallest and largest split hash of all documents.
    """
    if fraction <= 0 or fraction >= 1 or smallest < fraction <= largest:
        return fraction, None
    return 0.0, None if smallest >= largest else smallest


class Gzip:
    """Measure the size of a stream of texts after compression with `gzip -9`."""

    def __init__(self):
        self._compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
        self.read = 0  # bytes of text
        self._written = 0  # compressed bytes

    def add(self, content: bytes) -> None:
        """Compress the next bytes of text."""
        self.read += len(content)
        self._written += len(self._compressor.compress(content))

    def nats_per_byte(self) -> float | None:
        """End the stream; return `8 ln 2 · compressed bytes / bytes`, or None for an empty stream."""
        self._written += len(self._compressor.flush())
        return 8 * math.log(2) * self._written / self.read if self.read else None
