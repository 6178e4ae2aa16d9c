"""Blocks, settings and tensors that Qwen3-Next and Qwen3.5 share: gated delta nets, gated attention and experts."""

import dataclasses
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    NO_BIAS,
    PRE_NORMS,
    DecoderSizes,
    first_mixer,
    gated_mlp,
    read_hybrid_layers,
    self_attention,
    write_hybrid_layers,
    write_sizes,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.weight_rows import Weight, mtp_rows, sharing
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
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
) -> DecoderConfig:
    """Return a decoder of Qwen3-Next blocks with `mlps`, and attention in the layers where `full` is True."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True)

    def block(has_attention: bool, mlp: MLPConfig | ExpertsConfig) -> BlockConfig:
        return shape.block(attention if has_attention else delta, mlp, norm)

    return shape.decoder(map(block, full, mlps), norm)


def every_fourth(layers: int) -> tuple[bool, ...]:
    """Return flags for attention in every fourth layer."""
    return tuple((index + 1) % 4 == 0 for index in range(layers))


def qwen_experts(
    shape: DecoderSizes, *, dim: int, shared_dim: int, renormalize: bool = True, **options: Any
) -> ExpertsConfig:
    """Return experts of width `dim`, and a shared one of `shared_dim` with a gate for each token."""
    return shape.experts(
        mlp_dim=dim,
        shared=MLPConfig(mlp_dim=shared_dim, activation=shape.activation),
        shared_gate=True,
        router=RouterConfig(order="score_first", renormalize=renormalize),
        **options,
    )


def delta_net(shape: DecoderSizes, *, key_heads: int = 16, heads: int = 32, key_dim: int = 128, value_dim: int = 128,
              taps: int = 4) -> GatedDeltaNetConfig:  # fmt: skip
    """Return the gated delta net of a Qwen."""
    return GatedDeltaNetConfig(
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
        norm=RMSNormConfig(eps=shape.eps),
    )


def with_depth(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder with multi-token prediction, whose block is the last one with attention."""
    block = next(block for block in reversed(config.blocks) if isinstance(block.mixer, AttentionConfig))
    assert block.pre_mixer_norm is not None
    mtp = MTPConfig(num_depths=1, block=block, norm=block.pre_mixer_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def read_depth(fields: Fields, key: str, config: DecoderConfig) -> DecoderConfig:
    """Return the decoder with multi-token prediction if the number under `key` is 1."""
    depths = fields.integer(key, 0, least=0)
    if depths > 1:
        raise fields.error(f"{key}={depths} is not known here: one layer is.")
    return with_depth(config) if depths else config


def write_depth(config: DecoderConfig, key: str) -> dict[str, Any]:
    """Return the key that `read_depth` reads."""
    return {key: 0 if config.mtp is None else config.mtp.num_depths}


def read_hybrid(fields: Fields, shape: DecoderSizes) -> tuple[GatedDeltaNetConfig, tuple[bool, ...]]:
    """Read the gated delta net, and flags for the layers that have attention in its place."""
    fields.allow_only("attention_bias", False)
    fields.allow_only("hidden_act", "silu")
    delta = delta_net(
        shape,
        key_heads=fields.integer("linear_num_key_heads", 16),
        heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4),
    )
    full = read_hybrid_layers(fields, shape.num_layers, fields.integer("full_attention_interval", 4))
    if all(full):
        raise fields.error("all layers have attention: check layer_types.")
    return delta, full


def write_hybrid(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_hybrid` reads, the sizes of all layers, and the rotary embedding."""
    delta = first_mixer(config, GatedDeltaNetConfig)
    sizes = {
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
        "attention_bias": False,
    }
    layers = write_hybrid_layers(config, AttentionConfig)
    return write_sizes(config, NO_BIAS) | sizes | layers | write_rope(config, partial=True)


def read_experts(fields: Fields, shape: DecoderSizes, *, renormalize: bool, num: int, per_token: int) -> ExpertsConfig:
    """Read the experts; the last two arguments are transformers' defaults."""
    return qwen_experts(
        shape,
        num_experts=fields.integer("num_experts", num),
        num_experts_per_token=fields.integer("num_experts_per_tok", per_token),
        dim=fields.integer("moe_intermediate_size", 512),
        shared_dim=fields.integer("shared_expert_intermediate_size", 512),
        renormalize=renormalize,
    )


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_experts` reads."""
    shared = moe.experts_of(config).shared
    sizes = moe.write_experts(config, count="num_experts", width="moe_intermediate_size")
    return sizes | {"shared_expert_intermediate_size": shared.mlp_dim if shared else 0}


LAYER = "model.layers.{layer}."
LINEAR = LAYER + "linear_attn."
_MLP = LAYER + "mlp."
KEYS, VALUES = "(key_heads key_dim)", "(heads value_dim)"
_QUERY = "(heads head_dim) embed -> embed heads head_dim"
# queries, keys, values
CONVOLUTIONS = sharing(
    LINEAR + "conv1d.weight",
    *((f"mixer.{name}_taps", f"{KEYS} 1 taps -> key_heads key_dim taps") for name in ("query", "key")),
    ("mixer.value_taps", f"{VALUES} 1 taps -> heads value_dim taps"),
)
INTO_KEYS = f"{KEYS} embed -> embed key_heads key_dim"
INTO_VALUES = f"{VALUES} embed -> embed heads value_dim"
# rows of all families of this kind
SHARED_WEIGHTS = (
    *PRE_NORMS,
    *(row for row in self_attention(LAYER) if row.path != "mixer.query"),
    *sharing(LAYER + "self_attn.q_proj.weight", ("mixer.query", _QUERY), ("mixer.gate", _QUERY), within="heads"),
    *CONVOLUTIONS,
    Weight(LINEAR + "A_log", "mixer.a_log", "heads -> heads"),
    Weight(LINEAR + "dt_bias", "mixer.dt_bias", "heads -> heads"),
    Weight(LINEAR + "norm.weight", "mixer.norm.scale", "norm -> norm"),
    Weight(LINEAR + "out_proj.weight", "mixer.out", f"embed {VALUES} -> heads value_dim embed"),
)
EXPERTS = (
    *moe.separate_experts(_MLP),
    *gated_mlp(_MLP + "shared_expert.", "mlp.shared."),
    Weight(_MLP + "shared_expert_gate.weight", "mlp.shared_gate", "1 embed -> embed"),
)
FUSED_EXPERTS = moe.fused_experts(_MLP)


def with_depths(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the rows with those of the layer of multi-token prediction."""
    return (*weights, *mtp_rows(weights, LAYER, "mtp.layers.{depth}."))


DEPTH = (
    Weight("mtp.fc.weight", "mtp.depth.kernel", "embed joined -> joined embed"),
    Weight("mtp.pre_fc_norm_embedding.weight", "mtp.depth.embed_norm.scale", "norm -> norm"),
    Weight("mtp.pre_fc_norm_hidden.weight", "mtp.depth.stream_norm.scale", "norm -> norm"),
    Weight("mtp.norm.weight", "mtp.depth.final_norm.scale", "norm -> norm"),
)


# --- Qwen3.5 ---

_SECTIONS = (11, 11, 10)
_DEPTH_KEY = "mtp_num_hidden_layers"
IGNORED_STATE_KEYS = {"mamba_ssm_dtype": "states are in float32"}


def qwen3_5(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    mlp: MLPConfig | ExpertsConfig,
    full: tuple[bool, ...] = (),
    rope: Rope = Rope(theta=ROPE.theta, fraction=ROPE.fraction, sections=_SECTIONS),
) -> DecoderConfig:
    """Return a decoder of Qwen3.5 blocks, with attention where `full` is True, or in every fourth layer."""
    full = full or every_fourth(shape.num_layers)
    return qwen3_next(shape, delta=delta, full=full, mlps=(mlp,) * shape.num_layers, rope=rope)


def read_qwen3_5(fields: Fields, shape: DecoderSizes, mlp: MLPConfig | ExpertsConfig) -> DecoderConfig:
    """Read the configuration with this MLP."""
    fields.allow_only("attn_output_gate", True)
    fields.allow_only("output_gate_type", "swish")
    fields.allow_only("mtp_use_dedicated_embeddings", False)
    delta, full = read_hybrid(fields, shape)
    rope = read_rope(fields, fraction=0.25, sections=_SECTIONS)
    return read_depth(fields, _DEPTH_KEY, qwen3_5(shape, delta=delta, mlp=mlp, full=full, rope=rope))


def write_qwen3_5(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_qwen3_5` reads."""
    return write_hybrid(config) | write_depth(config, _DEPTH_KEY)


# queries, keys and values of all heads one after the other, and tensors for the rest
QWEN3_5_WEIGHTS = (
    *SHARED_WEIGHTS,
    *sharing(
        LINEAR + "in_proj_qkv.weight",
        *(("mixer.query", INTO_KEYS), ("mixer.key", INTO_KEYS), ("mixer.value", INTO_VALUES)),
    ),
    Weight(LINEAR + "in_proj_z.weight", "mixer.gate", INTO_VALUES),
    Weight(LINEAR + "in_proj_b.weight", "mixer.beta", "heads embed -> embed heads"),
    Weight(LINEAR + "in_proj_a.weight", "mixer.dt", "heads embed -> embed heads"),
)
