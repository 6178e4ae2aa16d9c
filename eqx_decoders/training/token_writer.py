"""Tokenises a corpus into the files of a token store."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.chat import ChatTemplate
from eqx_decoders.io.files import write_atomically
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.io.waiting import Waiting
from eqx_decoders.training.chats import encode_spans, render_documents
from eqx_decoders.training.compression import Gzip
from eqx_decoders.training.corpus import DATA, HELD_OUT, Paths, held_out_rule, read_documents
from eqx_decoders.training.records import Document


CHARACTERS_AT_ONCE = 1 << 20  # that are tokenised together
SPLITS = ("train", "held_out")
TARGETS = "targets.bin"  # one byte for each token: 1 where it is a target; only where some document has spans


class Counts(NamedTuple):
    """Of one split: documents, tokens (with the separators), tokens that are targets, bytes of UTF-8 that are.

    Every token but the first of its document is a target once, or those in its spans. `bytes` is None for training text
    that came as tokens. `gzip_nats_per_byte` is known for the held-out split.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    gzip_nats_per_byte: float | None = None


def write_store(
    folder: Path,
    tokenizer: Tokenizer,
    path: Paths,
    held_out_path: Paths,
    request: Mapping[str, Any],
    files: Mapping[str, Path],
    template: ChatTemplate | None = None,
    most: int | None = None,
) -> None:
    """Tokenise the documents below `path` (and `held_out_path`) into `folder`; the caller holds its lock.

    `request` are the settings that the manifest keeps, `files` the files of the corpus by name.
    """
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        with Waiting("reading the text", kept="nothing of the tokens is kept", partial=partial):
            sources = {name: describe_file(file) for name, file in files.items()} if most is None else {}
        documents = _documents(tokenizer, path, held_out_path, request, template, most)
        waiting = Waiting("tokenising", kept="nothing of the tokens is kept", partial=partial)
        with waiting, _Writer(partial / "tokens.bin", tokenizer) as writer:
            for document, held_out in documents:
                writer.add(document, held_out)
                waiting.add(len(document.text or ""))
        check(len(writer.lengths) > 0, f"{DATA} {path!r} holds no text, or nothing that is trained on.", DataError)
        np.save(partial / "offsets.npy", np.append(0, np.cumsum(writer.lengths)))
        np.save(partial / "held_out.npy", np.array(writer.held_out, bool))
        names = ["tokens.bin", "offsets.npy", "held_out.npy"]
        if (partial / TARGETS).exists():
            names.append(TARGETS)
        if template is not None and writer.has_chats:
            request = {**request, "chat_template": template.content_hash}
        sizes = {name: (partial / name).stat().st_size for name in names}
        manifest = {**request, "dtype": writer.dtype.str, "counts": writer.counts(), "sizes": sizes, "sources": sources}
        manifest["fingerprint"] = _content_hash(request, sources)
        (folder / "manifest.json").unlink(missing_ok=True)
        for name in names:
            os.replace(partial / name, folder / name)
        write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def describe_file(file: Path) -> dict[str, Any]:
    """Size, time of the last change and hash of a file."""
    stat = file.stat()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "hash": digest}


def _content_hash(request: Mapping[str, Any], sources: Mapping[str, dict[str, Any]]) -> str:
    content = json.dumps([request, {name: one["hash"] for name, one in sources.items()}], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _documents(
    tokenizer: Tokenizer,
    path: Paths,
    held_out_path: Paths,
    request: Mapping[str, Any],
    template: ChatTemplate | None,
    most: int | None,
) -> Iterator[tuple[Document, bool]]:
    """Every document, or the first `most`, and whether it is held out."""

    def read(path: Paths, flag: str = DATA) -> Iterator[Document]:
        found = read_documents(path, text_field=request["text_field"], tokenizer=tokenizer, flag=flag)
        return itertools.islice(found, most)

    is_held_out = held_out_rule(read(path), request["held_out_fraction"])
    yield from ((document, is_held_out(document)) for document in render_documents(read(path), template))
    if held_out_path:
        yield from ((document, True) for document in render_documents(read(held_out_path, HELD_OUT), template))


class _Writer:
    """Appends documents to the token file and counts them."""

    def __init__(self, file: Path, tokenizer: Tokenizer):
        ends = (tokenizer.bos_id, tokenizer.eos_id)
        rule = "the tokenizer has neither bos nor eos: documents need a token between them"
        check(ends != (None, None), f"{rule}; name one in tokenizer_config.json.", DataError)
        start = ends[0] if ends[0] is not None else ends[1]
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self.lengths = array("q")
        self.held_out = array("b")
        self._start = np.array([start], self.dtype)
        self._end = np.array([] if ends[1] is None else [ends[1]], self.dtype)
        self.targets = array("q")
        self.has_chats = False
        self._tokenizer = tokenizer
        self._streams: list[BinaryIO] = [file.open("wb")]  # of tokens and, where only parts are trained on, of targets
        self._waiting: list[tuple[Document, bool]] = []
        self._waiting_size = 0
        self._bytes: dict[bool, int | None] = {False: 0, True: 0}
        self._gzip = Gzip()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [one.close() for one in self._streams])
            if error[0] is None:
                self._encode()
                for stream in self._streams:
                    stream.flush()
                    os.fsync(stream.fileno())

    def add(self, document: Document, held_out: bool) -> None:
        """Take the next document."""
        text = document.text
        if text is None and held_out:  # bytes are counted of what is evaluated only: decoding is slow
            text = self._tokenizer.decode(np.asarray(document.tokens))
        if text is not None and document.spans is not None:
            text = "".join(text[start:stop] for start, stop in document.spans)
        self._count(text, held_out)
        if document.tokens is not None:
            self._encode()
            self._write(document.tokens, held_out)
            return
        self._waiting.append((document, held_out))
        self._waiting_size += len(document.text or "")
        if self._waiting_size >= CHARACTERS_AT_ONCE:
            self._encode()

    def _count(self, text: str | None, held_out: bool) -> None:
        content = text.encode() if text is not None else None
        total = self._bytes[held_out]
        self._bytes[held_out] = None if content is None or total is None else total + len(content)
        if held_out and content is not None:
            self._gzip.add(content)

    def _encode(self) -> None:
        plain = [one.text or "" for one, _ in self._waiting if one.spans is None]
        parted = [(one.text or "", one.spans) for one, _ in self._waiting if one.spans is not None]
        texts = iter(self._tokenizer.encode_many(plain) if plain else [])
        parts = iter(encode_spans(self._tokenizer, *zip(*parted, strict=True)) if parted else [])
        for document, held_out in self._waiting:
            if document.spans is None:
                self._write(next(texts), held_out)
            else:
                self._write_targets(document, *next(parts), held_out)
        self._waiting, self._waiting_size = [], 0

    def _write(self, tokens: np.ndarray, held_out: bool) -> None:
        whole = np.concatenate([self._start, tokens.astype(self.dtype), self._end])
        self._append(whole, np.ones(len(whole), bool), held_out)

    def _write_targets(self, document: Document, tokens: np.ndarray, targets: np.ndarray, held_out: bool) -> None:
        """A conversation stands as its template wrote it; a completion gets separators that it doesn't have."""
        tokens = tokens.astype(self.dtype)
        if document.chat is not None:
            self.has_chats = True
        else:
            start = self._start[int(np.array_equal(tokens[:1], self._start)) :]
            end = self._end[int(np.array_equal(tokens[-1:], self._end)) :]
            tokens = np.concatenate([start, tokens, end])
            targets = np.concatenate([np.zeros(len(start), bool), targets, np.ones(len(end), bool)])
        if len(self._streams) == 1:
            self._streams.append(Path(self._streams[0].name).with_name(TARGETS).open("wb"))
            for length in self.lengths:
                self._streams[1].write(_without_first(np.ones(length, bool)).tobytes())
        self._append(tokens, targets, held_out)

    def _append(self, tokens: np.ndarray, targets: np.ndarray, held_out: bool) -> None:
        targets = _without_first(targets)
        for stream, content in zip(self._streams, (tokens, targets), strict=False):
            stream.write(content.tobytes())
        self.lengths.append(len(tokens))
        self.targets.append(int(targets.sum()))
        self.held_out.append(held_out)

    def counts(self) -> dict[str, dict[str, Any]]:
        """Of each split, the arguments of `Counts`."""
        found = {}
        for held_out, split in enumerate(SPLITS):
            chosen = np.array(self.held_out) == held_out
            tokens, targets = (int(np.array(one)[chosen].sum()) for one in (self.lengths, self.targets))
            gzip = self._gzip.nats_per_byte() if held_out and chosen.any() else None
            count = Counts(int(chosen.sum()), tokens, targets, self._bytes[bool(held_out)], gzip)
            found[split] = count._asdict()
        return found


def _without_first(targets: np.ndarray) -> np.ndarray:
    """Nothing predicts the first token of a document."""
    targets[:1] = False
    return targets
