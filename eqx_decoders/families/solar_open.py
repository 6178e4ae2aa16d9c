"""Solar Open (Upstage 2025): Llama's attention, and DeepSeek-V3's experts in every layer."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families.common import decoder_sizes, llama_weights
from eqx_decoders.families.deepseek.blocks import (
    MLP,
    V3_EXPERTS,
    expert_settings,
    v3_experts_decoder,
    v3_router_settings,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP, Only


solar_open = functools.partial(v3_experts_decoder, output_bias=False, dense_layers=())
FAMILY = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    settings=(
        AUTO_MAP,
        # published files have these keys; transformers does not read them
        Only("use_qk_norm", False),
        Only("first_k_dense_replace", 0),
        moe.mlp_like_experts(1280),
        decoder_sizes(num_kv_heads=8, head_dim=128, eps=1e-5, paths={"intermediate_size": None}),
        rope_settings(theta=1e6),
        *v3_router_settings(scale=1.0),
        *expert_settings(num_experts=128, chosen=8, shared=1, expert_dim=1280),
    ),
    build=solar_open,
    weights=llama_weights(mlp=V3_EXPERTS),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


MODELS = {
    "solar-open-100b-a12b": dict(
        model_type="solar_open", vocab_size=196_608, hidden_size=4096, num_hidden_layers=48, num_attention_heads=64,
        rope_scaling=dict(factor=2.0, original_max_position_embeddings=65_536, rope_type="yarn"),
    ),
}  # fmt: skip
