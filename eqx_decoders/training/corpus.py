"""Where text comes from: documents out of plain text, JSON lines, Parquet and packed token files.

Without a path the corpus is the source code of Python's own standard library, about 12 MB on every machine that runs
this: nothing is downloaded.
"""

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.errors import DataError, check, need_extra
from eqx_decoders.io.tokenizer import Tokenizer


RECORDS = (".jsonl", ".parquet", ".bin", ".npy")
TEXTS = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html"),
    *(".py", ".c", ".h", ".cc", ".cpp", ".java", ".js", ".ts", ".rs"),
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


class Document(NamedTuple):
    """One document: its text, or its tokens without special ones around them. `where` is for error messages."""

    where: str
    text: str | None = None
    tokens: np.ndarray | None = None
    key: str | None = None  # hashed instead of the content to decide whether the document is held out

    def draw(self) -> float:
        """A number in [0, 1) from the hash of the document: equal on every machine, uniform over documents."""
        if self.key is not None:
            content = self.key.encode()
        elif self.tokens is not None:
            content = self.tokens.astype("<i8").tobytes()
        else:
            content = (self.text or "").encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48


def find_sources(path: str | None) -> tuple[Source, ...]:
    """The files of `path` (a file, a directory or a glob; None: the standard library), in the order of their names.

    Of a directory, the records (.jsonl, .parquet, .bin, .npy) are taken or, where it has none, the plain texts.
    Raises DataError if there are none.
    """
    if path is None:
        return _standard_library()
    root = Path(path)
    if root.is_file():
        return (Source(root.name, root),)
    if root.is_dir():
        found = _below(root)
        files = [one for one in found if one.file.suffix in RECORDS] or [
            one for one in found if one.file.suffix in TEXTS
        ]
        known = " ".join(RECORDS + TEXTS)
        check(bool(files), f"data path={path!r} holds no file that can be read; known endings: {known}.", DataError)
        return tuple(files)
    matches = sorted(Path(one) for one in glob.glob(path, recursive=True) if Path(one).is_file())
    rule = "it must be a file, a directory or a pattern that matches files"
    check(bool(matches), f"data path={path!r} does not exist: {rule}.", DataError)
    return tuple(Source(one.as_posix(), one) for one in matches)


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
    check(bool(found), f"the standard library at {root} holds no source files: give a data path.", DataError)
    return found


def read_documents(
    path: str | None, *, text_field: str = "text", tokenizer: Tokenizer | None = None
) -> Iterator[Document]:
    """Every document below `path` in a fixed order, read lazily. Documents without text are left out.

    - plain text: a file is a document (beyond 256 KiB: pieces of 64 KiB, cut at line ends);
    - `.jsonl` and `.parquet`: a line or row is a document, its text in the field or column `text_field`;
    - `.bin` (raw) and `.npy`: a list of uint16 or uint32 tokens; a document ends at the `eos_id` of `tokenizer`.

    Raises DataError with file and line for what cannot be read.
    """
    for source in find_sources(path):
        if source.file.suffix == ".jsonl":
            found = _read_json_lines(source, text_field)
        elif source.file.suffix == ".parquet":
            found = _read_parquet(source, text_field)
        elif source.file.suffix in (".bin", ".npy"):
            found = _read_tokens(source, tokenizer)
        else:
            found = _read_plain_text(source, key=source.name if path is None else None)
        yield from (one for one in found if one.text or (one.tokens is not None and len(one.tokens)))


def _read_plain_text(source: Source, key: str | None) -> Iterator[Document]:
    with source.file.open("rb") as stream:
        if source.file.stat().st_size <= LONG:
            yield Document(source.name, _decode(stream.read(), source.name), key=key)
            return
        piece = 0
        while lines := stream.readlines(PIECE):
            where = f"{source.name}, piece {piece} of {PIECE} bytes"
            yield Document(where, _decode(b"".join(lines), where), key=key)
            piece += 1


def _read_json_lines(source: Source, field: str) -> Iterator[Document]:
    with source.file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"{source.file}:{number}"
            try:
                record = json.loads(_decode(line, where))
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not valid JSON: {error}.") from error
            check(isinstance(record, dict), f"{where} must hold a JSON object with the field {field!r}.", DataError)
            yield Document(where, _checked_text(record.get(field), field, where, record))


def _read_parquet(source: Source, field: str) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise need_extra("pyarrow", "train") from error
    try:
        with parquet.ParquetFile(source.file) as file:
            columns = file.schema_arrow.names
            rule = f"has no column {field!r}; its columns: {', '.join(columns)}"
            check(field in columns, f"{source.file} {rule}. Set text_field.", DataError)
            row = 0
            for batch in file.iter_batches(batch_size=512, columns=[field]):  # one row group at a time
                for value in batch.column(0).to_pylist():
                    where = f"{source.file}, row {row}"
                    yield Document(where, _checked_text(value, field, where, {field: value}))
                    row += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{source.file} is not a Parquet file that can be read: {error}") from error


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


def _checked_text(value: Any, field: str, where: str, record: dict[str, Any]) -> str:
    if field not in record:
        raise DataError(f"{where} has no field {field!r}; its fields: {', '.join(record)}. Set text_field.")
    kind = type(value).__name__
    check(isinstance(value, str), f"{where}: field {field!r} must be a text, not {kind}.", DataError)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} is no Unicode text: {error}.") from error
    return value


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 text: {error}. Convert it, or leave it out.") from error


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
