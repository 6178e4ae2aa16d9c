"""Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024): Qwen2's attention, experts, and a shared one with a gate."""

from eqx_decoders.families import moe
from eqx_decoders.families._qwen import EARLY_WINDOWS, IGNORED_WINDOW_KEYS
from eqx_decoders.families._qwen_hybrid import EXPERTS, FUSED_EXPERTS, expert_settings, qwen_experts
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Defaults, Flag, Group
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def qwen2_moe(
    shape: DecoderSizes, *, experts: ExpertsConfig, rope: Rope = Rope(theta=1e6), masks: tuple[Mask, ...] = (),
    dense_layers: frozenset[int] = frozenset(),
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of Qwen2 blocks with experts; `dense_layers`, counted from 0, have `shape`'s MLP."""
    mixers = shape.attention_by_mask(masks, rope, rope, out_bias=False)
    return moe.sparse_decoder(shape, mixers, experts, dense_layers)


_EXPERTS = (
    *expert_settings(num=60, chosen=4, expert_dim=1408, shared_dim=5632),
    Flag("norm_topk_prob", "experts.router.renormalize", False),
)
FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    settings=(
        Defaults({"intermediate_size": 5632}),
        decoder_sizes(num_kv_heads=16, attention_bias=True, keys={"attention_bias": "qkv_bias"}),
        Group("experts", qwen_experts, _EXPERTS, uses=("shape",)),
        moe.sparse_steps(),
        EARLY_WINDOWS,
        rope_settings(),
    ),
    build=qwen2_moe,
    weights=llama_weights(experts=EXPERTS),
    fused=FUSED_EXPERTS,
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_WINDOW_KEYS,
)


_SETTINGS = dict(model_type="qwen2_moe", vocab_size=151_936, rope_theta=1_000_000.0)

MODELS = {
    "qwen1.5-moe-a2.7b": _SETTINGS | dict(hidden_size=2048, num_hidden_layers=24, num_attention_heads=16),
    "qwen2-57b-a14b": _SETTINGS | dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        moe_intermediate_size=2560, num_experts=64, num_experts_per_tok=8, shared_expert_intermediate_size=20_480,
    ),
}  # fmt: skip
