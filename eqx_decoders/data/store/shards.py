"""Shards: the tokens of one source, or of a part of it, in one file that is complete or does not exist.

A document is stored as `start tokens [end]`, where `start` is what the tokenizer puts before a text (usually bos or
nothing) and `end` its eos. A prompt with its completion is stored in the same way, but gets no second `start` or `end`
where its text has one. A conversation is stored as its chat template writes it, without separators: the template knows
how conversations begin and end.

Prompts and conversations are trained on in part: `targets` then says for every token of the shard whether it is a
target.

The file has sections, each an array that begins at a multiple of eight bytes: `tokens`; for each document its begin
(`offsets`, and the end of the last one), the number that decides whether it is held out (`draws`), bytes of UTF-8 that
are trained on (`bytes`, -1 where it came as tokens) and, only where some document has spans, its number of targets
(`target_counts`, and `targets` for each token), and, only where some document has images, videos or audio, its
references to them (`media`, in JSON, from `media_offsets` on). A description in JSON, its length and a mark follow, and
are written last.
"""

import functools
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eqx_decoders.errors import DataError


FORMAT = 4  # of shards; with another one, all are made again
MARK, TAIL = b"eqxshard", struct.Struct("<q8s")


class ShardInfo(NamedTuple):
    """Description of a shard: sums over its documents, and its sections as (dtype, first byte, length).

    `bytes` is None where some document came as tokens. `smallest` and `largest` are draws of the documents. `dropped`
    and `notes` are the counts of a `ReadReport`.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    smallest: float
    largest: float
    has_chats: bool
    sections: dict[str, tuple[str, int, int]]
    dropped: dict[str, int] = {}  # noqa: RUF012 - never changed
    notes: dict[str, int] = {}  # noqa: RUF012 - never changed


def read_info(path: Path) -> ShardInfo | None:
    """Read the description of a shard; None if the file is missing or incomplete."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL.size))
            length, mark = TAIL.unpack(file.read())
            begin = size - TAIL.size - length
            if mark != MARK or begin < 0:
                return None
            file.seek(begin)
            description = json.loads(file.read(length))
            whole = description["begin"] == begin
            if whole and description["digest"] is not None:
                file.seek(0)
                whole = checksum(file.read(begin)) == description["digest"]
            return ShardInfo(**description["info"]) if whole else None
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


class Shard:
    """Tokens of a finished shard, mapped into memory: only the parts that are used are read."""

    def __init__(self, path: Path):
        info = read_info(path)
        rule = "is gone or damaged: start again, and it is made once more"
        if info is None:
            raise DataError(f"the tokens {path} {rule}.")
        self.info, self._map = info, np.asarray(np.memmap(path, np.uint8, "r"))
        self.tokens, self.offsets, self.draws, self.bytes = map(self._section, ("tokens", "offsets", "draws", "bytes"))

    def __len__(self) -> int:
        return self.info.documents

    def __getitem__(self, document: int) -> np.ndarray:
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def targets(self, document: int) -> np.ndarray:
        """Return which tokens of `document` are targets; the first never is."""
        span = slice(int(self.offsets[document]), int(self.offsets[document + 1]))
        return np.arange(span.stop - span.start) > 0 if self._targets is None else self._targets[span]

    def media(self, document: int) -> tuple[str, ...]:
        """Return the references of a document to its images, videos and audio."""
        if "media" not in self.info.sections:
            return ()
        begin, end = self._section("media_offsets")[document : document + 2]
        return tuple(json.loads(self._section("media")[begin:end].tobytes() or b"[]"))

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Return which of the documents from `start` up to `stop` refer to images, videos or audio."""
        if "media" not in self.info.sections:
            return np.zeros(stop - start, bool)
        return np.diff(self._section("media_offsets")[start : stop + 1]) > 0

    def target_counts(self, start: int, stop: int) -> np.ndarray:
        """Return the number of targets of each document."""
        if self._targets is None:
            return self.sizes(start, stop) - 1
        return self._section("target_counts")[start:stop]

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of tokens of each document, with its separators."""
        return np.diff(self.offsets[start : stop + 1])

    @functools.cached_property
    def _targets(self) -> np.ndarray | None:
        return self._section("targets") if "targets" in self.info.sections else None

    def _section(self, name: str) -> np.ndarray:
        dtype, begin, length = self.info.sections[name]
        return self._map[begin : begin + length * np.dtype(dtype).itemsize].view(dtype)


def checksum(content: bytes) -> str:
    """Return the hash of a content, 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
