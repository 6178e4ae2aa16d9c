"""GLM-4.5, 4.6 and 4.7 (GLM Team 2025): DeepSeek-V3's experts, and attention that rotates half of each head."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    DEPTH,
    MLP,
    V3_COPIES,
    V3_EXPERTS,
    expert_settings,
    v3_experts,
    v3_router_settings,
)  # fmt: skip
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Flag


glm4_moe = functools.partial(v3_experts, output_bias=False)
FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(num_kv_heads=8, eps=1e-5),
        rope_settings(fraction=0.5),
        Flag("use_qk_norm", "attention.qk_norm", False, name="normalized"),
        *v3_router_settings(scale=1.0),
        *expert_settings(num_experts=128, chosen=8, shared=1, expert_dim=1408),
        moe.dense_layers(1),
        DEPTHS,
    ),
    build=glm4_moe,
    weights=(*llama_weights(experts=V3_EXPERTS), *DEPTH),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | {"moe_router_dtype": "scores are in float32"},
    copies=V3_COPIES,
)


_SETTINGS = dict(
    model_type="glm4_moe",
    vocab_size=151_552,
    hidden_size=5120,
    num_hidden_layers=92,
    num_attention_heads=96,
    head_dim=128,
    intermediate_size=12_288,
    attention_bias=True,
    rope_theta=1_000_000.0,
)

_355B = _SETTINGS | dict(
    first_k_dense_replace=3,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    routed_scaling_factor=2.5,
    use_qk_norm=True,
)

MODELS = {
    "glm4.5-air-106b-a12b": _SETTINGS | dict(hidden_size=4096, num_hidden_layers=46, intermediate_size=10_944),
    "glm4.5-355b-a32b": _355B,
    "glm4.6-355b-a32b": _355B,
    "glm4.7-355b-a32b": _355B,
}  # fmt: skip
