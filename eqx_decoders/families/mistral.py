"""Mistral 7B (Jiang et al. 2023): Llama's block, with a sliding window in every layer in version 0.1."""

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, find_window, llama_weights, read_masks
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Rule, Values
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
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

_SHAPE = DecoderSizes(
    vocab_size=32_000, embed_dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14_336,
    eps=1e-5,
)  # fmt: skip

MODELS = {
    "mistral-7b": lambda: mistral(_SHAPE, rope=Rope(theta=1e6)),
    "mistral-7b-v0.1": lambda: mistral(_SHAPE, rope=Rope(theta=10_000.0), mask=SlidingWindow(4096)),
}
