"""Granite 4, hybrid (IBM 2025): Mamba-2, few layers of attention without positions, experts or an MLP, multipliers."""

import dataclasses
from collections.abc import Callable
from typing import Any

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import ENDS, PRE_NORMS, DecoderSizes, decoder_sizes, hybrid_layers
from eqx_decoders.families.granite.text import EXPERTS, MULTIPLIERS, scaled, shared_mlp
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.mamba.blocks import mamba_settings, mamba_weights
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.settings_table import (
    ABSENT,
    Defaults,
    Group,
    Integer,
    Renamed,
    Rule,
    Unused,
    Values,
    first_layer,
    value_at,
)
from eqx_decoders.families.weight_rows import self_attention
from eqx_decoders.layers.attention.attention import AttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.recurrent.mamba2 import Mamba2Config
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def granite_hybrid(
    shape: DecoderSizes,
    *,
    mamba: Mamba2Config | None,
    full: tuple[bool, ...],
    mlp: MLPConfig | ExpertsConfig,
    query_scale: float,
    rope: Rope | None = None,
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Granite's blocks: attention in the layers where `full` is True, else `mamba`.

    The scales are those of `scaled`.
    """
    attention = shape.attention(rope=rope, query_scale=query_scale)

    def block(has_attention: bool) -> BlockConfig:
        return shape.block(attention if has_attention or mamba is None else mamba, mlp)

    return scaled(shape, map(block, full), **scales)


def _write_no_mamba(config: DecoderConfig) -> dict[str, Any]:
    """Return sizes that fit, which transformers wants even where no layer has them."""
    return (
        {}
        if first_layer(config, "mamba")
        else {"mamba_n_heads": config.embed_dim, "mamba_d_head": 2, "mamba_expand": 2}
    )


def _read_rope(fields: Fields, values: Values) -> Rope | None:
    known = {"rope": True, "nope": False, "none": False}
    positions, rope = fields.word("position_embedding_type", known, "none"), read_rope(fields)
    return rope if positions else None


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    positions = None if value_at(config, "attention.rope") is None else "rope"
    return {"position_embedding_type": positions, **write_rope(config, unused=True)}


def _mlp(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, shared_dim: int
) -> MLPConfig | ExpertsConfig:
    if not num_experts:
        return dataclasses.replace(shape, mlp_dim=shared_dim).mlp()
    options: dict[str, Any] = dict(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.experts(shared_dim=shared_dim, **options)


def _of_experts(field: str, otherwise: Any) -> Callable[[DecoderConfig], Any]:
    return lambda config: getattr(first_layer(config, "experts"), field, otherwise)


def _shared_dim(config: DecoderConfig) -> int:
    mlp = config.blocks[0].mlp
    shared = mlp.shared if isinstance(mlp, ExpertsConfig) else value_at(config, "mlp")
    return shared.mlp_dim if shared else 0


_EXPERTS = (
    Integer("num_local_experts", _of_experts("num_experts", 0), 8, least=0, name="num_experts"),
    Integer("num_experts_per_tok", _of_experts("num_experts_per_token", 0), 2, least=0, name="num_experts_per_token"),
    Integer("shared_intermediate_size", _shared_dim, 1024, name="shared_dim"),
)
_LAYER = "model.layers.{layer}."
FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    settings=(
        Renamed({"layers_block_type": "layer_types"}),
        Unused("head_dim", "it follows from the others"),
        Defaults({"intermediate_size": 11_008}),
        decoder_sizes(keys={"head_dim": None}, paths={"intermediate_size": _of_experts("mlp_dim", ABSENT)}),
        Group("mlp", _mlp, _EXPERTS, uses=("shape",)),
        hybrid_layers(AttentionConfig),
        mamba_settings(),
        Rule(writes=_write_no_mamba),
        Rule("rope", _read_rope, _write_rope),
        *MULTIPLIERS,
    ),
    build=granite_hybrid,
    weights=(
        *ENDS,
        *PRE_NORMS,
        *self_attention(_LAYER),
        *mamba_weights(_LAYER + "mamba."),
        *shared_mlp("mlp."),
        *shared_mlp(),
        *EXPERTS,
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "mamba_chunk_size": "how it is run",
        "init_method normalization_function": "how it was trained: RMSNorm is the one that is read",
        "mlp_bias": "transformers does not read it",
    },
)


_SETTINGS = dict(
    model_type="granitemoehybrid",
    vocab_size=100_352,
    num_hidden_layers=40,
    attention_multiplier=0.0078125,
    embedding_multiplier=12.0,
    initializer_range=0.1,
    layer_types=["full_attention" if layer % 10 == 5 else "linear_attention" for layer in range(40)],
    mamba_d_state=128,
    residual_multiplier=0.22,
    rms_norm_eps=1e-05,
    tie_word_embeddings=True,
)

MODELS = {
    "granite4-h-micro": _SETTINGS | dict(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, attention_multiplier=0.015625,
        logits_scaling=8.0, mamba_n_heads=64, num_local_experts=0, shared_intermediate_size=8192,
    ),
    "granite4-h-1b": _SETTINGS | dict(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, logits_scaling=6.0, mamba_n_heads=48,
        num_local_experts=0, shared_intermediate_size=4096,
    ),
    "granite4-h-tiny": _SETTINGS | dict(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, intermediate_size=512, logits_scaling=6.0,
        mamba_n_heads=48, num_experts_per_tok=6, num_local_experts=64,
    ),
    "granite4-h-small": _SETTINGS | dict(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=768, logits_scaling=16.0,
        num_experts_per_tok=10, num_local_experts=72, shared_intermediate_size=1536,
    ),
}  # fmt: skip
