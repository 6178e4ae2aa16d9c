"""Qwen3-Next (Qwen Team 2025): three gated delta nets to one gated attention, and experts.

A layer of multi-token prediction stands beside the others in published checkpoints, and not in `config.json`.
"""

import dataclasses
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    ENDS,
    GATED_MLP,
    NO_BIAS,
    PRE_NORMS,
    DecoderSizes,
    first_mixer,
    gated_mlp,
    read_hybrid_layers,
    read_shape,
    self_attention,
    write_hybrid_layers,
    write_sizes,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family, Weight, at_depths, sharing
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig
from eqx_decoders.model.mtp import MTPConfig


ROPE = Rope(theta=1e7, fraction=0.25)


def qwen3_next(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    full: tuple[bool, ...],
    mlps: tuple[MLPConfig | ExpertsConfig, ...],
    rope: Rope = ROPE,
) -> DecoderConfig:
    """A decoder of Qwen3-Next blocks: `full` says which layers have attention, `mlps` has what follows in each."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=norm), output_gate=True)

    def block(has_attention: bool, mlp: MLPConfig | ExpertsConfig) -> BlockConfig:
        return shape.block(attention if has_attention else delta, mlp, norm)

    return shape.decoder(map(block, full, mlps), norm)


def every_fourth(layers: int) -> tuple[bool, ...]:
    """Attention in every fourth layer."""
    return tuple((index + 1) % 4 == 0 for index in range(layers))


def qwen_experts(
    shape: DecoderSizes, *, dim: int, shared_dim: int, renormalize: bool = True, **options: Any
) -> ExpertsConfig:
    """Experts of width `dim`, and one of `shared_dim` whose part a gate decides token by token."""
    return shape.experts(
        mlp_dim=dim,
        shared=MLPConfig(mlp_dim=shared_dim, activation=shape.activation),
        shared_gate=True,
        router=RouterConfig(order="score_first", renormalize=renormalize),
        **options,
    )


def delta_net(shape: DecoderSizes, *, key_heads: int = 16, heads: int = 32, key_dim: int = 128, value_dim: int = 128,
              taps: int = 4) -> GatedDeltaNetConfig:  # fmt: skip
    """The gated delta net of a Qwen."""
    return GatedDeltaNetConfig(
        num_key_heads=key_heads,
        num_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        taps=taps,
        norm=RMSNormConfig(eps=shape.eps),
    )


def with_depth(config: DecoderConfig) -> DecoderConfig:
    """With a layer of multi-token prediction: attention, and what follows it in the last layer that has attention."""
    block = next(block for block in reversed(config.blocks) if isinstance(block.mixer, AttentionConfig))
    assert block.pre_mixer_norm is not None
    mtp = MTPConfig(num_depths=1, block=block, norm=block.pre_mixer_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def read_depth(fields: Fields, key: str, config: DecoderConfig) -> DecoderConfig:
    """With a layer of multi-token prediction if the number under `key` is 1."""
    depths = fields.integer(key, 0, least=0)
    if depths > 1:
        raise fields.error(f"{key}={depths} is not known here: one layer is.")
    return with_depth(config) if depths else config


def write_depth(config: DecoderConfig, key: str) -> dict[str, Any]:
    """What `read_depth` reads."""
    return {key: 0 if config.mtp is None else config.mtp.num_depths}


def read_hybrid(fields: Fields, shape: DecoderSizes) -> tuple[GatedDeltaNetConfig, tuple[bool, ...]]:
    """The gated delta net, and which layers have attention in its place."""
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
    """What `read_hybrid` reads, the sizes of all layers, and the rotary embedding."""
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
    """The experts; the last two arguments are what transformers takes where a key is missing."""
    return qwen_experts(
        shape,
        num_experts=fields.integer("num_experts", num),
        num_experts_per_token=fields.integer("num_experts_per_tok", per_token),
        dim=fields.integer("moe_intermediate_size", 512),
        shared_dim=fields.integer("shared_expert_intermediate_size", 512),
        renormalize=renormalize,
    )


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """What `read_experts` reads."""
    shared = moe.experts_of(config).shared
    sizes = moe.write_experts(config, count="num_experts", width="moe_intermediate_size")
    return sizes | {"shared_expert_intermediate_size": shared.mlp_dim if shared else 0}


def _read(fields: Fields) -> DecoderConfig:
    fields.content.setdefault("intermediate_size", 5632)
    shape = read_shape(fields, num_kv_heads=2, head_dim=256, keys=NO_BIAS)
    experts = read_experts(fields, shape, renormalize=fields.flag("norm_topk_prob", True), num=512, per_token=10)
    step, only = fields.integer("decoder_sparse_step", 1), fields.numbers("mlp_only_layers")
    delta, full = read_hybrid(fields, shape)
    dense = [index in only or (index + 1) % step != 0 for index in range(shape.num_layers)]
    mlps = tuple(shape.mlp() if each else experts for each in dense)
    config = qwen3_next(shape, delta=delta, full=full, mlps=mlps, rope=read_rope(fields, fraction=0.25))
    return read_depth(fields, "num_nextn_predict_layers", moe.need_experts(fields, config))


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts, sparse = moe.experts_of(config), moe.sparse_layers(config)
    settings = {
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "norm_topk_prob": experts.router.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index in range(len(config.blocks)) if index not in sparse],
    }
    depth = {} if config.mtp is None else write_depth(config, "num_nextn_predict_layers")
    return write_hybrid(config) | write_experts(config) | settings | depth


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
# what the families of this kind have in common
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
    """The rows with those of the layer of multi-token prediction."""
    return (*weights, *at_depths(weights, LAYER, "mtp.layers.{depth}."))


DEPTH = (
    Weight("mtp.fc.weight", "mtp.depth.kernel", "embed joined -> joined embed"),
    Weight("mtp.pre_fc_norm_embedding.weight", "mtp.depth.embed_norm.scale", "norm -> norm"),
    Weight("mtp.pre_fc_norm_hidden.weight", "mtp.depth.stream_norm.scale", "norm -> norm"),
    Weight("mtp.norm.weight", "mtp.depth.final_norm.scale", "norm -> norm"),
)
FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *ENDS,
        *with_depths(
            (
                *SHARED_WEIGHTS,
                *GATED_MLP,
                *EXPERTS,
                *sharing(  # with each key head the value heads that use it
                    LINEAR + "in_proj_qkvz.weight",
                    *(("mixer.query", INTO_KEYS), ("mixer.key", INTO_KEYS)),
                    *(("mixer.value", INTO_VALUES), ("mixer.gate", INTO_VALUES)),
                    within="key_heads",
                ),
                *sharing(
                    LINEAR + "in_proj_ba.weight",
                    *((f"mixer.{name}", "heads embed -> embed heads") for name in ("beta", "dt")),
                    within="key_heads",
                ),
            )
        ),
        *DEPTH,
    ),
    fused=with_depths(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    with_depth=with_depth,
)


def _80b() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=151_936, embed_dim=2048, num_layers=48, num_heads=16, num_kv_heads=2, head_dim=256, mlp_dim=5120
    )
    experts = qwen_experts(shape, num_experts=512, num_experts_per_token=10, dim=512, shared_dim=512)
    return qwen3_next(shape, delta=delta_net(shape), full=every_fourth(48), mlps=(experts,) * 48)


MODELS = {"qwen3-next-80b": _80b}
