"""OLMo 1 to 3 (Groeneveld et al. 2024; OLMo et al. 2024; Team Olmo 2025), OLMoE and FlexOlmo."""

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.families import moe
from eqx_decoders.families.common import LAYER, DecoderSizes, cycle_mask_settings, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.rope_config import RopesByLayer, rope_settings
from eqx_decoders.families.setting_rows import Flag, Number
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.mask import Causal, Mask, SlidingWindow
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import LayerNormConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig


_MLP = LAYER + "mlp."


def olmo_block(
    shape: DecoderSizes, *, rope: Rope | None, mask: Mask = Causal(), experts: ExpertsConfig | None = None
) -> BlockConfig:
    """Return a block of OLMo 2.

    The outputs of attention and of the MLP (or `experts`) are normalized, but not their inputs. One norm covers the
    queries of all heads, and another norm the keys of all heads.
    """
    mixer = shape.attention(rope=rope, mask=mask, qk_norm=QKNorm(norm=shape.norm, over="heads"))
    return shape.block(mixer, experts, norms="post")


# --- OLMo: LayerNorms without learned scale and bias, and clipped queries, keys and values ---


_NORM = LayerNormConfig(eps=1e-5, scale=False, bias=False)


def olmo(shape: DecoderSizes, *, rope: Rope, clip: float | None) -> DecoderConfig:
    """Return a decoder of OLMo blocks. Queries, keys and values are clipped to `[-clip, clip]`; None: no clipping."""
    return shape.decoder(shape.block(shape.attention(rope=rope, qkv_clip=clip), norm=_NORM), final_norm=_NORM)


OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    settings=(
        decoder_sizes(keys={"rms_norm_eps": None}),
        Number("clip_qkv", "attention.qkv_clip", None, name="clip"),
        rope_settings(),
    ),
    build=olmo,
    weights=llama_weights(),
)


_OLMO_BASE = dict(
    model_type="olmo",
    vocab_size=50_304,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11_008,
)


# --- OLMo 2: post-norms, and norms over the queries and the keys of all heads ---


def olmo2(shape: DecoderSizes, *, rope: Rope) -> DecoderConfig:
    """Return a decoder of OLMo 2 blocks."""
    return shape.decoder(olmo_block(shape, rope=rope))


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5),
        rope_settings(),
    ),
    build=olmo2,
    weights=llama_weights(norms="post"),
)


_OLMO2_BASE = dict(model_type="olmo2", vocab_size=100_352, rms_norm_eps=1e-06, rope_theta=500_000.0)


# --- Olmo 3: OLMo 2 with sliding-window attention in three of four layers ---


_OLMO3_THETA = 500_000.0


def olmo3(shape: DecoderSizes, *, masks: tuple[Mask, ...], rope: Rope, local_rope: Rope) -> DecoderConfig:
    """Return a decoder of Olmo 3 blocks.

    `masks`: attention mask of each layer. `local_rope`: rotary embedding of layers with a sliding window; `rope`:
    rotary embedding of other layers.
    """

    def block(mask: Mask) -> BlockConfig:
        return olmo_block(shape, rope=local_rope if isinstance(mask, SlidingWindow) else rope, mask=mask)

    return shape.decoder(map(block, masks))


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    settings=(
        decoder_sizes(eps=1e-5),
        # without rope_parameters, transformers uses this theta in layers with a window, regardless of rope_theta
        RopesByLayer(theta=_OLMO3_THETA, local_theta=_OLMO3_THETA, local_key=None),
        cycle_mask_settings(4, default=4096),
    ),
    build=olmo3,
    weights=llama_weights(norms="post"),
)


_OLMO3_BASE = dict(
    model_type="olmo3",
    vocab_size=100_278,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    intermediate_size=11_008,
    rms_norm_eps=1e-06,
)


# --- FlexOlmo (Shi et al. 2025): OLMo 2's block with independently trained experts ---


def flex_olmo(
    shape: DecoderSizes, *, num_experts: int, num_experts_per_token: int, renormalize: bool, rope: Rope
) -> DecoderConfig:
    """Return a decoder of FlexOlmo blocks with experts of `shape.mlp_dim` hidden features.

    `renormalize`: whether the router weights of a token's experts are divided by their sum.
    """
    router = RouterConfig(order="score_first", renormalize=renormalize)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, router=router)
    return shape.decoder(olmo_block(shape, rope=rope, experts=experts))


FLEX_OLMO = Family(
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    settings=(
        decoder_sizes(paths=moe.EXPERT_PATHS),
        rope_settings(theta=500_000.0),
        *moe.expert_counts("num_experts", num=7, chosen=5),
        Flag("norm_topk_prob", "experts.router.renormalize", False),
    ),
    build=flex_olmo,
    weights=llama_weights(norms="post", mlp=moe.separate_experts(_MLP)),
    fused=moe.fused_experts(_MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
)


# --- OLMoE (Muennighoff et al. 2024): pre-norms, norms over all heads, clipped projections, and experts ---


def olmoe(
    shape: DecoderSizes,
    *,
    num_experts: int,
    num_experts_per_token: int,
    renormalize: bool,
    rope: Rope,
    clip: float | None,
) -> DecoderConfig:
    """Return a decoder of OLMoE blocks. `renormalize`: see `flex_olmo`; `clip`: see `olmo`."""
    router = RouterConfig(order="score_first", renormalize=renormalize)
    experts = shape.experts(num_experts=num_experts, num_experts_per_token=num_experts_per_token, router=router)
    qk_norm = QKNorm(norm=shape.norm, over="heads")
    return shape.decoder(shape.block(shape.attention(rope=rope, qk_norm=qk_norm, qkv_clip=clip), experts))


OLMOE = Family(
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


FAMILIES = (OLMO, OLMO2, OLMO3, FLEX_OLMO, OLMOE)

MODELS = {
    "olmo-1b": _OLMO_BASE | dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "olmo-7b": _OLMO_BASE,
    "olmo-7b-0724": _OLMO_BASE | dict(clip_qkv=8.0),
    "olmo2-1b": _OLMO2_BASE | dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, intermediate_size=8192,
    ),
    "olmo2-7b": _OLMO2_BASE | dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11_008,
    ),
    "olmo2-13b": _OLMO2_BASE | dict(
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13_824,
    ),
    "olmo2-32b": _OLMO2_BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
    ),
    "olmo3-7b-pt": _OLMO3_BASE,
    "olmo3-7b": _OLMO3_BASE | dict(
        rope_parameters=dict(full_attention=dict(factor=8.0, original_max_position_embeddings=8192, rope_type="yarn")),
    ),
    "olmo3-32b": _OLMO3_BASE | dict(
        hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8, intermediate_size=27_648,
        rope_parameters=dict(full_attention=dict(factor=8.0, original_max_position_embeddings=8192, rope_type="yarn")),
    ),
    "flexolmo-7x7b": dict(
        model_type="flex_olmo", vocab_size=100_352, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        intermediate_size=11_008,
    ),
    "olmoe-7b-a1b": dict(
        model_type="olmoe", vocab_size=50_304, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16,
        intermediate_size=1024,
    ),
}  # fmt: skip
