"""Qwen3-Next (Qwen Team 2025) and the text decoder of Qwen3.5 (Qwen Team 2026).

Three of four layers are gated delta nets, and every fourth layer has attention with an output gate. Published
checkpoints contain one layer of multi-token prediction (MTP), but their `config.json` does not mention it.
"""

import dataclasses
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings
from eqx_decoders.families.common import (
    ENDS,
    GATED_MLP,
    LAYER,
    NO_BIAS,
    PRE_NORMS,
    DecoderSizes,
    decoder_sizes,
    hybrid_layers,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.qwen.text import EXPERTS, FUSED_EXPERTS, expert_settings, qwen_experts
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Defaults, Flag, Group, Integer, Only, Rule, Setting
from eqx_decoders.families.weight_rows import Weight, joined_kernels, mtp_rows, self_attention, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


ROPE = Rope(theta=1e7, fraction=0.25)


def qwen3_next(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    full: tuple[bool, ...],
    mlps: tuple[MLPConfig | ExpertsConfig, ...],
    rope: Rope = ROPE,
    depths: int = 0,
) -> DecoderConfig:
    """Return the configuration of a decoder with Qwen3-Next blocks.

    **Arguments:**

    - `shape`: sizes of the decoder and of attention.
    - `delta`: gated delta net of the layers without attention.
    - `full`: whether each layer has attention.
    - `mlps`: MLP or experts of each layer.
    - `rope`: rotary embedding of attention.
    - `depths`: number of MTP layers, 0 or 1.
    """
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True)

    def block(has_attention: bool, mlp: MLPConfig | ExpertsConfig) -> BlockConfig:
        return shape.block(attention if has_attention else delta, mlp, norm)

    config = shape.decoder(map(block, full, mlps), norm)
    return with_depths(config, depths) if depths else config


def delta_net(shape: DecoderSizes, **sizes: Any) -> GatedDeltaNetConfig:
    """Return the configuration of a gated delta net. `sizes` replaces fields of the published configuration."""
    published = dict(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128)
    return GatedDeltaNetConfig(norm=RMSNormConfig(eps=shape.eps), **{**published, **sizes})


def with_depths(config: DecoderConfig, depths: int = 1) -> DecoderConfig:
    """Return the configuration with MTP. The MTP block equals the last decoder block with attention."""
    block = next((block for block in reversed(config.blocks) if isinstance(block.mixer, AttentionConfig)), None)
    if block is None or block.pre_mixer_norm is None:
        raise ConversionError(
            "DecoderConfig.blocks must have a layer with an AttentionConfig and a pre_mixer_norm, because layers of "
            "multi-token prediction equal this layer: add one, or use a checkpoint without such layers."
        )
    mtp = MTPConfig(num_depths=depths, block=block, norm=block.pre_mixer_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


_DELTA = (
    Integer("linear_num_key_heads", "delta.num_key_heads", 16),
    Integer("linear_num_value_heads", "delta.num_heads", 32),
    Integer("linear_key_head_dim", "delta.key_dim", 128),
    Integer("linear_value_head_dim", "delta.value_dim", 128),
    Integer("linear_conv_kernel_dim", "delta.taps", 4),
)


def hybrid_settings(*delta: Setting, **layer_types: str) -> tuple[Setting, ...]:
    """Return the settings of the gated delta net, and of the layers that have attention instead.

    `delta` contains additional settings of the gated delta net. `layer_types` are keyword arguments of `hybrid_layers`.
    """
    return (
        Only("attention_bias", False, written=True),
        Only("hidden_act", "silu"),
        Group("delta", delta_net, (*_DELTA, *delta), uses=("shape",)),
        Integer("full_attention_interval", None, 4, name="_interval"),
        hybrid_layers(AttentionConfig, **layer_types),
        Check(
            lambda values: not all(values["full"]),
            "layer_types must have at least one layer without attention, but all layers have attention.",
        ),
    )


_HYBRID_SETTINGS = hybrid_settings()


# --- Tensors that Qwen3-Next and Qwen3.5 share ---

LINEAR = LAYER + "linear_attn."
KEYS, VALUES = "(key_heads key_dim)", "(heads value_dim)"
_QUERY = "(heads head_dim) embed -> embed heads head_dim"
_KEY_TAPS = f"{KEYS} 1 taps -> key_heads key_dim taps"
INTO_KEYS = f"{KEYS} embed -> embed key_heads key_dim"
INTO_VALUES = f"{VALUES} embed -> embed heads value_dim"
_SHARED_WEIGHTS = (
    *PRE_NORMS,
    *(row for row in self_attention(LAYER) if row.path != "mixer.query"),
    *sharing(LAYER + "self_attn.q_proj.weight", ("mixer.query", _QUERY), ("mixer.gate", _QUERY), within="heads"),
    *sharing(
        LINEAR + "conv1d.weight",
        ("mixer.query_taps", _KEY_TAPS),
        ("mixer.key_taps", _KEY_TAPS),
        ("mixer.value_taps", f"{VALUES} 1 taps -> heads value_dim taps"),
    ),
    Weight(LINEAR + "A_log", "mixer.a_log", "heads -> heads"),
    Weight(LINEAR + "dt_bias", "mixer.dt_bias", "heads -> heads"),
    Weight(LINEAR + "norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(LINEAR + "out_proj.weight", "mixer.out", f"embed {VALUES} -> heads value_dim embed"),
)


def with_depth_rows(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the weight rows of the decoder layers, followed by the corresponding rows of the MTP layer."""
    return (*weights, *mtp_rows(weights, LAYER, "mtp.layers.{depth}."))


_MTP_WEIGHTS = (
    *joined_kernels("mtp.fc.weight", "mtp.depth."),
    Weight("mtp.pre_fc_norm_embedding.weight", "mtp.depth.embed_norm.scale", "norm -> norm"),
    Weight("mtp.pre_fc_norm_hidden.weight", "mtp.depth.stream_norm.scale", "norm -> norm"),
    Weight("mtp.norm.weight", "mtp.depth.final_norm.scale", "norm -> norm"),
)


# --- Qwen3.5 ---

_SECTIONS = (11, 11, 10)  # M-RoPE sections for time, height and width
IGNORED_STATE_KEYS = {"mamba_ssm_dtype": "recurrent states are always float32"}


def qwen3_5(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    mlp: MLPConfig | ExpertsConfig,
    full: tuple[bool, ...] = (),
    rope: Rope = Rope(theta=ROPE.theta, fraction=ROPE.fraction, sections=_SECTIONS),
    depths: int = 0,
) -> DecoderConfig:
    """Return the configuration of a decoder with Qwen3.5 blocks.

    **Arguments:**

    - `shape`: sizes of the decoder and of attention.
    - `delta`: gated delta net of the layers without attention.
    - `mlp`: MLP or experts of all layers.
    - `full`: whether each layer has attention; (): every fourth layer has attention.
    - `rope`: rotary embedding of attention.
    - `depths`: number of MTP layers, 0 or 1.
    """
    full = full or tuple((layer + 1) % 4 == 0 for layer in range(shape.num_layers))
    return qwen3_next(shape, delta=delta, full=full, mlps=(mlp,) * shape.num_layers, rope=rope, depths=depths)


_QWEN3_5_SETTINGS = (
    Only("attn_output_gate", True),
    Only("output_gate_type", "swish"),
    Only("mtp_use_dedicated_embeddings", False),
    *_HYBRID_SETTINGS,
    rope_settings(fraction=0.25, sections=_SECTIONS),
    *depth_settings("mtp_num_hidden_layers"),
)


# `in_proj_qkv` contains the queries of all heads, then all keys, then all values.
QWEN3_5_WEIGHTS = (
    *_SHARED_WEIGHTS,
    *sharing(
        LINEAR + "in_proj_qkv.weight",
        ("mixer.query", INTO_KEYS),
        ("mixer.key", INTO_KEYS),
        ("mixer.value", INTO_VALUES),
    ),
    Weight(LINEAR + "in_proj_z.weight", "mixer.gate", INTO_VALUES),
    Weight(LINEAR + "in_proj_b.weight", "mixer.beta", "heads embed -> embed heads"),
    Weight(LINEAR + "in_proj_a.weight", "mixer.dt", "heads embed -> embed heads"),
)


# --- Qwen3-Next ---


def _qwen3_next(
    shape: DecoderSizes, *, experts: ExpertsConfig, dense_layers: frozenset[int], **options: Any
) -> DecoderConfig:
    mlps = tuple(shape.mlp() if index in dense_layers else experts for index in range(shape.num_layers))
    return moe.need_experts(qwen3_next(shape, mlps=mlps, **options))


_NEXT_EXPERTS = (*expert_settings(num=512, chosen=10), Flag("norm_topk_prob", "experts.router.renormalize", True))
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    settings=(
        Defaults({"intermediate_size": 5632}),
        decoder_sizes(num_kv_heads=2, head_dim=256, keys=NO_BIAS),
        Group("experts", qwen_experts, _NEXT_EXPERTS, uses=("shape",)),
        moe.sparse_steps(),
        *_HYBRID_SETTINGS,
        rope_settings(fraction=0.25),
        *depth_settings("num_nextn_predict_layers", always=False),
    ),
    build=_qwen3_next,
    weights=(
        *ENDS,
        *with_depth_rows(
            (
                *_SHARED_WEIGHTS,
                *GATED_MLP,
                *EXPERTS,
                *sharing(  # For each key head: its query, its key, and the values and gates of its value heads.
                    LINEAR + "in_proj_qkvz.weight",
                    ("mixer.query", INTO_KEYS),
                    ("mixer.key", INTO_KEYS),
                    ("mixer.value", INTO_VALUES),
                    ("mixer.gate", INTO_VALUES),
                    within="key_heads",
                ),
                *sharing(
                    LINEAR + "in_proj_ba.weight",
                    ("mixer.beta", "heads embed -> embed heads"),
                    ("mixer.dt", "heads embed -> embed heads"),
                    within="key_heads",
                ),
            )
        ),
        *_MTP_WEIGHTS,
    ),
    fused=with_depth_rows(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    with_depths=with_depths,
)


# --- Qwen3.5 with dense MLPs ---


QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    settings=(
        Defaults({"intermediate_size": 12_288}),
        decoder_sizes(num_kv_heads=4, head_dim=256, keys=NO_BIAS),
        Rule("mlp", lambda fields, values: values["shape"].mlp()),
        *_QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *GATED_MLP)), *_MTP_WEIGHTS),
    ignored_keys=IGNORED_STATE_KEYS,
    with_depths=with_depths,
)


_QWEN3_5_BASE = dict(model_type="qwen3_5_text", vocab_size=248_320, rope_theta=10_000_000.0)


# --- Qwen3.5 with experts: routing weights are always renormalized ---


QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        moe.mlp_like_experts(512),
        decoder_sizes(num_kv_heads=2, head_dim=256, keys=NO_BIAS, paths={"intermediate_size": None}),
        Group("mlp", qwen_experts, expert_settings(num=256, chosen=8), uses=("shape",)),
        *_QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *EXPERTS)), *_MTP_WEIGHTS),
    fused=with_depth_rows(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_STATE_KEYS,
    with_depths=with_depths,
)


_QWEN3_5_MOE_BASE = dict(
    model_type="qwen3_5_moe_text", vocab_size=248_320, num_attention_heads=32, rope_theta=10_000_000.0
)


FAMILIES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)

MODELS = {
    "qwen3-next-80b": dict(
        model_type="qwen3_next", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
        rope_theta=10_000_000.0,
    ),
    "qwen3.5-0.8b": _QWEN3_5_BASE | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, intermediate_size=3584,
        linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "qwen3.5-2b": _QWEN3_5_BASE | dict(
        hidden_size=2048, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2, intermediate_size=6144,
        linear_num_value_heads=16, tie_word_embeddings=True,
    ),
    "qwen3.5-4b": _QWEN3_5_BASE | dict(
        hidden_size=2560, num_hidden_layers=32, num_attention_heads=16, intermediate_size=9216,
        tie_word_embeddings=True,
    ),
    "qwen3.5-9b": _QWEN3_5_BASE | dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=16),
    "qwen3.5-27b": _QWEN3_5_BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, intermediate_size=17_408,
        linear_num_value_heads=48,
    ),
    "qwen3.5-35b-a3b": _QWEN3_5_MOE_BASE | dict(hidden_size=2048, num_hidden_layers=40, num_attention_heads=16),
    "qwen3.5-122b-a10b": _QWEN3_5_MOE_BASE | dict(
        hidden_size=3072, num_hidden_layers=48, linear_num_value_heads=64, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "qwen3.5-397b-a17b": _QWEN3_5_MOE_BASE | dict(
        hidden_size=4096, num_hidden_layers=60, linear_num_value_heads=64, moe_intermediate_size=1024, num_experts=512,
        num_experts_per_tok=10, shared_expert_intermediate_size=1024,
    ),
}  # fmt: skip
