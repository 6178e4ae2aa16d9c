"""On-disk cache of per-token signals (reference log-probs, teacher top-k), keyed by a hash of the tokens.

A segment is a document, or a piece of a document, in a row. The signals of a segment depend only on the tokens of the
segment, and not on other segments in the row. So the hash of the tokens identifies the signals for any packing, batch
size and number of processes.

Each process appends to the files in the folder `<process>`, to `index.bin` last, and reads the files of all processes.
If a process was killed while it wrote a segment, the incomplete segment is truncated when the process starts again.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer, Num

from eqx_decoders.errors import DataError, check
from eqx_decoders.io.atomic_files import write_json
from eqx_decoders.io.file_lock import read_json


_ENTRY = np.dtype([("hash", "V16"), ("length", "<u8")])


class Column(NamedTuple):
    """Format of a signal.

    - `dtype`: dtype of the stored values.
    - `width`: number of values per token; None: a single value, and the array has no dimension for values.
    """

    dtype: str
    width: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return np.dtype(self.dtype).itemsize * (self.width or 1)


class _Location(NamedTuple):
    """Location of a segment: the folder of the process that wrote it, the first token, and the number of tokens."""

    folder: Path
    start: int
    length: int


class SignalCache:
    """Cache of the signals of segments in a directory.

    **Arguments:**

    - `folder`: the directory, which is created if it does not exist.
    - `columns`: format of each signal by name.
    - `computed_by`: JSON values that describe everything, except the tokens, on which the signals depend.
    - `process`: index of this process, which determines the folder to which signals are written.

    Raises DataError if the directory contains signals that were computed with other values of `computed_by`.
    """

    def __init__(self, folder: Path, columns: Mapping[str, Column], computed_by: Mapping[str, Any], process: int = 0):
        self.columns = dict(columns)
        self._process_folder = folder / str(process)
        self._locations: dict[bytes, _Location] = {}  # by hash of the tokens
        described_columns = {name: list(column) for name, column in columns.items()}
        _check_computed_by(folder, {**computed_by, "columns": described_columns})
        self._process_folder.mkdir(parents=True, exist_ok=True)
        self._num_tokens = 0  # in the files of this process
        for path in sorted(path for path in folder.iterdir() if path.is_dir()):
            num_tokens = self._read_index(path)
            if path == self._process_folder:
                self._num_tokens = num_tokens

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._locations)

    def find(self, tokens: Integer[np.ndarray, "length"]) -> dict[str, Num[np.ndarray, "length *width"]] | None:
        """Return the signals of a segment; None if the cache does not contain them."""
        location = self._locations.get(_hash_of(tokens))
        if location is None:
            return None
        return {
            name: _read(location.folder / f"{name}.bin", column, location.start, location.length)
            for name, column in self.columns.items()
        }

    def add(
        self, tokens: Integer[np.ndarray, "length"], signals: Mapping[str, Num[np.ndarray, "length *width"]]
    ) -> None:
        """Store the signals of a segment, unless the cache already contains them."""
        key = _hash_of(tokens)
        if key in self._locations:
            return
        for name, column in self.columns.items():
            with (self._process_folder / f"{name}.bin").open("ab") as file:
                file.write(np.ascontiguousarray(signals[name].astype(column.dtype)).tobytes())
        with (self._process_folder / "index.bin").open("ab") as file:
            file.write(np.array([(key, len(tokens))], _ENTRY).tobytes())
        self._locations[key] = _Location(self._process_folder, self._num_tokens, len(tokens))
        self._num_tokens += len(tokens)

    def _read_index(self, folder: Path) -> int:
        """Read the index of a process; return the number of tokens in complete segments.

        In the folder of this process, incomplete segments at the end of the files are truncated.
        """
        index = folder / "index.bin"
        content = index.read_bytes() if index.exists() else b""
        entries = np.frombuffer(content[: len(content) // _ENTRY.itemsize * _ENTRY.itemsize], _ENTRY)
        stored_tokens = min(_size(folder / f"{name}.bin") // column.bytes for name, column in self.columns.items())
        num_tokens = num_entries = 0
        for entry in entries:
            length = int(entry["length"])
            if num_tokens + length > stored_tokens:
                break
            self._locations[entry["hash"].tobytes()] = _Location(folder, num_tokens, length)
            num_tokens += length
            num_entries += 1
        if folder == self._process_folder:
            _truncate(index, num_entries * _ENTRY.itemsize)
            for name, column in self.columns.items():
                _truncate(folder / f"{name}.bin", num_tokens * column.bytes)
        return num_tokens


def _check_computed_by(folder: Path, computed_by: Mapping[str, Any]) -> None:
    """Record how a new directory is computed. Raises DataError if an existing directory was computed differently."""
    file = folder / "made_by.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, dict(computed_by))
        return
    before = read_json(file.read_bytes())
    changes = [
        f"{name}={before.get(name)!r} instead of {value!r}"
        for name, value in computed_by.items()
        if before.get(name) != value
    ]
    check(
        not changes,
        f"the signals in {folder} were computed with {'; '.join(changes)}. Use another directory.",
        DataError,
    )


def _hash_of(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).digest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _truncate(path: Path, size: int) -> None:
    if _size(path) > size:
        os.truncate(path, size)


def _read(path: Path, column: Column, start: int, length: int) -> np.ndarray:
    """Read the values of `length` tokens from token `start` on, `[length]` or `[length, width]`."""
    with path.open("rb") as file:
        file.seek(start * column.bytes)
        values = np.frombuffer(file.read(length * column.bytes), column.dtype)
    return values if column.width is None else values.reshape(length, column.width)
