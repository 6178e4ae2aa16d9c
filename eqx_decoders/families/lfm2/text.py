"""LFM2 (Liquid AI 2025): layers of gated short convolutions, and of attention with normalized queries and keys."""

import functools
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    LAYER,
    DecoderSizes,
    decoder_sizes,
    ends,
    hybrid_layers,
    read_layer_indices,
    renamed,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Number, Renamed, Rule, Values
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def lfm2(
    shape: DecoderSizes,
    *,
    full: tuple[bool, ...],
    convolution: GatedConvolutionConfig,
    rope: Rope = Rope(theta=1e6),
    num_dense_layers: int | None = None,
    **expert_options: Any,
) -> DecoderConfig:
    """Return a decoder with attention or a gated convolution in each layer.

    Raises ConfigError if `num_dense_layers` is not below the number of layers.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `full`: for each layer, whether it has attention.
    - `convolution`: the mixer of the other layers.
    - `rope`: rotary embedding of attention.
    - `num_dense_layers`: number of layers before the first layer with experts; None: no layer has experts.
    - `expert_options`: arguments of `DecoderSizes.experts`.
    """
    attention = shape.attention(rope=rope, qk_norm=shape.qk_norm)
    mixers = [attention if has_attention else convolution for has_attention in full]
    if num_dense_layers is None:
        return shape.decoder(shape.block(mixer) for mixer in mixers)
    experts = shape.experts(**expert_options)
    blocks = (shape.block(mixer, experts if index >= num_dense_layers else None) for index, mixer in enumerate(mixers))
    return moe.need_experts(shape.decoder(blocks))


# --- config.json ---


def _convolution(shape: DecoderSizes, **options: Any) -> GatedConvolutionConfig:
    return GatedConvolutionConfig(channels=shape.embed_dim, **options)


def _convert_layer_indices(fields: Fields, values: Values) -> None:
    """Convert `full_attn_idxs`, which old files have, to `layer_types`."""
    num_layers = values["shape"].num_layers
    indices = read_layer_indices(fields, "full_attn_idxs", num_layers)
    if indices:
        types = ["full_attention" if index in indices else "conv" for index in range(num_layers)]
        fields.supply("layer_types", types)


_KEY_NAMES = {"rms_norm_eps": "norm_eps", "attention_bias": None, "hidden_act": None}
SETTINGS = (
    Renamed({"tie_embedding": "tie_word_embeddings"}),
    decoder_sizes(num_kv_heads=8, eps=1e-5, tied=True, keys=_KEY_NAMES),
    Group(
        "convolution",
        _convolution,
        (Integer("conv_L_cache", "convolution.taps", 3), Flag("conv_bias", "convolution.bias", False)),
        uses=("shape",),
        layer="convolution",
    ),
    Rule("", _convert_layer_indices),
    hybrid_layers(AttentionConfig, other="conv"),
    rope_settings(theta=1e6),
)


# --- tensors ---

MLP = LAYER + "feed_forward."
_ATTENTION_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MLP_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WEIGHTS = (
    *ends(final_norm="model.embedding_norm"),
    *norm_weights(LAYER, pre_mixer_norm="operator_norm", pre_mlp_norm="ffn_norm"),
    *renamed(self_attention(LAYER), _ATTENTION_NAMES),
    Weight(LAYER + "conv.in_proj.weight", "mixer.inputs", "(inputs mlp) embed -> embed inputs mlp"),
    Weight(LAYER + "conv.in_proj.bias", "mixer.inputs_bias", "(inputs mlp) -> inputs mlp"),
    Weight(LAYER + "conv.conv.weight", "mixer.taps", "mlp 1 taps -> mlp taps"),
    Weight(LAYER + "conv.conv.bias", "mixer.taps_bias", "mlp -> mlp"),
    Weight(LAYER + "conv.out_proj.weight", "mixer.out", "embed mlp -> mlp embed"),
    Weight(LAYER + "conv.out_proj.bias", "mixer.out_bias", "embed -> embed"),
    *renamed(gated_mlp(MLP), MLP_NAMES),
)


# --- LFM2 ---


def _adjust_mlp_dim(fields: Fields, values: Values) -> None:
    """Replace `intermediate_size` by the MLP width that transformers computes from it."""
    size = fields.integer("intermediate_size", 12_288)
    multiple = fields.integer("block_multiple_of", 256)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, null=None)
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if factor is not None:
            size = int(factor * size)
        size = -(-size // multiple) * multiple  # round up
    fields.content["intermediate_size"] = size


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    settings=(
        Renamed({"block_ff_dim": "intermediate_size"}),
        Rule("", _adjust_mlp_dim, lambda config: {"block_auto_adjust_ff_dim": False}),
        *SETTINGS,
    ),
    build=lfm2,
    weights=WEIGHTS,
    ignored_keys={
        "block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu block_use_xavier_init "
        "conv_dim conv_dim_out conv_use_xavier_init num_heads use_pos_enc": "transformers does not read it",
    },
)  # fmt: skip


_LFM2_BASE = dict(
    model_type="lfm2",
    vocab_size=65_536,
    num_hidden_layers=16,
    block_auto_adjust_ff_dim=False,
    layer_types=["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
)


# --- LFM2-MoE: dense layers, then layers with experts, whose router has sigmoid scores ---


_router = functools.partial(RouterConfig, score="sigmoid", order="score_first")
LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    settings=(
        *SETTINGS,
        Integer("moe_intermediate_size", "experts.mlp_dim", 1792, name="mlp_dim"),
        *moe.expert_counts("num_experts", num=32, chosen=4),
        moe.num_dense_layers("num_dense_layers", 2),
        Group(
            "router",
            _router,
            (
                Flag("use_expert_bias", "experts.router.selection_bias", True),
                Flag("norm_topk_prob", "experts.router.renormalize", True),
                Number("routed_scaling_factor", "experts.router.scaling_factor", 1.0),
            ),
        ),
    ),
    build=lfm2,
    weights=(
        *WEIGHTS,
        *renamed(moe.separate_experts(MLP, bias="expert_bias"), MLP_NAMES),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


FAMILIES = (LFM2, LFM2_MOE)

MODELS = {
    "lfm2-350m": _LFM2_BASE | dict(hidden_size=1024, num_attention_heads=16, intermediate_size=4608),
    "lfm2-700m": _LFM2_BASE | dict(hidden_size=1536, num_attention_heads=24, intermediate_size=6912),
    "lfm2-1.2b": _LFM2_BASE | dict(hidden_size=2048, num_attention_heads=32, intermediate_size=8192),
    "lfm2-8b-a1b": dict(
        model_type="lfm2_moe", vocab_size=65_536, hidden_size=2048, num_hidden_layers=24, num_attention_heads=32,
        intermediate_size=7168,
        layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    ),
}  # fmt: skip
