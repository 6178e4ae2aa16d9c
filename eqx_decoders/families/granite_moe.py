"""Granite 3 with experts (Granite Team 2024): Granite's multipliers, and a softmax over the chosen of many experts."""

import functools
from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._granite import EXPERTS, MULTIPLIERS, POSITIONS, granite
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.rope import Rope
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

_shape = functools.partial(DecoderSizes, vocab_size=49_155, num_kv_heads=8, head_dim=64, mlp_dim=512, tied=True)
_1B = _shape(embed_dim=1024, num_layers=24, num_heads=16)
_3B = _shape(embed_dim=1536, num_layers=32, num_heads=24)
_SCALES = dict(query_scale=1 / 64, embedding_scale=12.0, logit_divisor=6.0, residual_scale=0.22)
_model = functools.partial(granite_moe, num_experts_per_token=8, **_SCALES)

MODELS = {
    "granite3-1b-a400m": lambda: _model(_1B, num_experts=32),
    "granite3-3b-a800m": lambda: _model(_3B, num_experts=40),
    "granite3.1-1b-a400m": lambda: _model(_1B, num_experts=32, rope=Rope(theta=1.5e6)),
    "granite3.1-3b-a800m": lambda: _model(_3B, num_experts=40, rope=Rope(theta=1e7)),
}
