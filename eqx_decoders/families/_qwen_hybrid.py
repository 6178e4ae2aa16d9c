"""Blocks, settings and tensors that Qwen3-Next and Qwen3.5 share: gated delta nets, gated attention and experts."""

import dataclasses
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings
from eqx_decoders.families.common import PRE_NORMS, DecoderSizes, hybrid_layers
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check, Group, Integer, Only, Setting
from eqx_decoders.families.weight_rows import Weight, gated_mlp, joined_kernels, mtp_rows, self_attention, sharing
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
    depths: int = 0,
) -> DecoderConfig:
    """Return a decoder of Qwen3-Next blocks with `mlps`, and attention in the layers where `full` is True.

    `depths` is the number of layers of multi-token prediction, 0 or 1.
    """
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True)

    def block(has_attention: bool, mlp: MLPConfig | ExpertsConfig) -> BlockConfig:
        return shape.block(attention if has_attention else delta, mlp, norm)

    config = shape.decoder(map(block, full, mlps), norm)
    return with_depths(config, depths) if depths else config


def every_fourth(layers: int) -> tuple[bool, ...]:
    """Return flags for attention in every fourth layer."""
    return tuple((index + 1) % 4 == 0 for index in range(layers))


def qwen_experts(shape: DecoderSizes, *, renormalize: bool = True, **options: Any) -> ExpertsConfig:
    """Return experts, and a shared one with a gate for each token."""
    router = RouterConfig(order="score_first", renormalize=renormalize)
    return shape.experts(shared_gate=True, router=router, **options)


def delta_net(shape: DecoderSizes, **sizes: Any) -> GatedDeltaNetConfig:
    """Return the gated delta net of a Qwen, of the published sizes where `sizes` have no others."""
    published = dict(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128)
    return GatedDeltaNetConfig(norm=RMSNormConfig(eps=shape.eps), **{**published, **sizes})


def with_depths(config: DecoderConfig, depths: int = 1) -> DecoderConfig:
    """Return the decoder with multi-token prediction, whose block is the last one with attention."""
    block = next(block for block in reversed(config.blocks) if isinstance(block.mixer, AttentionConfig))
    assert block.pre_mixer_norm is not None
    mtp = MTPConfig(num_depths=depths, block=block, norm=block.pre_mixer_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


_DELTA = (
    Integer("linear_num_key_heads", "delta.num_key_heads", 16),
    Integer("linear_num_value_heads", "delta.num_heads", 32),
    Integer("linear_key_head_dim", "delta.key_dim", 128),
    Integer("linear_value_head_dim", "delta.value_dim", 128),
    Integer("linear_conv_kernel_dim", "delta.taps", 4),
)


# of Qwen3-Next and Qwen3.5: the gated delta net, and the layers that have attention in its place
def hybrid_settings(*delta: Setting, **words: str) -> tuple[Setting, ...]:
    """Return the rows with these ones more of the delta net; `words` are types of layers, as in `hybrid_layers`."""
    return (
        Only("attention_bias", False, written=True),
        Only("hidden_act", "silu"),
        Group("delta", delta_net, (*_DELTA, *delta), uses=("shape",)),
        Integer("full_attention_interval", None, 4, name="_interval"),
        hybrid_layers(AttentionConfig, **words),
        Check(lambda values: not all(values["full"]), "all layers have attention: check layer_types."),
    )


HYBRID_SETTINGS = hybrid_settings()


def expert_settings(*, num: int, chosen: int, expert_dim: int = 512, shared_dim: int = 512) -> tuple[Setting, ...]:
    """Return the rows of the experts; the arguments are transformers' defaults."""
    return (
        *moe.expert_counts("num_experts", num=num, chosen=chosen),
        Integer("moe_intermediate_size", "experts.mlp_dim", expert_dim),
        Integer("shared_expert_intermediate_size", "experts.shared.mlp_dim", shared_dim, name="shared_dim"),
    )


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


def with_depth_rows(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return the rows with those of the layer of multi-token prediction."""
    return (*weights, *mtp_rows(weights, LAYER, "mtp.layers.{depth}."))


DEPTH = (
    *joined_kernels("mtp.fc.weight", "mtp.depth."),
    Weight("mtp.pre_fc_norm_embedding.weight", "mtp.depth.embed_norm.scale", "norm -> norm"),
    Weight("mtp.pre_fc_norm_hidden.weight", "mtp.depth.stream_norm.scale", "norm -> norm"),
    Weight("mtp.norm.weight", "mtp.depth.final_norm.scale", "norm -> norm"),
)


# --- Qwen3.5 ---

_SECTIONS = (11, 11, 10)
IGNORED_STATE_KEYS = {"mamba_ssm_dtype": "states are in float32"}


def qwen3_5(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    mlp: MLPConfig | ExpertsConfig,
    full: tuple[bool, ...] = (),
    rope: Rope = Rope(theta=ROPE.theta, fraction=ROPE.fraction, sections=_SECTIONS),
    depths: int = 0,
) -> DecoderConfig:
    """Return a decoder of Qwen3.5 blocks, with attention where `full` is True, or in every fourth layer."""
    full = full or every_fourth(shape.num_layers)
    return qwen3_next(shape, delta=delta, full=full, mlps=(mlp,) * shape.num_layers, rope=rope, depths=depths)


# besides sizes and experts
QWEN3_5_SETTINGS = (
    Only("attn_output_gate", True),
    Only("output_gate_type", "swish"),
    Only("mtp_use_dedicated_embeddings", False),
    *HYBRID_SETTINGS,
    rope_settings(fraction=0.25, sections=_SECTIONS),
    *depth_settings("mtp_num_hidden_layers"),
)


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
