"""DeepSeek-V2, V3 and V3.1 (DeepSeek-AI 2024), V3.2 (DeepSeek-AI 2025), and Kimi K2 (Moonshot 2025).

Kimi K2 has the same blocks as DeepSeek-V3.
"""

from typing import Any

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families.deepseek.blocks import (
    INDEXER,
    MLP,
    V3_COPIES,
    V3_SETTINGS,
    V3_WEIGHTS,
    WEIGHTS,
    deepseek,
    deepseek_settings,
    deepseek_v3,
    indexer_settings,
    router_settings,
    with_indexer,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Only, Rule, Values, Word, value_at
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.model.decoder_config import DecoderConfig


# --- V2 and V2-Lite: softmax scores; V2-Lite has no query latents ---


def _router(*, grouped: bool, groups: int, groups_per_token: int, scaling_factor: float) -> RouterConfig:
    return RouterConfig(
        order="score_first",
        num_groups=groups if grouped else 1,
        groups_per_token=groups_per_token if grouped else 1,
        scaling_factor=scaling_factor,
    )


_TOPK_METHOD = Word(
    "topk_method", lambda config: value_at(config, "experts.router.num_groups") > 1, "greedy", name="grouped",
    known={"greedy": False, "group_limited_greedy": True},
)  # fmt: skip
V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    settings=(
        router_settings(_router, _TOPK_METHOD, scale=1.0, groups=1, groups_per_token=1),
        Only("scoring_func", "softmax"),
        *deepseek_settings(
            rope_settings("_rope", pairing="interleaved"), num_experts=64, shared=2, expert_dim=1407, num_dense_layers=0
        ),
        Flag("mlp_bias", "experts.shared.bias", False, name="mlp_bias"),
    ),
    build=deepseek,
    weights=WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "num_nextn_predict_layers": "V2 was published without multi-token prediction layers",
        "norm_topk_prob": "transformers does not renormalize the router weights of V2",
    },
)


_V2_BASE = dict(
    model_type="deepseek_v2",
    vocab_size=102_400,
    first_k_dense_replace=1,
    num_experts_per_tok=6,
    rope_scaling=dict(
        factor=40.0,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=4096,
        rope_type="yarn",
    ),
)


# --- V3, V3.1 and Kimi K2: sigmoid scores with selection biases, and multi-token prediction ---


V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    settings=V3_SETTINGS,
    build=deepseek_v3,
    weights=V3_WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    aliases=("kimi_k2",),
    copies=V3_COPIES,
)


_V3_BASE = dict(model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, intermediate_size=18_432)


# --- V3.2: V3's blocks with sparse attention; an indexer selects the keys ---


def _layer_types(num_layers: int, num_dense: int) -> dict[str, list[str]]:
    num_dense = min(num_dense, num_layers)
    mlp_types = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    return {"layer_types": ["indexed_attention"] * num_layers, "mlp_layer_types": mlp_types}


def _check_layer_types(fields: Fields, values: Values) -> None:
    expected = _layer_types(values["shape"].num_layers, len(values["dense_layers"]))
    for key, types in expected.items():
        fields.allow_only(key, types)


def _write_layer_types(config: DecoderConfig) -> dict[str, Any]:
    return _layer_types(len(config.blocks), moe.first_sparse_layer(config))


def _deepseek_v32(*, indexer: IndexerConfig, **options: Any) -> DecoderConfig:
    return with_indexer(deepseek_v3(**options), indexer)


V32 = Family(
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
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"mlp_bias": "the MLPs of this model have no bias in transformers"},
    copies=V3_COPIES,
)


FAMILIES = (V2, V3, V32)

MODELS = {
    "deepseek2-16b": _V2_BASE | dict(
        hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, intermediate_size=10_944,
        moe_intermediate_size=1408, q_lora_rank=None,
    ),
    "deepseek2-236b": _V2_BASE | dict(
        hidden_size=5120, num_hidden_layers=60, num_attention_heads=128, intermediate_size=12_288,
        moe_intermediate_size=1536, n_group=8, n_routed_experts=160, routed_scaling_factor=16.0, topk_group=3,
        topk_method="group_limited_greedy",
    ),
    "deepseek3-671b": _V3_BASE | dict(
        vocab_size=129_280, num_attention_heads=128,
        rope_scaling=dict(
            factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, rope_type="yarn",
        ),
    ),
    "kimi-k2-1t": _V3_BASE | dict(
        vocab_size=163_840, num_attention_heads=64, first_k_dense_replace=1, n_group=1, n_routed_experts=384,
        rope_scaling=dict(
            beta_fast=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096,
            rope_type="yarn",
        ),
        rope_theta=50_000.0, routed_scaling_factor=2.827, topk_group=1,
    ),
    "deepseek32-671b": dict(
        model_type="deepseek_v32", vocab_size=129_280, hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
        intermediate_size=18_432,
        rope_scaling=dict(
            factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, rope_type="yarn",
        ),
    ),
}  # fmt: skip
