"""Shards: files with the tokens of one source, or of a part of a source. A shard is complete or does not exist.

A document is stored as `start tokens [end]`: `start` are the tokens that the tokenizer puts before a text (usually bos,
or no tokens), and `end` is the eos token. A prompt with its completion is stored in the same way, except that `start`
or `end` is not added if the text already has these tokens. A conversation is stored as the chat template renders it,
without separators, because the template marks the start and the end of conversations.

In conversations, and in prompts with completions, only some tokens are targets. Then `targets` is a mask of all tokens
of the shard.

The file consists of sections: arrays that start at multiples of eight bytes.

- `tokens`: the tokens of all documents.
- `offsets`: start of each document in `tokens`, followed by the end of the last document.
- `draws`: split hash of each document.
- `bytes`: number of UTF-8 bytes of the targets of each document; -1 for documents that were read as tokens.
- `target_counts`, `targets`, only if a document has spans: number of targets of each document, mask of all tokens.
- `media`, `media_offsets`, only if a document has media files: references to the files in JSON, and their offsets.

After the sections, the file ends with a description in JSON, the length of the description, and a marker.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from eqx_decoders.data.chats import encode_spans, render_documents
from eqx_decoders.data.end_of_turn import note_missing_end
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.sources.documents import Document, ReadReport
from eqx_decoders.data.sources.readers import MAX_WHOLE_TEXT_BYTES, PIECE_BYTES, ReadOptions
from eqx_decoders.data.sources.sources import hash_json
from eqx_decoders.errors import DataError
from eqx_decoders.io.text.chat_template import ChatTemplate
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, start_ids


FORMAT = 5  # version of the file format; shards of another version are written again
MARKER = b"eqxshard"
FOOTER = struct.Struct("<q8s")  # length of the description, MARKER
DTYPES = {"offsets": "<i8", "draws": "<f8", "bytes": "<i8", "target_counts": "<i8", "targets": "|b1"}
DTYPES |= {"media": "|u1", "media_offsets": "<i8"}

MAX_CHARACTERS_PER_BATCH = 1 << 20  # of documents that are tokenized together
MAX_DOCUMENTS_PER_BATCH = 1 << 14
MAX_IN_MEMORY = 1 << 20  # bytes; while a shard is written, a larger section is stored in a temporary file
MAX_CHECKED = 1 << 20  # bytes; a smaller shard has a checksum, which is verified when the shard is opened

SPECIAL_TOKENS_NOTE = (
    "text starts with a special token and is tokenized with special tokens. Set special_tokens_in_text=False to "
    "tokenize them as plain text"
)
PLAIN_TEXT_NOTE = "text starts with a special token, which special_tokens_in_text=False tokenizes as plain text"


class ShardInfo(NamedTuple):
    """Description of a shard.

    - `documents`, `tokens`, `targets`: numbers in the shard.
    - `bytes`: number of UTF-8 bytes of the targets; None if a document was read as tokens.
    - `smallest`, `largest`: smallest and largest split hash of the documents.
    - `has_chats`: whether a document is a conversation.
    - `sections`: (dtype, first byte, number of values) of each section.
    - `dropped`, `notes`: counts of a `ReadReport`.
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


# --- reading ----------------------------------------------------------------------------------------------------------


def read_info(path: Path) -> ShardInfo | None:
    """Read the description of a shard; None if the file is missing or incomplete."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - FOOTER.size))
            length, marker = FOOTER.unpack(file.read())
            start = size - FOOTER.size - length
            if marker != MARKER or start < 0:
                return None
            file.seek(start)
            description = json.loads(file.read(length))
            is_complete = description["begin"] == start
            if is_complete and description["digest"] is not None:
                file.seek(0)
                is_complete = checksum(file.read(start)) == description["digest"]
            return ShardInfo(**description["info"]) if is_complete else None
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None


class Shard:
    """A complete shard, mapped into memory. Raises DataError if the file is missing or damaged."""

    def __init__(self, path: Path):
        info = read_info(path)
        if info is None:
            raise DataError(f"the tokens {path} are missing or damaged. Start again to tokenize them again.")
        self.info = info
        self._map = np.asarray(np.memmap(path, np.uint8, "r"))
        self.tokens = self._section("tokens")
        self.offsets = self._section("offsets")
        self.split_hashes = self._section("draws")
        self.bytes = self._section("bytes")

    def __len__(self) -> int:
        return self.info.documents

    def __getitem__(self, document: int) -> np.ndarray:
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def targets(self, document: int) -> np.ndarray:
        """Return a mask of the tokens of a document that are targets. The first token is never a target."""
        span = slice(int(self.offsets[document]), int(self.offsets[document + 1]))
        return np.arange(span.stop - span.start) > 0 if self._targets is None else self._targets[span]

    def media(self, document: int) -> tuple[str, ...]:
        """Return the references to the images, videos and audio of a document."""
        if "media" not in self.info.sections:
            return ()
        start, stop = self._section("media_offsets")[document : document + 2]
        return tuple(json.loads(self._section("media")[start:stop].tobytes() or b"[]"))

    def has_media(self, start: int, stop: int) -> np.ndarray:
        """Return a mask of the documents `start:stop` that have images, videos or audio."""
        if "media" not in self.info.sections:
            return np.zeros(stop - start, bool)
        return np.diff(self._section("media_offsets")[start : stop + 1]) > 0

    def target_counts(self, start: int, stop: int) -> np.ndarray:
        """Return the number of targets of each of the documents `start:stop`."""
        if self._targets is None:
            return self.sizes(start, stop) - 1
        return self._section("target_counts")[start:stop]

    def sizes(self, start: int, stop: int) -> np.ndarray:
        """Return the number of tokens, with separators, of each of the documents `start:stop`."""
        return np.diff(self.offsets[start : stop + 1])

    @functools.cached_property
    def _targets(self) -> np.ndarray | None:
        return self._section("targets") if "targets" in self.info.sections else None

    def _section(self, name: str) -> np.ndarray:
        dtype, start, length = self.info.sections[name]
        return self._map[start : start + length * np.dtype(dtype).itemsize].view(dtype)


def checksum(content: bytes) -> str:
    """Return a hash with 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TokenizationConfig:
    """Settings of tokenization: the tokens of a source depend only on the source and on these settings.

    **Arguments:**

    - `tokenizer`: tokenizer of texts.
    - `text_field`: field of records with the text.
    - `template`: chat template of conversations.
    - `media`: reader of the images, videos and audio of documents.
    - `special_tokens_in_text`: see `DataConfig`.
    """

    tokenizer: Tokenizer
    text_field: str = "text"
    template: ChatTemplate | None = None
    media: MediaReader | None = None
    special_tokens_in_text: bool | None = None

    @property
    def digest(self) -> str:
        """Hash of the configuration, which names the folder of its shards in the cache."""
        tokenizer = self.tokenizer
        template = None if self.template is None else self.template.content_hash
        form = [FORMAT, MAX_WHOLE_TEXT_BYTES, PIECE_BYTES] + ([] if self.media is None else [self.media.digest()])
        ids = [tokenizer.content_hash, tokenizer.vocab_size, separators(tokenizer), tokenizer.bos_id]
        return hash_json([form, *ids, self.text_field, template, self.special_tokens_in_text])

    def read_options(self, report: ReadReport, copy: Path | None = None) -> ReadOptions:
        """Return the options for the readers of sources."""
        return ReadOptions(self.text_field, self.tokenizer, copy=copy, report=report)


def separators(tokenizer: Tokenizer) -> tuple[tuple[int, ...], int | None]:
    """Return the tokens before a document, and the token after a document (None if the tokenizer has no eos token).

    The tokens before a document are those that the tokenizer puts before a prompt at inference, usually bos or no
    tokens. Raises DataError if there are no tokens that separate documents.
    """
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        raise DataError(
            "The tokenizer has neither bos nor eos, but documents must be separated by a token. Set bos_token or "
            "eos_token in tokenizer_config.json."
        )
    start = start_ids(tokenizer)
    if not start and tokenizer.eos_id is None:
        raise DataError(
            f"The tokenizer has no eos and does not put bos (bos_id={tokenizer.bos_id}) before a text, but documents "
            "must be separated by a token. Set eos_token in tokenizer_config.json, or add bos to the post-processor of "
            "tokenizer.json."
        )
    return start, tokenizer.eos_id


def is_rendered(text: str, tokenizer: JsonTokenizer) -> bool:
    """Return whether a text looks like a rendered conversation.

    Such a text starts with the name of a special token, and contains another such name.
    """
    names = tokenizer.special_names
    if not text.startswith(names):
        return False
    first = max((name for name in names if text.startswith(name)), key=len)
    return any(name in text[len(first) :] for name in names)


def write_shard(
    path: Path,
    documents: Iterable[Document],
    config: TokenizationConfig,
    *,
    report: ReadReport | None = None,
    progress: Callable[[int], None] = lambda characters: None,
) -> ShardInfo:
    """Tokenize documents and write them to a new shard; return the description of the shard.

    A large file is flushed to the disk. A small file gets a checksum instead, because the flush would take longer than
    tokenization.

    **Arguments:**

    - `report`: counts of the records that were skipped when the documents were read; this function adds to the counts.
    - `progress`: called with the number of characters of each tokenized batch.
    """
    report = ReadReport() if report is None else report
    with path.open("w+b") as file, _Writer(file, config, report, progress) as writer:
        for document in render_documents(iter(documents), config.template, report):
            writer.add(document)
        return writer.finish()


def trained_text(document: Document) -> str | None:
    """Return the part of a document's text that is trained on; None if the document was read as tokens."""
    if document.text is None or document.spans is None:
        return document.text
    return "".join(document.text[start:stop] for start, stop in document.spans)


class _Writer:
    """Writer of a shard. Tokens are written directly; other sections are collected and written by `finish`."""

    def __init__(
        self, file: IO[bytes], config: TokenizationConfig, report: ReadReport, progress: Callable[[int], None]
    ):
        tokenizer = config.tokenizer
        self._file = file
        self._config = config
        self._report = report
        self._progress = progress
        self._tokenizer = tokenizer
        self._media = config.media
        self._special_ids: Collection[int] = tokenizer.special_ids if isinstance(tokenizer, JsonTokenizer) else ()
        start, end = separators(tokenizer)
        vocab_size = max(tokenizer.vocab_size, 0 if config.media is None else config.media.token + 1)
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._start = np.array(start, self._dtype)
        self._end = np.array([] if end is None else [end], self._dtype)
        self._stack = contextlib.ExitStack()
        self._sections: dict[str, IO[bytes]] = {}
        self._batch: list[Document] = []
        self._batch_size = 0
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
        """Add the next document, which is tokenized together with other documents."""
        if document.media:
            document = self._expand_media(document)
        self._batch.append(document)
        self._batch_size += document.size
        if self._batch_size >= MAX_CHARACTERS_PER_BATCH or len(self._batch) >= MAX_DOCUMENTS_PER_BATCH:
            self._encode_batch()

    def _expand_media(self, document: Document) -> Document:
        """Replace the placeholders of media files in the text of a document."""
        if self._media is None:
            raise DataError(
                f"{document.where} has images, videos or audio, but the model has no encoder for them. Train a "
                "vision-language or audio model, or remove the field with the files."
            )
        references = self._media.locate(document.media, document.folder, document.where)
        document = document._replace(media=references)
        text = document.text or ""
        spans = ((0, len(text)),) if document.spans is None else document.spans
        expanded, moved = self._media.expand_text(text, (*spans, *document.literal), references, document.where)
        if document.spans is None and expanded == text:
            return document
        # Only texts with spans are tokenized with special tokens, such as the placeholders.
        return document._replace(text=expanded, spans=moved[: len(spans)], literal=moved[len(spans) :])

    def finish(self) -> ShardInfo:
        """Write the last batch, the sections and the description; return the description."""
        self._encode_batch()
        sections = {"tokens": (self._dtype.str, 0, self._tokens)}
        for name, section in self._sections.items():
            start = self._file.seek(0, os.SEEK_END)
            start += self._file.write(b"\0" * (-start % 8))
            length = section.tell() // np.dtype(DTYPES[name]).itemsize
            section.seek(0)
            shutil.copyfileobj(section, self._file)
            sections[name] = (DTYPES[name], start, length)
        info = ShardInfo(
            documents=self._documents,
            tokens=self._tokens,
            targets=self._targets,
            bytes=self._bytes if self._all_bytes else None,
            smallest=self._smallest,
            largest=self._largest,
            has_chats=self._has_chats,
            sections=sections,
            dropped=dict(self._report.dropped),
            notes=dict(self._report.notes),
        )
        size = self._file.tell()
        digest = None
        if size <= MAX_CHECKED:
            self._file.seek(0)
            digest = checksum(self._file.read())
        description = json.dumps({"begin": size, "digest": digest, "info": info._asdict()}).encode()
        self._file.write(description + FOOTER.pack(len(description), MARKER))
        self._file.flush()
        if digest is None:
            os.fsync(self._file.fileno())
        return info

    def _encode_batch(self) -> None:
        documents = [(document, self._encoding_mode(document)) for document in self._batch]
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
        self._progress(self._batch_size)
        self._batch, self._batch_size = [], 0

    def _encoding_mode(self, document: Document) -> str:
        """Return how to tokenize a document.

        - "tokens": the document was read as tokens.
        - "spans": text with spans, tokenized with special tokens.
        - "special": text without spans, tokenized with special tokens.
        - "plain": text without special tokens.
        """
        if document.spans is not None or document.text is None:
            return "tokens" if document.spans is None else "spans"
        if not isinstance(self._tokenizer, JsonTokenizer):
            return "plain"
        rendered = is_rendered(document.text, self._tokenizer)
        special_tokens_in_text = self._config.special_tokens_in_text
        if rendered and special_tokens_in_text is None:
            self._report.notes[SPECIAL_TOKENS_NOTE] += 1
        if rendered and special_tokens_in_text is False:
            self._report.notes[PLAIN_TEXT_NOTE] += 1
        use_special_tokens = rendered if special_tokens_in_text is None else special_tokens_in_text
        return "special" if use_special_tokens else "plain"

    def _with_separators(self, tokens: np.ndarray) -> np.ndarray:
        """Add missing separators to a text with special tokens.

        Nothing is added before a text that starts with a special token.
        """
        tokens = tokens.astype(self._dtype)
        starts_special = len(tokens) > 0 and int(tokens[0]) in self._special_ids
        end = self._end[int(np.array_equal(tokens[-1:], self._end)) :]
        return np.concatenate([self._start[:0] if starts_special else self._start, tokens, end])

    def _with_targets(
        self, document: Document, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Add missing separators to a prompt with its completion; return a conversation unchanged."""
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
        """Append a tokenized document. `targets`: mask of the targets; None: all tokens except the first."""
        if document.media and self._media is not None:
            targets = np.ones(len(tokens), bool) if targets is None else targets
            tokens, targets = self._media.expand_tokens((tokens, targets), document.media, document.where)
            document = document._replace(media=self._media.with_digests(document.media))
        if document.media or "media" in self._sections:
            self._append_media(document.media)
        if targets is not None and "targets" not in self._sections:
            self._start_targets()
        count = max(0, len(tokens) - 1)  # the first token of a document is never a target
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
        split_hash = document.split_hash()
        self._smallest, self._largest = min(self._smallest, split_hash), max(self._largest, split_hash)
        for name, value in (("offsets", self._tokens), ("draws", split_hash), ("bytes", size)):
            self._write(name, value)

    def _append_media(self, media: tuple[str, ...]) -> None:
        if "media" not in self._sections:  # no earlier document has media files
            self._section("media")
            self._section("media_offsets").write(bytes(8 * (self._documents + 1)))
        self._section("media").write(json.dumps(media).encode() if media else b"")
        self._write("media_offsets", self._section("media").tell())

    def _start_targets(self) -> None:
        """Create the sections of targets. In earlier documents all tokens except the first are targets."""
        offsets = self._section("offsets")
        offsets.seek(0)
        begins = np.frombuffer(offsets.read(), "<i8")
        for size in np.diff(begins).tolist():
            self._section("targets").write((np.arange(size) > 0).tobytes())
            self._write("target_counts", size - 1)
        for name in ("targets", "target_counts"):  # creates the sections if this is the first document
            self._section(name)

    def _write(self, name: str, value: Any) -> None:
        self._section(name).write(struct.pack("<d" if name == "draws" else "<q", value))

    def _section(self, name: str) -> IO[bytes]:
        if name not in self._sections:
            section = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY)  # noqa: SIM115 - closed with the writer
            self._sections[name] = self._stack.enter_context(section)
        return self._sections[name]
