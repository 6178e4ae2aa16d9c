"""`metrics.jsonl`, the file of metrics that every run has."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.errors import check_integer
from eqx_decoders.io.atomic_files import write_atomically


MetricsRow = dict[str, Any]


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, written without a buffer, so that a killed process loses no row.

    start: the first step that will be written. Rows of this and later steps, written by a process that was killed
    before it saved them, are dropped, and so is a line that a kill cut short; the file is replaced atomically.
    Numbers that JSON lacks become the strings "NaN", "Infinity" and "-Infinity", which `float` reads.
    """

    def __init__(self, path: str | Path, *, start: int = 0):
        check_integer("start", start, minimum=0)
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_from(start, self.path)
        self._file = io.FileIO(self.path, "a")  # unbuffered
        self._torn = False

    def write(self, row: MetricsRow) -> None:
        """Append one row; values may be numbers, strings, arrays, or lists and dictionaries of them."""
        line = json.dumps(_to_json(row), allow_nan=False).encode() + b"\n"
        if self._torn:  # a full disk cut the last row short
            line = b"\n" + line
        self._torn = True
        self._torn = self._file.write(line) != len(line)
        if self._torn:
            raise OSError(f"{self.path}: the row of step {row.get('step')} was written in part only")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[MetricsRow]:
    """Read the rows of a metrics file; lines that are no JSON object (cut short by a kill) are left out."""
    return [row for _, row in _lines(Path(path)) if row is not None]


def _lines(path: Path) -> Iterator[tuple[bytes, MetricsRow | None]]:
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            yield line, row if isinstance(row, dict) and line.endswith(b"\n") else None


def _drop_from(start: int, path: Path) -> None:
    """Rewrite the file without the rows of step `start` and later, and without lines that are no rows."""
    if not path.exists():
        return
    lines = list(_lines(path))
    steps = [None if row is None else row.get("step", -1) for _, row in lines]
    valid = [line for (line, _), step in zip(lines, steps, strict=True) if isinstance(step, int) and step < start]
    if len(valid) < len(lines):
        write_atomically(path, b"".join(valid))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # arrays of NumPy and JAX
        return _to_json(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
