"""Counts of a corpus: documents, tokens, targets, bytes, and the gzip baseline of each split."""

from typing import NamedTuple


SPLITS = ("train", "held_out")


class CorpusStats(NamedTuple):
    """Counts of one split: documents, tokens (with separators), tokens that are targets, bytes of UTF-8 in the targets.

    Every token but the first of its document is a target once or, where it has spans, those in its spans. `bytes` is
    None for training text that came as tokens. `gzip_nats_per_byte` is known for the held-out split: for all its text
    or, in a corpus above a gigabyte, for the text in its first gigabyte.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    gzip_nats_per_byte: float | None = None
    gzip_bytes: int | None = None  # bytes that gzip has read
