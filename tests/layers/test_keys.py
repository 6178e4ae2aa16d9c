"""New layers: every weight has a separate random key, and every configured bias exists."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_decoders as ed
from eqx_decoders.blocks.block import BlockConfig, ExtraLayerConfig
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.encoders.encoder import Encoder
from eqx_decoders.families.gemma.mobilenet import EdgeResidualConfig, InvertedResidualConfig, PlaneAttentionConfig
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.families.xlstm import MLSTMConfig
from eqx_decoders.io.huggingface.load import read_config
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.attention.learned_init import LearnedInitConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.embedding.engram import EngramConfig
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerInputConfig
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig
from tests.commands import ROOT


FIXTURES = ROOT / "tests" / "fixtures"
ATTENTION = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, output_gate=True)
EXPERTS = ExpertsConfig(
    num_experts=2, num_experts_per_token=1, mlp_dim=3, shared=MLPConfig(mlp_dim=3), shared_gate=True
)
TEACHER = dict(teacher_heads=3, teacher_kv_heads=1, teacher_head_dim=2)
ENGRAM = EngramConfig(embed_dim=4, vocab_size=4, layers=(0,), layer=0, num_heads=1, head_dim=2, vocab_bases=(3,))
FURTHER = ExtraLayerConfig(layer=MLPConfig(mlp_dim=3))
TWO = tuple(NamedMixer(name=name, mixer=GatedConvolutionConfig(channels=3)) for name in "ab")
MAMBA = Mamba2Config(num_heads=2, num_groups=1, key_dim=2, value_dim=3)
BESIDE = SharedTransformerConfig(
    attention=dataclasses.replace(ATTENTION, output_gate=False), mlp=MLPConfig(mlp_dim=3, fused=True)
)
# a layer, and its number of random weights
LAYERS = {
    "attention": (ATTENTION, 5),
    "fused attention": (dataclasses.replace(ATTENTION, fused_qkv=True), 3),
    "latent attention": (
        LatentAttentionConfig(num_heads=2, q_rank=3, kv_rank=3, nope_dim=2, rope_dim=2, value_dim=2),
        5,
    ),
    "learned kernels": (LearnedInitConfig(attention=dataclasses.replace(ATTENTION, output_gate=False), **TEACHER), 16),
    "gated delta net": (GatedDeltaNetConfig(num_heads=2, num_key_heads=1, key_dim=2, value_dim=3), 11),
    "kimi delta attention": (KimiDeltaAttentionConfig(num_heads=2, head_dim=3, gate_rank=2), 14),
    "gated convolution": (GatedConvolutionConfig(channels=3), 3),
    "mamba": (Mamba1Config(channels=3, key_dim=2, step_rank=2), 6),
    "gated unit": (RGLRUConfig(num_heads=2, value_dim=3), 7),
    "time mix": (TimeMixConfig(embed_dim=4, channels=3), 4),
    "channel mix": (ChannelMixConfig(embed_dim=4, mlp_dim=3), 3),
    "mLSTM": (MLSTMConfig(num_heads=2, key_dim=2, value_dim=3), 7),
    "mamba2": (Mamba2Config(num_heads=2, num_groups=1, key_dim=2, value_dim=3, taps_bias=False), 11),
    "lightning attention": (LightningAttentionConfig(num_heads=2, head_dim=3), 5),
    "aided mixer": (AidedMixerConfig(mixer=MAMBA, transformer=BESIDE, mlp_rank=2, attention_rank=2), 11 + 1 + 4),
    "parallel mixers": (ParallelMixersConfig(mixers=TWO), 6),
    "mlp": (MLPConfig(mlp_dim=3), 3),
    "fused mlp": (MLPConfig(mlp_dim=3, fused=True), 3),
    "linear": (LinearConfig(), 1),
    "experts": (EXPERTS, 8),
    "engram": (ENGRAM, 3),
    "per-layer input": (PerLayerInputConfig(features=2), 2),
    "hyper-connections": (
        BlockConfig(mixer=None, mlp=LinearConfig(), post_layers=(FURTHER,), residual=HyperConnections(streams=2)),
        1 + 3 + 2,
    ),
    "block": (BlockConfig(mixer=ATTENTION, mlp=EXPERTS, residual="chained"), 14),
    "edge residual": (EdgeResidualConfig(dim=4), 2),
    "inverted residual": (InvertedResidualConfig(dim=4, start=3, middle=3), 4),
    "plane attention": (PlaneAttentionConfig(dim=4, num_heads=2, head_dim=3, kv_stride=2), 6),
}
PLANES = ("edge residual", "inverted residual", "plane attention")


@pytest.fixture
def keys(monkeypatch):
    """Return the keys of all random arrays; the arrays themselves are ones."""
    keys = []

    def recorded(draw):
        def call(key, *arguments, **options):
            if not isinstance(key, jax.core.Tracer):  # keys of scanned layers are traced
                keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
            made = jax.eval_shape(functools.partial(draw, key, *arguments, **options))
            return jnp.asarray(np.ones(made.shape, made.dtype))  # no compilation per shape

        return call

    for draw in ("normal", "truncated_normal", "uniform"):
        monkeypatch.setattr(jax.random, draw, recorded(getattr(jax.random, draw)))
    return keys


@pytest.mark.parametrize("name", LAYERS)
def test_no_two_weights_share_a_key(name, keys):
    config, count = LAYERS[name]
    config.build(4, key=jax.random.key(0), **(dict(edges="same", layer_scale=None) if name in PLANES else {}))
    assert len(set(keys)) == len(keys) == count


@pytest.mark.parametrize("fixture", ["glm4v", "mistral3", "phi4_multimodal"])
def test_no_two_weights_of_an_encoder_share_a_key(fixture, keys):
    """Also with convolutions in the projector, and with a projection after it."""
    config, _ = read_config(FIXTURES / fixture)
    for encoder in (config.media.vision, config.media.audio):
        if encoder is not None:
            Encoder.build(encoder, key=jax.random.key(0))
            assert len(set(keys)) == len(keys) > 3
            keys.clear()


@pytest.mark.parametrize(
    ("config", "biases", "names"),
    [
        (MLPConfig(mlp_dim=3), dict(bias=True), ("gate_bias", "up_bias", "down_bias")),
        (EXPERTS, dict(bias=True, out_bias=True), ("gate_bias", "up_bias", "down_bias", "out_bias")),
        (ATTENTION, dict(qkv_bias=True, out_bias=True), ("query_bias", "key_bias", "value_bias", "out_bias")),
        (HeadTransformConfig(), dict(bias=True), ("bias",)),
    ],
    ids=["mlp", "experts", "attention", "head transform"],
)
def test_configured_biases_exist(config, biases, names):
    for one, there in ((config, False), (dataclasses.replace(config, **biases), True)):
        layer = eqx.filter_eval_shape(functools.partial(one.build, 4), key=jax.random.key(0))
        assert [getattr(layer, name) is not None for name in names] == [there] * len(names)


def test_no_two_layers_and_tables_are_equal():
    """For a decoder: rows of its tables, and stacked and unstacked layers."""
    block = BlockConfig(mixer=None, mlp=MLPConfig(mlp_dim=4))
    fused = BlockConfig(mixer=None, mlp=MLPConfig(mlp_dim=4, gated=False))
    config = ed.DecoderConfig(
        vocab_size=4,
        embed_dim=4,
        blocks=(block, block, fused),
        final_norm=None,
        positions=LearnedPositions(max_positions=4),
    )
    model = ed.init(config, key=jax.random.key(0))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    matrices = [np.asarray(matrix) for leaf in leaves for matrix in (leaf if leaf.ndim == 3 else leaf[None])]
    assert len(matrices) == 3 + 2 * 3 + 2  # two tables and a head, two gated layers, and one layer without a gate
    directions = [matrix.ravel() / np.linalg.norm(matrix) for matrix in matrices]
    assert np.abs(np.stack(directions) @ np.stack(directions).T - np.eye(len(matrices))).max() < 0.9
