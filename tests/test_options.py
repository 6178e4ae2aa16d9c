"""An option that can be set is read, and one that describes no model is refused by name."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
import types
import typing
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

import eqx_decoders as ed
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections
from eqx_decoders.blocks.residual.residual import Chained, NoResidual, Parallel, PostNorm, Sequential, Weighted
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, _declared
from eqx_decoders.families.deepseek.compressed_attention import CompressedAttentionConfig, CompressedIndexerConfig
from eqx_decoders.families.deepseek.compression import CompressionConfig
from eqx_decoders.families.diffllama import DifferentialAttentionConfig
from eqx_decoders.families.doge import DynamicMaskConfig
from eqx_decoders.families.gemma.altup import AltUp, Laurel
from eqx_decoders.families.gemma.rg_lru import RGLRUConfig
from eqx_decoders.families.jetmoe import HeadMixtureConfig
from eqx_decoders.families.minimax.lightning import LightningAttentionConfig
from eqx_decoders.families.qwen.gated_streams import GatedStreams
from eqx_decoders.families.rwkv import ChannelMixConfig, TimeMixConfig
from eqx_decoders.families.xlstm import MLSTMConfig
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm, QueryTemperature
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig, PooledIndexerConfig
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.learned_init import LearnedInitConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.attention.moba import BlockSelection
from eqx_decoders.layers.deepstack import AddedFeaturesConfig
from eqx_decoders.layers.embedding.embedding import LearnedPositions, SinusoidalPositions
from eqx_decoders.layers.embedding.engram import EngramConfig, TokenClasses
from eqx_decoders.layers.embedding.head_transform import HeadTransformConfig
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig
from eqx_decoders.layers.mask import Bidirectional, Causal, Chunked, SlidingWindow
from eqx_decoders.layers.mlp import LinearConfig, MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig, LayerScaleConfig, RMSNormConfig
from eqx_decoders.layers.parallel_mixers import NamedMixer, ParallelMixersConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.recurrent.kimi_delta import KimiDeltaAttentionConfig
from eqx_decoders.layers.recurrent.mamba1 import Mamba1Config
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NTKRope,
    ProportionalRope,
    Rope,
    YarnRope,
)
from eqx_decoders.layers.shared_transformer import AidedMixerConfig, SharedTransformerConfig
from eqx_decoders.model.mtp_config import MTPConfig
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.settings.step import MeshConfig
from eqx_decoders.training.step.router_bias import update_router_bias
from tests.compare import assert_allclose, assert_array_equal
from tests.encoders.options import ENCODER_OPTIONS
from tests.errors import refused


RMS = RMSNormConfig()
MIXER = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(theta=100.0))
LEARNED = LearnedInitConfig(attention=MIXER, teacher_heads=6, teacher_kv_heads=3, teacher_head_dim=6)
RANKS = dict(num_heads=4, q_rank=6, kv_rank=5, nope_dim=3, rope_dim=4, value_dim=2)
SMALL_MAMBA = Mamba2Config(num_heads=4, value_dim=3, num_groups=2, key_dim=4)
WIDE_EPS = RMSNormConfig(eps=0.5)
BESIDE = SharedTransformerConfig(attention=MIXER, mlp=MLPConfig(mlp_dim=12, fused=True), count=2)
LATENT = LatentAttentionConfig(rope=Rope(theta=100.0), **RANKS)
INDEXER = IndexerConfig(num_heads=3, head_dim=4, top_k=2)
COMPRESSED = CompressedAttentionConfig(
    num_heads=4, head_dim=4, rope_dim=4, q_rank=6, out_groups=2, out_rank=3, window=2, rope=Rope(theta=3.0),
    compression=CompressionConfig(size=2),
)  # fmt: skip
MLP = MLPConfig(mlp_dim=12)
EXPERTS = ExpertsConfig(num_experts=8, num_experts_per_token=2, mlp_dim=6)
BLOCK = ed.BlockConfig(mixer=MIXER, mlp=MLP, pre_mixer_norm=RMS, pre_mlp_norm=RMS)
ASIDE = dataclasses.replace(BLOCK, mlp=dataclasses.replace(EXPERTS, shared=MLP, shortcut="aside"))
EMPTY = ed.BlockConfig(mixer=None, mlp=None)
SMALL = MLPConfig(mlp_dim=4)
FURTHER = ed.ExtraLayerConfig(layer=MLP, pre_norm=RMS)
SOFT = dataclasses.replace(BLOCK, mlp=dataclasses.replace(MLP, activation="relu"))
AHEAD = MTPConfig(num_depths=1, block=BLOCK, norm=RMS)
GIVER = dataclasses.replace(BLOCK, shares_kv_as="giver")
CLASSES = TokenClasses.of([index // 2 for index in range(16)])
ENGRAM = EngramConfig(
    embed_dim=8, vocab_size=16, layers=(2, 0), layer=0, num_heads=2, head_dim=3, vocab_bases=(5, 7), taps=3
)
PER_LAYER = PerLayerEmbeddingConfig(features=4, vocab_size=16)
DECODER = ed.DecoderConfig(vocab_size=16, embed_dim=8, blocks=(BLOCK,), final_norm=RMS)


def decoder(**changes):
    return dataclasses.replace(DECODER, **changes)


def ahead(config: MTPConfig):
    """A decoder with these depths, and their residual connection."""
    return dataclasses.replace(block(residual=config.block.residual), mtp=config)


def of_blocks(*blocks):
    return decoder(blocks=blocks)


def block(**changes):
    return decoder(blocks=(dataclasses.replace(BLOCK, **changes),))


def mixer(**changes):
    return block(mixer=dataclasses.replace(MIXER, **changes))


def engram(config: EngramConfig):
    """A decoder that begins with it, with as many residual streams as it has."""
    residual = HyperConnections(streams=config.streams) if config.streams > 1 else Sequential()
    return dataclasses.replace(
        block(pre_layers=(ed.ExtraLayerConfig(layer=config),), residual=residual), embed_dim=config.embed_dim
    )


def per_layer(config: PerLayerEmbeddingConfig, **changes):
    """A decoder with a layer that takes an embedding of its own."""
    taker = ed.ExtraLayerConfig(layer=PerLayerInputConfig(features=config.features, **changes))
    return decoder(blocks=(dataclasses.replace(BLOCK, post_layers=(taker,)),), per_layer_embedding=config)


def itself(config):
    return config


# Other values of the fields of all rotary embeddings.
ROPE: dict = dict(theta=100.0, fraction=0.5, pairing="interleaved", sections=(1, 0), interleaved_sections=False)
ROPE |= dict(reverse=True)
# Every class of configuration: one to start from, how a decoder gets it, and another value for each of its fields.
OPTIONS: dict[type, tuple] = {
    RMSNormConfig: (RMS, lambda c: decoder(final_norm=c), dict(eps=0.1, scale=False, offset=0.5, clip=0.1)),
    LayerScaleConfig: (LayerScaleConfig(), lambda c: block(post_mlp_norm=c), dict(start=0.5)),
    LayerNormConfig: (
        LayerNormConfig(),
        lambda c: decoder(final_norm=c),
        dict(eps=0.1, scale=False, bias=False, offset=0.5),
    ),
    Rope: (
        Rope(),
        lambda c: mixer(rope=c),
        ROPE,
    ),
    DynamicRope: (
        DynamicRope(factor=2.0, original_length=3),
        lambda c: mixer(rope=c),
        ROPE | dict(factor=4.0, original_length=4),
    ),
    LinearRope: (LinearRope(factor=2.0), lambda c: mixer(rope=c), ROPE | dict(factor=4.0)),
    LongRope: (
        LongRope(short_factors=(1.0, 2.0, 3.0, 4.0), long_factors=(3.0, 4.0, 5.0, 6.0), original_length=3),
        lambda c: mixer(rope=c, head_dim=int(8 / c.fraction)),  # of which 8 features are rotated
        ROPE
        | dict(short_factors=(2.0, 3.0, 4.0, 5.0), long_factors=(5.0, 9.0, 1.0, 1.0), original_length=40)
        | dict(factor=4.0, attention_factor=2.0, long_attention_factor=3.0, keeps_short=True),
    ),
    NTKRope: (NTKRope(alpha=2.0), lambda c: mixer(rope=c), ROPE | dict(alpha=4.0)),
    ProportionalRope: (
        ProportionalRope(theta=100.0, fraction=0.75),
        lambda c: mixer(rope=c),
        ROPE | dict(theta=50.0, factor=4.0),
    ),
    Llama3Rope: (
        Llama3Rope(theta=100.0, original_length=64),
        lambda c: mixer(rope=c),
        ROPE
        | dict(theta=50.0, factor=4.0, low_frequency_factor=2.0)
        | dict(high_frequency_factor=8.0, original_length=32),
    ),
    YarnRope: (
        YarnRope(theta=100.0, factor=4.0, original_length=64, beta_fast=5.0, beta_slow=0.5),
        lambda c: mixer(rope=c),
        ROPE
        | dict(theta=50.0, factor=8.0, original_length=16, beta_fast=2.0)
        | dict(beta_slow=1.5, truncate=False, mscale=2.0, mscale_all_dim=2.0, attention_factor=2.0),
    ),
    QKNorm: (
        QKNorm(),
        lambda c: mixer(qk_norm=c),
        dict(norm=RMSNormConfig(eps=0.5), over="heads", when="after_rope"),
    ),
    QueryTemperature: (
        QueryTemperature(scale=0.5, length=2),
        lambda c: mixer(temperature=c),
        dict(scale=2.0, length=3, offset=0),
    ),
    Causal: (Causal(), lambda c: mixer(mask=c), {}),
    Bidirectional: (Bidirectional(), lambda c: mixer(mask=c), dict(size=2)),
    SlidingWindow: (SlidingWindow(3), lambda c: mixer(mask=c), dict(size=2)),
    Chunked: (Chunked(3), lambda c: mixer(mask=c), dict(size=2)),
    AttentionConfig: (
        MIXER,
        # where its output may have features of its own, and behind a layer that lends its keys and values
        lambda c: decoder(blocks=(GIVER, dataclasses.replace(BLOCK, mixer=c, residual="chained"))),
        dict(num_heads=2, num_kv_heads=4, head_dim=4, mask=SlidingWindow(2), rope=None, query_scale=0.1, soft_cap=0.5)
        | dict(sinks=True, qk_norm=QKNorm(), qkv_bias=True, out_bias=True, fused_qkv=True, shared_kv=True)
        | dict(output_gate=True, temperature=QueryTemperature(scale=0.5, length=2), out_dim=6, spans=True)
        | dict(qkv_clip=0.1, inner_norm=RMS, key_scale=2.0, alibi=Alibi(), value_dim=6, value_scale=2.0)
        | dict(value_norm=RMS, kv_shared_from="giver", selection=BlockSelection(size=1, top_k=2)),
    ),
    Alibi: (Alibi(), lambda c: mixer(alibi=c), dict(max_exponent=2.0, scale=0.5, rounded=True)),
    BlockSelection: (
        BlockSelection(size=1, top_k=2),
        lambda c: mixer(selection=c),
        dict(size=2, top_k=3, local_blocks=2),
    ),
    BlockIndexerConfig: (
        BlockIndexerConfig(size=1, top_k=2, num_heads=2, head_dim=8),
        lambda c: mixer(selection=c),
        dict(size=2, top_k=3, local_blocks=2, num_heads=4, head_dim=10, norm=RMSNormConfig(scale=False)),
    ),
    PooledIndexerConfig: (
        PooledIndexerConfig(size=1, top_k=2, num_heads=3, head_dim=8),
        lambda c: mixer(selection=c),
        dict(size=2, top_k=3, local_blocks=2, num_heads=5, head_dim=16, norm=RMSNormConfig(scale=False)),
    ),
    HeadMixtureConfig: (
        HeadMixtureConfig(attention=MIXER, num_experts=4),
        lambda c: block(mixer=c),
        dict(attention=dataclasses.replace(MIXER, num_heads=6), num_experts=3),
    ),
    DynamicMaskConfig: (
        DynamicMaskConfig(attention=MIXER, top_k=2),
        lambda c: block(mixer=c),
        dict(attention=dataclasses.replace(MIXER, soft_cap=0.5), top_k=3),
    ),
    DifferentialAttentionConfig: (
        DifferentialAttentionConfig(attention=MIXER),
        lambda c: block(mixer=c),
        dict(attention=dataclasses.replace(MIXER, soft_cap=0.5), norm=RMSNormConfig(scale=False, eps=0.5)),
    ),
    LatentAttentionConfig: (
        LATENT,
        lambda c: block(mixer=c),
        dict(num_heads=2, q_rank=None, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=3, mask=SlidingWindow(2))
        | dict(rope=None, query_scale=0.1, norm=RMSNormConfig(eps=0.5), kv_scale=2.0, bias=True, indexer=INDEXER),
    ),
    IndexerConfig: (
        INDEXER,
        # behind one that shares its choice, as far as both are alike
        lambda c: decoder(
            blocks=tuple(
                dataclasses.replace(BLOCK, mixer=dataclasses.replace(LATENT, indexer=each))
                for each in (dataclasses.replace(c, shares_as="it", shared_from=None), c)
            )
        ),
        dict(num_heads=5, head_dim=6, top_k=3, norm=LayerNormConfig(bias=False), loss_weight=0.5, warmup=True)
        | dict(pairing="interleaved", shares_as="name", shared_from="it"),
    ),
    CompressedAttentionConfig: (
        COMPRESSED,
        lambda c: block(mixer=c),
        dict(num_heads=6, head_dim=6, rope_dim=2, q_rank=5, out_groups=4, out_rank=2, window=1, rope=Rope(theta=5.0))
        | dict(compression=None, norm=RMSNormConfig(eps=0.5), indexer=CompressedIndexerConfig(head_dim=4, top_k=1)),
    ),
    CompressionConfig: (
        CompressionConfig(size=2),
        lambda c: block(mixer=dataclasses.replace(COMPRESSED, compression=c)),
        dict(size=3, overlaps=True, norm=RMSNormConfig(eps=0.5)),
    ),
    CompressedIndexerConfig: (
        CompressedIndexerConfig(num_heads=3, head_dim=4, top_k=1),
        lambda c: block(mixer=dataclasses.replace(COMPRESSED, indexer=c)),
        dict(num_heads=5, head_dim=6, top_k=3),
    ),
    LearnedInitConfig: (
        LEARNED,
        lambda c: block(mixer=c),
        dict(attention=dataclasses.replace(MIXER, rope=None), teacher_heads=2, teacher_kv_heads=6, teacher_head_dim=4)
        | dict(general=True),
    ),
    GatedDeltaNetConfig: (
        GatedDeltaNetConfig(num_key_heads=2, num_heads=4, key_dim=4, value_dim=3),
        lambda c: block(mixer=c),
        dict(num_key_heads=1, num_heads=8, key_dim=6, value_dim=5, taps=2, norm=RMSNormConfig(eps=0.5))
        | dict(negative_eigenvalues=True, gate_activation="sigmoid"),
    ),
    Mamba1Config: (
        Mamba1Config(channels=6, key_dim=4, step_rank=2),
        lambda c: block(mixer=c),
        dict(channels=8, key_dim=3, step_rank=3, taps=2, taps_bias=False, bias=True, norm=RMSNormConfig(eps=0.5)),
    ),
    Mamba2Config: (
        SMALL_MAMBA,
        lambda c: block(mixer=c),
        dict(num_heads=8, value_dim=5, num_groups=1, key_dim=6, taps=2, taps_bias=False, dt_min=2.0, dt_max=0.1)
        | dict(eps=0.5, norm="before_gate", in_bias=True, out_bias=True, in_scales=(2.0, 0.5, 2.0, 0.5, 3.0)),
    ),
    SharedTransformerConfig: (
        SharedTransformerConfig(attention=MIXER, mlp=dataclasses.replace(MLP, fused=True)),
        lambda c: block(mixer=AidedMixerConfig(mixer=SMALL_MAMBA, transformer=c, number=c.count - 1)),
        dict(attention=dataclasses.replace(MIXER, soft_cap=0.5), mlp=dataclasses.replace(MLP, mlp_dim=8, fused=True))
        | dict(norm=RMSNormConfig(eps=0.5), count=2),
    ),
    AidedMixerConfig: (
        AidedMixerConfig(mixer=SMALL_MAMBA, transformer=BESIDE),
        lambda c: block(mixer=c),
        dict(mixer=dataclasses.replace(SMALL_MAMBA, key_dim=3), transformer=dataclasses.replace(BESIDE, norm=WIDE_EPS))
        | dict(norm=RMSNormConfig(eps=0.5), number=1, mlp_rank=2, attention_rank=3),
    ),
    NamedMixer: (
        NamedMixer(name="recurrence", mixer=SMALL_MAMBA),
        lambda c: block(mixer=ParallelMixersConfig(mixers=(c, NamedMixer(name="attention", mixer=MIXER)))),
        dict(name="other", mixer=dataclasses.replace(SMALL_MAMBA, key_dim=3), input_scale=0.5, output_scale=2.0),
    ),
    ParallelMixersConfig: (
        ParallelMixersConfig(mixers=(NamedMixer(name="first", mixer=MIXER),)),
        lambda c: block(mixer=c),
        dict(mixers=tuple(NamedMixer(name=name, mixer=MIXER) for name in ("first", "second"))),
    ),
    LightningAttentionConfig: (
        LightningAttentionConfig(num_heads=4, head_dim=3, rate_layers=3),
        lambda c: block(mixer=c),
        dict(num_heads=2, head_dim=4, norm=RMSNormConfig(eps=0.5), rate_layers=2),
    ),
    GatedConvolutionConfig: (
        GatedConvolutionConfig(channels=8),
        lambda c: block(mixer=c),
        dict(channels=4, taps=2, bias=True),
    ),
    MLSTMConfig: (
        MLSTMConfig(num_heads=2, key_dim=3, value_dim=4),
        lambda c: block(mixer=c),
        dict(num_heads=1, key_dim=4, value_dim=3, gate_cap=1.0, eps=0.5, norm_eps=0.5),
    ),
    TimeMixConfig: (
        TimeMixConfig(embed_dim=8, channels=6),
        lambda c: dataclasses.replace(block(mixer=c), embed_dim=c.embed_dim),
        dict(embed_dim=6, channels=4),
    ),
    ChannelMixConfig: (
        ChannelMixConfig(embed_dim=8, mlp_dim=6),
        lambda c: dataclasses.replace(block(mlp=c), embed_dim=c.embed_dim),
        dict(embed_dim=6, mlp_dim=4),
    ),
    RGLRUConfig: (
        RGLRUConfig(num_heads=2, value_dim=4),
        lambda c: block(mixer=c),
        dict(num_heads=1, value_dim=3, taps=2, activation="relu"),
    ),
    KimiDeltaAttentionConfig: (
        KimiDeltaAttentionConfig(num_heads=2, head_dim=4, gate_rank=3),
        lambda c: block(mixer=c),
        dict(num_heads=3, head_dim=6, gate_rank=2, taps=2, norm=RMSNormConfig(eps=0.5)),
    ),
    LinearConfig: (LinearConfig(), lambda c: block(mlp=c), {}),
    MLPConfig: (
        MLP,
        lambda c: block(mlp=c),
        dict(mlp_dim=10, activation="xielu", gated=False, bias=True, fused=True, inner_norm=RMS, dropout=0.5)
        | dict(gate_scale=2.0, out_scale=2.0, activation_scale=2.0, up_offset=1.0, limit=0.1, gate_sparsity=0.7),
    ),
    ExpertsConfig: (
        EXPERTS,
        lambda c: of_blocks(dataclasses.replace(BLOCK, mlp=c), dataclasses.replace(BLOCK, shortcut_from=c.shortcut)),
        dict(num_experts=4, num_experts_per_token=3, mlp_dim=5, router=RouterConfig(bias=True), activation="relu")
        | dict(activation_scale=2.0, gated=False, latent_dim=3, norms=RMS, out_bias=True, num_zero_experts=3)
        | dict(shortcut="aside")
        | dict(up_offset=1.0, limit=0.1, bias=True, shared=MLP, shared_gate=True, capacity_factor=0.5),
    ),
    RouterConfig: (
        RouterConfig(),
        lambda c: block(mlp=dataclasses.replace(EXPERTS, router=c)),
        dict(score="sigmoid", order="score_first", renormalize=True, bias=True, selection_bias=True, num_groups=4)
        | dict(hashed_tokens=16, groups_per_token=2, group_score="top2_sum", scaling_factor=2.0, per_expert_scale=True)
        | dict(input_scaling=True, balance_loss=0.5, balance_form="megatron", z_loss=0.5)
        | dict(bias_update_rate=0.1, input_norm=RMS, sparse_mixer=0.3),
    ),
    EngramConfig: (
        ENGRAM,
        engram,
        dict(embed_dim=6, vocab_size=15, layers=(0, 2), layer=2, streams=2, num_heads=1, head_dim=2, vocab_bases=(5,))
        | dict(taps=2, seed=1, pad_token=1, token_classes=CLASSES, eps=0.5, hash_bits=63, end_token=3, bias=False)
        | dict(row_multiple=8, table_parts=2, norm_offset=1.0),
    ),
    TokenClasses: (
        CLASSES,
        lambda c: engram(dataclasses.replace(ENGRAM, token_classes=c)),
        dict(packed=TokenClasses.of([index // 3 for index in range(16)]).packed),
    ),
    HyperConnections: (
        HyperConnections(streams=2),
        lambda c: block(residual=c),
        dict(streams=3, mixing="permutations", iterations=1, norm=RMSNormConfig(eps=0.5), eps=0.5, weighted_sum=True),
    ),
    GatedStreams: (
        GatedStreams(streams=2, rank=3),
        lambda c: block(residual=c),
        dict(streams=3, rank=2, norm=RMSNormConfig(eps=0.5)),
    ),
    Laurel: (Laurel(rank=3), lambda c: block(residual=c), dict(rank=2, norm=RMSNormConfig(eps=0.5))),
    AltUp: (
        AltUp(streams=2),
        lambda c: decoder(blocks=block(residual=c, post_layers=(FURTHER,)).blocks * 2),
        dict(streams=3, inner=Laurel(rank=3), norm=RMSNormConfig(eps=0.5), read_scale=False),
    ),
    PerLayerEmbeddingConfig: (
        PER_LAYER,
        per_layer,
        dict(features=3, vocab_size=2, norm=RMSNormConfig(eps=0.5), init_std=0.3, unknown_token=0),
    ),
    AddedFeaturesConfig: (AddedFeaturesConfig(), lambda c: block(post_layers=(ed.ExtraLayerConfig(layer=c),)), {}),
    PerLayerInputConfig: (
        PerLayerInputConfig(features=4),
        lambda c: per_layer(dataclasses.replace(PER_LAYER, features=c.features), activation=c.activation),
        dict(features=3, activation="relu"),
    ),
    ed.BlockConfig: (
        dataclasses.replace(BLOCK, pre_mixer_norm=None, pre_mlp_norm=None),
        lambda c: of_blocks(c) if c.shortcut_from is None else of_blocks(ASIDE, c),
        dict(mixer=None, mlp=None, pre_mixer_norm=RMS, post_mixer_norm=RMS, pre_mlp_norm=RMS, post_mlp_norm=RMS)
        | dict(residual="parallel", dropout=0.5, pre_layers=(FURTHER,), post_layers=(FURTHER,), shares_kv_as="name")
        | dict(shortcut_from="aside"),
    ),
    ed.ExtraLayerConfig: (
        FURTHER,
        lambda c: block(pre_layers=(c,)),
        dict(layer=SMALL, pre_norm=None, post_norm=RMS, scale=0.5),
    ),
    Sequential: (
        Sequential(),
        lambda c: decoder(blocks=block(residual=c).blocks * 2),
        dict(residual_scale=0.5, output_scale=True, output_norm=RMS),
    ),
    Weighted: (
        Weighted(),
        lambda c: block(residual=c),
        dict(keeps_normed=True, stream_scales=(0.5, 2.0), layer_scales=(2.0, 0.5), gains=True),
    ),
    PostNorm: (PostNorm(), lambda c: block(residual=c), dict(norm=RMS)),
    **{kind: (kind(), lambda c: block(residual=c), {}) for kind in (Parallel, NoResidual, Chained)},
    LearnedPositions: (
        LearnedPositions(max_positions=8),
        lambda c: decoder(positions=c),
        dict(max_positions=3, offset=2),
    ),
    SinusoidalPositions: (SinusoidalPositions(), lambda c: decoder(positions=c), dict(max_timescale=100.0)),
    ed.DecoderConfig: (
        DECODER,
        itself,
        dict(
            vocab_size=15,
            embed_dim=6,
            blocks=(BLOCK, BLOCK),
            final_norm=None,
            tied=True,
            head_bias=True,
            scores=2,
            embedding_scale=3.0,
        )
        | dict(positions=SinusoidalPositions(), logit_divisor=2.0, logit_soft_cap=0.5, dropout=0.5)
        | dict(per_layer_embedding=dataclasses.replace(PER_LAYER, norm=RMSNormConfig(eps=0.5)))
        | dict(init_std=0.3, mtp=AHEAD, embedding_norm=RMS, embedding_rank=5, head_transform=HeadTransformConfig()),
    ),
    HeadTransformConfig: (
        HeadTransformConfig(),
        lambda c: decoder(head_transform=c),
        dict(features=5, activation="relu", bias=True, norm=RMS),
    ),
    MTPConfig: (
        AHEAD,
        ahead,
        dict(num_depths=2, block=SOFT, norm=RMSNormConfig(eps=0.5), normed_stream=True, loss_weight=0.5)
        | dict(normed_depths=True, all_streams=True, joint_norm=True, model_norm=True),
    ),
}
# Other fields that a field needs before it means anything, and their values on both sides.
GROUPED = dict(order="score_first", num_groups=4)
NEEDS: dict[tuple[type, str], dict] = {
    (Alibi, "rounded"): dict(max_exponent=3.0, scale=2.0),  # slopes that bfloat16 does not hold
    (AttentionConfig, "value_scale"): dict(out_bias=True),
    (LongRope, "short_factors"): dict(original_length=9),  # of a short text
    (YarnRope, "mscale"): dict(mscale=1.0, mscale_all_dim=1.0),
    (YarnRope, "mscale_all_dim"): dict(mscale=1.0, mscale_all_dim=1.0),
    (ExpertsConfig, "shared_gate"): dict(shared=MLP),
    (ExpertsConfig, "norms"): dict(shared=MLP),
    (ExpertsConfig, "shortcut"): dict(shared=MLP),
    (PerLayerEmbeddingConfig, "unknown_token"): dict(vocab_size=2),
    (ed.DecoderConfig, "per_layer_embedding"): dict(per_layer_embedding=PER_LAYER, blocks=per_layer(PER_LAYER).blocks),
    (EngramConfig, "table_parts"): dict(row_multiple=2),
    (MTPConfig, "normed_depths"): dict(num_depths=2),
    (MTPConfig, "all_streams"): dict(block=dataclasses.replace(BLOCK, residual=HyperConnections()), loss_weight=20.0),
    (MTPConfig, "joint_norm"): dict(
        block=dataclasses.replace(BLOCK, residual=HyperConnections()), loss_weight=20.0, all_streams=True
    ),
    (MTPConfig, "model_norm"): dict(loss_weight=20.0),
    (RouterConfig, "renormalize"): dict(order="score_first"),
    (RouterConfig, "selection_bias"): dict(order="score_first"),
    (RouterConfig, "hashed_tokens"): dict(order="score_first"),
    (RouterConfig, "num_groups"): dict(order="score_first"),
    (RouterConfig, "groups_per_token"): GROUPED,
    (RouterConfig, "group_score"): GROUPED | dict(groups_per_token=2),
    (RouterConfig, "balance_form"): GROUPED | dict(balance_loss=0.5),
    (RouterConfig, "bias_update_rate"): dict(order="score_first", selection_bias=True),
}
LEARNS = (IndexerConfig, "loss_weight")
CASES = [(kind, field) for kind, (_, _, values) in OPTIONS.items() for field in values]


def reachable(kind, found: dict) -> dict:
    """The configurations that a field of `kind` may hold, their fields' and subclasses', from the annotations."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is not None:
        for part in typing.get_args(kind):
            reachable(part, found)
    elif inspect.isabstract(kind):  # such as MixerConfig
        for part in kind.__subclasses__():
            reachable(part, found)
    elif dataclasses.is_dataclass(kind) and kind not in found and kind.__module__.startswith("eqx_decoders."):
        found[kind] = {field.name for field in dataclasses.fields(kind)}
        for part in (*typing.get_type_hints(kind).values(), *kind.__subclasses__()):
            reachable(part, found)
    return found


def test_every_field_of_every_configuration_is_in_the_table():
    listed = {kind: set(values) for kind, (_, _, values) in OPTIONS.items()}
    of_encoders = {kind: set(values) for kind, (_, _, values) in ENCODER_OPTIONS.items()}
    listed[ed.DecoderConfig].add("media")
    assert listed | of_encoders == reachable(ed.DecoderConfig, {})


@pytest.mark.parametrize("kind, field", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_every_option_comes_back_from_json(kind, field):
    base, place, values = OPTIONS[kind]
    config = place(dataclasses.replace(base, **NEEDS.get((kind, field), {}) | {field: values[field]}))
    assert ed.DecoderConfig.from_json(config.to_json()) == config != place(base)


def named_draws(config) -> ed.Decoder:
    """A decoder whose weights depend on their names and shapes alone: a new one leaves the others as they are."""
    tree = ed.abstract(config, scan=False, attention="dot")
    arrays, static = eqx.partition(tree, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    leaves = [
        jnp.asarray(np.random.default_rng(zlib.crc32(name.encode())).normal(0.1, 0.5, leaf.shape), leaf.dtype)
        for name, leaf in named_leaves(arrays).items()
    ]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), leaves), static)


@functools.cache
def logits(config, keyed: bool = False) -> np.ndarray:
    """Logits without and with a key, which dropout and random routing need."""
    key = jax.random.key(0) if keyed else None
    spans = ed.Inputs(spans=jnp.asarray([[0, 1, 1, 1, 0]]))
    return np.asarray(named_draws(config)(jnp.asarray([[3, 1, 4, 1, 5]]), key=key, inputs=spans).logits)


@functools.cache
def trained(config) -> tuple[float, np.ndarray | None]:
    """The training loss, and the selection biases after a step."""
    model, tokens = named_draws(config), jnp.asarray([[3, 1, 4, 1, 5]])
    loss, metrics = ed.next_token_loss(model, Batch(tokens=tokens))
    if metrics.stats is None or metrics.stats.routing is None:
        return float(loss), None
    moved = named_leaves(update_router_bias(model, metrics.stats))
    return float(loss), next((np.asarray(moved[name]) for name in moved if name.endswith("selection_bias")), None)


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape != other.shape or not np.allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.slow(fast=("AttentionConfig-soft_cap", "RouterConfig-scaling_factor", "DecoderConfig-logit_divisor"))
@pytest.mark.parametrize("kind, field", CASES, ids=lambda x: getattr(x, "__name__", x))
def test_every_option_is_read(kind, field):
    base, place, values = OPTIONS[kind]
    base = dataclasses.replace(base, **NEEDS.get((kind, field), {}))
    before, after = place(base), place(dataclasses.replace(base, **{field: values[field]}))
    if kind is PerLayerEmbeddingConfig and field == "init_std":
        tables = [config.per_layer_embedding.build(8, 1, key=jax.random.key(0)).table for config in (before, after)]
        assert_allclose(tables[0] * 0.3 / base.init_std, tables[1], rtol=1e-5)
        return
    if field == "init_std":
        short = [dataclasses.replace(config, blocks=(EMPTY,), tied=True) for config in (before, after)]
        tables = [ed.Decoder.build(config, key=jax.random.key(0)).embedding.table for config in short]
        assert_allclose(tables[0] * 0.3 / base.init_std, tables[1], rtol=1e-5)
        return
    if field == "start":
        scales = [config.blocks[0].post_mlp_norm.build(8).scale for config in (before, after)]
        assert_array_equal(scales, np.outer([1.0, 0.5], np.ones(8)))
        return
    if field == "rate_layers":  # of a new model: the last of two layers forgets least
        second, last = (np.asarray(config.blocks[0].mixer.rates(1)) for config in (before, after))
        assert np.all((last > 0) & (last < 0.01 * second))
        return
    plain, other = logits(before), logits(after)
    if field in ("sections", "interleaved_sections"):  # of positions with several dimensions; text has one
        assert_array_equal(plain, other)
        return
    assert np.all(np.isfinite(other))
    if field in ("dropout", "random"):
        assert_array_equal(plain, other)  # without a key it is not read
        assert_array_equal(plain, logits(before, keyed=True))  # nor a key without a rate
        assert differ(plain, logits(after, keyed=True))
    elif field in (
        "shares_kv_as",
        "shares_as",
        "row_multiple",
        "table_parts",
    ):  # of use to layers that borrow, to files
        assert_array_equal(plain, other)
    elif field in ("balance_loss", "balance_form", "z_loss", "mtp") or kind is MTPConfig or (kind, field) == LEARNS:
        assert_array_equal(plain, other)
        assert abs(trained(before)[0] - trained(after)[0]) > 1e-3
    elif field == "bias_update_rate":
        assert_array_equal(plain, other)
        assert np.abs(trained(before)[1] - trained(after)[1]).max() == pytest.approx(values[field])
    else:
        assert differ(plain, other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_a_key_is_not_read_without_a_rate(kind):
    base, place, _ = OPTIONS[kind]
    for needs in [{}, *(needs for (one, _), needs in NEEDS.items() if one is kind)]:
        config = place(dataclasses.replace(base, **needs))
        assert_array_equal(logits(config), logits(config, keyed=True))


@pytest.mark.slow
def test_wirings_differ():
    found = [logits(block(residual=residual)) for residual in ("sequential", "parallel", "none", "chained")]
    assert all(differ(one, other) for i, one in enumerate(found) for other in found[:i])


@pytest.mark.slow
def test_masks_differ():
    found = [logits(mixer(mask=mask)) for mask in (Causal(), SlidingWindow(3), Chunked(3), Bidirectional())]
    assert all(differ(one, other) for i, one in enumerate(found) for other in found[:i])


# --- execution ---

EXECUTION = dict(
    layout=lambda: ed.Layout.create(data=8),
    precision=lambda: ed.Precision(compute=jnp.bfloat16),
    remat=lambda: "full",
    attention=lambda: "chunked",
    scan=lambda: False,
    layer_stats=lambda: True,
    attention_maxima=lambda: True,
    layer_streams=lambda: True,
    expert_choices=lambda: True,
    lookup=lambda: "one_hot",
    experts=lambda: "dense",
    expert_exchange=lambda: "all_to_all",
    head_bytes=lambda: 1,
    exchange_bytes=lambda: 1,
    batch_split=lambda: 2,
    low_precision=lambda: ed.LowPrecision(mode="int8"),
    context_order=lambda: "zigzag",
    context_form=lambda: "all_to_all",
    pipeline=lambda: ed.Pipeline(microbatches=2),
)


def program(model, fused=False) -> str:
    """The text of the gradient of a loss, of the fused one or of a sum of logits; without addresses."""
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays, tokens):
        if fused:
            return ed.next_token_loss(eqx.combine(arrays, static), ed.Batch(tokens=tokens))
        out = eqx.combine(arrays, static)(tokens)
        return out.logits.sum(), out.stats

    text = str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(arrays, jnp.zeros((8, 4), jnp.int32)))
    return re.sub(r"0x[0-9a-f]+", "", text)


@pytest.mark.slow
def test_every_choice_of_execution_changes_the_program():
    assert set(EXECUTION) == {field.name for field in dataclasses.fields(ed.Execution)}
    sparse = dataclasses.replace(BLOCK, mlp=EXPERTS)
    model = named_draws(decoder(blocks=(sparse,) * 2)).replace(scan=True, attention="auto")
    plain = program(model)
    assert program(model.replace(remat="none", scan=True)) == plain
    split = model.replace(layout=ed.Layout.create(expert=8))  # what exchanges tokens
    assert program(split) == program(split.replace(expert_exchange="gather"))
    latent = named_draws(block(mixer=LATENT)).replace(attention="auto")
    bases = dict.fromkeys(EXECUTION, (model, plain)) | dict.fromkeys(
        ("expert_exchange", "exchange_bytes"), (split, program(split))
    )
    bases["attention_maxima"] = (latent, program(latent))
    wide = named_draws(decoder(vocab_size=300)).replace(layout=ed.Layout.create(fsdp=8))
    bases["head_bytes"] = (wide, program(wide, fused=True))
    long = model.replace(layout=ed.Layout.create(data=4, context=2))
    bases["context_order"], bases["context_form"] = (long, program(long, fused=True)), (long, program(long))
    staged = model.replace(layout=ed.Layout.create(stage=2, data=4))
    bases["pipeline"] = (staged, program(staged))
    in_losses = ("head_bytes", "context_order")
    texts = {
        name: program(bases[name][0].replace(**{name: value()}), name in in_losses) for name, value in EXECUTION.items()
    }
    assert [name for name, text in texts.items() if text == bases[name][1]] == []
    assert "sharding_constraint" in texts["layout"] and "sharding_constraint" not in plain
    assert "bf16" in texts["precision"] and "bf16" not in plain
    assert "prevent_cse" in texts["remat"] and "prevent_cse" not in plain
    assert "scan[" in plain and "scan[" not in texts["scan"]
    stats = eqx.filter_eval_shape(model.replace(layer_stats=True), jnp.zeros((8, 4), jnp.int32)).stats
    assert stats.activations.mean.shape == stats.activations.std.shape == (2,)


def test_precision_of_weights():
    model = ed.abstract(DECODER, precision=ed.Precision(params="bfloat16"))
    assert {leaf.dtype for leaf in named_leaves(model).values()} == {jnp.dtype(jnp.bfloat16)}


# --- every public configuration ---

# What is passed between functions and what families are made of: data, and no settings of a user.
DATA = {
    "DocumentChunks", "KVShape", "ChatTemplate", "Difference", "Family", "GenerationConfig", "Greedy", "Kernel",
    "ModelInfo", "Provenance", "TokenizationConfig", "RemoteFile", "DecoderSizes", "StateShape", "StoredTensor",
    "MXFP4Tensor", "BytesTensor",
    "PackedFP4Tensor", "PackedTensor", "RepeatedTensor", "ScaledTensor", "TransposedTensor", "LaneLayout",
    "CompressedShape", "AdapterSettings", "Adapter", "ServedAdapters",
    "ConvShape", "TextModel", "Weight", "WeightMapping", "Residual", "Part", "Section", "HeadSplit",
    "DeviceHead", "ChannelShape", "EncoderSizes", "ConformerSizes", "SpeechSizes", "MultimodalFamily",
    "Key", "Integer", "Number", "Flag", "Layers", "Numbers", "Word", "Only", "Unused", "Defaults", "Renamed",
    "Check", "Rule", "Group", "Table", "RopesByLayer", "Inverse", "MambaSizes",
    "Image", "TiledImage", "Packing", "SyntheticImage", "AnsweredQuestion", "SyntheticReader", "ProcessorReader",
    "TileSizes", "Tiles", "Chip", "Collective", "Machine", "DeviceMemory", "Operations", "Plan", "Roofline", "Route",
    "DecodingPlan", "PlannedStep", "Estimate", "FlashPlan", "ScanPlan", "AttentionCall", "AttentionOptions", "Ring",
    "StateLayout", "ExternalCall", "OtherModel", "Preferences",
    "CachedBlock", "Echo", "EngineStats",
    "Candidate", "Comparison", "Ranking", "Rename", "TensorGroup", "Vocabulary",
    "Architecture", "BlockTensor", "Description", "GlobalScaleTensor", "FileMetadata", "GGUFFile", "HeadHalvesTensor",
    "InterleavedTensor", "IndexedTensor", "CodebookTensor", "MappedTensor", "NewMetadata", "MinusOneTensor",
    "DequantizedTensor", "ExpandedTensor",
    "SequenceState", "StepResults", "TextFrontend", "Delta", "RunnerConfig", "HttpRequest",
    "Run", "RunDirectory", "AtLeast", "InRange", "Backend", "ProductPlan", "Operation", "OneOf", "NonEmpty",
    "EvaluationPlan", "LMEvalScores", "TaskEvaluator", "LoadedTask", "TaskScores", "TextScores", "TextSet",
    "ToolCallFormat",
    "SharedPrompt", "PendingResponse", "TokenScore", "RequestOutput", "RequestQueue", "MethodStart", "Critic",
}  # fmt: skip


def configurations() -> dict[str, type]:
    """The public dataclasses of all modules, those of weights aside."""
    found = {}
    for module in pkgutil.walk_packages(ed.__path__, "eqx_decoders."):
        for name, value in vars(importlib.import_module(module.name)).items():
            public = isinstance(value, type) and not name.startswith("_")
            if public and (value.__module__.endswith("processor") or ".media_files." in value.__module__):
                continue  # what a model's directory says: compared with transformers
            if public and dataclasses.is_dataclass(value) and not issubclass(value, eqx.Module):
                found[name] = value
    return found


def test_every_number_and_word_of_a_configuration_has_a_declared_range():
    """NaN, True, a float for an integer and a misspelled word are refused in all of them (see test_errors.py)."""
    free = set()
    for name, kind in configurations().items():
        if name not in DATA:
            declared = {field for field, *_ in _declared(kind)} if issubclass(kind, CheckedFields) else set()
            for field, hint in typing.get_type_hints(kind).items():
                parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
                bounded = {int, float} & set(parts) or typing.get_origin(hint) is typing.Literal
                if bounded and field not in declared and field in getattr(kind, "__annotations__", ()):
                    free.add(f"{name}.{field}")
    assert free == {*FREE, *(f"MeshConfig.{field.name}" for field in dataclasses.fields(MeshConfig))}


# any integer is a seed or a priority; the others are bounded by other fields, or by what is made of them
FREE = [
    "ApiConfig.seed",
    "EngramConfig.seed",
    "GenerateConfig.seed",
    "SamplingParams.seed",
    "ServeConfig.seed",
    "Verify.seed",
    "Request.priority",
    "EngramConfig.layer",
    "Llama3Rope.high_frequency_factor",
    "Mamba2Config.dt_max",
    "YarnRope.beta_fast",
    "GenerateConfig.top_k",
    "GenerateConfig.top_p",
    "GenerateConfig.min_p",
    "LoRASettings.rank",
    "LoRASettings.alpha",
]


# --- bad configurations ---

ATTENTION = dict(num_heads=4, num_kv_heads=2, head_dim=8)
TAUGHT = dict(attention=MIXER, teacher_heads=4, teacher_kv_heads=2, teacher_head_dim=8)
YARN = dict(factor=4.0, original_length=8)
SPARSE = dict(num_experts=8, num_experts_per_token=2, mlp_dim=6)
FIRST = dict(order="score_first")
PLAIN = dict(vocab_size=16, embed_dim=8, blocks=(BLOCK,), final_norm=None)

# class, valid fields, wrong ones, and what the sentence must hold besides the first wrong field's name and value
BAD = [
    (RMSNormConfig, {}, dict(eps=0.0), "above 0"),
    (RMSNormConfig, {}, dict(eps=-1e-6), "above 0"),
    (RMSNormConfig, dict(scale=False), dict(offset=1.0), "needs scale=True"),
    (MLPConfig, dict(mlp_dim=4, gated=False), dict(gate_scale=2.0), "needs gated=True"),
    (Mamba2Config, dict(num_heads=2, value_dim=3, num_groups=1, key_dim=4), dict(in_scales=(1.0,)), "5 elements"),
    (NamedMixer, dict(mixer=MIXER), dict(name="a.b"), "must be an identifier"),
    (
        AidedMixerConfig,
        dict(mixer=SMALL_MAMBA, transformer=BESIDE),
        dict(number=2),
        "less than SharedTransformerConfig",
    ),
    (ParallelMixersConfig, {}, dict(mixers=()), "at least one mixer"),
    (LayerNormConfig, {}, dict(eps=0.0), "above 0"),
    (LayerNormConfig, dict(scale=False), dict(offset=1.0), "needs scale=True"),
    (NTKRope, {}, dict(alpha=0.5), "at least 1"),
    (LongRope, dict(short_factors=(1.0,), original_length=9), dict(long_factors=(1.0, 2.0)), "must both have a number"),
    (LongRope, dict(short_factors=(), original_length=9), dict(long_factors=()), "must both have a number"),
    (Rope, {}, dict(theta=0.0), "above 0"),
    (Rope, {}, dict(theta=-1e4), "above 0"),
    (Rope, {}, dict(fraction=0.0), "above 0"),
    (Rope, {}, dict(fraction=1.5), "at most 1"),
    (ProportionalRope, {}, dict(factor=0.5), "at least 1"),
    (LinearRope, dict(factor=2.0), dict(theta=0.0), "above 0"),
    (LinearRope, {}, dict(factor=0.5), "at least 1"),
    (Llama3Rope, {}, dict(factor=0.0), "at least 1"),
    (Llama3Rope, {}, dict(low_frequency_factor=0.0), "above 0"),
    (Llama3Rope, dict(low_frequency_factor=4.0), dict(high_frequency_factor=3.0), "at least 4.0"),
    (Llama3Rope, {}, dict(original_length=0), "at least 1"),
    (YarnRope, YARN, dict(factor=0.5), "at least 1"),
    (YarnRope, YARN, dict(beta_slow=0.0), "above 0"),
    (YarnRope, YARN, dict(beta_fast=0.5), "at least 1.0"),
    (YarnRope, YARN, dict(theta=1.0), "above 1"),
    (YarnRope, YARN, dict(attention_factor=0.0), "above 0"),
    (YarnRope, YARN, dict(mscale_all_dim=0.0), "above 0"),
    (YarnRope, YARN, dict(mscale=1.0), "needs mscale_all_dim"),
    (YarnRope, YARN | dict(mscale_all_dim=1.0, attention_factor=1.0), dict(mscale=1.0), "excludes attention_factor"),
    (QueryTemperature, {}, dict(scale=0.0), "above 0"),
    (QueryTemperature, {}, dict(length=0), "at least 1"),
    (SlidingWindow, {}, dict(size=0), "at least 1"),
    (Chunked, {}, dict(size=-4), "at least 1"),
    (AttentionConfig, ATTENTION, dict(num_heads=0), "at least 1"),
    (AttentionConfig, ATTENTION | dict(shared_kv=True), dict(kv_shared_from="full"), "excludes shared_kv=True"),
    (AttentionConfig, ATTENTION | dict(key_scale=2.0), dict(kv_shared_from="full"), "excludes key_scale=2.0"),
    (AttentionConfig, ATTENTION, dict(num_kv_heads=-2), "at least 1"),
    (AttentionConfig, ATTENTION, dict(num_heads=30, num_kv_heads=8), "multiple of num_kv_heads=8"),
    (AttentionConfig, ATTENTION, dict(head_dim=0), "at least 1"),
    (AttentionConfig, ATTENTION, dict(head_dim=7), "positive even number"),
    (AttentionConfig, ATTENTION | dict(rope=Rope(fraction=0.4)), dict(head_dim=8), "= 3 features are rotated"),
    (AttentionConfig, ATTENTION | dict(rope=Rope(fraction=0.1)), dict(head_dim=8), "= 0 features are rotated"),
    (AttentionConfig, ATTENTION | dict(rope=ProportionalRope()), dict(head_dim=7), "head_dim=7 must be even"),
    (AttentionConfig, ATTENTION, dict(query_scale=0.0), "above 0"),
    (AttentionConfig, ATTENTION, dict(soft_cap=-30.0), "above 0"),
    (AttentionConfig, ATTENTION | dict(shared_kv=True), dict(fused_qkv=True), "shared_kv=True exclude"),
    (LatentAttentionConfig, RANKS, dict(num_heads=0), "at least 1"),
    (LatentAttentionConfig, RANKS, dict(q_rank=0), "at least 1"),
    (LatentAttentionConfig, RANKS, dict(rope_dim=0), "at least 1"),
    (LatentAttentionConfig, RANKS, dict(rope_dim=3), "rope_dim=3 must be even"),
    (LatentAttentionConfig, RANKS, dict(value_dim=-2), "at least 1"),
    (LatentAttentionConfig, RANKS, dict(query_scale=0.0), "above 0"),
    (LearnedInitConfig, TAUGHT, dict(teacher_heads=0), "at least 1"),
    (MLSTMConfig, dict(num_heads=1, key_dim=2, value_dim=2), dict(gate_cap=41.0), "at most 40"),
    (MLPConfig, {}, dict(mlp_dim=0), "at least 1"),
    (MLPConfig, dict(mlp_dim=8), dict(activation="Swish"), "Known: silu"),
    (MLPConfig, dict(mlp_dim=8, gated=False), dict(fused=True), "needs gated=True"),
    (MLPConfig, dict(mlp_dim=8), dict(dropout=1.0), "below 1"),
    (MLPConfig, dict(mlp_dim=8), dict(dropout=-0.1), "at least 0"),
    (ExpertsConfig, SPARSE, dict(num_experts=0), "at least 1"),
    (ExpertsConfig, SPARSE, dict(num_experts_per_token=9), "num_experts=8"),
    (ExpertsConfig, SPARSE, dict(mlp_dim=0), "at least 1"),
    (ExpertsConfig, SPARSE, dict(latent_dim=0), "at least 1"),
    (ExpertsConfig, SPARSE | dict(limit=1.0), dict(gated=False), "excludes limit: without a gate"),
    (ExpertsConfig, SPARSE, dict(limit=0.0), "above 0"),
    (ExpertsConfig, SPARSE, dict(capacity_factor=-1.0), "above 0"),
    (ExpertsConfig, SPARSE, dict(shared_gate=True), "shared=MLPConfig"),
    (ExpertsConfig, SPARSE | dict(router=RouterConfig(**FIRST, num_groups=3)), dict(num_experts=8), "num_groups=3"),
    (
        ExpertsConfig,
        SPARSE | dict(router=RouterConfig(**FIRST, num_groups=8)),
        dict(num_experts=8),
        "groups_per_token=1",
    ),
    (RouterConfig, {}, dict(num_groups=0), "at least 1"),
    (RouterConfig, FIRST | dict(num_groups=4), dict(groups_per_token=5), "at most num_groups=4"),
    (RouterConfig, {}, dict(scaling_factor=0.0), "above 0"),
    (RouterConfig, {}, dict(balance_loss=-0.1), "at least 0"),
    (RouterConfig, {}, dict(bias_update_rate=-1e-3), "at least 0"),
    (RouterConfig, FIRST, dict(bias_update_rate=1e-3), "needs selection_bias=True"),
    (RouterConfig, {}, dict(selection_bias=True), "needs order='score_first'"),
    (RouterConfig, {}, dict(num_groups=2), "needs order='score_first'"),
    (RouterConfig, dict(order="score_first"), dict(sparse_mixer=0.1), "needs score='softmax' and order='select_first'"),
    (RouterConfig, {}, dict(renormalize=True), "no effect"),
    (ed.BlockConfig, dict(mixer=None, mlp=MLP), dict(residual="paralel"), "Did you mean 'parallel'"),
    (ed.BlockConfig, dict(mixer=None, mlp=MLP), dict(dropout=1.0), "below 1"),
    (ed.BlockConfig, dict(mlp=MLP, post_mixer_norm=RMS), dict(mixer=None), "post_mixer_norm"),
    (ed.BlockConfig, dict(mixer=MIXER, pre_mlp_norm=RMS), dict(mlp=None), "pre_mlp_norm"),
    (ed.BlockConfig, dict(mixer=None, mlp=MLP), dict(residual="nope"), "Did you mean 'none'"),
    (ed.BlockConfig, dict(mixer=None, mlp=MLP), dict(residual="chained"), "needs a mixer and an mlp"),
    (ed.BlockConfig, dict(mixer=MIXER, mlp=None), dict(residual="chained"), "needs a mixer and an mlp"),
    (AttentionConfig, vars(MIXER), dict(out_dim=0), "AttentionConfig.out_dim=0 must be an integer of at least 1"),
    (LearnedPositions, {}, dict(max_positions=0), "at least 1"),
    (SinusoidalPositions, {}, dict(max_timescale=0.0), "above 0"),
    (SinusoidalPositions, {}, dict(max_timescale=-1.0), "above 0"),
    (ed.DecoderConfig, PLAIN, dict(vocab_size=0), "at least 1"),
    (ed.DecoderConfig, PLAIN, dict(embed_dim=-8), "at least 1"),
    (ed.DecoderConfig, PLAIN, dict(logit_divisor=0.0), "above 0"),
    (ed.DecoderConfig, PLAIN, dict(blocks=()), "at least one BlockConfig"),
    (ed.DecoderConfig, PLAIN, dict(embedding_scale=0.0), "above 0"),
    (ed.DecoderConfig, PLAIN, dict(logit_soft_cap=0.0), "above 0"),
    (ed.DecoderConfig, PLAIN, dict(dropout=1.0), "below 1"),
    (ed.DecoderConfig, PLAIN, dict(init_std=0.0), "above 0"),
]


def unhooked(kind, **values):
    """What `kind(**values)` does where no type hook runs before its own checks, as it is outside of the tests."""
    config = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(config, field.name, values.get(field.name, field.default))
    config.__post_init__()
    return config


def label(value) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("kind, valid, wrong, rule", BAD, ids=label)
def test_bad_configurations_are_refused_by_name(kind, valid, wrong, rule):
    field, value = next(iter(wrong.items()))
    with pytest.raises(ed.ConfigError) as caught:
        unhooked(kind, **(valid | wrong))
    sentence = str(caught.value)
    assert f"{field}={value!r}" in sentence
    assert kind.__name__ in sentence or (kind is AttentionConfig and "head_dim" in wrong)
    assert rule in sentence
    with pytest.raises((ed.ConfigError, TypeCheckError)):
        kind(**(valid | wrong))


@pytest.mark.parametrize("field", ["fused_qkv", "shared_kv"])
def test_learned_kernels_are_those_of_separate_projections(field):
    attention = dataclasses.replace(MIXER, **{field: True})
    with refused(ed.ConfigError, "LearnedInitConfig.attention", f"{field}=True"):
        LearnedInitConfig(**(TAUGHT | dict(attention=attention)))


@pytest.mark.parametrize("blocks", [(None,), (MLP,), (BLOCK, "block")])
def test_blocks_of_a_wrong_type_are_refused(blocks):
    index = len(blocks) - 1
    with pytest.raises(ed.ConfigError, match=re.escape(f"blocks[{index}]={blocks[index]!r} must be a BlockConfig")):
        unhooked(ed.DecoderConfig, **(PLAIN | dict(blocks=blocks)))


@pytest.mark.parametrize(
    "kind, values",
    [
        (QKNorm, dict(norm=None)),
        (AttentionConfig, ATTENTION | dict(mask="causal")),
        (AttentionConfig, ATTENTION | dict(mask=Causal)),
        (AttentionConfig, ATTENTION | dict(rope="llama3")),
        (AttentionConfig, ATTENTION | dict(qk_norm=RMS)),
        (AttentionConfig, ATTENTION | dict(sinks="no")),
        (LatentAttentionConfig, RANKS | dict(rope="yarn")),
        (LatentAttentionConfig, RANKS | dict(bias="no")),
        (LearnedInitConfig, TAUGHT | dict(attention=MLP)),
        (LearnedInitConfig, TAUGHT | dict(general=1)),
        (MLPConfig, dict(mlp_dim=8, gated="no")),
        (ExpertsConfig, SPARSE | dict(router="mixtral")),
        (ExpertsConfig, SPARSE | dict(shared=EXPERTS)),
        (RouterConfig, dict(bias="no")),
        (ed.BlockConfig, dict(mixer=MLP, mlp=None)),
        (ed.BlockConfig, dict(mixer=None, mlp=MLP, pre_mlp_norm="rms")),
        (ed.DecoderConfig, PLAIN | dict(tied="no")),
        (ed.DecoderConfig, PLAIN | dict(positions=64)),
        (ed.DecoderConfig, PLAIN | dict(blocks=BLOCK)),
        (ed.Execution, dict(scan="no")),
        (ed.Execution, dict(layout=None)),
    ],
    ids=label,
)
def test_values_of_a_wrong_type_are_refused_by_the_type_hook(kind, values):
    with pytest.raises(TypeCheckError):
        kind(**values)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: unhooked(ed.Execution, remat="ful"), r"remat='ful' is not known. Did you mean 'full'"),
        (lambda: unhooked(ed.Execution, attention="doot"), r"attention='doot' is not known. Did you mean 'dot'"),
        (lambda: ed.Precision(compute="int8"), r"Precision.compute='int8' is not known"),
        (lambda: ed.init_cache(DECODER, 0, 4), r"batch_size=0 must be an integer of at least 1"),
        (lambda: ed.init_cache(DECODER, 1, 0), r"max_length=0 must be an integer of at least 1"),
        (lambda: unhooked(Rope, sections=(4, -1)), r"Rope.sections\[1\]=-1 must be an integer of at least 0"),
        (lambda: unhooked(Rope, pairing="half_of_axis"), r"Rope.pairing='half_of_axis' needs AxialRope"),
        (lambda: RMS.build(0), r"RMSNorm size=0 must be an integer of at least 1"),
    ],
)
def test_bad_calls_are_refused(make, sentence):
    with pytest.raises(ed.ConfigError, match=sentence):
        make()
