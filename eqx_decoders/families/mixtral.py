"""Mixtral (Jiang et al. 2024): Mistral's attention, and eight experts, two for each token."""

from eqx_decoders.families import moe
from eqx_decoders.families.common import NO_BIAS, DecoderSizes, decoder_sizes, llama_weights, same_window
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.layers.mask import Causal, Mask
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


def mixtral(
    shape: DecoderSizes,
    *,
    num_experts: int = 8,
    num_experts_per_token: int = 2,
    rope: Rope = Rope(theta=1e6),
    mask: Mask = Causal(),
) -> DecoderConfig:
    """Return a decoder of Mixtral blocks: a softmax over the chosen experts weighs them."""
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token)
    return shape.decoder(shape.block(shape.attention(rope=rope, mask=mask), experts))


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    settings=(
        same_window(None),
        decoder_sizes(num_kv_heads=8, eps=1e-5, keys=NO_BIAS, paths=moe.EXPERT_PATHS),
        *moe.expert_counts("num_local_experts", num=8, chosen=2),
        rope_settings(theta=1e6),
    ),
    build=mixtral,
    weights=llama_weights(
        mlp=moe.separate_experts("model.layers.{layer}.block_sparse_moe.", gate="w1", up="w3", down="w2")
    ),
    fused=moe.fused_experts("model.layers.{layer}.mlp."),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


MODELS = {
    "mixtral-8x7b": dict(
        model_type="mixtral", vocab_size=32_000, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=14_336,
    ),
    "mixtral-8x22b": dict(
        model_type="mixtral", vocab_size=32_768, hidden_size=6144, num_hidden_layers=56, num_attention_heads=48,
        intermediate_size=16_384,
    ),
}  # fmt: skip
