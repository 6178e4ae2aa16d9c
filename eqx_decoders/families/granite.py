"""Granite 3.0 to 3.3 (Granite Team 2024): Llama's block with multipliers of embeddings, branches, scores and logits."""

from typing import Any

from eqx_decoders.families import _granite
from eqx_decoders.families._granite import MULTIPLIERS
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def granite(shape: DecoderSizes, *, mlp_bias: bool = False, rope: Rope = Rope(), **scales: Any) -> DecoderConfig:
    """Return a decoder of Granite blocks; scores are multiplied by `query_scale` alone."""
    return _granite.granite(shape, shape.mlp(bias=mlp_bias), rope=rope, **scales)


FAMILY = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    settings=(decoder_sizes(), Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"), rope_settings(), *MULTIPLIERS),
    build=granite,
    weights=llama_weights(),
)


_SETTINGS = dict(
    model_type="granite",
    vocab_size=49_155,
    num_hidden_layers=40,
    num_attention_heads=32,
    num_key_value_heads=8,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    rms_norm_eps=1e-05,
    tie_word_embeddings=True,
)

MODELS = {
    "granite3-2b": _SETTINGS | dict(
        hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
    ),
    "granite3-8b": _SETTINGS | dict(
        hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125, logits_scaling=16.0,
    ),
    "granite3.1-2b": _SETTINGS | dict(
        hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
        rope_theta=5_000_000.0,
    ),
    "granite3.1-8b": _SETTINGS | dict(
        hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125, logits_scaling=16.0,
        rope_theta=10_000_000.0,
    ),
    "granite3.3-2b": _SETTINGS | dict(
        vocab_size=49_159, hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
        rope_theta=10_000_000.0,
    ),
    "granite3.3-8b": _SETTINGS | dict(
        vocab_size=49_159, hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125,
        logits_scaling=16.0, rope_theta=10_000_000.0,
    ),
}  # fmt: skip
