"""The fingerprint of weights depends on all bits of 64-bit dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.model.weights_fingerprint import _bits


@pytest.mark.parametrize(
    "values",
    [np.array([1.0, 1.0 + 2**-50, 2.0]), np.array([1, 1 + 2**40, 2]), np.array([1, 1 + 2**40, 2], np.uint64)],
    ids=["float64", "int64", "uint64"],
)
def test_all_bits_of_64_bit_dtypes_count(values):
    with jax.enable_x64(True):
        bits = np.asarray(_bits(jnp.asarray(values)))
    assert bits.dtype == np.uint32 and len(set(bits.tolist())) == 3
