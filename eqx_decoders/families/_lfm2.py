"""Blocks, settings and tensors that LFM2 and LFM2-MoE share."""

from typing import Any

from eqx_decoders.families.common import (
    ENDS,
    DecoderSizes,
    decoder_sizes,
    gated_mlp,
    norm_weights,
    renamed,
    self_attention,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Integer, Renamed, Rule, Setting, Values
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.recurrent.gated_conv import GatedConvolutionConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def lfm2(
    shape: DecoderSizes,
    *,
    full: tuple[bool, ...],
    taps: int = 3,
    bias: bool = False,
    rope: Rope = Rope(theta=1e6),
    dense_layers: int | None = None,
    **experts: Any,
) -> DecoderConfig:
    """Return a decoder whose layers have attention, where `full` says so, or a convolution.

    `dense_layers` are those that begin a model with experts; None: all are dense.
    """
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=shape.norm))
    convolution = GatedConvolutionConfig(channels=shape.embed_dim, taps=taps, bias=bias)
    wide = None if dense_layers is None else shape.experts(**experts)
    count = len(full) if dense_layers is None else dense_layers
    mixers = (attention if has_attention else convolution for has_attention in full)
    return shape.decoder(shape.block(mixer, wide if index >= count else None) for index, mixer in enumerate(mixers))


# --- config.json ---

_TYPES = ("conv", "full_attention")


def _read_layers(fields: Fields, values: Values) -> tuple[bool, ...]:
    layers, indices = values["shape"].num_layers, fields.numbers("full_attn_idxs", (), null=())
    types = fields.words("layer_types", _TYPES, layers)
    full = [index in indices for index in range(layers)] if types is None else [kind == _TYPES[1] for kind in types]
    if not any(full):
        raise fields.error("no layer has attention: check layer_types.")
    return tuple(full)


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    return {"layer_types": [_TYPES[isinstance(block.mixer, AttentionConfig)] for block in config.blocks]}


_KEYS = {"rms_norm_eps": "norm_eps", "attention_bias": None, "hidden_act": None}
_SIZES = decoder_sizes(num_kv_heads=8, eps=1e-5, tied=True, keys=_KEYS)


def settings(*before: Setting) -> tuple[Setting, ...]:
    """Return the rows of sizes, convolutions and kinds of layers, behind others."""
    return (
        *before,
        Renamed({"tie_embedding": "tie_word_embeddings"}),
        _SIZES,
        Integer("conv_L_cache", lambda config: _convolution(config).taps, 3, name="taps"),
        Flag("conv_bias", lambda config: _convolution(config).bias, False, name="bias"),
        Rule("full", _read_layers, _write_layers),
        rope_settings(theta=1e6),
    )


def _convolution(config: DecoderConfig) -> GatedConvolutionConfig:
    mixers = (block.mixer for block in config.blocks)
    found = next((mixer for mixer in mixers if isinstance(mixer, GatedConvolutionConfig)), None)
    return found or GatedConvolutionConfig(channels=config.embed_dim)


# --- tensors ---

_LAYER, MLP = "model.layers.{layer}.", "model.layers.{layer}.feed_forward."
_NAMES = {"o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
MLP_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
WEIGHTS = (
    *renamed(ENDS, {"model.norm": "model.embedding_norm"}),
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
