"""Ministral 8B (Mistral AI 2024): Mistral's block, with a window in three of four layers."""

from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, layer_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
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

_8B = DecoderSizes(
    vocab_size=131_072, embed_dim=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=12_288,
    eps=1e-5,
)  # fmt: skip

MODELS = {
    "ministral-8b": lambda: ministral(_8B, rope=Rope(theta=1e8), masks=(Causal(), *(SlidingWindow(32_768),) * 3) * 9)
}
