"""On-disk cache of per-token signals (reference log-probs, teacher top-k), keyed by a hash of the tokens.

A segment is a document, or a piece of a document, in a row. Its signals depend on its own tokens only, and not on other
segments in the row. So they are found by a hash of its tokens, for any packing, batch size and number of processes.
Each process appends to its own files, `<process>/index.bin` last, and reads the files of all processes. Records that a
killed process has not finished are truncated.
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
    """Kind of signal. dtype: how it is stored. width: values per token; None: one value, without an extra dimension."""

    dtype: str
    width: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes per token."""
        return np.dtype(self.dtype).itemsize * (self.width or 1)


class SignalCache:
    """Cache of the signals of segments in a directory.

    **Arguments:**

    - `folder`: the directory, which is created if it does not exist.
    - `columns`: the kinds of signals.
    - `made_by`: everything that the signals depend on besides tokens, as JSON.
    - `process`: index of this process, which appends to the files of that index.

    Raises DataError if the directory contains signals with another `made_by`.
    """

    def __init__(self, folder: Path, columns: Mapping[str, Column], made_by: Mapping[str, Any], process: int = 0):
        self.columns, self._own = dict(columns), folder / str(process)
        self._places: dict[bytes, tuple[Path, int, int]] = {}  # folder, first token, tokens
        _check_maker(folder, dict(made_by) | {"columns": {name: list(each) for name, each in columns.items()}})
        self._own.mkdir(parents=True, exist_ok=True)
        for part in sorted(path for path in folder.iterdir() if path.is_dir()):
            end = self._read_index(part)
            if part == self._own:
                self._end = end

    def __len__(self) -> int:
        """Return the number of segments."""
        return len(self._places)

    def find(self, tokens: Integer[np.ndarray, "length"]) -> dict[str, Num[np.ndarray, "length *width"]] | None:
        """Return the signals of a segment; None if the cache does not contain them."""
        place = self._places.get(_hash_of(tokens))
        if place is None:
            return None
        part, begin, length = place
        return {name: _read(part / f"{name}.bin", column, begin, length) for name, column in self.columns.items()}

    def add(
        self, tokens: Integer[np.ndarray, "length"], numbers: Mapping[str, Num[np.ndarray, "length *width"]]
    ) -> None:
        """Store the signals of a segment."""
        key = _hash_of(tokens)
        if key in self._places:
            return
        for name, column in self.columns.items():
            with (self._own / f"{name}.bin").open("ab") as file:
                file.write(np.ascontiguousarray(numbers[name].astype(column.dtype)).tobytes())
        with (self._own / "index.bin").open("ab") as file:
            file.write(np.array([(key, len(tokens))], _ENTRY).tobytes())
        self._places[key] = (self._own, self._end, len(tokens))
        self._end += len(tokens)

    def _read_index(self, part: Path) -> int:
        """Read the complete entries of a process, and truncate own files after them; return the number of tokens."""
        index = part / "index.bin"
        entries = np.frombuffer(index.read_bytes()[: _size(index) // 24 * 24] if index.exists() else b"", _ENTRY)
        complete = min(_size(part / f"{name}.bin") // column.bytes for name, column in self.columns.items())
        begin = count = 0
        for entry in entries:
            key, length = entry["hash"].tobytes(), int(entry["length"])
            if begin + length > complete:
                break
            self._places[key] = (part, begin, length)
            begin, count = begin + length, count + 1
        if part == self._own:
            for path, size in ((index, 24 * count), *self._sizes(part, begin)):
                if path.exists() and _size(path) > size:
                    os.truncate(path, size)
        return begin

    def _sizes(self, part: Path, tokens: int) -> list[tuple[Path, int]]:
        return [(part / f"{name}.bin", tokens * column.bytes) for name, column in self.columns.items()]


def _check_maker(folder: Path, made_by: Mapping[str, Any]) -> None:
    """Record how a new directory is computed. Raises DataError if an existing directory was computed differently."""
    file = folder / "made_by.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, dict(made_by))
        return
    before = read_json(file.read_bytes())
    others = [name for name in made_by if before.get(name) != made_by[name]]
    changes = "; ".join(f"{name}={before.get(name)!r}, and is now {made_by[name]!r}" for name in others)
    check(not others, f"{folder} was computed with {changes}. Choose another directory.", DataError)


def _hash_of(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).digest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path, column: Column, begin: int, length: int) -> np.ndarray:
    with path.open("rb") as file:
        file.seek(begin * column.bytes)
        numbers = np.frombuffer(file.read(length * column.bytes), column.dtype)
    return numbers if column.width is None else numbers.reshape(length, column.width)
