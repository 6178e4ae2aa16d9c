"""MiniMax M2 (MiniMax 2025): norms over the queries and the keys of all heads, partial rotary embeddings, and experts.

Routers have sigmoid scores and selection biases.
"""

from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings, rotary_dim_setting
from eqx_decoders.families.setting_rows import AUTO_MAP, Only, only
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def minimax_m2(shape: DecoderSizes, *, rope: Rope, num_experts: int, num_experts_per_token: int) -> DecoderConfig:
    """Return a decoder of MiniMax M2 blocks."""
    router = RouterConfig(score="sigmoid", order="score_first", renormalize=True, selection_bias=True)
    mixer = shape.attention(rope=rope, qk_norm=QKNorm(norm=shape.norm, over="heads"))
    experts = shape.experts(router=router, num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.decoder(shape.block(mixer, experts))


_MOE = LAYER + "block_sparse_moe."
_BIAS = "e_score_correction_bias"
FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(num_kv_heads=8, head_dim=128, keys=NO_BIAS, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=256, chosen=8),
        # published configuration files have these keys, but transformers does not read them
        *only(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True),
        *only(shared_intermediate_size=0, attn_type_list=lambda values: [1] * values["shape"].num_layers),
        Only("sliding_window"),
        rotary_dim_setting(),
        rope_settings(theta=5e6, fraction=1.0),
    ),
    build=minimax_m2,
    weights=llama_weights(mlp=moe.separate_experts(_MOE, gate="w1", up="w3", down="w2", bias=_BIAS)),
    fused=moe.fused_experts(LAYER + "mlp.", bias=_BIAS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS
    | {
        "layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta mlp_intermediate_size "
        "shared_moe_mode": "it configures layer types that MiniMax M2 does not have",
        "use_mtp num_mtp_modules mtp_transformer_layers": "multi-token prediction layers are not published",
    },
)


MODELS = {
    "minimax-m2-229b-a10b": dict(
        model_type="minimax_m2", vocab_size=200_064, hidden_size=3072, num_hidden_layers=62, num_attention_heads=48,
        intermediate_size=1536, rotary_dim=64,
    ),
}  # fmt: skip
