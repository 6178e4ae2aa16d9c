"""Hunyuan (Tencent 2025), dense and with experts: queries and keys are normalized after RoPE."""

from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights, renamed
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.attention.attention import AttentionConfig, QKNorm
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def hunyuan_attention(shape: DecoderSizes, rope: Rope) -> AttentionConfig:
    """Return attention whose queries and keys are normalized after RoPE."""
    return shape.attention(rope=rope, qk_norm=QKNorm(norm=shape.norm, when="after_rope"))


NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
IGNORED_KEYS = {"eod_token_id": "generation_config.json has the end-of-sequence tokens"}


# --- Hunyuan, dense: RoPE scaling by `alpha`, which increases the base ---


def hunyuan(shape: DecoderSizes, *, rope: Rope) -> DecoderConfig:
    """Return a decoder of Hunyuan blocks."""
    return shape.decoder(shape.block(hunyuan_attention(shape, rope)))


HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    settings=(decoder_sizes(eps=1e-5), rope_settings()),
    build=hunyuan,
    weights=renamed(llama_weights(), NAMES),
    ignored_keys=IGNORED_KEYS,
)


# --- Hunyuan with experts: routed experts and a shared expert ---


def hunyuan_moe(
    shape: DecoderSizes, *, rope: Rope, num_experts: int = 64, num_experts_per_token: int = 8
) -> DecoderConfig:
    """Return a decoder of Hunyuan blocks with experts; `shape.mlp_dim` is the width of an expert."""
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        router=RouterConfig(order="score_first", renormalize=True),
        shared_dim=shape.mlp_dim,
    )
    return shape.decoder(shape.block(hunyuan_attention(shape, rope), experts))


_MLP = LAYER + "mlp."
HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_experts", "moe_topk", num=1, chosen=1),
        rope_settings(),
    ),
    build=hunyuan_moe,
    weights=renamed(llama_weights(mlp=moe.separate_experts(_MLP, router="gate.wg", shared="shared_mlp")), NAMES),
    ignored_keys=IGNORED_KEYS | moe.IGNORED_ROUTER_KEYS,
)


FAMILIES = (HUNYUAN, HUNYUAN_MOE)

MODELS = {
    "hunyuan-7b": dict(
        model_type="hunyuan_v1_dense", vocab_size=128_167, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, intermediate_size=14_336,
        rope_scaling=dict(alpha=1000.0, rope_type="dynamic"), tie_word_embeddings=True,
    ),
    "hunyuan-80b-a13b": dict(
        model_type="hunyuan_v1_moe", vocab_size=128_167, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=3072, moe_topk=8, num_experts=64,
        rope_scaling=dict(alpha=1000.0, rope_type="dynamic"), tie_word_embeddings=True,
    ),
}  # fmt: skip
