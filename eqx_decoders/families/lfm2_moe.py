"""LFM2-MoE (Liquid AI 2025): LFM2's layers, behind the first of which stand experts chosen by sigmoid scores."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families._lfm2 import MLP, MLP_NAMES, SETTINGS, WEIGHTS, lfm2
from eqx_decoders.families.common import renamed
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Flag, Group, Integer, Number
from eqx_decoders.layers.moe.router import RouterConfig


_router = functools.partial(RouterConfig, score="sigmoid", order="score_first")
FAMILY = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    settings=(
        *SETTINGS,
        Integer("moe_intermediate_size", "experts.mlp_dim", 1792, name="mlp_dim"),
        *moe.expert_counts("num_experts", num=32, chosen=4),
        moe.num_dense_layers("num_dense_layers", 2),
        Group(
            "router",
            _router,
            (
                Flag("use_expert_bias", "experts.router.selection_bias", True),
                Flag("norm_topk_prob", "experts.router.renormalize", True),
                Number("routed_scaling_factor", "experts.router.scaling_factor", 1.0),
            ),
        ),
    ),
    build=lfm2,
    weights=(
        *WEIGHTS,
        *renamed(moe.separate_experts(MLP, bias="expert_bias"), MLP_NAMES),
    ),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


MODELS = {
    "lfm2-8b-a1b": dict(
        model_type="lfm2_moe", vocab_size=65_536, hidden_size=2048, num_hidden_layers=24, num_attention_heads=32,
        intermediate_size=7168,
        layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    ),
}  # fmt: skip
