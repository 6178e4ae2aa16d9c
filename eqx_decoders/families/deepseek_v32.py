"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3's blocks, whose attention reads the keys that an indexer chooses."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import MLP, V3_COPIES, V3_SETTINGS, V3_WEIGHTS, deepseek_v3, v3_671b, with_indexer
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Group, Integer, Only, Rule, Values
from eqx_decoders.families.weight_rows import Weight
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


_INDEXER = "model.layers.{layer}.self_attn.indexer."
FAMILY = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    settings=(
        Group("indexer", IndexerConfig, (
            Integer("index_n_heads", "num_heads", 64),
            Integer("index_head_dim", "head_dim", 128),
            Integer("index_topk", "top_k", 2048),
        ), path="latent.indexer"),
        Only("rope_interleave", True),
        *V3_SETTINGS,
        Rule("", _check_layer_types, _write_layer_types),
    ),
    build=_deepseek_v32,
    weights=(
        *V3_WEIGHTS,
        Weight(_INDEXER + "wq_b.weight", "mixer.indexer.query", "(heads head_dim) q_rank -> q_rank heads head_dim"),
        Weight(_INDEXER + "wk.weight", "mixer.indexer.key", "head_dim embed -> embed head_dim"),
        Weight(_INDEXER + "k_norm.weight", "mixer.indexer.key_norm.scale", "norm -> norm"),
        Weight(_INDEXER + "k_norm.bias", "mixer.indexer.key_norm.bias", "norm -> norm"),
        Weight(_INDEXER + "weights_proj.weight", "mixer.indexer.head_weight", "heads embed -> embed heads"),
    ),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "transformers' MLP of this model never has one"},
    copies=V3_COPIES,
)  # fmt: skip

MODELS = {"deepseek32-671b": lambda: with_indexer(v3_671b(), IndexerConfig())}
