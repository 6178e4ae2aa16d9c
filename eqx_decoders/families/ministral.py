"""Ministral 8B (Mistral AI 2024): Mistral's block, with a window in three of four layers."""

from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, layer_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def ministral(shape: DecoderSizes, *, rope: Rope, masks: tuple[Mask, ...]) -> DecoderConfig:
    """Return a decoder of Ministral blocks."""
    return shape.decoder(map(shape.block, shape.attention_by_mask(masks, rope, rope)))


FAMILY = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, keys=NO_BIAS),
        layer_masks(lambda index, values: True),
        rope_settings(),
    ),
    build=ministral,
    weights=llama_weights(),
)


MODELS = {
    "ministral-8b": dict(
        model_type="ministral", vocab_size=131_072, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
        intermediate_size=12_288,
        layer_types=["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(36)],
        rms_norm_eps=1e-05, rope_theta=100_000_000.0, sliding_window=32_768,
    ),
}  # fmt: skip
