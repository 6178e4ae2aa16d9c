"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, LayerNorm, tanh-GELU MLPs without a gate, biases."""

from typing import Any

from eqx_decoders.blocks.residual.residual import Weighted
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, ends, fused_attention, plain_mlp
from eqx_decoders.families.family import Family
from eqx_decoders.families.setting_rows import Flag, Renamed
from eqx_decoders.families.weight_rows import norm_weights
from eqx_decoders.layers.attention.alibi import Alibi
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def bloom(shape: DecoderSizes, *, keeps_normed: bool = False) -> DecoderConfig:
    """Return a decoder of BLOOM blocks.

    `keeps_normed`: whether the residual connection adds the output to the normalized input instead of the input.
    """
    layer_norm = LayerNormConfig(eps=shape.eps)
    mixer = shape.attention(rope=None, alibi=Alibi(), qkv_bias=True, out_bias=True)
    residual: dict[str, Any] = {"residual": Weighted(keeps_normed=True)} if keeps_normed else {}
    block = shape.block(mixer, shape.mlp(gated=False, bias=True), layer_norm, **residual)
    return shape.decoder(block, layer_norm, embedding_norm=layer_norm)


_KEY_NAMES = {
    "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "rms_norm_eps": "layer_norm_epsilon",
    **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "attention_bias")),
}  # fmt: skip
_LAYER = "transformer.h.{layer}."
FAMILY = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    settings=(
        Renamed({"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}),
        decoder_sizes(
            mlp_dim=lambda values: 4 * values["embed_dim"], eps=1e-5, tied=True, activation="gelu_tanh", keys=_KEY_NAMES
        ),
        Flag("apply_residual_connection_post_layernorm", "blocks.0.residual.keeps_normed", False, name="keeps_normed"),
    ),
    build=bloom,
    weights=(
        *ends("transformer.word_embeddings", "transformer.ln_f"),
        *norm_weights("transformer.", embedding_norm="word_embeddings_layernorm"),
        *norm_weights(_LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="post_attention_layernorm"),
        *fused_attention(_LAYER + "self_attention.", "query_key_value", "dense"),
        *plain_mlp(_LAYER + "mlp.", up="dense_h_to_4h", down="dense_4h_to_h"),
    ),
    ignored_keys={
        "pretraining_tp slow_but_exact masked_softmax_fusion bias_dropout_fusion skip_bias_add skip_bias_add_qkv "
        "offset_alibi seq_length": "runtime option; it changes no output",
        "attention_softmax_in_fp32": "softmax is always computed in float32",
    },
)


_BASE = dict(model_type="bloom", vocab_size=250_880)

MODELS = {
    "bloom-560m": _BASE | dict(hidden_size=1024, n_layer=24, n_head=16),
    "bloom-1b1": _BASE | dict(hidden_size=1536, n_layer=24, n_head=16),
    "bloom-1b7": _BASE | dict(hidden_size=2048, n_layer=24, n_head=16),
    "bloom-3b": _BASE | dict(hidden_size=2560, n_layer=30, n_head=32),
    "bloom-7b1": _BASE | dict(hidden_size=4096, n_layer=30, n_head=32),
    "bloom-176b": _BASE | dict(hidden_size=14_336, n_layer=70, n_head=112),
}  # fmt: skip
