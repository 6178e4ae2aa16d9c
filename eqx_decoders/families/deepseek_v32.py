"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3's blocks, whose attention reads the keys that an indexer chooses."""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    INDEXER,
    MLP,
    V3_COPIES,
    V3_SETTINGS,
    V3_WEIGHTS,
    deepseek_v3,
    indexer_settings,
    with_indexer,
)  # fmt: skip
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Only, Rule, Values
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def _layer_types(layers: int, dense: int) -> dict[str, list[str]]:
    dense = min(dense, layers)
    kinds = ["dense"] * dense + ["sparse"] * (layers - dense)
    return {"layer_types": ["indexed_attention"] * layers, "mlp_layer_types": kinds}


def _check_layer_types(fields: Fields, values: Values) -> None:
    for key, types in _layer_types(values["shape"].num_layers, len(values["dense_layers"])).items():
        fields.allow_only(key, types)


def _write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    return _layer_types(len(config.blocks), moe.sparse_layers(config)[0])


def _deepseek_v32(*, indexer: IndexerConfig, **options: Any) -> DecoderConfig:
    return with_indexer(deepseek_v3(**options), indexer)


FAMILY = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    settings=(
        indexer_settings(num_heads=64),
        Only("rope_interleave", True),
        *V3_SETTINGS,
        Rule("", _check_layer_types, _write_layer_types),
    ),
    build=_deepseek_v32,
    weights=(*V3_WEIGHTS, *INDEXER),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "transformers' MLP of this model never has one"},
    copies=V3_COPIES,
)

MODELS = {
    "deepseek32-671b": dict(
        model_type="deepseek_v32", vocab_size=129_280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        intermediate_size=18_432,
        rope_scaling=dict(
            factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, rope_type="yarn",
        ),
    ),
}  # fmt: skip
