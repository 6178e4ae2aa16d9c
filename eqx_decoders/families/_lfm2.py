"""Blocks, settings and tensors that LFM2 and LFM2-MoE share."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, hybrid_layers, renamed
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Group, Integer, Renamed, Rule, Values
from eqx_decoders.families.weight_rows import Weight, gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def lfm2(
    shape: DecoderSizes,
    *,
    full: tuple[bool, ...],
    convolution: GatedConvolutionConfig | None = None,
    rope: Rope = Rope(theta=1e6),
    num_dense_layers: int | None = None,
    **experts: Any,
) -> DecoderConfig:
    """Return a decoder whose layers have attention, where `full` says so, or a convolution.

    `num_dense_layers` are those that begin a model with experts; None: all are dense.
    """
    attention = shape.attention(rope=rope, qk_norm=shape.qk_norm)
    convolution = convolution or GatedConvolutionConfig(channels=shape.embed_dim)
    wide = None if num_dense_layers is None else shape.experts(**experts)
    count = len(full) if num_dense_layers is None else num_dense_layers
    mixers = (attention if has_attention else convolution for has_attention in full)
    return shape.decoder(shape.block(mixer, wide if index >= count else None) for index, mixer in enumerate(mixers))


# --- config.json ---


def _convolution(shape: DecoderSizes, **options: Any) -> GatedConvolutionConfig:
    return GatedConvolutionConfig(channels=shape.embed_dim, **options)


def _list_layers(fields: Fields, values: Values) -> None:
    """Replace the numbers of the layers with attention, in old files, by the types of all."""
    full = fields.numbers("full_attn_idxs", (), null=())
    if full:
        types = ("full_attention" if index in full else "conv" for index in range(values["shape"].num_layers))
        fields.supply("layer_types", list(types))


_KEYS = {"rms_norm_eps": "norm_eps", "attention_bias": None, "hidden_act": None}
SETTINGS = (
    Renamed({"tie_embedding": "tie_word_embeddings"}),
    decoder_sizes(num_kv_heads=8, eps=1e-5, tied=True, keys=_KEYS),
    Group(
        "convolution",
        _convolution,
        (Integer("conv_L_cache", "convolution.taps", 3), Flag("conv_bias", "convolution.bias", False)),
        uses=("shape",),
        layer="convolution",
    ),
    Rule("", _list_layers),
    hybrid_layers(AttentionConfig, other="conv"),
    rope_settings(theta=1e6),
)


# --- tensors ---

_LAYER, MLP = "model.layers.{layer}.", "model.layers.{layer}.feed_forward."
_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MLP_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WEIGHTS = (
    *ends(final_norm="model.embedding_norm"),
    *norm_weights(_LAYER, pre_mixer_norm="operator_norm", pre_mlp_norm="ffn_norm"),
    *renamed(self_attention(_LAYER), _NAMES),
    Weight(_LAYER + "conv.in_proj.weight", "mixer.inputs", "(inputs mlp) embed -> embed inputs mlp"),
    Weight(_LAYER + "conv.in_proj.bias", "mixer.inputs_bias", "(inputs mlp) -> inputs mlp"),
    Weight(_LAYER + "conv.conv.weight", "mixer.taps", "mlp 1 taps -> mlp taps"),
    Weight(_LAYER + "conv.conv.bias", "mixer.taps_bias", "mlp -> mlp"),
    Weight(_LAYER + "conv.out_proj.weight", "mixer.out", "embed mlp -> mlp embed"),
    Weight(_LAYER + "conv.out_proj.bias", "mixer.out_bias", "embed -> embed"),
    *renamed(gated_mlp(MLP), MLP_NAMES),
)
