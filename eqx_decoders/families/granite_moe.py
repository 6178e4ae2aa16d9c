"""Granite 3 with experts (Granite Team 2024): Granite's multipliers, and a softmax over the chosen of many experts."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._granite import EXPERTS, MULTIPLIERS, POSITIONS, granite
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.model.decoder_config import DecoderConfig


def granite_moe(shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, **options: Any) -> DecoderConfig:
    """Return a decoder of Granite blocks with experts; the other options are those of `granite`."""
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return granite(shape, experts, **options)


FAMILY = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        POSITIONS,
        rope_settings(),
        *MULTIPLIERS,
    ),
    build=granite_moe,
    weights=llama_weights(mlp=EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


_SETTINGS = dict(
    model_type="granitemoe",
    vocab_size=49_155,
    num_key_value_heads=8,
    intermediate_size=512,
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    logits_scaling=6.0,
    num_experts_per_tok=8,
    residual_multiplier=0.22,
    tie_word_embeddings=True,
)

MODELS = {
    "granite3-1b-a400m": _SETTINGS | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_local_experts=32,
    ),
    "granite3-3b-a800m": _SETTINGS | dict(
        hidden_size=1536, num_hidden_layers=32, num_attention_heads=24, num_local_experts=40,
    ),
    "granite3.1-1b-a400m": _SETTINGS | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_local_experts=32, rope_theta=1_500_000.0,
    ),
    "granite3.1-3b-a800m": _SETTINGS | dict(
        hidden_size=1536, num_hidden_layers=32, num_attention_heads=24, num_local_experts=40, rope_theta=10_000_000.0,
    ),
}  # fmt: skip
