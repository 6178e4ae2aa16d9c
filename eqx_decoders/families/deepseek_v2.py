"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): softmax scores; V2-Lite has no latents for queries."""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import MLP, WEIGHTS, deepseek, deepseek_settings, router_settings
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Only, Word, value_at
from eqx_decoders.layers.moe.router import RouterConfig


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


_SETTINGS = dict(
    model_type="deepseek_v2",
    vocab_size=102_400,
    first_k_dense_replace=1,
    num_experts_per_tok=6,
    rope_scaling=dict(
        factor=40.0,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=4096,
        rope_type="yarn",
    ),
)

MODELS = {
    "deepseek2-16b": _SETTINGS | dict(
        hidden_size=2048, num_hidden_layers=27, num_attention_heads=16, intermediate_size=10_944,
        moe_intermediate_size=1408, q_lora_rank=None,
    ),
    "deepseek2-236b": _SETTINGS | dict(
        hidden_size=5120, num_hidden_layers=60, num_attention_heads=128, intermediate_size=12_288,
        moe_intermediate_size=1536, n_group=8, n_routed_experts=160, routed_scaling_factor=16.0, topk_group=3,
        topk_method="group_limited_greedy",
    ),
}  # fmt: skip
