"""FlexOlmo (Shi et al. 2025): OLMo 2's block with experts that were trained apart."""

from eqx_decoders.families import moe
from eqx_decoders.families._olmo import olmo_block
from eqx_decoders.families.common import LAYER, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Flag
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_THETA = 500_000.0


def flex_olmo(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, renormalize: bool = False,
    rope: Rope = Rope(theta=_THETA),
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of FlexOlmo blocks, whose experts are as wide as the MLP of `shape`."""
    router = RouterConfig(order="score_first", renormalize=renormalize)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, router=router)
    return shape.decoder(olmo_block(shape, rope=rope, experts=experts))


_MLP = LAYER + "mlp."
FAMILY = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        rope_settings(theta=_THETA),
        *moe.expert_counts("num_experts", num=7, chosen=5),
        Flag("norm_topk_prob", "experts.router.renormalize", False),
    ),
    build=flex_olmo,
    weights=llama_weights(norms="post", mlp=moe.separate_experts(_MLP)),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


MODELS = {
    "flexolmo-7x7b": dict(
        model_type="flex_olmo", vocab_size=100_352, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=11_008,
    ),
}  # fmt: skip
