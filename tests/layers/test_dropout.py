"""Dropout: which features it drops and what it does to the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.dropout import dropout


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout(dtype):
    x = jnp.asarray(1 + np.arange(4 * 3 * 500).reshape(4, 3, 500) % 7, dtype)
    out = dropout(x, 0.25, jax.random.key(1))
    assert out.dtype == dtype
    kept = np.asarray(out != 0)
    assert np.all(kept == kept[:, :1])  # one mask for all positions of a row
    assert not np.all(kept[0] == kept[1])  # another for each row
    expected = np.where(kept, np.asarray(x / 0.75, np.float32), 0)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    assert kept[:, 0].mean() == pytest.approx(0.75, abs=0.04)
    assert np.asarray(out, np.float32).mean() == pytest.approx(np.asarray(x, np.float32).mean(), rel=0.06)
    assert dropout(x, 0.25, None) is x
    assert dropout(x, 0.0, jax.random.key(1)) is x
