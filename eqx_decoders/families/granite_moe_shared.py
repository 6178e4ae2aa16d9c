"""Granite with experts and a shared one (IBM 2025): Granite's multipliers, and an MLP beside its experts."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._granite import EXPERTS, MULTIPLIERS, POSITIONS, granite, shared_mlp
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Integer, value_at
from eqx_decoders.model.decoder_config import DecoderConfig


def granite_moe_shared(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, shared_dim: int = 0, **options: Any
) -> DecoderConfig:
    """Return a decoder of Granite blocks with experts; every token uses an MLP of `shared_dim`, unless that is 0."""
    counts: dict[str, Any] = dict(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return granite(shape, shape.experts(shared_dim=shared_dim or None, **counts), **options)


def _shared_dim(config: DecoderConfig) -> int:
    shared = value_at(config, "experts.shared")
    return shared.mlp_dim if shared else 0


FAMILY = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        Integer("shared_intermediate_size", _shared_dim, 0, least=0, name="shared_dim"),
        POSITIONS,
        rope_settings(),
        *MULTIPLIERS,
    ),
    build=granite_moe_shared,
    weights=llama_weights(mlp=EXPERTS + shared_mlp()),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)

MODELS = {}
