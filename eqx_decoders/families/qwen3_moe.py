"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention; layers with experts and dense ones mixed at will."""

import functools

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import WINDOW, qwen3_moe, sparse_settings
from eqx_decoders.families.common import DecoderSizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Unused
from eqx_decoders.layers.rope import Rope


_MLP = "model.layers.{layer}.mlp."
FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    settings=(
        *sparse_settings(num_kv_heads=4, mlp_dim=6144, expert_dim=768, num_experts=128, num_experts_per_token=8),
        WINDOW,
        Unused("max_window_layers", "transformers gives all layers the window"),
        Flag("norm_topk_prob", "experts.router.renormalize", False),
        rope_settings(),
    ),
    build=qwen3_moe,
    weights=llama_weights(experts=moe.separate_experts(_MLP)),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)

_shape = functools.partial(DecoderSizes, vocab_size=151_936, head_dim=128)
_30B = _shape(embed_dim=2048, num_layers=48, num_heads=32, num_kv_heads=4, mlp_dim=768)
_235B = _shape(embed_dim=4096, num_layers=94, num_heads=64, num_kv_heads=4, mlp_dim=1536)
_480B = _shape(embed_dim=6144, num_layers=62, num_heads=96, num_kv_heads=8, mlp_dim=2560)

MODELS = {
    "qwen3-30b-a3b": lambda: qwen3_moe(_30B, expert_dim=768, rope=Rope(theta=1e7)),
    "qwen3-30b-a3b-base": lambda: qwen3_moe(_30B, expert_dim=768),
    "qwen3-235b-a22b": lambda: qwen3_moe(_235B, expert_dim=1536, rope=Rope(theta=5e6)),
    "qwen3-480b-a35b": lambda: qwen3_moe(_480B, expert_dim=2560, num_experts=160, rope=Rope(theta=1e7)),
}
