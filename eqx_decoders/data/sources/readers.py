"""Read the documents of a source: plain text, JSON, Parquet, ArrayRecord, tokens, or a Hugging Face dataset.

Large sources are split into parts, which different processes read. A part is a range (start, stop) of bytes of plain
text and JSON lines, of row groups of Parquet, of records of ArrayRecord, of rows of a saved dataset, or of files of a
streamed dataset. The documents of all parts, in order, are the documents of the source.
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


Part = tuple[int, int]  # (start, stop) in units that depend on the kind of source

# A larger plain-text file is read as documents of about PIECE_BYTES, split at line ends. So a single book has training
# and held-out documents, and the tokenizer does not get a gigabyte of text in one call.
MAX_WHOLE_TEXT_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024

TOKENS_PER_CHUNK = 1 << 22  # tokens of a .bin or .npy file that are read together
RECORDS_PER_READ = 256  # records of an ArrayRecord file that are read together

# A large file is split into about TARGET_PARTS parts of MIN_PART_BYTES to MAX_PART_BYTES.
TARGET_PARTS = 32
MIN_PART_BYTES = 1 << 24
MAX_PART_BYTES = 1 << 28

ALL_COLUMNS = ("*",)  # value of `ReadOptions.columns` that selects all columns of a table


class ReadOptions(NamedTuple):
    """Options of readers.

    **Fields:**

    - `text_field`: field of records, or column of tables, with the text.
    - `tokenizer`: tokenizer of files that contain tokens.
    - `copy`: path for the local copy of a remote file; None: a temporary file.
    - `columns`: columns of tables to read, or `ALL_COLUMNS`; None: the columns that documents are made of.
    - `report`: counts the skipped records; None: they are not counted.
    """

    text_field: str = "text"
    tokenizer: Tokenizer | None = None
    copy: Path | None = None
    columns: Sequence[str] | None = None
    report: ReadReport | None = None

    def used_columns(self, names: Sequence[str], where: str) -> list[str]:
        """Return the columns of a table to read, from all columns `names`.

        Raises DataError if no column contains documents.
        """
        if self.columns is not None:
            return list(names) if self.columns == ALL_COLUMNS else [name for name in self.columns if name in names]
        return used_columns(names, self.text_field, where)


def read_source(source: Source, reading: ReadOptions, part: Part | None = None) -> Iterator[Document]:
    """Yield the documents of a source, or of a part of a source, lazily and in a fixed order.

    - Plain text: a file is a document. Files of more than 256 KiB are split at line ends into pieces of 64 KiB.
    - `.jsonl`, `.json`, `.parquet` and datasets: a line, list member or row is a document. It has a text in the field
      `text_field`, a conversation in `messages`, or a `prompt` and its `completion` (see `records`).
    - `.arrayrecord`, `.array_record`: a record is a document. All records are JSON objects if the first record is a
      JSON object; otherwise they are texts.
    - `.bin` (raw) and `.npy`: uint16 or uint32 tokens. A document ends at the tokenizer's `eos_id`.

    Documents without text are skipped and counted in `reading.report`. Raises DataError with the file and, for errors
    in its content, the line.
    """
    with _as_data_errors(source.file):
        folder = folder_of(source.file)
        for document in _READERS[reader_name(source.file)].read(source, reading, part):
            if document.text or document.chat or (document.tokens is not None and len(document.tokens)):
                yield document._replace(folder=folder, known_hash=document.split_hash())
            elif reading.report is not None:
                reading.report.dropped["empty_text"] += 1


def read_records(source: Source, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the location (for error messages) and the content of each record: a JSON object or a row of a table.

    `columns`: columns of a table to read, or `ALL_COLUMNS`. Raises DataError for a kind of source without records.
    """
    with _as_data_errors(source.file):
        records = _READERS[reader_name(source.file)].records
        if records is None:
            raise DataError(
                f"{source.file} is not a file of records. Use .jsonl, .json (also .gz or .zst), .parquet, .arrayrecord "
                "or a dataset."
            )
        for where, record in records(source, ReadOptions(columns=columns), None):
            for name, value in record.items() if isinstance(record, dict) else ():
                check_unicode(value, name, where)
            yield where, record


def split_into_parts(source: Source, size: int | None) -> list[Part | None]:
    """Return the parts of a source; [None] if the source is not split.

    The parts depend only on the content of the source. `size`: number of bytes; None: unknown.
    """
    max_part_bytes = min(MAX_PART_BYTES, max(MIN_PART_BYTES, (size or 0) // TARGET_PARTS))
    if size is not None and size <= 2 * MIN_PART_BYTES:
        return [None]
    if isinstance(source.file, File) and is_compressed(source.file):
        return [None]
    with _as_data_errors(source.file):
        boundaries = _READERS[reader_name(source.file)].boundaries(source.file, size, max_part_bytes)
    return [None] if len(boundaries) < 3 else list(itertools.pairwise(boundaries))


@contextlib.contextmanager
def _as_data_errors(file: Location) -> Iterator[None]:
    """Convert exceptions of other packages that read a file to DataError with the name of the file."""
    try:
        yield
    except EqxDecodersError:
        raise
    except Exception as error:
        raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}.") from error


def reader_name(file: Location) -> str:
    """Return the key in `_READERS` of the reader for a file or dataset."""
    if isinstance(file, HubDataset):
        return "streamed dataset"
    if isinstance(file, Path) and file.is_dir():
        return "saved dataset"
    return _KINDS.get(plain_suffix(file), "text")


# --- plain text -------------------------------------------------------------------------------------------------------


def _read_text(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    key = source.name if source.by_name else None
    with open_stream(_file(source)) as stream:
        content = stream.read(MAX_WHOLE_TEXT_BYTES + 1) if part is None else b""
    if part is None and len(content) <= MAX_WHOLE_TEXT_BYTES:
        yield Document(source.name, decode(content, source.name), key=key)
        return
    with open_stream(_file(source)) as stream:
        start, stop = part or (0, None)
        if part is not None:
            stream.seek(start)
        for piece in itertools.count():
            if start == stop or not (lines := stream.readlines(PIECE_BYTES)):
                return
            where = f"{source.name}, " + (f"piece {piece} of {PIECE_BYTES} bytes" if part is None else f"byte {start}")
            content = b"".join(lines)
            yield Document(where, decode(content, where), key=key)
            start += len(content)


def _text_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    """Split a local file at starts of documents. They are found by seeking, which is too slow for remote files."""
    if not isinstance(file, Path) or size is None:
        return []
    boundaries = [0]
    end = 0  # end of the current document
    with StatusLine("finding starts of documents", remains=KEPT), file.open("rb") as stream:
        while end < size:
            # As in `readlines(PIECE_BYTES)`, the last line of a document is the line that exceeds PIECE_BYTES.
            stream.seek(end + PIECE_BYTES)
            end = min(end + PIECE_BYTES, size) + len(stream.readline())
            if end - boundaries[-1] >= max_part_bytes or end >= size:
                boundaries.append(end)
    return boundaries


# --- JSON -------------------------------------------------------------------------------------------------------------


def _read_json(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_json_records(source, reading, part), reading.text_field, report=reading.report)


def _json_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    with open_stream(_file(source)) as stream:
        if part is None:
            yield from _all_json_records(stream, _file(source))
        else:
            yield from _json_records_of_range(stream, _file(source), *part)


def _all_json_records(stream: Any, file: File) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file of JSON lines, or of a `.json` file with a list (the list is parsed completely)."""
    may_be_list = plain_suffix(file) == ".json"
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if may_be_list and line.lstrip().startswith(b"["):
            records = parsed(line + stream.read(), str(file))
            yield from ((f"{file}, record {index}", record) for index, record in enumerate(records, 1))
        elif line.strip():
            may_be_list = False
            yield f"{file}:{number}", parsed(line, f"{file}:{number}")


def _json_records_of_range(stream: Any, file: File, start: int, stop: int) -> Iterator[tuple[str, Any]]:
    """Yield the records of the JSON lines whose first byte is in the range `start:stop`."""
    position = max(0, start - 1)
    stream.seek(position)
    if start > 0:
        position += len(stream.readline())  # this line started before `start`, or ends there
    while position < stop and (line := stream.readline()):
        where = f"{file}, byte {position}"
        if line.removeprefix(codecs.BOM_UTF8).strip():
            yield where, parsed(line, where)
        position += len(line)


def _jsonl_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    return [] if size is None else _even_boundaries(size, size, max_part_bytes)


def _no_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    return []


def _even_boundaries(count: int, size: int | None, max_part_bytes: int) -> list[int]:
    """Split `count` bytes, records or rows, with `size` bytes in total, into parts of about `max_part_bytes`."""
    return [*range(0, count, max(1, count * max_part_bytes // max(size or 1, 1))), count]


def _with_locations(where: str, records: Iterable[Any], start: int) -> Iterator[tuple[str, Any]]:
    """Yield each record with its location, `where` and a number that counts from `start`."""
    return ((f"{where} {number}", record) for number, record in enumerate(records, start))


# --- tables -----------------------------------------------------------------------------------------------------------


def _read_parquet(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_parquet_records(source, reading, part), reading.text_field, report=reading.report)


def _parquet_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    file = _file(source)
    with _parquet(file, reading.copy) as table:
        columns = reading.used_columns(table.schema_arrow.names, str(file))
        first_group, stop_group = part or (0, table.num_row_groups)
        first_row = sum(table.metadata.row_group(group).num_rows for group in range(first_group))
        groups = list(range(first_group, stop_group))
        batches = table.iter_batches(batch_size=512, row_groups=groups, columns=columns)  # one row group at a time
        rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict"))
        yield from _with_locations(f"{file}, row", rows, first_row)


def _parquet_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    if size is None:  # the server does not support range requests
        return []
    boundaries = [0]
    part_bytes = 0
    with _parquet(file) as table:
        for group in range(table.num_row_groups):
            part_bytes += table.metadata.row_group(group).total_byte_size
            if part_bytes >= max_part_bytes or group == table.num_row_groups - 1:
                boundaries.append(group + 1)
                part_bytes = 0
    return boundaries


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
    return _with_locations(f"{source.file}, row", saved_rows(dataset, (start, stop), columns), start)


def _saved_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    return _even_boundaries(open_saved(cast(Path, file)).num_rows, size, max_part_bytes)


def _read_streamed(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    return record_documents(_streamed_records(source, reading, part), reading.text_field, report=reading.report)


def _streamed_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    dataset = cast(HubDataset, source.file)
    files = "" if part is None else f", files {part[0]} to {part[1] - 1}"
    return _with_locations(f"{dataset}{files}, row", dataset.rows(part), 0)


def _streamed_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    return list(range(cast(HubDataset, file).open().num_shards + 1))


# --- ArrayRecord ------------------------------------------------------------------------------------------------------


def _read_array_record(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    file = _file(source)
    with local_copy(file, reading.copy) as path, _array_record(path, file) as reader:
        start, stop = part or (0, reader.num_records())
        if start == stop:
            return
        first = _json_or_none(reader.read([0])[0])
        records = _with_locations(f"{file}, record", _read_batches(reader, start, stop), start)
        if is_record(first, reading.text_field):
            objects = ((where, parsed(record, where)) for where, record in records)
            yield from record_documents(objects, reading.text_field, report=reading.report)
        else:
            yield from (Document(where, decode(record, where)) for where, record in records)


def _array_records(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[tuple[str, Any]]:
    """Yield the JSON objects of an ArrayRecord file."""
    file = _file(source)
    with local_copy(file, reading.copy) as path, _array_record(path, file) as reader:
        start, stop = part or (0, reader.num_records())
        for where, record in _with_locations(f"{file}, record", _read_batches(reader, start, stop), start):
            yield where, parsed(record, where)


def _read_batches(reader: Any, start: int, stop: int) -> Iterator[bytes]:
    for first in range(start, stop, RECORDS_PER_READ):
        yield from reader.read(range(first, min(first + RECORDS_PER_READ, stop)))


def _json_or_none(record: bytes) -> Any:
    try:
        return parsed(record, "") if record.lstrip().startswith(b"{") else None
    except DataError:
        return None


def _array_record_boundaries(file: Location, size: int | None, max_part_bytes: int) -> list[int]:
    if not isinstance(file, Path):  # the process of each part would need a copy of the complete file
        return []
    with _array_record(file, file) as reader:
        return _even_boundaries(reader.num_records(), size, max_part_bytes)


@contextlib.contextmanager
def _array_record(path: Path, source: Location) -> Iterator[Any]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError as error:
        raise missing_package("array_record", "data") from error
    reader = ArrayRecordReader(str(path))
    try:
        if not reader.ok():
            reader.close()  # raises an exception with the reason
            raise ValueError("the end of the file is missing")
        yield reader
        reader.close()
    except (RuntimeError, ValueError, IndexError, OSError) as error:
        raise DataError(f"{source} cannot be read as an ArrayRecord file: {error}.") from error


# --- tokens -----------------------------------------------------------------------------------------------------------


def _read_tokens(source: Source, reading: ReadOptions, part: Part | None) -> Iterator[Document]:
    tokenizer, file = reading.tokenizer, _file(source)
    if tokenizer is None or tokenizer.eos_id is None:
        raise DataError(
            f"{file} contains tokens. Use a tokenizer with an end-of-sequence token, which separates the documents."
        )
    with local_copy(file, reading.copy) as path:
        tokens = _open_tokens(path, file, tokenizer.vocab_size)
        unfinished: list[np.ndarray] = []  # tokens of the current document in earlier chunks
        for start in range(0, len(tokens), TOKENS_PER_CHUNK):
            chunk = np.asarray(tokens[start : start + TOKENS_PER_CHUNK])
            _check_ids(chunk, start, file, tokenizer.vocab_size)
            *finished, remainder = np.split(chunk, np.flatnonzero(chunk == tokenizer.eos_id) + 1)
            for piece in finished:
                yield _token_document(file, [*unfinished, piece[:-1]], tokenizer)
                unfinished = []
            unfinished.append(remainder)
        if unfinished:
            yield _token_document(file, unfinished, tokenizer)


def _token_document(file: File, pieces: list[np.ndarray], tokenizer: Tokenizer) -> Document:
    tokens = np.concatenate(pieces)
    prefix = start_ids(tokenizer)  # the token store adds these tokens before every document
    if prefix and tuple(tokens[: len(prefix)].tolist()) == prefix:
        tokens = tokens[len(prefix) :]
    return Document(str(file), tokens=tokens)


def _open_tokens(path: Path, file: File, vocab_size: int) -> np.ndarray:
    if file.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise DataError(f"{file} cannot be read as an .npy file: {error}") from error
        check(
            tokens.ndim == 1 and tokens.dtype in (np.uint16, np.uint32),
            f"{file} contains an array of {tokens.dtype} with shape {tokens.shape}, but must contain a 1-D array of "
            "uint16 or uint32 tokens.",
            DataError,
        )
        return tokens
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    size = path.stat().st_size
    check(
        size % dtype.itemsize == 0,
        f"{file} has {size} bytes, which is not a multiple of the size of {dtype.name} tokens "
        f"(vocab_size={vocab_size}).",
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
    """Return the file of a source. The source must not be a dataset."""
    return cast(File, source.file)


class _SourceReader(NamedTuple):
    """Reader of one kind of source.

    - `read`: yields the documents of a part, or of all parts.
    - `boundaries`: takes the file, its number of bytes and the maximum size of a part; returns the boundaries of the
      parts, or an empty list if the source cannot be split.
    - `records`: yields records with their locations; None for kinds of sources without records.
    """

    read: Callable[[Source, ReadOptions, Part | None], Iterator[Document]]
    boundaries: Callable[[Location, int | None, int], list[int]]
    records: Callable[[Source, ReadOptions, Part | None], Iterator[tuple[str, Any]]] | None = None


_KINDS = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".bin": "tokens", ".npy": "npy"}
_KINDS |= dict.fromkeys(ARRAY_RECORDS, "arrayrecord")
_READERS = {
    "text": _SourceReader(_read_text, _text_boundaries),
    "jsonl": _SourceReader(_read_json, _jsonl_boundaries, _json_records),
    "json": _SourceReader(_read_json, _no_boundaries, _json_records),
    "parquet": _SourceReader(_read_parquet, _parquet_boundaries, _parquet_records),
    "arrayrecord": _SourceReader(_read_array_record, _array_record_boundaries, _array_records),
    "tokens": _SourceReader(_read_tokens, _no_boundaries),
    "npy": _SourceReader(_read_tokens, _no_boundaries),
    "saved dataset": _SourceReader(_read_saved, _saved_boundaries, _saved_records),
    "streamed dataset": _SourceReader(_read_streamed, _streamed_boundaries, _streamed_records),
}
