"""Readers of the documents of a source, or of a part of a source: text, JSON, Parquet, ArrayRecord, tokens, datasets.

Large sources are cut into parts that different processes read. A part is a range (start, stop): of bytes of plain text
and JSON lines, row groups of Parquet, records of ArrayRecord, rows of a saved dataset, or files of a streamed dataset.
The documents of all parts in order are the documents of the source.
"""

import codecs
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from eqx_decoders.data.sources.data_files import File, RemoteFile, is_compressed, local_copy, open_stream, plain_suffix
from eqx_decoders.data.sources.documents import (
    Document,
    ReadReport,
    decode,
    is_record,
    parsed,
    record_documents,
    used_columns,
)
from eqx_decoders.data.sources.hub_datasets import HubDataset, open_saved, saved_rows
from eqx_decoders.data.sources.records import check_unicode
from eqx_decoders.data.sources.sources import ARRAY_RECORDS, KEPT, Location, Source, folder_of
from eqx_decoders.errors import DataError, EqxDecodersError, check, missing_package
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer, start_ids


Part = tuple[int, int]

# A plain text above LONG bytes is read as documents of about PIECE bytes, cut at line ends, so that a single book can
# be split into training and held-out text, and the tokenizer does not get a gigabyte at once.
LONG, PIECE = 256 * 1024, 64 * 1024

TOKENS_AT_ONCE = 1 << 22
RECORDS_AT_ONCE = 256

# A large file is cut into PARTS parts of SMALLEST_PART to LARGEST_PART bytes.
SMALLEST_PART, PARTS, LARGEST_PART = 1 << 24, 32, 1 << 28


ALL = ("*",)  # columns of a table


class ReadOptions(NamedTuple):
    """Options of readers: the text field of records, and the tokenizer of files that contain tokens.

    copy: path for the local copy of a remote file; None: a temporary file. columns: columns of a table to read, or
    `ALL`; None: columns of documents. report: counts of records that are left out.
    """

    text_field: str = "text"
    tokenizer: Tokenizer | None = None
    copy: Path | None = None
    columns: Sequence[str] | None = None
    report: ReadReport | None = None

    def used_columns(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns of a table to read. Raises DataError if the table has no columns of documents."""
        if self.columns is not None:
            return list(names) if self.columns == ALL else [name for name in self.columns if name in names]
        return used_columns(names, self.text_field, where)


def read_source(source: Source, reading: ReadOptions, part: Part | None = None) -> Iterator[Document]:
    """Yield every document of a source, or of a part of a source, in a fixed order, read lazily.

    Documents without text are left out, and counted in `reading.report`.

    - plain text: a file is a document (above 256 KiB: pieces of 64 KiB, cut at line ends);
    - `.jsonl`, `.json`, `.parquet` and datasets: a line, list member or row is a document. It has the text in the field
      `text_field`, or a conversation in `messages`, or a `prompt` and its `completion` (see `records`);
    - `.arrayrecord`, `.array_record`: a record is a document, a text or (if the first record is one) a JSON object;
    - `.bin` (raw) and `.npy`: uint16 or uint32 tokens. A document ends at the tokenizer's `eos_id`.

    Raises DataError with the file and, for errors in its content, the line.
    """
    with _as_data_errors(source.file):
        folder = folder_of(source.file)
        for document in _READERS[kind_of(source.file)].read(source, reading, part):
            if document.text or document.chat or (document.tokens is not None and len(document.tokens)):
                yield document._replace(folder=folder, known_hash=document.split_hash())
            elif reading.report is not None:
                reading.report.dropped["empty_text"] += 1


def read_records(source: Source, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the records of a source, JSON objects or rows of a table, with their location for error messages.

    columns: columns of a table to read, or `ALL`. Raises DataError for a source that contains no records.
    """
    with _as_data_errors(source.file):
        records = _READERS[kind_of(source.file)].records
        if records is None:
            raise DataError(
                f"{source.file} contains no records: give .jsonl, .json (also .gz or .zst), .parquet, .arrayrecord or "
                "a dataset."
            )
        for where, record in records(source, ReadOptions(columns=columns), None):
            for name, value in record.items() if isinstance(record, dict) else ():
                check_unicode(value, name, where)
            yield where, record


def parts_of(source: Source, size: int | None) -> list[Part | None]:
    """Return the parts of a source of `size` bytes, which follow from its content alone; [None] if it is not cut."""
    max_size = min(LARGEST_PART, max(SMALLEST_PART, (size or 0) // PARTS))
    if (size is not None and size <= 2 * SMALLEST_PART) or (
        isinstance(source.file, File) and is_compressed(source.file)
    ):
        return [None]
    with _as_data_errors(source.file):
        cuts = _READERS[kind_of(source.file)].cuts(source.file, size, max_size)
    return [None] if len(cuts) < 3 else list(itertools.pairwise(cuts))


@contextlib.contextmanager
def _as_data_errors(file: Location) -> Iterator[None]:
    """Convert errors of the packages that read a file to DataError with the name of the file."""
    try:
        yield
    except EqxDecodersError:
        raise
    except Exception as error:
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}.") from error


def kind_of(file: Location) -> str:
    """Return the name of the reader for a file or dataset."""
    if isinstance(file, HubDataset):
        return "streamed dataset"
    if isinstance(file, Path) and file.is_dir():
        return "saved dataset"
    return _KINDS.get(plain_suffix(file), "text")


# --- plain text -------------------------------------------------------------------------------------------------------


def _read_text(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    key = source.name if source.by_name else None
    with open_stream(_file(source)) as stream:
        content = stream.read(LONG + 1) if part is None else b""
    if part is None and len(content) <= LONG:
        yield Document(source.name, decode(content, source.name), key=key)
        return
    with open_stream(_file(source)) as stream:
        start, stop = part or (0, None)
        if part is not None:
            stream.seek(start)
        for piece in itertools.count():
            if start == stop or not (lines := stream.readlines(PIECE)):
                return
            where = f"{source.name}, " + (f"piece {piece} of {PIECE} bytes" if part is None else f"byte {start}")
            content = b"".join(lines)
            yield Document(where, decode(content, where), key=key)
            start += len(content)


def _text_cuts(file: Location, size: int | None, max_size: int) -> list[int]:
    """Cut a local file at starts of documents, which are found by seeking; this is too slow for remote files."""
    if not isinstance(file, Path) or size is None:
        return []
    cuts, end = [0], 0
    with StatusLine("finding starts of documents", remains=KEPT), file.open("rb") as stream:
        while end < size:
            stream.seek(end + PIECE)  # like `readlines(PIECE)`: the line that crosses it is the last one
            end = min(end + PIECE, size) + len(stream.readline())
            if end - cuts[-1] >= max_size or end >= size:
                cuts.append(end)
    return cuts


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_json_records(source, reading, part), reading.text_field, report=reading.report)


def _json_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    """Read the records of JSON lines, or of a JSON list, which is read at once."""
    with open_stream(_file(source)) as stream:
        yield from _records(stream, _file(source)) if part is None else _records_within(stream, _file(source), *part)


def _records(stream: Any, file: File) -> Iterator[tuple[str, Any]]:
    may_be_list = plain_suffix(file) == ".json"
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if may_be_list and line.lstrip().startswith(b"["):
            records = parsed(line + stream.read(), str(file))
            yield from ((f"{file}, record {index}", record) for index, record in enumerate(records, 1))
        elif line.strip():
            may_be_list = False
            yield f"{file}:{number}", parsed(line, f"{file}:{number}")


def _records_within(stream: Any, file: File, start: int, stop: int) -> Iterator[tuple[str, Any]]:
    """Yield the records of the lines that start at the bytes `start:stop`."""
    begin = max(0, start - 1)
    stream.seek(begin)
    if start > 0:
        begin += len(stream.readline())  # the rest of the last line of the part before
    while begin < stop and (line := stream.readline()):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            yield f"{file}, byte {begin}", parsed(line, f"{file}, byte {begin}")
        begin += len(line)


def _even_cuts(count: int, size: int | None, max_size: int) -> list[int]:
    """Cut `count` bytes, records or rows of `size` bytes in total into parts of about `max_size` bytes."""
    return [*range(0, count, max(1, count * max_size // max(size or 1, 1))), count]


def _numbered(where: str, records: Iterable[Any], start: int) -> Iterator[tuple[str, Any]]:
    """Yield records with their location for error messages."""
    return ((f"{where} {number}", record) for number, record in enumerate(records, start))


# --- tables -----------------------------------------------------------------------------------------------------------


def _read_parquet(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_parquet_records(source, reading, part), reading.text_field, report=reading.report)


def _parquet_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    file = _file(source)
    with _parquet(file, reading.copy) as table:
        columns = reading.used_columns(table.schema_arrow.names, str(file))
        first, last = part or (0, table.num_row_groups)
        begin = sum(table.metadata.row_group(group).num_rows for group in range(first))
        groups = list(range(first, last))
        batches = table.iter_batches(batch_size=512, row_groups=groups, columns=columns)  # one row group at a time
        rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
        yield from _numbered(f"{file}, row", rows, begin)


def _parquet_cuts(file: Location, size: int | None, max_size: int) -> list[int]:
    if size is None:  # the server does not support range requests
        return []
    cuts, bytes_ = [0], 0
    with _parquet(file) as table:
        for group in range(table.num_row_groups):
            bytes_ += table.metadata.row_group(group).total_byte_size
            if bytes_ >= max_size or group == table.num_row_groups - 1:
                cuts.append(group + 1)
                bytes_ = 0
    return cuts


@contextlib.contextmanager
def _parquet(file: Any, copy: Path | None = None) -> Iterator[Any]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow import ArrowException
    except ImportError as error:
        raise missing_package("pyarrow", "train") from error
    try:
        with contextlib.ExitStack() as stack:
            if isinstance(file, RemoteFile) and file.size is None:
                file = stack.enter_context(local_copy(file, copy))
            opened = stack.enter_context(file.open("rb")) if isinstance(file, RemoteFile) else file
            yield stack.enter_context(parquet.ParquetFile(opened))
    except (ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as a Parquet file: {error}") from error


def _read_saved(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_saved_records(source, reading, part), reading.text_field, report=reading.report)


def _saved_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    dataset = open_saved(cast(Path, source.file))
    columns = reading.used_columns(dataset.column_names, str(source.file))
    start, stop = part or (0, dataset.num_rows)
    return _numbered(f"{source.file}, row", saved_rows(dataset, (start, stop), columns), start)


def _saved_cuts(file: Location, size: int | None, max_size: int) -> list[int]:
    return _even_cuts(open_saved(cast(Path, file)).num_rows, size, max_size)


def _read_streamed(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_streamed_records(source, reading, part), reading.text_field, report=reading.report)


def _streamed_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    dataset = cast(HubDataset, source.file)  # as its kind says
    files = "" if part is None else f", files {part[0]} to {part[1] - 1}"
    return _numbered(f"{dataset}{files}, row", dataset.rows(part), 0)


def _streamed_cuts(file: Location, size: int | None, max_size: int) -> list[int]:
    return list(range(cast(HubDataset, file).open().num_shards + 1))


# --- ArrayRecord ------------------------------------------------------------------------------------------------------


def _read_array_record(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    file = _file(source)
    with local_copy(file, reading.copy) as path, _array_record(path, file) as reader:
        start, stop = part or (0, reader.num_records())
        if start == stop:
            return
        first = _json_or_none(reader.read([0])[0])
        named = _numbered(f"{file}, record", _read_batches(reader, start, stop), start)
        if is_record(first, reading.text_field):
            objects = ((where, parsed(record, where)) for where, record in named)
            yield from record_documents(objects, reading.text_field, report=reading.report)
        else:
            yield from (Document(where, decode(record, where)) for where, record in named)


def _array_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    """Yield the JSON objects of an ArrayRecord file."""
    file = _file(source)
    with local_copy(file, reading.copy) as path, _array_record(path, file) as reader:
        start, stop = part or (0, reader.num_records())
        for where, record in _numbered(f"{file}, record", _read_batches(reader, start, stop), start):
            yield where, parsed(record, where)


def _read_batches(reader: Any, start: int, stop: int) -> Iterator[bytes]:
    for begin in range(start, stop, RECORDS_AT_ONCE):
        yield from reader.read(range(begin, min(begin + RECORDS_AT_ONCE, stop)))


def _json_or_none(record: bytes) -> Any:
    try:
        return parsed(record, "") if record.lstrip().startswith(b"{") else None
    except DataError:
        return None


def _array_record_cuts(file: Location, size: int | None, max_size: int) -> list[int]:
    if not isinstance(file, Path):  # each part would need a copy of the file
        return []
    with _array_record(file, file) as reader:
        return _even_cuts(reader.num_records(), size, max_size)


@contextlib.contextmanager
def _array_record(path: Path, source: Location) -> Iterator[Any]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise missing_package("array_record", "data") from error
    reader = ArrayRecordReader(str(path))
    try:
        if not reader.ok():
            reader.close()  # which raises the reason
            raise ValueError("the end of the file is missing")
        yield reader
        reader.close()
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        raise DataError(f"{source} cannot be read as an ArrayRecord file: {error}.") from error


# --- tokens -----------------------------------------------------------------------------------------------------------


def _read_tokens(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    tokenizer, file = reading.tokenizer, _file(source)
    if tokenizer is None or tokenizer.eos_id is None:
        raise DataError(f"{file} contains tokens, which need a tokenizer with an eos_id that ends documents.")
    with local_copy(file, reading.copy) as path:
        tokens = _open_tokens(path, file, tokenizer.vocab_size)
        parts: list[np.ndarray] = []
        for start in range(0, len(tokens), TOKENS_AT_ONCE):
            chunk = np.asarray(tokens[start : start + TOKENS_AT_ONCE])
            _check_ids(chunk, start, file, tokenizer.vocab_size)
            *ended, rest = np.split(chunk, np.flatnonzero(chunk == tokenizer.eos_id) + 1)
            for piece in ended:
                yield _token_document(file, [*parts, piece[:-1]], tokenizer)
                parts = []
            parts.append(rest)
        if parts:
            yield _token_document(file, parts, tokenizer)


def _token_document(file: File, parts: list[np.ndarray], tokenizer: Tokenizer) -> Document:
    tokens = np.concatenate(parts)
    start = start_ids(tokenizer)  # the token store adds them before every document
    if start and tuple(tokens[: len(start)].tolist()) == start:
        tokens = tokens[len(start) :]
    return Document(str(file), tokens=tokens)


def _open_tokens(path: Path, file: File, vocab_size: int) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DataError(f"{file} cannot be read as an .npy file: {error}") from error
        valid = tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32)
        content = f"{tokens.dtype} of shape {tokens.shape}"
        check(valid, f"{file} contains {content}; it must be a 1-D array of uint16 or uint32 tokens.", DataError)
        return tokens
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    size = path.stat().st_size
    check(
        size % dtype.itemsize == 0,
        f"{file} has {size} bytes, not a multiple of the size of {dtype.name} tokens (vocab_size={vocab_size}).",
        DataError,
    )
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def _check_ids(tokens: np.ndarray, start: int, file: File, vocab_size: int) -> None:
    if len(tokens) and int(tokens.max()) >= vocab_size:
        index = int(np.argmax(tokens >= vocab_size))
        raise DataError(
            f"{file} contains the token id {tokens[index]} at index {start + index}, but ids must be below "
            f"vocab_size={vocab_size}. Was the file written with another tokenizer?"
        )


# --- table of readers -------------------------------------------------------------------------------------------------


def _file(source: Source) -> File:
    """Return the file of a source that is not a dataset."""
    return cast(File, source.file)


class _SourceReader(NamedTuple):
    """Reader of one kind of source.

    - `read`: yields documents.
    - `cuts`: returns the boundaries of parts of a maximum size.
    - `records`: yields records; None for kinds without records.
    """

    read: Callable[[Source, ReadOptions, Part | None], Iterator[Document]]
    cuts: Callable[[Location, int | None, int], list[int]]
    records: Callable[[Source, ReadOptions, Part | None], Iterator[tuple[str, Any]]] | None = None


_KINDS = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".bin": "tokens", ".npy": "npy"}
_KINDS |= dict.fromkeys(ARRAY_RECORDS, "arrayrecord")
_READERS = {
    "text": _SourceReader(_read_text, _text_cuts),
    "jsonl": _SourceReader(
        _read_json, lambda file, size, max_size: [] if size is None else _even_cuts(size, size, max_size), _json_records
    ),
    "json": _SourceReader(_read_json, lambda file, size, max_size: [], _json_records),
    "parquet": _SourceReader(_read_parquet, _parquet_cuts, _parquet_records),
    "arrayrecord": _SourceReader(_read_array_record, _array_record_cuts, _array_records),
    "tokens": _SourceReader(_read_tokens, lambda file, size, max_size: []),
    "npy": _SourceReader(_read_tokens, lambda file, size, max_size: []),
    "saved dataset": _SourceReader(_read_saved, _saved_cuts, _saved_records),
    "streamed dataset": _SourceReader(_read_streamed, _streamed_cuts, _streamed_records),
}
