"""OLMoE (Muennighoff et al. 2024): norms over all heads, clipped queries, keys and values; experts in every layer."""

from eqx_decoders.families import moe
from eqx_decoders.families.common import DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag, Number
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def olmoe(
    shape: DecoderSizes,
    *,
    num_experts: int = 64,
    num_experts_per_token: int = 8,
    renormalize: bool = False,
    rope: Rope = Rope(),
    clip: float | None = None,
) -> DecoderConfig:
    """Return a decoder of OLMoE blocks."""
    router = RouterConfig(order="score_first", renormalize=renormalize)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, router=router)
    qk_norm = QKNorm(norm=shape.norm, over="heads")
    return shape.decoder(shape.block(shape.attention(rope=rope, qk_norm=qk_norm, qkv_clip=clip), experts))


_MLP = "model.layers.{layer}.mlp."
FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_experts", num=64, chosen=8),
        Flag("norm_topk_prob", "experts.router.renormalize", False),
        Number("clip_qkv", "attention.qkv_clip", None, name="clip"),
        rope_settings(),
    ),
    build=olmoe,
    weights=llama_weights(mlp=moe.separate_experts(_MLP)),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


MODELS = {
    "olmoe-7b-a1b": dict(
        model_type="olmoe", vocab_size=50_304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16,
        intermediate_size=1024,
    ),
}  # fmt: skip
