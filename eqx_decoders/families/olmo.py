"""OLMo (Groeneveld et al. 2024): Llama with LayerNorms without weights, and clipped queries, keys and values."""

from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Number
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_NORM = LayerNormConfig(eps=1e-5, scale=False, bias=False)


def olmo(shape: DecoderSizes, *, rope: Rope = Rope(), clip: float | None = None) -> DecoderConfig:
    """Return a decoder of OLMo blocks."""
    return shape.decoder(shape.block(shape.attention(rope=rope, qkv_clip=clip), norm=_NORM), final_norm=_NORM)


FAMILY = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    settings=(
        decoder_sizes(keys={"rms_norm_eps": None}),
        Number("clip_qkv", "attention.qkv_clip", None, name="clip"),
        rope_settings(),
    ),
    build=olmo,
    weights=llama_weights(),
)


_SETTINGS = dict(
    model_type="olmo",
    vocab_size=50_304,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11_008,
)

MODELS = {
    "olmo-1b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "olmo-7b": _SETTINGS,
    "olmo-7b-0724": _SETTINGS | dict(clip_qkv=8.0),
}  # fmt: skip
