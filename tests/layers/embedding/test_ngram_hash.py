"""Hashes of n-grams in 63 bits: two-word arithmetic is exact, and multipliers equal those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.embedding.ngram_hash import hash_rows, multipliers, table_sizes, up_to_last
from tests.compare import assert_array_equal


@pytest.mark.parametrize(
    ("classes", "number", "want"),
    [
        (248_320, 1, (3_352_040_966_061, 19_752_442_147_475, 10_742_103_100_073)),
        (96, 1, (77_285_740_698_026_809, 26_638_966_734_423_735, 81_143_631_060_127_045)),
    ],
)
def test_multipliers_match_transformers(classes, number, want):
    assert multipliers(63, 1234, number, classes, 3) == want


@pytest.mark.slow(fast=("248320-20000000",))
@pytest.mark.parametrize(("classes", "base"), [(248_320, 20_000_000), (2, 2), (2**31 - 1, 2**29)])
def test_remainders_are_exact(classes, base):
    """Products up to 2^63, tables of two rows up to more than 2^29 rows; NumPy has 64-bit integers."""
    factors = multipliers(63, 7, 0, classes, 3)
    sizes = np.asarray(table_sizes((0,), (base, base + 1), 2)[0], np.int32).reshape(2, 2)
    tokens = np.random.default_rng(0).integers(0, classes, (3, 2, 200))
    tokens[:, 0, 0], tokens[:, 0, 1] = classes - 1, 0
    rows = jax.jit(lambda *each: hash_rows(63, each, factors, sizes))(*jnp.asarray(tokens, jnp.int32))
    mixed = tokens[0] * factors[0]
    for order in (1, 2):
        mixed = mixed ^ (tokens[order] * factors[order])
        assert mixed.dtype == np.int64 and mixed.min() >= 0
        assert_array_equal(rows[order - 1], mixed[..., None] % sizes[order - 1])


def test_n_grams_do_not_cross_end_tokens():
    """As in transformers' loop over earlier end tokens. An end token belongs to the text that it ends."""
    tokens, end = np.random.default_rng(1).integers(0, 3, (4, 30)), 0
    earlier = [jnp.asarray(np.pad(tokens, ((0, 0), (k, 0)), constant_values=-1)[:, :30]) for k in (1, 2, 3)]
    reached = up_to_last(earlier, end)
    for row, place in np.ndindex(tokens.shape):
        begin = max((p + 1 for p in range(place) if tokens[row, p] == end), default=0)
        for k in (1, 2, 3):
            want = tokens[row, place - k] if place - k >= begin else -1
            assert reached[k - 1][row, place] == want
    assert up_to_last(earlier, None) == earlier
