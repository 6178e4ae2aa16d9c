"""dots.llm1 (rednote-hilab 2025): Qwen3's attention and DeepSeek-V3's experts."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import MLP, V3_EXPERTS, expert_settings, v3_experts, v3_router, v3_router_settings
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, layer_masks, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Integer
from eqx_decoders.layers.rope import Rope


dots1 = functools.partial(v3_experts, normalized=True)
FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    settings=(
        decoder_sizes(),
        rope_settings(),
        Integer("max_window_layers", None, 62, least=0, name="_first"),
        layer_masks(lambda index, values: index >= values["_first"], default=4096),
        *v3_router_settings(scale=1.0, renormalize=False),
        *expert_settings(num_experts=128, chosen=6, shared=2, expert_dim=1408),  # transformers has no defaults
        moe.dense_layers(0),
    ),
    build=dots1,
    weights=llama_weights(experts=V3_EXPERTS),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {"max_window_layers use_sliding_window": "layer_types and sliding_window say it"},
)

_142B = DecoderSizes(
    vocab_size=152_064, embed_dim=4096, num_layers=62, num_heads=32, num_kv_heads=32, head_dim=128, mlp_dim=10_944,
    eps=1e-5,
)  # fmt: skip

MODELS = {
    "dots1-142b-a14b": lambda: dots1(
        _142B, rope=Rope(theta=1e7), router=v3_router(scaling_factor=2.5), num_experts=128, num_experts_per_token=6,
        num_shared=2, expert_dim=1408, dense_layers=range(1),
    ),
}  # fmt: skip
