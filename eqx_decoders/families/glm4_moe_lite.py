"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's blocks with wider heads."""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    MLP,
    V3_COPIES,
    V3_ROPE,
    V3_WEIGHTS,
    deepseek_v3,
    expert_settings,
    latent_mixer,
    latent_sizes,
    v3_router_settings,
)  # fmt: skip
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.hf_table import Family


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=(
        *v3_router_settings(scale=1.8),
        *latent_sizes(nope_dim=192, eps=1e-5),
        V3_ROPE,
        latent_mixer(768, value_dim=256),
        *expert_settings(num_experts=64, chosen=4, shared=1, expert_dim=1536),
        moe.dense_layers(1, listed=True),
        DEPTHS,
    ),
    build=deepseek_v3,
    weights=V3_WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    copies=V3_COPIES,
)


MODELS = {
    "glm4.7-flash-30b-a3b": dict(
        model_type="glm4_moe_lite", vocab_size=154_880, hidden_size=2048, num_hidden_layers=47, num_attention_heads=20,
        intermediate_size=10_240, rope_theta=1_000_000.0,
    ),
}  # fmt: skip
