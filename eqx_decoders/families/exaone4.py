"""EXAONE 4.0 (LG AI Research 2025): post-norms only, and RoPE only in layers with windows."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, llama_weights, read_masks, write_masks
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Rule, Values, value_at
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def exaone4(shape: DecoderSizes, *, masks: tuple[Mask, ...] | None = None, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of EXAONE 4 blocks.

    `masks`: the attention mask of each layer; only layers with windows have RoPE. None: all layers have a causal mask
    and RoPE.
    """
    mixers = shape.attention_by_mask(masks or (), None if masks else rope, rope, qk_norm=shape.qk_norm)
    return shape.decoder(shape.block(mixer, norms="post") for mixer in mixers)


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...] | None:
    size = fields.integer("sliding_window", 4096, null=None)

    def is_local(index: int) -> bool:
        # called only if layer_types is missing: with layer_types, the pattern may be a string, and it is not read
        return size is not None and (index + 1) % fields.integer("sliding_window_pattern", 4) != 0

    masks = read_masks(fields, values, size, is_local)
    return masks if size else None


def _write_masks(config: DecoderConfig) -> dict[str, Any]:
    # transformers applies RoPE to full layers only if sliding_window is null, even in a model without windows
    has_rope = value_at(config, "attention.rope") is not None
    return write_masks(config, default=None if has_rope else 4096)


FAMILY = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    settings=(
        decoder_sizes(num_kv_heads=32, eps=1e-5, keys=NO_BIAS),
        Rule("masks", _read_masks, _write_masks),
        rope_settings(required=False),
    ),
    build=exaone4,
    weights=llama_weights(norms="post"),
    ignored_keys={"sliding_window_pattern": "layer_types determines it"},
)


_BASE = dict(
    model_type="exaone4",
    vocab_size=102_400,
    num_key_value_heads=8,
    rope_scaling=dict(
        factor=16.0,
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    ),
    rope_theta=1_000_000.0,
)

MODELS = {
    "exaone4-1.2b": _BASE | dict(
        hidden_size=2048, num_hidden_layers=30, num_attention_heads=32, intermediate_size=4096, sliding_window=None,
        tie_word_embeddings=True,
    ),
    "exaone4-32b": _BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, intermediate_size=27_392,
    ),
}  # fmt: skip
