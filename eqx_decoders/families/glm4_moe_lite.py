"""GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's blocks with wider heads."""

from eqx_decoders.families import moe
from eqx_decoders.families._deepseek import (
    MLP,
    V3_COPIES,
    V3_ROPE,
    V3_WEIGHTS,
    deepseek_v3,
    expert_settings,
    latent_attention,
    latent_mixer,
    latent_sizes,
    v3_router,
    v3_router_settings,
)  # fmt: skip
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=(
        *v3_router_settings(scale=1.8),
        *latent_sizes(nope_dim=192, eps=1e-5),
        V3_ROPE,
        latent_mixer(768, value_dim=256),
        *expert_settings(num_experts=64, chosen=4, shared=1, expert_dim=1536),
        moe.dense_layers(1, listed=True),
        DEPTHS,
    ),
    build=deepseek_v3,
    weights=V3_WEIGHTS,
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    copies=V3_COPIES,
)


def _flash() -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=154_880, embed_dim=2048, num_layers=47, num_heads=20, num_kv_heads=20, head_dim=256, mlp_dim=10_240,
        eps=1e-5,
    )  # fmt: skip
    rope = Rope(theta=1e6, pairing="interleaved")
    return deepseek_v3(
        shape=shape, mixer=latent_attention(shape, rope=rope, q_rank=768, nope_dim=192, value_dim=256),
        router=v3_router(scaling_factor=1.8), num_experts=64, num_experts_per_token=4, num_shared=1, expert_dim=1536,
        dense_layers=range(1),
    )  # fmt: skip


MODELS = {"glm4.7-flash-30b-a3b": _flash}
