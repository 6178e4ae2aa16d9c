"""DeepSeek-V3 and V3.1 (DeepSeek-AI 2024), and Kimi K2 (Moonshot 2025), which has V3's blocks.

Sigmoid scores with selection biases, and layers of multi-token prediction, which follow the others in a checkpoint.
"""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    MLP,
    V3_COPIES,
    V3_SETTINGS,
    V3_WEIGHTS,
    V3_YARN,
    deepseek_v3,
    v3_671b,
    v3_model,
    v3_router,
)
from eqx_decoders.families.hf_table import Family
from eqx_decoders.layers.rope import YarnRope


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


MODELS = {
    "deepseek3-671b": v3_671b,
    "kimi-k2-1t": lambda: v3_model(
        vocab_size=163_840, num_heads=64, num_experts=384, dense_layers=range(1),
        rope=YarnRope(theta=50_000.0, factor=32.0, beta_fast=1.0, **V3_YARN),
        router=v3_router(groups=1, groups_per_token=1, scaling_factor=2.827),
    ),
}  # fmt: skip
