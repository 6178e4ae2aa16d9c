"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3's blocks, whose attention reads the keys that an indexer chooses."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import MLP, V3_COPIES, V3_WEIGHTS, read_v3, v3_671b, with_indexer, write_v3
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def _read(fields: Fields) -> DecoderConfig:
    indexer = IndexerConfig(
        num_heads=fields.integer("index_n_heads", 64),
        head_dim=fields.integer("index_head_dim", 128),
        top_k=fields.integer("index_topk", 2048),
    )
    layers = fields.layers("num_hidden_layers", 61)
    dense = min(fields.integer("first_k_dense_replace", 3, least=0), layers)
    fields.allow_only("layer_types", ["indexed_attention"] * layers)
    fields.allow_only("mlp_layer_types", ["dense"] * dense + ["sparse"] * (layers - dense))
    fields.allow_only("rope_interleave", True)
    return with_indexer(read_v3(fields), indexer)


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.blocks[0].mixer
    if not isinstance(mixer, LatentAttentionConfig) or mixer.indexer is None:
        return {}
    settings = write_v3(config)
    dense, layers = settings["first_k_dense_replace"], len(config.blocks)
    return settings | {
        "index_n_heads": mixer.indexer.num_heads,
        "index_head_dim": mixer.indexer.head_dim,
        "index_topk": mixer.indexer.top_k,
        "layer_types": ["indexed_attention"] * layers,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
    }


_INDEXER = "model.layers.{layer}.self_attn.indexer."
FAMILY = Family(
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    read=_read,
    write=_write,
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
)

MODELS = {"deepseek32-671b": lambda: with_indexer(v3_671b(), IndexerConfig())}
