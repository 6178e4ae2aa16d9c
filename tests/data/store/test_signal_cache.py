"""Test the cache of per-token signals: lookup by tokens, several processes, and killed processes."""

import numpy as np
import pytest

from eqx_decoders.data.store.signal_cache import Column, SignalCache
from eqx_decoders.errors import DataError
from tests.errors import refused


COLUMNS = {"one": Column("<f4"), "several": Column("<i4", 3)}
MAKER = {"weights": "a1"}


def numbers_of(tokens):
    return {"one": tokens / 7, "several": np.outer(tokens, [1, 2, 3])}


def test_saved_signals_are_found_by_tokens(tmp_path):
    folder, texts = tmp_path / "kept", [np.array([1, 2, 3]), np.array([2]), np.array([1, 2])]
    first = SignalCache(folder, COLUMNS, MAKER)
    assert first.find(texts[0]) is None
    for tokens in (*texts[:2], texts[0]):
        first.add(tokens, numbers_of(tokens))
    other = SignalCache(folder, COLUMNS, MAKER, process=1)
    other.add(texts[2], numbers_of(texts[2]))
    again = SignalCache(folder, COLUMNS, MAKER)
    assert len(first) == 2 and len(again) == 3
    for tokens in texts:
        found = again.find(tokens)
        assert np.array_equal(found["one"], (tokens / 7).astype(np.float32))
        assert np.array_equal(found["several"], numbers_of(tokens)["several"])


@pytest.mark.parametrize("file", ["index.bin", "one.bin", "several.bin"])
def test_partial_records_are_removed(tmp_path, file):
    """The file is truncated. Signals that are added later are complete."""
    numbers = SignalCache(tmp_path, COLUMNS, MAKER)
    texts = [np.array([1, 2, 3]), np.array([4, 5])]
    for tokens in texts:
        numbers.add(tokens, numbers_of(tokens))
    path = tmp_path / "0" / file
    path.write_bytes(path.read_bytes()[:-3])
    numbers = SignalCache(tmp_path, COLUMNS, MAKER)
    assert len(numbers) == 1 and numbers.find(texts[1]) is None
    numbers.add(texts[1], numbers_of(texts[1]))
    again = SignalCache(tmp_path, COLUMNS, MAKER)
    for tokens in texts:
        assert np.array_equal(again.find(tokens)["several"], numbers_of(tokens)["several"])


def test_signals_computed_differently_are_refused(tmp_path):
    SignalCache(tmp_path, COLUMNS, MAKER)
    with refused(DataError, "weights='a1'", "'b2'"):
        SignalCache(tmp_path, COLUMNS, {"weights": "b2"})
    with refused(DataError, "columns="):
        SignalCache(tmp_path, {"one": Column("<f2")}, MAKER)
