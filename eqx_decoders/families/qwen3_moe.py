"""Qwen3 with experts (Yang et al. 2025): Qwen3's attention; layers with experts and dense ones mixed at will."""

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import WINDOW, qwen3_moe, sparse_settings
from eqx_decoders.families.common import llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Unused


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


_SETTINGS = dict(model_type="qwen3_moe", vocab_size=151_936, head_dim=128, norm_topk_prob=True)

MODELS = {
    "qwen3-30b-a3b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, rope_theta=10_000_000.0,
    ),
    "qwen3-30b-a3b-base": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, rope_theta=1_000_000.0,
    ),
    "qwen3-235b-a22b": _SETTINGS | dict(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, moe_intermediate_size=1536,
        rope_theta=5_000_000.0,
    ),
    "qwen3-480b-a35b": _SETTINGS | dict(
        hidden_size=6144, num_hidden_layers=62, num_attention_heads=96, num_key_value_heads=8,
        moe_intermediate_size=2560, num_experts=160, rope_theta=10_000_000.0,
    ),
}  # fmt: skip
