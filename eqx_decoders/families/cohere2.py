"""Command R7B and Command A (Cohere 2025): Command R's blocks, windows with RoPE and full layers without positions."""

from eqx_decoders.families._cohere import COHERE_SETTINGS, IGNORED_COHERE_KEYS, cohere_decoder
from eqx_decoders.families.common import DecoderSizes, cycle_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Check, Only
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def cohere2(shape: DecoderSizes, *, masks: tuple[Mask, ...], rope: Rope, logit_divisor: float = 16.0) -> DecoderConfig:
    """Return a decoder of Command R7B's blocks; only layers with a window have the rotary embedding."""
    return cohere_decoder(shape, shape.attention_by_mask(masks, None, rope), logit_divisor)


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    settings=(
        *COHERE_SETTINGS,
        Only("use_qk_norm", False),
        Check(
            lambda values: values["shape"].head_dim * values["shape"].num_heads == values["shape"].embed_dim,
            "head_dim must be hidden_size / num_attention_heads: transformers reads no other.",
        ),
        cycle_masks(4, key="sliding_window_pattern"),
        rope_settings(pairing="interleaved"),
    ),
    build=cohere2,
    weights=llama_weights(),
    ignored_keys=IGNORED_COHERE_KEYS,
)


_SETTINGS = dict(model_type="cohere2", vocab_size=256_000, num_key_value_heads=8, logit_scale=0.25, rope_theta=50_000.0)

MODELS = {
    "command-r7b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=14_336,
    ),
    "command-a-111b": _SETTINGS | dict(
        hidden_size=12_288, num_hidden_layers=64, num_attention_heads=96, intermediate_size=36_864,
    ),
}  # fmt: skip
