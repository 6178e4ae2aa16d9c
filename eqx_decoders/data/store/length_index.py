"""Length index: sizes and draws of all documents of a corpus of many shards, in one file.

Rows are planned from them, thousands of documents at a time, which in many small sources are in as many files.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from eqx_decoders.io.atomic_files import atomic_stream, writing_to
from eqx_decoders.io.status import StatusLine


DOCUMENT = np.dtype([("size", "<i8"), ("draw", "<f8")])


def open_length_index(file: Path, count: int, documents: Iterable[np.ndarray]) -> np.ndarray:
    """Map the index of `count` documents in `file` into memory, after writing it if it is missing or incomplete.

    `documents` yields arrays of DOCUMENT for all documents in order; it is read only to write the index.
    """
    try:
        whole = file.stat().st_size == count * DOCUMENT.itemsize
    except FileNotFoundError:
        whole = False
    if not whole:
        status = StatusLine("listing documents", remains="the tokens are kept")
        with status, writing_to(file.parent), atomic_stream(file) as stream:
            for entries in documents:
                stream.write(entries.tobytes())
    return np.asarray(np.memmap(file, DOCUMENT, "r", shape=(count,)))
