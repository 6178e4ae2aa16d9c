"""Hy3 (Tencent Hunyuan 2026): Qwen3's attention, and DeepSeek-V3's experts without expert groups."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import LAYER, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.deepseek.blocks import DEPTH, v3_experts_decoder, v3_router
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Flag, Group, Integer, Number, only


_THETA = 11_158_840.0
_EXPERTS = moe.separate_experts(LAYER + "mlp.", router="router.gate", bias="expert_bias", shared="shared_mlp")
# a layer of multi-token prediction reads the normalized stream of the previous layer, as in vLLM and SGLang
hy_v3 = functools.partial(v3_experts_decoder, normalized=True, normed_depths=True)
FAMILY = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    settings=(
        # published files have these keys; transformers does not read them
        *only(qk_norm=True, route_norm=True, moe_router_use_sigmoid=True, moe_router_enable_expert_bias=True),
        decoder_sizes(num_kv_heads=8, head_dim=128, eps=1e-5),
        rope_settings(theta=_THETA),
        Group("router", v3_router, (Number("router_scaling_factor", "experts.router.scaling_factor", 2.826),)),
        *moe.expert_counts("num_experts", num=192, chosen=8),
        moe.num_shared("num_shared_experts", 1),
        Integer("moe_intermediate_size", "experts.mlp_dim", 1536, name="expert_dim", twin="expert_hidden_dim"),
        Flag("mlp_bias", "experts.shared.bias", False, name="mlp_bias"),
        moe.dense_layers_setting(1, listed=True),
        DEPTHS,
    ),
    build=hy_v3,
    weights=(*llama_weights(experts=_EXPERTS), *renamed(DEPTH, {"shared_head.norm": "final_layernorm"})),
    modules={r"\.shared_mlp\.": ".shared_experts."},
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "enable_moe_fp32_combine enable_attention_fp32_softmax enable_lm_head_fp32 "
        "use_grouped_mm": "precision and kernels of the computation",
    },
)


MODELS = {
    "hy3-295b-a21b": dict(
        model_type="hy_v3", vocab_size=120_832, hidden_size=4096, num_hidden_layers=80, num_attention_heads=64,
        intermediate_size=13_312, initializer_range=0.006,
    ),
}  # fmt: skip
