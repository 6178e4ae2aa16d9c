"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): softmax scores; V2-Lite has no latents for queries."""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import MLP, WEIGHTS, deepseek, deepseek_settings, latent_attention, router_settings
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Only, Word, value_at
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import YarnRope


def _router(*, grouped: bool, groups: int, groups_per_token: int, scaling_factor: float) -> RouterConfig:
    return RouterConfig(
        order="score_first",
        num_groups=groups if grouped else 1,
        groups_per_token=groups_per_token if grouped else 1,
        scaling_factor=scaling_factor,
    )


_METHOD = Word(
    "topk_method", lambda config: value_at(config, "experts.router.num_groups") > 1, "greedy", name="grouped",
    known={"greedy": False, "group_limited_greedy": True},
)  # fmt: skip
FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    settings=(
        router_settings(_router, _METHOD, scale=1.0, groups=1, chosen=1),
        Only("scoring_func", "softmax"),
        *deepseek_settings(
            rope_settings("_rope", pairing="interleaved"), num_experts=64, shared=2, expert_dim=1407, num_dense_layers=0
        ),
        Flag("mlp_bias", "experts.shared.bias", False, name="mlp_bias"),
    ),
    build=deepseek,
    weights=WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "num_nextn_predict_layers": "V2 was published without such layers",
        "norm_topk_prob": "transformers never divides",
    },
)

_ROPE = YarnRope(factor=40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707, pairing="interleaved")
_LITE = DecoderSizes(
    vocab_size=102_400, embed_dim=2048, num_layers=27, num_heads=16, num_kv_heads=16, head_dim=192, mlp_dim=10_944
)
_FULL = DecoderSizes(
    vocab_size=102_400, embed_dim=5120, num_layers=60, num_heads=128, num_kv_heads=128, head_dim=192, mlp_dim=12_288
)
_COMMON: dict[str, Any] = dict(num_experts_per_token=6, num_shared=2, dense_layers=range(1))

MODELS = {
    "deepseek2-16b": lambda: deepseek(
        _LITE,
        latent_attention(_LITE, rope=_ROPE, q_rank=None),
        **_COMMON,
        num_experts=64,
        expert_dim=1408,
        router=RouterConfig(order="score_first"),
    ),
    "deepseek2-236b": lambda: deepseek(
        _FULL,
        latent_attention(_FULL, rope=_ROPE, q_rank=1536),
        **_COMMON,
        num_experts=160,
        expert_dim=1536,
        router=RouterConfig(order="score_first", num_groups=8, groups_per_token=3, scaling_factor=16.0),
    ),
}
