"""Layers with caches: dtypes of their outputs, and operation counts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families.diffllama import DifferentialAttentionConfig
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.families.xlstm import MLSTMConfig
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from tests.layers.common import BF16, context


EMBED = 6
_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4)
LAYERS = {
    "mamba": Mamba1Config(channels=5, key_dim=3, step_rank=2),
    "mamba2": Mamba2Config(num_heads=2, num_groups=1, key_dim=2, value_dim=3),
    "delta net": GatedDeltaNetConfig(num_heads=2, num_key_heads=1, key_dim=2, value_dim=3),
    "kimi delta": KimiDeltaAttentionConfig(num_heads=2, head_dim=3, gate_rank=2),
    "gated convolution": GatedConvolutionConfig(channels=5, taps=3),
    "lightning": LightningAttentionConfig(num_heads=2, head_dim=4),
    "mLSTM": MLSTMConfig(num_heads=2, key_dim=3, value_dim=4),
    "gated unit": RGLRUConfig(num_heads=2, value_dim=3),
    "time mix": TimeMixConfig(embed_dim=EMBED, channels=5),
    "differential": DifferentialAttentionConfig(attention=_ATTENTION),
    "dynamic mask": DynamicMaskConfig(attention=_ATTENTION, top_k=2),
}
CONFIGS = {name: BlockConfig(mixer=mixer, mlp=None) for name, mixer in LAYERS.items()}
CONFIGS["channel mix"] = BlockConfig(mixer=None, mlp=ChannelMixConfig(embed_dim=EMBED, mlp_dim=5))


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_streams_stay_bfloat16(name):
    """Although some intermediate results are float32. Implicit dtype promotion raises an error in this test."""
    block = eqx.filter_eval_shape(lambda key: CONFIGS[name].build(EMBED, key=key), jax.random.key(0))
    x, ctx = jnp.ones((2, 6, EMBED), jnp.bfloat16), context([range(6)] * 2, precision=BF16)
    assert eqx.filter_eval_shape(lambda block: block(x, ctx)[0], block).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "count"),
    [("lightning", 2 * 2 * 4**2), ("time mix", 2 * 5), ("differential", 2 * 4 * 10 * 8), ("dynamic mask", 4 * 2 * 9)],
)
def test_operations_are_counted(name, count):
    """Per token in a row of ten tokens."""
    assert LAYERS[name].token_products(10) == count
