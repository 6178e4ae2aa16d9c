"""Where text comes from: documents out of plain text, records (JSON, Parquet) and packed token files.

Without a path the corpus is the source code of Python's own standard library, about 12 MB on every machine that runs
this: nothing is downloaded.
"""

import glob
import itertools
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.compressed import is_compressed, open_stream, plain_suffix
from eqx_decoders.io.tokenizer import Tokenizer
from eqx_decoders.training.records import Document, decode, read_json, read_parquet


Paths = str | Sequence[str] | None

DATA, HELD_OUT = "--data (DataConfig.path)", "--held-out (DataConfig.held_out_path)"  # for error messages
RECORDS = (".jsonl", ".parquet", ".bin", ".npy", ".json")
UNCOMPRESSED = (".parquet", ".bin", ".npy")  # mapped into memory, or compressed inside
TEXTS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".rs"),
)

# Which files of a directory are its corpus: the first of these that chooses any. `.json` is late, since a folder of
# texts or records often has settings beside them.
PREFERENCES: tuple[Callable[[Path], bool], ...] = (
    lambda file: file.suffix in RECORDS[:-1],
    lambda file: is_compressed(file) and plain_suffix(file) == ".jsonl",
    lambda file: file.suffix in TEXTS,
    lambda file: plain_suffix(file) == ".json",
    lambda file: is_compressed(file) and plain_suffix(file) in TEXTS,
)

# A plain text above LONG bytes is read as documents of about PIECE bytes, cut at line ends: one book can then be split
# into training and held-out text, and no tokenizer gets a gigabyte at once.
LONG, PIECE = 256 * 1024, 64 * 1024

TOKENS_AT_ONCE = 1 << 22
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
BUILD_SETTINGS = "_sysconfigdata"  # the file that describes the machine on which Python was compiled


class Source(NamedTuple):
    """A file of the corpus and the name under which it is known, relative to the corpus."""

    name: str
    file: Path


def as_paths(path: Paths) -> tuple[str | None, ...]:
    """The paths one by one; of None: the one that stands for the standard library."""
    return (path,) if path is None or isinstance(path, str) else tuple(path)


def find_sources(path: Paths, flag: str = DATA) -> tuple[Source, ...]:
    """The files of `path`: one or several, each a file, a directory or a glob (None: the standard library).

    Those of a directory or glob come in the order of their names. Of a directory the records (.jsonl, .parquet, .bin,
    .npy) are taken or, where it has none, the compressed ones; then the plain texts; then what else can be read. Files
    and globs must have endings that are known, or none at all: that is plain text, as in `LICENSE`.

    Raises DataError, with the flag, if there are none.
    """
    found: dict[str, Source] = {}
    for one in as_paths(path):
        for name, file in _find(one, flag):
            copies = (f"{name} ({number})" for number in itertools.count(2))
            name = name if name not in found else next(copy for copy in copies if copy not in found)
            found[name] = Source(name, file)
    return tuple(found.values())


def _find(path: str | None, flag: str) -> Sequence[Source]:
    if path is None:
        return _standard_library()
    root, known = Path(path), " ".join(RECORDS + TEXTS)
    if root.is_dir():
        found = _below(root)
        files = next(filter(None, ([one for one in found if chosen(one.file)] for chosen in PREFERENCES)), [])
        check(bool(files), f"{flag} {path!r} holds no file that can be read; known endings: {known}.", DataError)
        return files
    matches = [root] if root.is_file() else sorted(Path(one) for one in glob.glob(path, recursive=True))
    files = [file for file in matches if file.is_file()]
    rule = "it must be a file, a directory or a pattern that matches files"
    check(bool(files), f"{flag} {path!r} does not exist: {rule}.", DataError)
    for file in files:
        whole = not is_compressed(file) or plain_suffix(file) not in UNCOMPRESSED
        rule = f"known endings are {known}, and .gz and .zst behind those of text and JSON"
        good = plain_suffix(file) in ("", *RECORDS, *TEXTS) and whole
        check(good, f"{flag} {str(file)!r} is of an unknown kind: {rule}. Rename it to .txt if it is text.", DataError)
    return [Source(file.name if file == root else file.as_posix(), file) for file in files]


def _below(root: Path, skip: frozenset[str] = frozenset()) -> list[Source]:
    """All files below `root`, without hidden ones and folders named in `skip`."""
    found = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = (one for one in folders if not one.startswith(".") and one not in skip)
        files = (Path(folder, name) for name in names if not name.startswith("."))
        found += [Source(file.relative_to(root).as_posix(), file) for file in files if file.is_file()]
    return sorted(found)


def _standard_library() -> tuple[Source, ...]:
    root = Path(sysconfig.get_path("stdlib"))
    found = tuple(
        one for one in _below(root, SKIPPED_FOLDERS) if one.name.endswith(".py") and BUILD_SETTINGS not in one.name
    )
    check(bool(found), f"the standard library at {root} holds no source files: give {DATA}.", DataError)
    return found


def read_documents(
    path: Paths, *, text_field: str = "text", tokenizer: Tokenizer | None = None, flag: str = DATA
) -> Iterator[Document]:
    """Every document below `path` in a fixed order, read lazily. Documents without text are left out.

    - plain text: a file is a document (beyond 256 KiB: pieces of 64 KiB, cut at line ends);
    - `.jsonl`, `.json` and `.parquet`: a line, member of the list or row is a document: the text in the field or column
      `text_field`, else the conversation in `messages`, else a `prompt` and its `completion`;
    - `.bin` (raw) and `.npy`: a list of uint16 or uint32 tokens; a document ends at the `eos_id` of `tokenizer`.

    Raises DataError with file and line for what cannot be read.
    """
    for source in find_sources(path, flag):
        kind = plain_suffix(source.file)
        if kind in (".jsonl", ".json"):
            found = read_json(source.file, text_field)
        elif kind == ".parquet":
            found = read_parquet(source.file, text_field)
        elif kind in (".bin", ".npy"):
            found = _read_tokens(source, tokenizer)
        else:
            found = _read_plain_text(source, key=source.name if path is None else None)
        yield from (one for one in found if one.text or one.chat or (one.tokens is not None and len(one.tokens)))


def _read_plain_text(source: Source, key: str | None) -> Iterator[Document]:
    with open_stream(source.file) as stream:
        content = stream.read(LONG + 1)
    if len(content) <= LONG:
        yield Document(source.name, decode(content, source.name), key=key)
        return
    with open_stream(source.file) as stream:
        piece = 0
        while lines := stream.readlines(PIECE):
            where = f"{source.name}, piece {piece} of {PIECE} bytes"
            yield Document(where, decode(b"".join(lines), where), key=key)
            piece += 1


def _read_tokens(source: Source, tokenizer: Tokenizer | None) -> Iterator[Document]:
    rule = f"{source.file} holds tokens: they need their tokenizer, with an eos_id that ends documents"
    if tokenizer is None or tokenizer.eos_id is None:
        raise DataError(f"{rule}.")
    tokens = _open_tokens(source.file, tokenizer.vocab_size)
    parts: list[np.ndarray] = []
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        chunk = np.asarray(tokens[start : start + TOKENS_AT_ONCE])
        _check_ids(chunk, start, source.file, tokenizer.vocab_size)
        *ended, rest = np.split(chunk, np.flatnonzero(chunk == tokenizer.eos_id) + 1)
        for piece in ended:
            yield _token_document(source, [*parts, piece[:-1]], tokenizer)
            parts = []
        parts.append(rest)
    if parts:
        yield _token_document(source, parts, tokenizer)


def _token_document(source: Source, parts: list[np.ndarray], tokenizer: Tokenizer) -> Document:
    tokens = np.concatenate(parts)
    if len(tokens) and tokens[0] == tokenizer.bos_id:  # the token store puts one in front of every document
        tokens = tokens[1:]
    return Document(str(source.file), tokens=tokens)


def _open_tokens(file: Path, vocab_size: int) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            tokens = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DataError(f"{file} is not an .npy file that can be read: {error}") from error
        good = tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32)
        held = f"{tokens.dtype} of shape {tokens.shape}"
        check(good, f"{file} holds {held}; it must be a list of uint16 or uint32 tokens.", DataError)
        return tokens
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    size = file.stat().st_size
    whole = size % dtype.itemsize == 0
    check(
        whole, f"{file} has {size} bytes: no whole number of {dtype.name} tokens (vocab_size={vocab_size}).", DataError
    )
    return np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)


def _check_ids(tokens: np.ndarray, start: int, file: Path, vocab_size: int) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        place = int(np.argmax(tokens >= vocab_size))
        found = f"{file} holds the token id {tokens[place]} at place {start + place}"
        raise DataError(f"{found}; ids must be below vocab_size={vocab_size}: is it another tokenizer's file?")


def held_out_rule(documents: Iterable[Document], fraction: float) -> Callable[[Document], bool]:
    """Which documents are held out: those whose hash draws a number below `fraction`.

    Equal documents fall on the same side, so no text is in both. Where that would leave one side empty (a few
    documents only), the one with the smallest number is held out; a single document is never.
    """
    smallest, largest = 1.0, 0.0
    if fraction <= 0:
        return lambda one: False
    for document in documents:
        draw = document.draw()
        smallest, largest = min(smallest, draw), max(largest, draw)
        if smallest < fraction <= largest:  # as a rule after a few documents
            return lambda one: one.draw() < fraction
    if smallest >= largest:
        return lambda one: False
    return lambda one: one.draw() == smallest
