"""DeepSeek-V3 and V3.1 (DeepSeek-AI 2024), and Kimi K2 (Moonshot 2025), which has V3's blocks.

Sigmoid scores with selection biases, and layers of multi-token prediction, which follow the others in a checkpoint.
"""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    MLP,
    V3_COPIES,
    V3_SETTINGS,
    V3_WEIGHTS,
    deepseek_v3,
)
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
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


_SETTINGS = dict(model_type="deepseek_v3", hidden_size=7168, num_hidden_layers=61, intermediate_size=18_432)

MODELS = {
    "deepseek3-671b": _SETTINGS | dict(
        vocab_size=129_280, num_attention_heads=128,
        rope_scaling=dict(
            factor=40.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, rope_type="yarn",
        ),
    ),
    "kimi-k2-1t": _SETTINGS | dict(
        vocab_size=163_840, num_attention_heads=64, first_k_dense_replace=1, n_group=1, n_routed_experts=384,
        rope_scaling=dict(
            beta_fast=1.0, factor=32.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096,
            rope_type="yarn",
        ),
        rope_theta=50_000.0, routed_scaling_factor=2.827, topk_group=1,
    ),
}  # fmt: skip
