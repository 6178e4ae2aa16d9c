"""RMSNorm and LayerNorm against NumPy in float64, written from the formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.layers.norm import LayerNormConfig, LayerScaleConfig, RMSNormConfig
from tests.compare import assert_close
from tests.layers.common import drawn, normal
from tests.oracles import norm_by_hand, wide


@pytest.mark.parametrize(
    "config",
    [
        RMSNormConfig(),
        RMSNormConfig(offset=1.0, eps=0.3),
        RMSNormConfig(scale=False),
        LayerNormConfig(),
        LayerNormConfig(offset=1.0, bias=False, eps=0.3),
        LayerNormConfig(offset=1.0),
    ],
)
def test_norms(config):
    layer = drawn(lambda key: config.build(7))
    x = 3 * normal(2, 3, 7) + 1
    want = np.apply_along_axis(lambda row: norm_by_hand(layer, row), -1, wide(x))
    assert_close(layer(jnp.asarray(x)), want, units=32)
    half = layer(jnp.asarray(x, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert_close(half.astype(jnp.float32), want, units=4, dtype="bfloat16")
    fresh = config.build(7)  # new scales and offsets multiply by one
    assert fresh.scale is None or np.all(np.asarray(fresh.scale) + config.offset == 1)
    assert getattr(fresh, "bias", None) is None or not np.any(fresh.bias)


def test_layer_scale():
    layer = drawn(lambda key: LayerScaleConfig(start=0.5).build(7))
    x = normal(2, 3, 7)
    assert_close(layer(jnp.asarray(x)), wide(x) * wide(layer.scale), units=4)
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.all(np.asarray(LayerScaleConfig(start=0.5).build(7).scale) == 0.5)


def test_bfloat16_norms_are_computed_in_float32():
    """The mean square of 4096 equal values is exact; a bfloat16 sum would stop at 256."""
    layer = RMSNormConfig(eps=1e-12).build(4096)
    assert np.all(np.asarray(layer(jnp.full((1, 4096), 3.0, jnp.bfloat16)), np.float32) == 1.0)
    assert np.all(np.isfinite(layer(jnp.zeros((1, 4096)))))
