"""Mamba-2 (Dao & Gu 2024), without attention and MLPs, and Bamba, with few attention layers."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, ends, read_layer_indices
from eqx_decoders.families.family import Family
from eqx_decoders.families.mamba.blocks import (
    BACKBONE,
    backbone,
    mamba_decoder,
    mamba_settings,
    mamba_sizes,
    mamba_weights,
)
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Check, Flag, Only, Rule, Values
from eqx_decoders.families.weight_rows import gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


# --- Mamba-2 ---


_MAMBA2_NAMES = {
    "mamba_n_heads": "num_heads", "mamba_d_head": "head_dim", "mamba_expand": "expand", "mamba_n_groups": "n_groups",
    "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}  # fmt: skip
MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    settings=(
        mamba_sizes(vocab_size=32_768, embed_dim=4096, num_layers=64, tied=False),
        Only("hidden_act", "silu", written=True),
        mamba_settings(num_groups=8, key_dim=128, value_dim=64, keys=_MAMBA2_NAMES),
    ),
    build=mamba_decoder,
    weights=backbone(mamba_weights(BACKBONE + "mixer.")),
    ignored_keys={
        "rescale_prenorm_residual time_step_floor time_step_max time_step_min time_step_rank": "it affects only the "
        "initialization of weights",
        "chunk_size residual_in_fp32": "it affects only how transformers runs the model",
        "norm_before_gate rms_norm": "transformers does not read it",
    },
)


# --- Bamba (IBM, Princeton, CMU and UIUC 2024): few attention layers with partial rotation, an MLP in each layer ---


def bamba(
    shape: DecoderSizes, *, mamba: Mamba2Config, attention_layers: tuple[int, ...], rope: Rope, mlp_bias: bool
) -> DecoderConfig:
    """Return a decoder of Bamba blocks.

    `attention_layers`: indices of the layers with attention, whose rotary embedding is `rope`. Other layers have
    `mamba`.
    """
    attention = shape.attention(rope=rope)
    mlp = shape.mlp(bias=mlp_bias)
    mixers = (attention if index in attention_layers else mamba for index in range(shape.num_layers))
    return shape.decoder(shape.block(mixer, mlp) for mixer in mixers)


def _read_attention_layers(fields: Fields, values: Values) -> tuple[int, ...]:
    layers = read_layer_indices(fields, "attn_layer_indices", values["shape"].num_layers)
    if not layers:
        raise fields.error("attn_layer_indices is empty: add the index of at least one attention layer.")
    return layers


def _write_attention_layers(config: DecoderConfig) -> dict[str, Any]:
    layers = [index for index, block in enumerate(config.blocks) if isinstance(block.mixer, AttentionConfig)]
    return {"attn_layer_indices": layers}


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, eps=1e-5, keys={"head_dim": None}),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Rule("attention_layers", _read_attention_layers, _write_attention_layers),
        rope_settings(fraction=0.5),
        Check(
            lambda values: values["rope"].fraction == 0.5,
            "partial_rotary_factor={rope.fraction} must be 0.5, because transformers always rotates half of each head "
            "in Bamba. Remove it.",
        ),
        Only("attn_rotary_emb", lambda values: values["shape"].head_dim // 2),
        mamba_settings(),
    ),
    build=bamba,
    weights=(
        *ends(final_norm="model.final_layernorm"),
        *norm_weights(LAYER, pre_mixer_norm="input_layernorm", pre_mlp_norm="pre_ff_layernorm"),
        *self_attention(LAYER),
        *mamba_weights(LAYER + "mamba."),
        *gated_mlp(LAYER + "feed_forward."),
    ),
    ignored_keys={"mamba_chunk_size num_logits_to_keep z_loss_coefficient": "it does not change the logits"},
)


FAMILIES = (MAMBA2, BAMBA)

MODELS = {
    "mamba2-130m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=768, num_hidden_layers=24, n_groups=1, num_heads=24,
        tie_word_embeddings=True,
    ),
    "mamba2-370m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=1024, num_hidden_layers=48, n_groups=1, num_heads=32,
        tie_word_embeddings=True,
    ),
    "mamba2-780m": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=1536, num_hidden_layers=48, n_groups=1, num_heads=48,
        tie_word_embeddings=True,
    ),
    "mamba2-1.3b": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=2048, num_hidden_layers=48, n_groups=1, num_heads=64,
        tie_word_embeddings=True,
    ),
    "mamba2-2.7b": dict(
        model_type="mamba2", vocab_size=50_288, hidden_size=2560, n_groups=1, num_heads=80, tie_word_embeddings=True,
    ),
    "mamba-codestral-7b": dict(model_type="mamba2"),
    "bamba-9b": dict(
        model_type="bamba", vocab_size=128_256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=14_336, attn_layer_indices=[9, 18, 27], mamba_d_state=128,
    ),
}  # fmt: skip
