"""Qwen3.5 with experts, text (Qwen Team 2026): Qwen3.5's layers, and experts whose weights always sum to 1."""

from eqx_decoders.families import moe
from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    EXPERTS,
    FUSED_EXPERTS,
    IGNORED_STATE_KEYS,
    QWEN3_5_SETTINGS,
    QWEN3_5_WEIGHTS,
    expert_settings,
    qwen3_5,
    qwen_experts,
    with_depth_rows,
    with_depths,
)
from eqx_decoders.families.common import ENDS, NO_BIAS, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Group


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        moe.mlp_like_experts(512),
        decoder_sizes(num_kv_heads=2, head_dim=256, keys=NO_BIAS, paths={"intermediate_size": None}),
        Group("mlp", qwen_experts, expert_settings(num=256, chosen=8), uses=("shape",)),
        *QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *EXPERTS)), *DEPTH),
    fused=with_depth_rows(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_STATE_KEYS,
    with_depths=with_depths,
)


_SETTINGS = dict(model_type="qwen3_5_moe_text", vocab_size=248_320, num_attention_heads=32, rope_theta=10_000_000.0)

MODELS = {
    "qwen3.5-35b-a3b": _SETTINGS | dict(hidden_size=2048, num_hidden_layers=40, num_attention_heads=16),
    "qwen3.5-122b-a10b": _SETTINGS | dict(
        hidden_size=3072, num_hidden_layers=48, linear_num_value_heads=64, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "qwen3.5-397b-a17b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=60, linear_num_value_heads=64, moe_intermediate_size=1024, num_experts=512,
        num_experts_per_tok=10, shared_expert_intermediate_size=1024,
    ),
}  # fmt: skip
