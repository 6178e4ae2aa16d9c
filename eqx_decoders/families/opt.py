"""OPT (Zhang et al. 2022): learned positions from the third row on, LayerNorm, ReLU without a gate, biases."""

import functools

from eqx_decoders.families.common import (
    DecoderSizes,
    decoder_sizes,
    gpt_sizes,
    norm_weights,
    plain_mlp,
    renamed,
    self_attention,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Check, Flag, Integer, Only
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.embedding.embedding import LearnedPositions
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-5)


def opt(shape: DecoderSizes, *, max_positions: int = 2048, bias: bool = True) -> DecoderConfig:
    """Return a decoder of OPT blocks."""
    mixer, mlp = shape.attention(rope=None, qkv_bias=bias, out_bias=bias), shape.mlp(gated=False, bias=bias)
    positions = LearnedPositions(max_positions=max_positions, offset=2)
    return shape.decoder(shape.block(mixer, mlp, _NORM), _NORM, positions=positions)


_KEYS = {
    "intermediate_size": "ffn_dim",
    "hidden_act": "activation_function",
    "initializer_range": "init_std",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "attention_bias", "rms_norm_eps")),
}
_PREFIX, _LAYER = "model.decoder.", "model.decoder.layers.{layer}."
FAMILY = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    settings=(
        decoder_sizes(tied=True, activation="relu", keys=_KEYS),
        Integer("max_position_embeddings", "positions.max_positions", 2048, name="max_positions"),
        Flag("enable_bias", "attention.qkv_bias", True, name="bias"),
        Integer("word_embed_proj_dim", "embed_dim", lambda values: values["shape"].embed_dim, name="_embed"),
        Check(
            lambda values: values["_embed"] == values["shape"].embed_dim,
            "word_embed_proj_dim={_embed} must be hidden_size: OPT-350M's projections are not implemented.",
        ),
        Only("do_layer_norm_before", True, written=True),
        Only("layer_norm_elementwise_affine", True, written=True),
        Only("_remove_final_layer_norm", False, written=True),
    ),
    build=opt,
    weights=(
        Weight(_PREFIX + "embed_tokens.weight", "embedding.table", "vocab embed -> vocab embed"),
        Weight(_PREFIX + "embed_positions.weight", "positions.table", "positions embed -> positions embed"),
        *norm_weights(_PREFIX, final_norm="final_layer_norm"),
        *norm_weights(_LAYER, pre_mixer_norm="self_attn_layer_norm", pre_mlp_norm="final_layer_norm"),
        *renamed(self_attention(_LAYER), {"o_proj": "out_proj"}),
        *plain_mlp(_LAYER, up="fc1", down="fc2"),
        Weight("lm_head.weight", "head.kernel", "vocab embed -> embed vocab"),
    ),
    ignored_keys=dict.fromkeys(("dropout", "layerdrop", "activation_dropout"), "drops something in training alone"),
)

_sizes = functools.partial(gpt_sizes, vocab_size=50_272, tied=True, activation="relu")
_SIZES = {
    "opt-125m": _sizes(768, 12, 12),
    "opt-1.3b": _sizes(2048, 24, 32),
    "opt-2.7b": _sizes(2560, 32, 32),
    "opt-6.7b": _sizes(4096, 32, 32),
    "opt-13b": _sizes(5120, 40, 40),
    "opt-30b": _sizes(7168, 48, 56),
    "opt-66b": _sizes(9216, 64, 72),
}

MODELS = {name: functools.partial(opt, shape) for name, shape in _SIZES.items()}
