"""Granite 3 (Granite Team 2024; IBM 2025), dense and with experts.

Llama's blocks with multipliers of embeddings, branches, attention scores and logits.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Sequential
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, NormPlaces, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Integer, Number, Only, value_at
from eqx_decoders.families.weight_rows import Weight, sharing
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def scaled(
    shape: DecoderSizes, blocks: Iterable[BlockConfig], *, residual_scale: float, **scales: Any
) -> DecoderConfig:
    """Return a decoder of these blocks with multipliers.

    `residual_scale`: multiplier of the output of each branch. `scales`: `embedding_scale` and `logit_divisor`, fields
    of `DecoderConfig`.
    """
    residual = Sequential(residual_scale=residual_scale)
    return shape.decoder((dataclasses.replace(block, residual=residual) for block in blocks), **scales)


def granite(
    shape: DecoderSizes,
    mlp: MLPConfig | ExpertsConfig,
    *,
    rope: Rope,
    query_scale: float,
    norms: NormPlaces = "pre",
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Granite blocks.

    `mlp`: MLP or experts of every layer. `query_scale`: multiplier of attention scores, instead of
    `1 / sqrt(head_dim)`. `norms`: positions of norms. `scales`: arguments of `scaled`.
    """
    block = shape.block(shape.attention(rope=rope, query_scale=query_scale), mlp, norms=norms)
    return scaled(shape, [block] * shape.num_layers, **scales)


# transformers 4 writes this key for models in which all layers have a rotary embedding.
_POSITIONS = Only("position_embedding_type", "rope")
STREAM_SCALES = (
    Number("embedding_multiplier", "embedding_scale", 1.0),
    Number("residual_multiplier", "blocks.0.residual.residual_scale", 1.0),
)
MULTIPLIERS = (
    *STREAM_SCALES,
    Number("attention_multiplier", "attention.query_scale", 1.0),
    Number("logits_scaling", "logit_divisor", 1.0),
)

_MOE = LAYER + "block_sparse_moe."
_EXPERTS_IN = "experts mlp embed -> experts embed mlp"
EXPERTS = (
    *sharing(_MOE + "input_linear.weight", ("mlp.gate", _EXPERTS_IN), ("mlp.up", _EXPERTS_IN), axis=1),
    Weight(_MOE + "output_linear.weight", "mlp.down", "experts embed mlp -> experts mlp embed"),
    Weight(_MOE + "router.layer.weight", "mlp.router.kernel", "experts embed -> embed experts"),
)


def shared_mlp(path: str = "mlp.shared.") -> tuple[Weight, ...]:
    """Return the weight rows of the shared expert, or of the MLP of a model without experts."""
    pattern = "mlp embed -> embed mlp"
    return (
        *sharing(LAYER + "shared_mlp.input_linear.weight", (path + "gate", pattern), (path + "up", pattern)),
        Weight(LAYER + "shared_mlp.output_linear.weight", path + "down", "embed mlp -> mlp embed"),
    )


# --- Granite 3.0 to 3.3 ---


def granite_dense(shape: DecoderSizes, *, mlp_bias: bool, **options: Any) -> DecoderConfig:
    """Return a decoder of Granite blocks with MLPs. `options`: arguments of `granite`."""
    return granite(shape, shape.mlp(bias=mlp_bias), **options)


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    settings=(
        decoder_sizes(),
        Flag("mlp_bias", "mlp.bias", False, name="mlp_bias"),
        rope_settings(),
        *MULTIPLIERS,
    ),
    build=granite_dense,
    weights=llama_weights(),
)


_GRANITE_BASE = dict(
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


# --- Granite 3 with experts: softmax over the scores of the selected experts ---


def granite_moe(shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, **options: Any) -> DecoderConfig:
    """Return a decoder of Granite blocks with experts. `options`: arguments of `granite`."""
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return granite(shape, experts, **options)


GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        _POSITIONS,
        rope_settings(),
        *MULTIPLIERS,
    ),
    build=granite_moe,
    weights=llama_weights(mlp=EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


_GRANITE_MOE_BASE = dict(
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


# --- Granite 3 with experts and a shared expert ---


def granite_moe_shared(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, shared_dim: int, **options: Any
) -> DecoderConfig:
    """Return a decoder of Granite blocks with experts and a shared expert.

    `shared_dim`: hidden features of the shared expert; 0: no shared expert. `options`: arguments of `granite`.
    """
    experts = shape.experts(
        num_experts=num_experts, num_experts_per_token=num_experts_per_token, shared_dim=shared_dim or None
    )
    return granite(shape, experts, **options)


def _shared_dim(config: DecoderConfig) -> int:
    shared = value_at(config, "experts.shared")
    return shared.mlp_dim if shared else 0


GRANITE_MOE_SHARED = Family(
    model_type="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        Integer("shared_intermediate_size", _shared_dim, 0, least=0, name="shared_dim"),
        _POSITIONS,
        rope_settings(),
        *MULTIPLIERS,
    ),
    build=granite_moe_shared,
    weights=llama_weights(mlp=EXPERTS + shared_mlp()),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED)

MODELS = {
    "granite3-2b": _GRANITE_BASE | dict(
        hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
    ),
    "granite3-8b": _GRANITE_BASE | dict(
        hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125, logits_scaling=16.0,
    ),
    "granite3.1-2b": _GRANITE_BASE | dict(
        hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
        rope_theta=5_000_000.0,
    ),
    "granite3.1-8b": _GRANITE_BASE | dict(
        hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125, logits_scaling=16.0,
        rope_theta=10_000_000.0,
    ),
    "granite3.3-2b": _GRANITE_BASE | dict(
        vocab_size=49_159, hidden_size=2048, intermediate_size=8192, attention_multiplier=0.015625, logits_scaling=8.0,
        rope_theta=10_000_000.0,
    ),
    "granite3.3-8b": _GRANITE_BASE | dict(
        vocab_size=49_159, hidden_size=4096, intermediate_size=12_800, attention_multiplier=0.0078125,
        logits_scaling=16.0, rope_theta=10_000_000.0,
    ),
    "granite3-1b-a400m": _GRANITE_MOE_BASE | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_local_experts=32,
    ),
    "granite3-3b-a800m": _GRANITE_MOE_BASE | dict(
        hidden_size=1536, num_hidden_layers=32, num_attention_heads=24, num_local_experts=40,
    ),
    "granite3.1-1b-a400m": _GRANITE_MOE_BASE | dict(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, num_local_experts=32, rope_theta=1_500_000.0,
    ),
    "granite3.1-3b-a800m": _GRANITE_MOE_BASE | dict(
        hidden_size=1536, num_hidden_layers=32, num_attention_heads=24, num_local_experts=40, rope_theta=10_000_000.0,
    ),
}  # fmt: skip
