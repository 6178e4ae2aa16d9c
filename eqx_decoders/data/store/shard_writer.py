"""Writing of shards: documents encoded as tokens, section by section (see `data.store.shards`)."""

import contextlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.end_of_turn import note_missing_end
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import Document, ReadReport
from eqx_decoders.data.store.shards import MARK, TAIL, ShardInfo, checksum
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, start_ids


CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE = 1 << 20, 1 << 14  # that are tokenized together
IN_MEMORY = 1 << 20  # bytes of a section, beyond which it waits in a temporary file
CHECKED = 1 << 20  # bytes of a shard up to which its content is verified when it is opened

RENDERED = (
    "text starts with a special token and is tokenized with special tokens. Set special_tokens_in_text=False to "
    "tokenize them as plain text"
)
PLAIN = "text starts with a special token, which special_tokens_in_text=False tokenizes as plain text"

_DTYPES = {"offsets": "<i8", "draws": "<f8", "bytes": "<i8", "target_counts": "<i8", "targets": "|b1"}
_DTYPES |= {"media": "|u1", "media_offsets": "<i8"}


def separators(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int | None]:
    """Return the tokens before a document, and the token after it (None for a tokenizer without eos).

    A document starts like a prompt at inference: with what the tokenizer puts before a text, usually bos or nothing.
    """
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        raise DataError(
            "The tokenizer has neither bos nor eos, but documents must be separated by a token. Set bos_token or "
            "eos_token in tokenizer_config.json."
        )
    start = start_ids(tokenizer)
    if not start and tokenizer.eos_id is None:
        raise DataError(
            f"The tokenizer has bos_id={tokenizer.bos_id}, puts no token before a text and has no eos, but documents "
            "must be separated by a token. Set eos_token in tokenizer_config.json, or add bos to the post-processor of "
            "tokenizer.json."
        )
    return start, tokenizer.eos_id


def is_rendered(text: str, tokenizer: JsonTokenizer) -> bool:
    """Return whether a text looks like a rendered chat: it starts with a special token's name and contains another."""
    names = tokenizer.special_names
    if not text.startswith(names):
        return False
    first = max((name for name in names if text.startswith(name)), key=len)
    return any(name in text[len(first) :] for name in names)


def write_shard(
    path: Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    done: Callable[[int], None] = lambda characters: None,
    media: MediaReader | None = None,
    special_tokens_in_text: bool | None = None,
    report: ReadReport | None = None,
) -> ShardInfo:
    """Write documents into a new shard, conversations as `template` writes them.

    A large file is flushed to the disk; a small one, for which that would take longer than all else, gets a checksum.
    `done` is called with the number of characters of each batch that is written. `media` reads the images, videos and
    audio that documents refer to. `special_tokens_in_text`: see `DataConfig`. `report`: counts of records that
    were left out when the documents were read; counts of this function are added.
    """
    report = ReadReport() if report is None else report
    with path.open("w+b") as file, _Writer(file, tokenizer, done, media, special_tokens_in_text, report) as writer:
        for document in render_documents(iter(documents), template, report):
            writer.add(document)
        return writer.finish()


def trained_text(document: Document) -> str | None:
    """Return the part of a document's text that is trained on; None if it came as tokens."""
    if document.text is None or document.spans is None:
        return document.text
    return "".join(document.text[start:stop] for start, stop in document.spans)


class _Writer:
    """Writer of one shard: appends documents to its tokens, and collects the other sections."""

    def __init__(
        self,
        file: IO[bytes],
        tokenizer: Tokenizer,
        done: Callable[[int], None],
        media: MediaReader | None,
        special_tokens_in_text: bool | None,
        report: ReadReport,
    ):
        self._media, self._special_tokens_in_text, self._report = media, special_tokens_in_text, report
        self._special_ids: Collection[int] = tokenizer.special_ids if isinstance(tokenizer, JsonTokenizer) else ()
        start, end = separators(tokenizer)
        largest = max(tokenizer.vocab_size, 0 if media is None else media.token + 1)
        self._dtype = np.dtype("<u2" if largest <= 1 << 16 else "<u4")
        self._start = np.array(start, self._dtype)
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
        """Add the next document."""
        if document.media:
            if self._media is None:
                rule = "has images, and nothing reads them: train a model that sees"
                raise DataError(f"{document.where} {rule}, or leave the field 'images' out.")
            files = self._media.locate(document.media, document.folder, document.where)
            document = document._replace(media=files)
            text = document.text or ""
            spans = ((0, len(text)),) if document.spans is None else document.spans
            expanded, moved = self._media.expand_text(text, (*spans, *document.literal), document.media, document.where)
            spans, literal = moved[: len(spans)], moved[len(spans) :]
            if document.spans is not None or expanded != text:  # only texts with spans have special tokens
                document = document._replace(text=expanded, spans=spans, literal=literal)
        self._waiting.append(document)
        self._waiting_size += document.size
        if self._waiting_size >= CHARACTERS_AT_ONCE or len(self._waiting) >= DOCUMENTS_AT_ONCE:
            self._encode()

    def finish(self) -> ShardInfo:
        """Write the remaining documents, the sections and the description."""
        self._encode()
        sections = {"tokens": (self._dtype.str, 0, self._tokens)}
        for name, section in self._sections.items():
            begin = self._file.seek(0, os.SEEK_END)
            begin += self._file.write(b"\0" * (-begin % 8))
            length = section.tell() // np.dtype(_DTYPES[name]).itemsize
            section.seek(0)
            shutil.copyfileobj(section, self._file)
            sections[name] = (_DTYPES[name], begin, length)
        total = self._bytes if self._all_bytes else None
        counts = (self._documents, self._tokens, self._targets, total)
        dropped, notes = dict(self._report.dropped), dict(self._report.notes)
        info = ShardInfo(*counts, self._smallest, self._largest, self._has_chats, sections, dropped, notes)
        begin, digest = self._file.tell(), None
        if begin <= CHECKED:
            self._file.seek(0)
            digest = checksum(self._file.read())
        description = json.dumps({"begin": begin, "digest": digest, "info": info._asdict()}).encode()
        self._file.write(description + TAIL.pack(len(description), MARK))
        self._file.flush()
        if digest is None:
            os.fsync(self._file.fileno())
        return info

    def _encode(self) -> None:
        documents = [(document, self._encoding_mode(document)) for document in self._waiting]
        plain = [document.text or "" for document, mode in documents if mode == "plain"]
        special = [document.text or "" for document, mode in documents if mode == "special"]
        spanned = [
            (document.text or "", document.spans, document.literal) for document, mode in documents if mode == "spans"
        ]
        encoded: dict[str, Iterator[Any]] = {
            "plain": iter(self._tokenizer.encode_many(plain) if plain else []),
            "special": iter(encode_spans(self._tokenizer, special, [()] * len(special)) if special else []),
            "spans": iter(
                encode_spans(self._tokenizer, *zip(*spanned, strict=True), report=self._report) if spanned else []
            ),
        }
        for document, mode in documents:
            if mode == "spans":
                self._append(document, *self._with_targets(document, *next(encoded[mode])))
            elif mode == "special":
                self._append(document, self._with_separators(next(encoded[mode])[0]), None)
            else:
                tokens = next(encoded[mode]) if document.tokens is None else document.tokens
                tokens = np.concatenate([self._start, tokens.astype(self._dtype), self._end])
                self._append(document, tokens, None)
        self._done(self._waiting_size)
        self._waiting, self._waiting_size = [], 0

    def _encoding_mode(self, document: Document) -> str:
        """Return how to encode a document.

        "tokens": it has tokens. "spans": text with spans. "special": text with special tokens. "plain": other text.
        """
        if document.spans is not None or document.text is None:
            return "tokens" if document.spans is None else "spans"
        if not isinstance(self._tokenizer, JsonTokenizer):
            return "plain"
        rendered = is_rendered(document.text, self._tokenizer)
        if rendered and self._special_tokens_in_text is None:
            self._report.notes[RENDERED] += 1
        if rendered and self._special_tokens_in_text is False:
            self._report.notes[PLAIN] += 1
        parsed = rendered if self._special_tokens_in_text is None else self._special_tokens_in_text
        return "special" if parsed else "plain"

    def _with_separators(self, tokens: np.ndarray) -> np.ndarray:
        """Add missing separators to a text with special tokens. Nothing is put before a special token."""
        tokens = tokens.astype(self._dtype)
        starts_special = len(tokens) > 0 and int(tokens[0]) in self._special_ids
        end = self._end[int(np.array_equal(tokens[-1:], self._end)) :]
        return np.concatenate([self._start[:0] if starts_special else self._start, tokens, end])

    def _with_targets(
        self, document: Document, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add the separators that a completion lacks; a conversation stays as its template wrote it."""
        tokens = tokens.astype(self._dtype)
        if document.chat is not None:
            self._has_chats = True
            note_missing_end(self._tokenizer, tokens, targets, self._report)
            return tokens, targets
        start = self._start[:0] if np.array_equal(tokens[: len(self._start)], self._start) else self._start
        end = self._end[int(np.array_equal(tokens[-1:], self._end)) :]
        masks = [np.zeros(len(start), bool), targets, np.ones(len(end), bool)]
        return np.concatenate([start, tokens, end]), np.concatenate(masks)

    def _append(self, document: Document, tokens: np.ndarray, targets: np.ndarray | None) -> None:
        """Append one document; `targets` is None where all tokens are targets."""
        if document.media and self._media is not None:
            targets = np.ones(len(tokens), bool) if targets is None else targets
            tokens, targets = self._media.expand_tokens((tokens, targets), document.media, document.where)
            document = document._replace(media=self._media.with_digests(document.media))
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
        """Begin the sections of targets: in the documents before, all tokens but the first are targets."""
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
