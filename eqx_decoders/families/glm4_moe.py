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
    v3_router,
    v3_router_settings,
)  # fmt: skip
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import AUTO_MAP, Flag
from eqx_decoders.layers.rope import Rope


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

_shape = functools.partial(
    DecoderSizes, vocab_size=151_552, num_heads=96, num_kv_heads=8, head_dim=128, eps=1e-5, attention_bias=True
)
_AIR = _shape(embed_dim=4096, num_layers=46, mlp_dim=10_944)
_FULL = _shape(embed_dim=5120, num_layers=92, mlp_dim=12_288)
_model = functools.partial(glm4_moe, rope=Rope(theta=1e6, fraction=0.5), num_experts_per_token=8, num_shared=1)

MODELS = {
    "glm4.5-air-106b-a12b": lambda: _model(
        _AIR, num_experts=128, expert_dim=1408, dense_layers=range(1), router=v3_router(scaling_factor=1.0)
    ),
    **dict.fromkeys(("glm4.5-355b-a32b", "glm4.6-355b-a32b", "glm4.7-355b-a32b"), lambda: _model(
        _FULL, num_experts=160, expert_dim=1536, dense_layers=range(3), router=v3_router(scaling_factor=2.5),
        normalized=True,
    )),
}  # fmt: skip
