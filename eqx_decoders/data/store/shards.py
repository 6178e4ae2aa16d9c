"""Shards: the tokens of one source, or of a part of it, in one file that is there whole or not at all.

A document is stored as `[start] tokens [end]`, where `end` is the tokenizer's eos and `start` its bos (eos, if it has
none). The model thus predicts the first real token from the separator and learns where documents end. A prompt with its
completion is stored like that, too, but gets no second `start` or `end` where its text has one. A conversation stands
as its chat template writes it, with nothing around it: the template knows how conversations begin and end.

Of these two only a part is trained on: `targets` then tells for every token of the shard whether it is a target.

The file has sections, each an array that begins at a multiple of eight bytes: `tokens`; for each document where it
begins (`offsets`, and the end of the last one), the number that decides whether it is held out (`draws`), bytes of
UTF-8 that are trained on (`bytes`, -1 where it came as tokens) and, only where some document has spans, how many tokens
are targets (`target_counts`, and `targets` for each token), and, only where some document has images, what it says
of them (`media`, in JSON, from `media_offsets` on). Behind them stand a description in JSON, its length and a
mark, which are written last.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.media_documents import MediaReader
from eqx_decoders.data.sources.documents import Document
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import Tokenizer


FORMAT = 1  # of shards; with another one, all are made again
CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE = 1 << 20, 1 << 14  # that are tokenised together
IN_MEMORY = 1 << 20  # bytes of a section, beyond which it waits in a temporary file
CHECKED = 1 << 20  # bytes of a shard up to which its content is verified when it is opened

_MARK, _TAIL = b"eqxshard", struct.Struct("<q8s")
_DTYPES = {"offsets": "<i8", "draws": "<f8", "bytes": "<i8", "target_counts": "<i8", "targets": "|b1"}
_DTYPES |= {"media": "|u1", "media_offsets": "<i8"}


class ShardInfo(NamedTuple):
    """What the description says: sums over all documents, and where the arrays are, as (dtype, first byte, length).

    `bytes` is None where some document came as tokens. `smallest` and `largest` are draws of the documents.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    smallest: float
    largest: float
    has_chats: bool
    sections: dict[str, tuple[str, int, int]]


def read_info(path: Path) -> ShardInfo | None:
    """The description of a shard; None if there is none, or it is not whole."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL.size))
            length, mark = _TAIL.unpack(file.read())
            begin = size - _TAIL.size - length
            if mark != _MARK or begin < 0:
                return None
            file.seek(begin)
            found = json.loads(file.read(length))
            whole = found["begin"] == begin
            if whole and found["digest"] is not None:
                file.seek(0)
                whole = _digest(file.read(begin)) == found["digest"]
            return ShardInfo(**found["info"]) if whole else None
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


class Shard:
    """A finished shard, mapped into memory: as much of it is read as is looked at."""

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
        """Which tokens of `document` are targets; the first never is."""
        place = slice(int(self.offsets[document]), int(self.offsets[document + 1]))
        return np.arange(place.stop - place.start) > 0 if self._targets is None else self._targets[place]

    def media(self, document: int) -> tuple[str, ...]:
        """What a document says of its images."""
        if "media" not in self.info.sections:
            return ()
        begin, end = self._section("media_offsets")[document : document + 2]
        return tuple(json.loads(self._section("media")[begin:end].tobytes() or b"[]"))

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Whether each document says anything of images."""
        if "media" not in self.info.sections:
            return np.zeros(stop - start, bool)
        return np.diff(self._section("media_offsets")[start : stop + 1]) > 0

    def target_counts(self, start: int, stop: int) -> np.ndarray:
        """How many tokens of each document are targets."""
        if self._targets is None:
            return self.sizes(start, stop) - 1
        return self._section("target_counts")[start:stop]

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Tokens of each document, with its separators."""
        return np.diff(self.offsets[start : stop + 1])

    @functools.cached_property
    def _targets(self) -> np.ndarray | None:
        return self._section("targets") if "targets" in self.info.sections else None

    def _section(self, name: str) -> np.ndarray:
        dtype, begin, length = self.info.sections[name]
        return self._map[begin : begin + length * np.dtype(dtype).itemsize].view(dtype)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def separators(tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The tokens before and after a document; the latter is None for a tokenizer without eos."""
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    rule = "the tokenizer has neither bos nor eos: documents need a token between them"
    if start is None:
        raise DataError(f"{rule}; name one in tokenizer_config.json.")
    return start, tokenizer.eos_id


def write_shard(
    path: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    done: Callable[[int], None] = lambda characters: None,
    media: MediaReader | None = None,
) -> ShardInfo:
    """Write the documents, conversations as `template` has it, into a new file.

    It is flushed to the disk, which may take longer than all else for a small file: that has a checksum instead.
    `done` is told how many characters have been written more. `media` reads the images that documents refer to.
    """
    with path.open("w+b") as file, _Writer(file, tokenizer, done, media) as writer:
        for document in render_documents(iter(documents), template):
            writer.add(document)
        return writer.finish()


def trained_text(document: Document) -> str | None:
    """The part of a document's text that is trained on; None if it came as tokens."""
    if document.text is None or document.spans is None:
        return document.text
    return "".join(document.text[start:stop] for start, stop in document.spans)


class _Writer:
    """Appends documents to the tokens and keeps what the other sections will hold."""

    def __init__(
        self, file: IO[bytes], tokenizer: Tokenizer, done: Callable[[int], None], media: MediaReader | None = None
    ):
        self._media = media
        start, end = separators(tokenizer)
        largest = max(tokenizer.vocab_size, 0 if media is None else media.token + 1)
        self._dtype = np.dtype("<u2" if largest <= 1 << 16 else "<u4")
        self._start = np.array([start], self._dtype)
        self._end = np.array([] if end is None else [end], self._dtype)
        self._file, self._tokenizer, self._done = file, tokenizer, done
        self._stack = contextlib.ExitStack()
        self._sections: dict[str, IO[bytes]] = {}
        self._waiting: list[Document] = []
        self._waiting_size = 0
        self._documents = self._tokens = self._targets = self._bytes = 0
        self._all_bytes, self._has_chats = True, False
        self._smallest, self._largest = 1.0, 0.0

    def __enter__(self) -> "_Writer":
        for name in ("offsets", "draws", "bytes"):
            self._section(name)
        self._write("offsets", 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, document: Document) -> None:
        """Take the next document."""
        if document.media:
            if self._media is None:
                rule = "has images, and nothing reads them: train a model that sees"
                raise DataError(f"{document.where} {rule}, or leave the field 'images' out.")
            files = self._media.located(document.media, document.folder, document.where)
            document = document._replace(media=files)
            text = document.text or ""
            spans = ((0, len(text)),) if document.spans is None else document.spans
            written, moved = self._media.written(text, (*spans, *document.literal), document.media, document.where)
            spans, literal = moved[: len(spans)], moved[len(spans) :]
            if document.spans is not None or written != text:  # only texts with spans have special tokens
                document = document._replace(text=written, spans=spans, literal=literal)
        self._waiting.append(document)
        self._waiting_size += document.size
        if self._waiting_size >= CHARACTERS_AT_ONCE or len(self._waiting) >= DOCUMENTS_AT_ONCE:
            self._encode()

    def finish(self) -> ShardInfo:
        """Write what is left, and the description."""
        self._encode()
        places = {"tokens": (self._dtype.str, 0, self._tokens)}
        for name, section in self._sections.items():
            begin = self._file.seek(0, os.SEEK_END)
            begin += self._file.write(b"\0" * (-begin % 8))
            length = section.tell() // np.dtype(_DTYPES[name]).itemsize
            section.seek(0)
            shutil.copyfileobj(section, self._file)
            places[name] = (_DTYPES[name], begin, length)
        total = self._bytes if self._all_bytes else None
        counts = (self._documents, self._tokens, self._targets, total)
        info = ShardInfo(*counts, self._smallest, self._largest, self._has_chats, places)
        begin, digest = self._file.tell(), None
        if begin <= CHECKED:
            self._file.seek(0)
            digest = _digest(self._file.read())
        description = json.dumps({"begin": begin, "digest": digest, "info": info._asdict()}).encode()
        self._file.write(description + _TAIL.pack(len(description), _MARK))
        self._file.flush()
        if digest is None:
            os.fsync(self._file.fileno())
        return info

    def _encode(self) -> None:
        plain = [one.text for one in self._waiting if one.spans is None and one.text is not None]
        parted = [(one.text or "", one.spans, one.literal) for one in self._waiting if one.spans is not None]
        texts = iter(self._tokenizer.encode_many(plain) if plain else [])
        parts = iter(encode_spans(self._tokenizer, *zip(*parted, strict=True)) if parted else [])
        for document in self._waiting:
            if document.spans is not None:
                self._append(document, *self._with_targets(document, *next(parts)))
            else:
                tokens = next(texts) if document.tokens is None else document.tokens
                tokens = np.concatenate([self._start, tokens.astype(self._dtype), self._end])
                self._append(document, tokens, None)
        self._done(self._waiting_size)
        self._waiting, self._waiting_size = [], 0

    def _with_targets(
        self, document: Document, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """A conversation stands as its template wrote it; a completion gets separators that it doesn't have."""
        tokens = tokens.astype(self._dtype)
        if document.chat is not None:
            self._has_chats = True
            return tokens, targets
        start = self._start[int(np.array_equal(tokens[:1], self._start)) :]
        end = self._end[int(np.array_equal(tokens[-1:], self._end)) :]
        ones = [np.zeros(len(start), bool), targets, np.ones(len(end), bool)]
        return np.concatenate([start, tokens, end]), np.concatenate(ones)

    def _append(self, document: Document, tokens: np.ndarray, targets: np.ndarray | None) -> None:
        """`targets` are None where all tokens are some."""
        if document.media and self._media is not None:
            targets = np.ones(len(tokens), bool) if targets is None else targets
            tokens, targets = self._media.placed((tokens, targets), document.media, document.where)
            document = document._replace(media=self._media.kept(document.media))
        if document.media or "media" in self._sections:
            self._append_media(document.media)
        if targets is not None and "targets" not in self._sections:
            self._begin_targets()
        count = max(0, len(tokens) - 1)  # nothing predicts the first token of a document
        if "targets" in self._sections:
            targets = np.ones(len(tokens), bool) if targets is None else targets
            targets[:1] = False
            count = int(targets.sum())
            self._section("targets").write(targets.tobytes())
            self._write("target_counts", count)
        text = trained_text(document)
        size = -1 if text is None else len(text.encode())
        self._file.write(tokens.tobytes())
        self._documents += 1
        self._tokens += len(tokens)
        self._targets += count
        self._bytes += size
        self._all_bytes = self._all_bytes and text is not None
        draw = document.draw()
        self._smallest, self._largest = min(self._smallest, draw), max(self._largest, draw)
        for name, value in (("offsets", self._tokens), ("draws", draw), ("bytes", size)):
            self._write(name, value)

    def _append_media(self, media: tuple[str, ...]) -> None:
        if "media" not in self._sections:  # the documents before have none
            self._section("media")
            self._section("media_offsets").write(bytes(8 * (self._documents + 1)))
        self._section("media").write(json.dumps(media).encode() if media else b"")
        self._write("media_offsets", self._section("media").tell())

    def _begin_targets(self) -> None:
        """Of the documents before, all tokens but their first are targets."""
        offsets = self._section("offsets")
        offsets.seek(0)
        begins = np.frombuffer(offsets.read(), "<i8")
        for size in np.diff(begins).tolist():
            self._section("targets").write((np.arange(size) > 0).tobytes())
            self._write("target_counts", size - 1)
        for name in ("targets", "target_counts"):  # also where there is none before
            self._section(name)

    def _write(self, name: str, value: Any) -> None:
        self._section(name).write(struct.pack("<d" if name == "draws" else "<q", value))

    def _section(self, name: str) -> IO[bytes]:
        if name not in self._sections:
            section = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - closed with the writer
            self._sections[name] = self._stack.enter_context(section)
        return self._sections[name]
