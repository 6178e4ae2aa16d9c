"""dots.llm1 (rednote-hilab 2025): Qwen3's attention and DeepSeek-V3's experts."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families.common import decoder_sizes, layer_masks, llama_weights
from eqx_decoders.families.deepseek.blocks import (
    MLP,
    V3_EXPERTS,
    expert_settings,
    v3_experts_decoder,
    v3_router_settings,
)
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import Integer


dots1 = functools.partial(v3_experts_decoder, normalized=True)
FAMILY = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    settings=(
        decoder_sizes(),
        rope_settings(),
        Integer("max_window_layers", None, 62, least=0, name="_max_window_layers"),
        layer_masks(lambda index, values: index >= values["_max_window_layers"], default=4096),
        *v3_router_settings(scale=1.0, renormalize=False),
        # transformers has no defaults: these are the published values
        *expert_settings(num_experts=128, chosen=6, shared=2, expert_dim=1408),
        moe.dense_layers_setting(0),
    ),
    build=dots1,
    weights=llama_weights(experts=V3_EXPERTS),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {"max_window_layers use_sliding_window": "layer_types and sliding_window determine it"},
)


MODELS = {
    "dots1-142b-a14b": dict(
        model_type="dots1", vocab_size=152_064, hidden_size=4096, num_hidden_layers=62, num_attention_heads=32,
        intermediate_size=10_944, first_k_dense_replace=1, norm_topk_prob=True, rms_norm_eps=1e-05,
        rope_theta=10_000_000.0, routed_scaling_factor=2.5,
    ),
}  # fmt: skip
