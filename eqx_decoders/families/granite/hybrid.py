"""Granite 4 hybrids (IBM 2025): Mamba-2, few attention layers without position embeddings, Granite 3's multipliers.

Each layer also has an MLP or experts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import ENDS, LAYER, PRE_NORMS, DecoderSizes, decoder_sizes, hybrid_layers
from eqx_decoders.families.family import Family
from eqx_decoders.families.granite.text import EXPERTS, MULTIPLIERS, scaled, shared_mlp
from eqx_decoders.families.mamba.blocks import mamba_settings, mamba_weights
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import (
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
    mamba: Mamba2Config,
    full: tuple[bool, ...],
    mlp: MLPConfig | ExpertsConfig,
    query_scale: float,
    rope: Rope | None,
    **scales: Any,
) -> DecoderConfig:
    """Return a decoder of Granite 4 blocks.

    `full`: for each layer, whether it has attention; other layers have `mamba`. `mlp`: MLP or experts of every layer.
    `query_scale`: see `granite`. `scales`: arguments of `scaled`.
    """
    attention = shape.attention(rope=rope, query_scale=query_scale)
    blocks = (shape.block(attention if has_attention else mamba, mlp) for has_attention in full)
    return scaled(shape, blocks, **scales)


def _write_unused_mamba_sizes(config: DecoderConfig) -> dict[str, Any]:
    """Return valid Mamba-2 sizes if no layer has Mamba-2, because transformers checks them in any case."""
    if first_layer(config, "mamba"):
        return {}
    return {"mamba_n_heads": config.embed_dim, "mamba_d_head": 2, "mamba_expand": 2}


def _read_rope(fields: Fields, values: Values) -> Rope | None:
    has_rope = fields.word("position_embedding_type", {"rope": True, "nope": False, "none": False}, "none")
    rope = read_rope(fields)  # also reads the keys if there is no rotary embedding
    return rope if has_rope else None


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    position_type = None if value_at(config, "attention.rope") is None else "rope"
    return {"position_embedding_type": position_type, **write_rope(config, unused=True)}


def _mlp(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, shared_dim: int
) -> MLPConfig | ExpertsConfig:
    if not num_experts:
        return dataclasses.replace(shape, mlp_dim=shared_dim).mlp()
    return shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, shared_dim=shared_dim)


def _experts_field(field: str, default: Any) -> Callable[[DecoderConfig], Any]:
    """Return a function that returns a field of the experts, or `default` if no layer has experts."""
    return lambda config: getattr(first_layer(config, "experts"), field, default)


def _shared_dim(config: DecoderConfig) -> int:
    mlp = config.blocks[0].mlp
    shared = mlp.shared if isinstance(mlp, ExpertsConfig) else value_at(config, "mlp")
    return shared.mlp_dim if shared else 0


_EXPERTS = (
    Integer("num_local_experts", _experts_field("num_experts", 0), 8, least=0, name="num_experts"),
    Integer(
        "num_experts_per_tok", _experts_field("num_experts_per_token", 0), 2, least=0, name="num_experts_per_token"
    ),
    Integer("shared_intermediate_size", _shared_dim, 1024, name="shared_dim"),
)
FAMILY = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    settings=(
        Renamed({"layers_block_type": "layer_types"}),
        Unused("head_dim", "it is hidden_size / num_attention_heads"),
        Defaults({"intermediate_size": 11_008}),
        decoder_sizes(keys={"head_dim": None}, paths={"intermediate_size": _experts_field("mlp_dim", ABSENT)}),
        Group("mlp", _mlp, _EXPERTS, uses=("shape",)),
        hybrid_layers(AttentionConfig),
        mamba_settings(),
        Rule(writes=_write_unused_mamba_sizes),
        Rule("rope", _read_rope, _write_rope),
        *MULTIPLIERS,
    ),
    build=granite_hybrid,
    weights=(
        *ENDS,
        *PRE_NORMS,
        *self_attention(LAYER),
        *mamba_weights(LAYER + "mamba."),
        *shared_mlp("mlp."),
        *shared_mlp(),
        *EXPERTS,
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "mamba_chunk_size": "it affects only how transformers runs the model",
        "init_method normalization_function": "they describe training; transformers always uses RMSNorm",
        "mlp_bias": "transformers does not read it",
    },
)


_BASE = dict(
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
    "granite4-h-micro": _BASE | dict(
        hidden_size=2048, num_attention_heads=32, num_key_value_heads=8, attention_multiplier=0.015625,
        logits_scaling=8.0, mamba_n_heads=64, num_local_experts=0, shared_intermediate_size=8192,
    ),
    "granite4-h-1b": _BASE | dict(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, logits_scaling=6.0, mamba_n_heads=48,
        num_local_experts=0, shared_intermediate_size=4096,
    ),
    "granite4-h-tiny": _BASE | dict(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=4, intermediate_size=512, logits_scaling=6.0,
        mamba_n_heads=48, num_experts_per_tok=6, num_local_experts=64,
    ),
    "granite4-h-small": _BASE | dict(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=768, logits_scaling=16.0,
        num_experts_per_tok=10, num_local_experts=72, shared_intermediate_size=1536,
    ),
}  # fmt: skip
