"""On-disk cache of per-token signals (reference log-probs, a teacher's most likely tokens), keyed by token hashes."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.data.store.signal_cache import SignalCache
from eqx_decoders.errors import DataError
from eqx_decoders.io.processes import all_gather_json
from eqx_decoders.sharding.layout import Layout


class RowSegment(NamedTuple):
    """Segment of a batch row."""

    row: int
    span: slice
    tokens: np.ndarray


@runtime_checkable
class Scorer(Protocol):
    """Computes signals of a batch. All processes call it together."""

    def __call__(self, batch: Batch, segments: Sequence[RowSegment]) -> Mapping[str, np.ndarray]:
        """Return signals of this process's rows by name, at least for these segments."""
        ...


class SavedSignals:
    """Callable that adds signals to a process's rows of a batch: stored ones, and newly computed ones if missing.

    **Arguments:**

    - `numbers`: the directory of signals; its columns are fields of `Signals`.
    - `compute`: computes missing signals. None: all signals must be stored.
    """

    def __init__(self, numbers: SignalCache, compute: Scorer | None):
        self._numbers, self._compute = numbers, compute

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its signals. Raises DataError if signals are missing and there is no `compute`.

        Newly computed signals are also read back from disk, so that they equal those that a later run reads.
        """
        segments = list(_segments(batch))
        missing = [segment for segment in segments if self._numbers.find(segment.tokens) is None]
        if any(all_gather_json("saved signals", bool(missing))):
            self._add(batch, missing)
        arrays: dict[str, Any] = {}
        for name, column in self._numbers.columns.items():
            width = () if column.width is None else (column.width,)
            dtype = np.int32 if np.issubdtype(np.dtype(column.dtype), np.integer) else np.float32
            arrays[name] = np.zeros((*np.shape(batch.tokens), *width), dtype)
        for segment in segments:
            for name, values in (self._numbers.find(segment.tokens) or {}).items():
                arrays[name][segment.row, segment.span] = values
        signals = Signals() if batch.signals is None else batch.signals
        return dataclasses.replace(batch, signals=dataclasses.replace(signals, **arrays))

    def _add(self, batch: Batch, missing: list[RowSegment]) -> None:
        if self._compute is None:
            raise DataError(
                "some tokens of the data have no stored signals, and there is no model to compute them: use the data "
                "and seq_len of the run that stored them, or name the model."
            )
        computed = self._compute(batch, missing)
        for segment in missing:
            signals = {name: array[segment.row, segment.span] for name, array in computed.items()}
            self._numbers.add(segment.tokens, signals)


def _segments(batch: Batch) -> Iterator[RowSegment]:
    """Yield the segments of a batch, without padding."""
    tokens = np.asarray(batch.tokens)
    segment_ids = np.ones_like(tokens) if batch.segment_ids is None else np.asarray(batch.segment_ids)
    for row, ids in enumerate(segment_ids):
        bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        for start, end in itertools.pairwise(bounds):
            if ids[start] != 0:
                yield RowSegment(row, slice(start, end), tokens[row, start:end])


def rows_of_process(array: Any, layout: Layout, rows: Any) -> np.ndarray:
    """Return some rows of an array that is sharded over the devices of all processes. All processes must call it."""
    if jax.process_count() == 1:
        return np.asarray(array)
    replicated = jax.jit(lambda x: x, out_shardings=layout.replicated())(array)
    return np.asarray(replicated.addressable_data(0))[list(rows)]
