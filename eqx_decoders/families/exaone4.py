"""EXAONE 4.0 (LG AI Research 2025): norms on outputs only, and RoPE in the layers with windows only."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, llama_weights, read_masks, write_masks
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Rule, Values, value_at
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def exaone4(shape: DecoderSizes, *, masks: tuple[Mask, ...] | None = None, rope: Rope = Rope()) -> DecoderConfig:
    """Return a decoder of EXAONE 4 blocks; without `masks` all layers are causal, and all have RoPE."""
    mixers = shape.attention_by_mask(masks or (), None if masks else rope, rope, qk_norm=shape.qk_norm)
    return shape.decoder(shape.block(mixer, norms="post") for mixer in mixers)


def _read_masks(fields: Fields, values: Values) -> tuple[Mask, ...] | None:
    def local(index: int) -> bool:  # without layer_types; with them the pattern, which may be a word, is not read
        return size is not None and (index + 1) % fields.integer("sliding_window_pattern", 4) != 0

    size = fields.integer("sliding_window", 4096, null=None)
    masks = read_masks(fields, values, size, local)
    return masks if size else None


def _write_masks(config: DecoderConfig) -> dict[str, Any]:
    # the size says too that full layers have no RoPE
    return write_masks(config, default=4096 if value_at(config, "attention.rope") is None else None)


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
    ignored_keys={"sliding_window_pattern": "layer_types says it"},
)


_SETTINGS = dict(
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
    "exaone4-1.2b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=30, num_attention_heads=32, intermediate_size=4096, sliding_window=None,
        tie_word_embeddings=True,
    ),
    "exaone4-32b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, intermediate_size=27_392,
    ),
}  # fmt: skip
