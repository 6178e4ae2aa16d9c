"""Mistral 7B (Jiang et al. 2023): Llama's block, with a sliding window in every layer in version 0.1."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, find_window, llama_weights, read_masks
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Rule, Values
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def mistral(shape: DecoderSizes, *, rope: Rope, mask: Mask = Causal()) -> DecoderConfig:
    """Return a decoder of Mistral blocks, all with the same mask."""
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask)))


def _read_mask(fields: Fields, values: Values) -> Mask:
    window = fields.integer("sliding_window", 4096, null=None)
    masks = read_masks(fields, values, window, lambda index: window is not None)
    if len(set(masks)) > 1 or (window is not None and Causal() in masks):
        raise fields.error("layer_types must be the same for all layers of a Mistral, as sliding_window says.")
    return masks[0]


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=8, keys=NO_BIAS),
        Rule("mask", _read_mask, lambda config: {"sliding_window": find_window(config)}),
        rope_settings(),
    ),
    build=mistral,
    weights=llama_weights(),
    ignored_keys={
        "attention_bias mlp_bias use_sliding_window max_window_layers": "no key of transformers; biases would be stored"
    },
)


_SETTINGS = dict(
    model_type="mistral",
    vocab_size=32_000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=14_336,
    rms_norm_eps=1e-05,
)

MODELS = {
    "mistral-7b": _SETTINGS | dict(rope_theta=1_000_000.0, sliding_window=None),
    "mistral-7b-v0.1": _SETTINGS,
}  # fmt: skip
