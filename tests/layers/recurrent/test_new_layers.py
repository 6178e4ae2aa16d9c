"""Initial parameters of recurrent layers: decay rates are uniform in the published range, skip weights are one."""

import jax
import jax.numpy as jnp
import pytest

from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config


HEADS = 1024


@pytest.mark.slow(fast=("kimi delta",))
@pytest.mark.parametrize(
    "config, least",
    [
        (GatedDeltaNetConfig(num_key_heads=HEADS, num_heads=HEADS, key_dim=2, value_dim=1), 0.01),
        (KimiDeltaAttentionConfig(num_heads=HEADS, head_dim=2, gate_rank=1), 1.0),
        (Mamba2Config(num_heads=HEADS, value_dim=1, num_groups=1, key_dim=2), 1.0),
    ],
    ids=["gated delta net", "kimi delta", "mamba2"],
)
def test_initial_decay_rates_are_uniform(config, least):
    rates = jax.jit(lambda key: jnp.exp(config.build(2, key=key).a_log))(jax.random.key(0))
    assert least <= rates.min() < least + 0.3 and 15.7 < rates.max() <= 16
    assert abs(rates.mean() - (least + 16) / 2) < 1


@pytest.mark.parametrize(
    "config",
    [
        Mamba1Config(channels=4, key_dim=2, step_rank=1),
        Mamba2Config(num_heads=2, value_dim=1, num_groups=1, key_dim=2),
    ],
    ids=["mamba1", "mamba2"],
)
def test_initial_skip_weights_are_one(config):
    skip = jax.jit(lambda key: config.build(2, key=key).skip)(jax.random.key(0))
    assert (skip == 1).all()
