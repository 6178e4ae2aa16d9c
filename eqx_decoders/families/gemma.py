"""Gemma (Gemma Team 2024): norms that store w - 1, scaled embeddings, tanh-gelu, tied head."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Rule, Values
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def gemma(shape: DecoderSizes, *, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of Gemma blocks."""
    norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    block = shape.block(shape.attention(rope=rope), norm=norm)
    return shape.decoder(block, norm, embedding_scale=shape.embed_dim**0.5)


def _tanh(fields: Fields, values: Values) -> None:
    """Read "gelu" as its tanh approximation, as transformers does: the first files mean it."""
    if fields.content.get("hidden_act") == "gelu":
        fields.content["hidden_act"] = "gelu_pytorch_tanh"


FAMILY = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    settings=(
        Rule("", _tanh),
        decoder_sizes(num_kv_heads=16, head_dim=256, tied=True, activation="gelu_pytorch_tanh"),
        rope_settings(),
    ),
    build=gemma,
    weights=llama_weights(),
    ignored_keys={"hidden_activation": "transformers reads hidden_act"},
)


_SETTINGS = dict(model_type="gemma", vocab_size=256_128)

MODELS = {
    "gemma-2b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1, intermediate_size=16_384,
    ),
    "gemma-7b": _SETTINGS | dict(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, intermediate_size=24_576,
    ),
}  # fmt: skip
