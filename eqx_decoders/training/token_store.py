"""Tokens of a corpus, made once: a memory-mapped file, an index of its documents and a manifest of what they are.

A document is stored as `[start] tokens [end]`, where `end` is the tokenizer's eos and `start` its bos (eos, if it has
none). The model thus predicts the first real token from the separator and learns where documents end.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.files import write_atomically
from eqx_decoders.training.corpus import Document, Source, find_sources, held_out_rule, read_documents
from eqx_decoders.training.tokenizer import Tokenizer


FORMAT = 1
TEXT_AT_ONCE = 1 << 20  # characters that are tokenized together
SPLITS = ("train", "held_out")


class Counts(NamedTuple):
    """Of one split: documents, tokens (with the separators), tokens that are targets, bytes of UTF-8.

    Every token but the first separator of its document is a target once: `targets = tokens - documents`. `bytes` is
    None for training text that came as tokens. `gzip_nats_per_byte` is known for the held-out split.
    """

    documents: int
    tokens: int
    targets: int
    bytes: int | None
    gzip_nats_per_byte: float | None = None


class TokenStore:
    """The finished tokens of a corpus; `store[i]` are those of document `i`."""

    def __init__(self, folder: Path):
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        self.offsets: np.ndarray = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        self.held_out: np.ndarray = np.load(folder / "held_out.npy", allow_pickle=False)
        self.tokens: np.ndarray = np.memmap(folder / "tokens.bin", self.manifest["dtype"], "r")

    def __len__(self) -> int:
        return len(self.held_out)

    def __getitem__(self, document: int | np.integer) -> np.ndarray:
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document, with its separators."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """Equal for equal documents and tokenizers, wherever and whenever they were read."""
        return self.manifest["fingerprint"]

    def documents(self, split: str) -> np.ndarray:
        """The numbers of the documents of `split`."""
        return np.flatnonzero(self.held_out == (split == "held_out"))

    def counts(self, split: str) -> Counts:
        """How much there is of `split`."""
        return Counts(**self.manifest["counts"][split])


def open_store(
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    path: str | None = None,
    held_out_path: str | None = None,
    held_out_fraction: float = 0.05,
    text_field: str = "text",
) -> TokenStore:
    """Open the tokens of a corpus in `folder`, making them first if they aren't there.

    The manifest is written last, by a rename: a store without it was interrupted and is made again. One process at a
    time makes it (a file lock), others wait and then open it. Raises DataError if the files, the tokenizer or the split
    are not those from which an existing store was made, and says what changed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"path": path, "held_out_path": held_out_path, "text_field": text_field}
    asked = {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "text_field": text_field,
        "held_out_fraction": 0.0 if held_out_path else held_out_fraction,
        "own_held_out_path": held_out_path is not None,
    }
    files = {"train": find_sources(path), "held_out": find_sources(held_out_path) if held_out_path else ()}
    with _locked(folder / "lock"):
        made = _finished(folder)
        if made is None:
            _build(folder, tokenizer, origin, asked, files)
        else:
            _check_unchanged(folder, made, asked, files)
    return TokenStore(folder)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _finished(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete store: all files there, with their lengths."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if sizes == manifest["sizes"] else None


def _describe(files: dict[str, tuple[Source, ...]]) -> dict[str, dict[str, Any]]:
    return {f"{split}:{one.name}": _describe_file(one.file) for split, found in files.items() for one in found}


def _describe_file(file: Path) -> dict[str, Any]:
    stat = file.stat()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "hash": digest}


def _check_unchanged(
    folder: Path, made: dict[str, Any], asked: dict[str, Any], files: dict[str, tuple[Source, ...]]
) -> None:
    """Every difference between the store and what is asked for, in one sentence."""
    changes = [f"{key} was {made.get(key)!r} and is {now!r}" for key, now in asked.items() if made.get(key) != now]
    now = {f"{split}:{one.name}": one.file for split, found in files.items() for one in found}
    old = made["sources"]
    changes += [f"{name} is gone" for name in old if name not in now]
    changes += [f"{name} is new" for name in now if name not in old]
    changes += [f"{name} has other contents" for name in now if name in old and _file_changed(now[name], old[name])]
    if changes:
        listed = "; ".join(changes[:8]) + (f"; and {len(changes) - 8} more" if len(changes) > 8 else "")
        raise DataError(
            f"the data are not those of the tokens in {folder}: {listed}. "
            "Restore them to go on with this run, or start another run directory."
        )


def _file_changed(file: Path, old: dict[str, Any]) -> bool:
    stat = file.stat()
    if stat.st_size == old["size"] and stat.st_mtime_ns == old["mtime_ns"]:
        return False
    return stat.st_size != old["size"] or _describe_file(file)["hash"] != old["hash"]


def _build(
    folder: Path,
    tokenizer: Tokenizer,
    origin: dict[str, Any],
    asked: dict[str, Any],
    files: dict[str, tuple[Source, ...]],
) -> None:
    partial = folder / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: we hold the lock
    partial.mkdir()
    try:
        sources = _describe(files)
        writer = _Writer(partial / "tokens.bin", tokenizer)
        with writer:
            for document, held_out in _split(tokenizer, origin, asked["held_out_fraction"]):
                writer.add(document, held_out)
        check(len(writer.lengths) > 0, f"data path={origin['path']!r} holds no text.", DataError)
        np.save(partial / "offsets.npy", np.append(0, np.cumsum(writer.lengths)))
        np.save(partial / "held_out.npy", np.array(writer.held_out, bool))
        names = ("tokens.bin", "offsets.npy", "held_out.npy")
        sizes = {name: (partial / name).stat().st_size for name in names}
        facts = {"dtype": writer.dtype.str, "counts": writer.counts(), "sizes": sizes, "sources": sources}
        facts["fingerprint"] = _fingerprint(asked, sources)
        (folder / "manifest.json").unlink(missing_ok=True)
        for name in names:
            os.replace(partial / name, folder / name)
        write_atomically(folder / "manifest.json", json.dumps(asked | facts, indent=1).encode())
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fingerprint(asked: dict[str, Any], sources: dict[str, dict[str, Any]]) -> str:
    content = json.dumps([asked, {name: one["hash"] for name, one in sources.items()}], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _split(tokenizer: Tokenizer, origin: dict[str, Any], fraction: float) -> Iterator[tuple[Document, bool]]:
    def read(path: str | None) -> Iterator[Document]:
        return read_documents(path, text_field=origin["text_field"], tokenizer=tokenizer)

    rule = held_out_rule(read(origin["path"]), fraction)
    yield from ((document, rule(document)) for document in read(origin["path"]))
    if origin["held_out_path"]:
        yield from ((document, True) for document in read(origin["held_out_path"]))


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
        self._tokenizer = tokenizer
        self._stream = file.open("wb")
        self._waiting: list[tuple[str, bool]] = []
        self._waiting_size = 0
        self._bytes: dict[bool, int | None] = {False: 0, True: 0}
        self._gzip = Gzip()

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        with self._stream:
            if error[0] is None:
                self._encode()
                self._stream.flush()
                os.fsync(self._stream.fileno())

    def add(self, document: Document, held_out: bool) -> None:
        """Take the next document."""
        text = document.text
        if text is None and held_out:  # bytes are counted of what is evaluated only: decoding is slow
            text = self._tokenizer.decode(np.asarray(document.tokens))
        self._count(text, held_out)
        if document.tokens is not None:
            self._encode()
            self._write(document.tokens, held_out)
            return
        self._waiting.append((document.text or "", held_out))
        self._waiting_size += len(document.text or "")
        if self._waiting_size >= TEXT_AT_ONCE:
            self._encode()

    def _count(self, text: str | None, held_out: bool) -> None:
        content = text.encode() if text is not None else None
        total = self._bytes[held_out]
        self._bytes[held_out] = None if content is None or total is None else total + len(content)
        if held_out and content is not None:
            self._gzip.add(content)

    def _encode(self) -> None:
        encoded = self._tokenizer.encode_many([text for text, _ in self._waiting]) if self._waiting else []
        for tokens, (_, held_out) in zip(encoded, self._waiting, strict=True):
            self._write(tokens, held_out)
        self._waiting, self._waiting_size = [], 0

    def _write(self, tokens: np.ndarray, held_out: bool) -> None:
        whole = np.concatenate([self._start, tokens.astype(self.dtype), self._end])
        self._stream.write(whole.tobytes())
        self.lengths.append(len(whole))
        self.held_out.append(held_out)

    def counts(self) -> dict[str, dict[str, Any]]:
        """Of each split, the arguments of `Counts`."""
        found = {}
        for held_out, split in enumerate(SPLITS):
            chosen = np.array(self.lengths)[np.array(self.held_out) == held_out]
            documents, tokens = len(chosen), int(chosen.sum())
            gzip = self._gzip.nats_per_byte() if held_out and documents else None
            count = Counts(documents, tokens, tokens - documents, self._bytes[bool(held_out)], gzip)
            found[split] = count._asdict()
        return found


class Gzip:
    """`gzip -9` of texts one after another, of which only the size is kept."""

    def __init__(self):
        self._compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
        self._read, self._size = 0, 0

    def add(self, content: bytes) -> None:
        """Compress the next bytes."""
        self._read += len(content)
        self._size += len(self._compressor.compress(content))

    def nats_per_byte(self) -> float:
        """`8 ln 2 · compressed bytes / bytes`; ends the stream."""
        self._size += len(self._compressor.flush())
        return 8 * float(np.log(2)) * self._size / self._read


def gzip_nats_per_byte(texts: Iterable[str]) -> float:
    """What `gzip -9` needs for the concatenated `texts`, in nats per byte of UTF-8: a baseline for a model's loss."""
    gzip = Gzip()
    for text in texts:
        gzip.add(text.encode())
    check(gzip._read > 0, "gzip_nats_per_byte needs at least one byte of text.", DataError)
    return gzip.nats_per_byte()
