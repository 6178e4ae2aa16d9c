"""Bamba (IBM, Princeton, CMU and UIUC 2024): Mamba-2, few layers of attention, half of RoPE, an MLP in each layer."""

from eqx_decoders.families._mamba import mamba_settings, mamba_weights
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, ends
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check, Flag, Numbers, Only
from eqx_decoders.families.weight_rows import gated_mlp, norm_weights, self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def bamba(
    shape: DecoderSizes, *, mamba: Mamba2Config, full: tuple[int, ...], rope: Rope, mlp_bias: bool = False
) -> DecoderConfig:
    """Return a decoder of Bamba blocks: attention in the layers `full`, counted from 0, else `mamba`."""
    attention, mlp = shape.attention(rope=rope), shape.mlp(bias=mlp_bias)
    return shape.decoder(shape.block(attention if i in full else mamba, mlp) for i in range(shape.num_layers))


def _full(config: DecoderConfig) -> list[int]:
    return [index for index, block in enumerate(config.blocks) if isinstance(block.mixer, AttentionConfig)]


FAMILY = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, eps=1e-5, keys={"head_dim": None}),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        Numbers("attn_layer_indices", _full, (), name="full"),
        Check(
            lambda values: bool(values["full"]),
            "attn_layer_indices must have the index of at least one attention layer.",
        ),
        rope_settings(fraction=0.5),
        Check(lambda values: values["rope"].fraction == 0.5, "transformers always rotates half of a head."),
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
    ignored_keys={"mamba_chunk_size num_logits_to_keep z_loss_coefficient": "how it is run"},
)


MODELS = {
    "bamba-9b": dict(
        model_type="bamba", vocab_size=128_256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=14_336, attn_layer_indices=[9, 18, 27], mamba_d_state=128,
    ),
}  # fmt: skip
