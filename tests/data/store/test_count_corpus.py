"""The gzip baseline."""

import gzip
import math

import pytest

from eqx_decoders.data.store.count_corpus import Gzip


def test_texts_are_compressed_as_one():
    texts = ["the cat ", "sat on the mat ", "naïve 東京 " * 20]
    baseline = Gzip()
    for text in texts:
        baseline.add(text.encode())
    whole = "".join(texts).encode()
    assert baseline.nats_per_byte() == pytest.approx(8 * math.log(2) * len(gzip.compress(whole, 9)) / len(whole))


def test_nothing_has_no_rate():
    assert Gzip().nats_per_byte() is None
