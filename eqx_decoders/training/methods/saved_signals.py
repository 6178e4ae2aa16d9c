"""Signals of batches that a model computes once: kept in a directory by the tokens that they are of, and read again."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.data.store.signal_cache import SignalCache
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.processes import all_gather_json
from eqx_decoders.sharding.layout import Layout


Numbers = Mapping[str, np.ndarray]


@runtime_checkable
class Scorer(Protocol):
    """What computes the numbers of a batch's tokens; all processes call it together."""

    def __call__(self, batch: Batch, places: Sequence["RowSegment"]) -> Numbers:
        """Return the numbers of this process's rows, at least in these places."""
        ...


class RowSegment(NamedTuple):
    """Segment of a batch."""

    row: int
    span: slice
    tokens: np.ndarray


class SavedSignals:
    """Function that adds to the signals of a process's rows what is kept, and computes what is not.

    **Arguments:**

    - `numbers`: the directory; its columns are fields of `Signals`.
    - `compute`: what computes the numbers of a batch; None: all must be there.
    """

    def __init__(self, numbers: SignalCache, compute: Scorer | None):
        self._numbers, self._compute = numbers, compute

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its signals. Raises DataError for tokens of which there are none, and nothing to ask.

        Numbers that were computed just now are read back, too: they are what the next run will read.
        """
        pieces = list(_pieces(batch))
        missing = [piece for piece in pieces if self._numbers.find(piece.tokens) is None]
        if any(all_gather_json("saved signals", bool(missing))):
            self._add(batch, missing)
        numbers_of = [(piece, self._numbers.find(piece.tokens) or {}) for piece in pieces]
        arrays: dict[str, Any] = {}
        for name, column in self._numbers.columns.items():
            width = () if column.width is None else (column.width,)
            kind = np.int32 if np.issubdtype(np.dtype(column.dtype), np.integer) else np.float32
            arrays[name] = np.zeros((*np.shape(batch.tokens), *width), kind)
            for piece, numbers in numbers_of:
                arrays[name][piece.row, piece.span] = numbers[name]
        signals = Signals() if batch.signals is None else batch.signals
        return dataclasses.replace(batch, signals=dataclasses.replace(signals, **arrays))

    def _add(self, batch: Batch, missing: list[RowSegment]) -> None:
        rule, remedy = (
            "some of the data's tokens have no saved numbers",
            "give the same data and --seq-len, or the model",
        )
        check(self._compute is not None, f"{rule}, and there is no model to compute them: {remedy}.", DataError)
        assert self._compute is not None
        computed = self._compute(batch, missing)
        for piece in missing:
            self._numbers.add(piece.tokens, {name: x[piece.row, piece.span] for name, x in computed.items()})


def _pieces(batch: Batch) -> Iterator[RowSegment]:
    """Yield the segments of a batch, without padding."""
    tokens = np.asarray(batch.tokens)
    segments = np.ones_like(tokens) if batch.segment_ids is None else np.asarray(batch.segment_ids)
    for row, ids in enumerate(segments):
        cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
        for begin, end in itertools.pairwise(cuts):
            if ids[begin] != 0:
                yield RowSegment(row, slice(begin, end), tokens[row, begin:end])


def rows_of_process(x: Any, layout: Layout, rows: Any) -> np.ndarray:
    """Return some rows of an array that the devices of all processes hold; all must call it."""
    if jax.process_count() == 1:
        return np.asarray(x)
    whole = jax.jit(lambda x: x, out_shardings=layout.replicated())(x)
    return np.asarray(whole.addressable_data(0))[list(rows)]
