"""ALiBi: slopes of the paper, and biases in 16 bits."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eqx_decoders.layers.attention.alibi import Alibi
from tests.compare import assert_allclose, assert_array_equal
from tests.oracles import slopes_by_hand


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 71])
def test_slopes(heads):
    assert_allclose(Alibi(max_exponent=6.0).slopes(heads), slopes_by_hand(heads, 6.0), rtol=1e-6)


def test_rounded_biases_match_16_bits():
    """Products of rounded slopes and positions. From position 256 on, neighboring keys share a bias."""

    def low(x):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

    slopes, positions = Alibi().slopes(12), np.arange(600)
    product = low(low(slopes)[:, None] * low(positions))
    want = 0.25 * (product[:, None] - product[:, :, None])
    places = jnp.asarray(positions)
    got = Alibi(scale=0.25, rounded=True).bias(slopes[:, None, None], places[None, :, None], places[None, None])
    assert_array_equal(got, want)
    assert (want[:, 0, 256] == want[:, 0, 257]).all()
