"""MiniMax M3, text model (MiniMax 2026): attention to blocks of keys that an indexer selects, and clipped SwiGLU."""

import dataclasses
from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    LAYER,
    NO_BIAS,
    DecoderSizes,
    attentions,
    decoder_sizes,
    fused_mlp,
    llama_weights,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings, rotary_dim_setting
from eqx_decoders.families.setting_rows import ABSENT, Group, Integer, Number, Only, Rule, Values, write_all
from eqx_decoders.families.weight_rows import Weight, norm
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.attention.block_indexer import BlockIndexerConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def minimax_m3(
    shape: DecoderSizes, *, rope: Rope, indexed_layers: tuple[bool, ...], indexer: BlockIndexerConfig, dense_dim: int,
    dense_layers: frozenset[int], shared_dim: int, scaling_factor: float, alpha: float, limit: float,
    **expert_counts: Any,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of MiniMax M3 blocks. Raises ConfigError if all layers are dense.

    **Arguments:**

    - `shape`: sizes of the decoder. `shape.mlp_dim` is the size of an expert.
    - `rope`: rotary embedding of all layers.
    - `indexed_layers`: for each layer, whether it attends only to the blocks of keys that `indexer` selects.
    - `dense_layers`: indices of the layers that have an MLP of `dense_dim` hidden features instead of experts.
    - `shared_dim`: hidden features of the shared expert.
    - `scaling_factor`: see `RouterConfig`.
    - `alpha`, `limit`: `activation_scale` and `limit` of all MLPs and experts, see `MLPConfig`.
    - `expert_counts`: `num_experts` and `num_experts_per_token`.
    """
    offset_norm = RMSNormConfig(eps=shape.eps, offset=1.0)
    gating: dict[str, Any] = dict(activation_scale=alpha, up_offset=1.0, limit=limit)
    router = RouterConfig(
        score="sigmoid", order="score_first", renormalize=True, selection_bias=True, scaling_factor=scaling_factor
    )
    mlp = MLPConfig(mlp_dim=dense_dim, fused=True, **gating)
    shared = MLPConfig(mlp_dim=shared_dim, fused=True, **gating)
    experts = shape.experts(router=router, shared=shared, **gating, **expert_counts)
    attention = shape.attention(rope=rope, qk_norm=QKNorm(norm=offset_norm))
    indexed_attention = dataclasses.replace(attention, selection=dataclasses.replace(indexer, norm=offset_norm))
    blocks = (
        shape.block(
            indexed_attention if is_indexed else attention, mlp if index in dense_layers else experts, offset_norm
        )
        for index, is_indexed in enumerate(indexed_layers)
    )
    return dataclasses.replace(moe.need_experts(shape.decoder(blocks)), final_norm=offset_norm)


def _dense_dim(config: DecoderConfig) -> Any:
    return next((block.mlp.mlp_dim for block in config.blocks if isinstance(block.mlp, MLPConfig)), ABSENT)


_FULL = "full_attention"
_INDEXED = "minimax_m3_sparse"
_INDEXER = Group("indexer", BlockIndexerConfig, (
    Integer("index_n_heads", "num_heads", 4),
    Integer("index_head_dim", "head_dim", 128),
    Integer("index_block_size", "size", 128),
    Integer("index_topk_blocks", "top_k", 16),
    Integer("index_local_blocks", "local_blocks", 1),
))  # fmt: skip


def _read_indexed_layers(fields: Fields, values: Values) -> tuple[bool, ...]:
    _INDEXER.read(fields, values)
    num_layers = values["shape"].num_layers
    layer_types = fields.words("layer_types", (_FULL, _INDEXED), num_layers) or [_FULL] * num_layers
    return tuple(layer_type == _INDEXED for layer_type in layer_types)


def _write_indexed_layers(config: DecoderConfig) -> dict[str, Any]:
    indexers = [mixer.block_indexer for mixer in attentions(config)]
    first_indexer = next((indexer for indexer in indexers if indexer is not None), None)
    written = {} if first_indexer is None else write_all(_INDEXER.settings, first_indexer)
    return written | {"layer_types": [_FULL if indexer is None else _INDEXED for indexer in indexers]}


_MLP = LAYER + "mlp."
_INDEX = LAYER + "self_attn.indexer."
FAMILY = Family(
    model_type="minimax_m3_vl_text",
    architecture="MiniMaxM3VLForCausalLM",
    settings=(
        decoder_sizes(
            num_kv_heads=4, head_dim=128, keys={**NO_BIAS, "hidden_act": None},
            paths={"intermediate_size": "experts.mlp_dim"},
        ),
        Only("hidden_act", "silu", "swigluoai", written=True),  # both values mean clipped SwiGLU
        Integer("dense_intermediate_size", _dense_dim, 12_288, name="dense_dim"),
        Integer("shared_intermediate_size", "experts.shared.mlp_dim", 3072, name="shared_dim"),
        *moe.expert_counts("num_local_experts", num=128, chosen=4),
        Number("routed_scaling_factor", "experts.router.scaling_factor", 2.0),
        Number("swiglu_alpha", "experts.activation_scale", 1.702, name="alpha"),
        Number("swiglu_limit", "experts.limit", 7.0),
        moe.dense_layers_setting(0, listed=True),
        Rule("indexed_layers", _read_indexed_layers, _write_indexed_layers),
        rotary_dim_setting(),
        rope_settings(theta=5e6, fraction=1.0),
    ),
    build=minimax_m3,
    weights=(
        *llama_weights(mlp=(
            *fused_mlp(_MLP),
            *fused_mlp(_MLP + "shared_experts.", "mlp.shared."),
            *moe.fused_experts(_MLP, bias="gate.e_score_correction_bias"),
        )),
        Weight(_INDEX + "q_proj.weight", "mixer.indexer.query",
               "(kv_heads head_dim) embed -> embed kv_heads head_dim"),
        Weight(_INDEX + "k_proj.weight", "mixer.indexer.key", "head_dim embed -> embed head_dim"),
        *norm(_INDEX + "q_norm", "mixer.indexer.query_norm"),
        *norm(_INDEX + "k_norm", "mixer.indexer.key_norm"),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)  # fmt: skip


MODELS = {
    "minimax-m3-428b-a23b": dict(
        model_type="minimax_m3_vl_text", vocab_size=200_064, hidden_size=6144, num_hidden_layers=60,
        num_attention_heads=64, intermediate_size=3072,
        layer_types=["full_attention", "full_attention", "full_attention"] + ["minimax_m3_sparse"] * 57,
        mlp_layer_types=["dense", "dense", "dense"] + ["sparse"] * 57, rotary_dim=64,
    ),
}  # fmt: skip
