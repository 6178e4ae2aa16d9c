"""Blocks, settings and tensors of DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention, and experts."""

import dataclasses
from typing import Any

from eqx_decoders.errors import ConversionError
from eqx_decoders.families import moe
from eqx_decoders.families.common import (
    ENDS,
    GATED_MLP,
    PRE_NORMS,
    DecoderSizes,
    gated_mlp,
    map_blocks,
    read_shape,
    write_outer,
)
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.weight_rows import Weight
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


def latent_attention(
    shape: DecoderSizes, *, rope: Rope | None, q_rank: int | None, kv_rank: int = 512, nope_dim: int = 128,
    value_dim: int = 128,
) -> LatentAttentionConfig:  # fmt: skip
    """Return latent attention with `shape.head_dim` features in queries and keys, `nope_dim` of them not rotated."""
    return LatentAttentionConfig(  # its norms have the default eps
        num_heads=shape.num_heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=shape.head_dim - nope_dim,
        value_dim=value_dim,
        rope=rope,
        bias=shape.attention_bias,
    )


def deepseek(
    shape: DecoderSizes,
    mixer: LatentAttentionConfig,
    *,
    router: RouterConfig,
    num_experts: int,
    num_experts_per_token: int,
    num_shared: int,
    expert_dim: int,
    num_dense_layers: int,
    mlp_bias: bool = False,
) -> DecoderConfig:
    """Return a decoder of DeepSeek blocks.

    `shape`'s MLP is that of the first `num_dense_layers`; `num_shared` experts are used by every token.
    """
    experts = shape.experts(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        router=router,
        shared=MLPConfig(mlp_dim=expert_dim * num_shared, activation=shape.activation, bias=mlp_bias),
    )
    dense, sparse = shape.block(mixer, shape.mlp(bias=mlp_bias)), shape.block(mixer, experts)
    return shape.decoder(dense if index < num_dense_layers else sparse for index in range(shape.num_layers))


def read_deepseek(
    fields: Fields, router: RouterConfig, *, num_experts: int, num_shared: int, expert_dim: int, num_dense_layers: int,
    interleaved: bool, **options: Any,
) -> DecoderConfig:  # fmt: skip
    """Read the configuration with this router; the four numbers are transformers' defaults."""
    for key in ("head_dim", "qk_head_dim"):  # they follow from the sizes with and without rotation
        fields.content.pop(key, None)
    fields.content.pop("auto_map", None)  # names code in the same directory, which is neither run nor exported
    fields.allow_only("moe_layer_freq", 1)
    fields.allow_only("ep_size", 1)
    nope_dim = fields.integer("qk_nope_head_dim", 128)
    shape = read_shape(fields, head_dim=nope_dim + fields.integer("qk_rope_head_dim", 64))
    if shape.num_kv_heads != shape.num_heads:
        raise fields.error("num_key_value_heads must be num_attention_heads: latent attention has as many of both.")
    mixer = latent_attention(
        shape,
        rope=read_rope(fields, pairing="interleaved" if interleaved else "half"),
        q_rank=fields.integer("q_lora_rank", 1536, null=None),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        value_dim=fields.integer("v_head_dim", 128),
    )
    config = deepseek(
        shape,
        mixer,
        router=router,
        num_experts=fields.integer("n_routed_experts", num_experts),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        num_shared=fields.integer("n_shared_experts", num_shared),
        expert_dim=fields.integer("moe_intermediate_size", expert_dim),
        num_dense_layers=fields.integer("first_k_dense_replace", num_dense_layers, least=0),
        **options,
    )
    return moe.need_experts(fields, config)


def write_deepseek(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_deepseek` reads, and those of the router."""
    mixer, experts = config.blocks[0].mixer, moe.experts_of(config)
    if not isinstance(mixer, LatentAttentionConfig) or experts.shared is None:
        raise ConversionError("DecoderConfig.blocks must have latent attention, and shared experts.")
    settings = {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_heads,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "intermediate_size": moe.dense_dim(config, default=experts.mlp_dim),
        "n_shared_experts": max(1, experts.shared.mlp_dim // experts.mlp_dim),
        "first_k_dense_replace": moe.sparse_layers(config)[0],
        "routed_scaling_factor": experts.router.scaling_factor,
        "n_group": experts.router.num_groups,
        "topk_group": experts.router.groups_per_token,
    }
    sizes = write_outer(config) | moe.write_experts(config, count="n_routed_experts", width="moe_intermediate_size")
    return sizes | settings | write_rope(config)


_ATTENTION = "model.layers.{layer}.self_attn."
MLP = "model.layers.{layer}.mlp."
WEIGHTS = (
    *ENDS,
    *PRE_NORMS,
    Weight(_ATTENTION + "q_proj.weight", "mixer.query", "(heads qk_dim) embed -> embed heads qk_dim"),
    Weight(_ATTENTION + "q_a_proj.weight", "mixer.query_down", "q_rank embed -> embed q_rank"),
    Weight(_ATTENTION + "q_a_proj.bias", "mixer.query_down_bias", "q_rank -> q_rank"),
    Weight(_ATTENTION + "q_a_layernorm.weight", "mixer.query_norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "q_b_proj.weight", "mixer.query_up", "(heads qk_dim) q_rank -> q_rank heads qk_dim"),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.weight", "mixer.kv_down", "latent embed -> embed latent"),
    Weight(_ATTENTION + "kv_a_proj_with_mqa.bias", "mixer.kv_down_bias", "latent -> latent"),
    Weight(_ATTENTION + "kv_a_layernorm.weight", "mixer.kv_norm.scale", "norm -> norm"),
    Weight(_ATTENTION + "kv_b_proj.weight", "mixer.kv_up", "(heads kv_dim) kv_rank -> kv_rank heads kv_dim"),
    Weight(_ATTENTION + "o_proj.weight", "mixer.out", "embed (heads value_dim) -> heads value_dim embed"),
    Weight(_ATTENTION + "o_proj.bias", "mixer.out_bias", "embed -> embed"),
    *GATED_MLP,
    *moe.separate_experts(MLP),
    *gated_mlp(MLP + "shared_experts.", "mlp.shared."),
)


# --- V3 ---


def v3_router(*, groups: int, groups_per_token: int, scaling_factor: float, renormalize: bool = True) -> RouterConfig:
    """Return a router with sigmoid scores and selection biases; a group's score is the sum of its two best."""
    return RouterConfig(
        score="sigmoid",
        order="score_first",
        renormalize=renormalize,
        selection_bias=True,
        num_groups=groups,
        groups_per_token=groups_per_token,
        group_score="top2_sum" if groups > 1 else "max",
        scaling_factor=scaling_factor,
    )


def with_indexer(config: DecoderConfig, indexer: IndexerConfig | None) -> DecoderConfig:
    """Return the decoder with this indexer in all layers, those of multi-token prediction included."""

    def changed(block: Any) -> Any:
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, indexer=indexer))

    mtp = None if config.mtp is None else dataclasses.replace(config.mtp, block=changed(config.mtp.block))
    return dataclasses.replace(map_blocks(config, changed), mtp=mtp)


def read_v3(fields: Fields) -> DecoderConfig:
    """Read the configuration of DeepSeek-V3."""
    fields.allow_only("topk_method", "noaux_tc")
    fields.allow_only("scoring_func", "sigmoid")
    router = v3_router(
        groups=fields.integer("n_group", 8),
        groups_per_token=fields.integer("topk_group", 4),
        scaling_factor=fields.number("routed_scaling_factor", 2.5),
        renormalize=fields.flag("norm_topk_prob", True),
    )
    defaults: dict[str, Any] = dict(num_experts=256, num_shared=1, expert_dim=2048, num_dense_layers=3)
    config = read_deepseek(fields, router, **defaults, interleaved=fields.flag("rope_interleave", True))
    depths = fields.integer("num_nextn_predict_layers", 0, least=0)
    if depths == 0:
        return config
    # the stream is read after the final norm, as vLLM and SGLang run these weights
    norm = RMSNormConfig(eps=fields.number("rms_norm_eps", 1e-6))
    mtp = MTPConfig(num_depths=depths, block=config.blocks[-1], norm=norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def write_v3(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_v3` reads."""
    mixer = config.blocks[0].mixer
    return write_deepseek(config) | {
        "norm_topk_prob": moe.experts_of(config).router.renormalize,
        "rope_interleave": getattr(getattr(mixer, "rope", None), "pairing", None) == "interleaved",
        "num_nextn_predict_layers": 0 if config.mtp is None else config.mtp.num_depths,
    }


_LAYER = "model.layers.{layer}."
V3_WEIGHTS = (
    *WEIGHTS,
    Weight(MLP + "gate.e_score_correction_bias", "mlp.router.selection_bias", "experts -> experts"),
    Weight(_LAYER + "enorm.weight", "embed_norm.scale", "norm -> norm"),
    Weight(_LAYER + "hnorm.weight", "stream_norm.scale", "norm -> norm"),
    Weight(_LAYER + "eh_proj.weight", "kernel", "embed joined -> joined embed"),
    Weight(_LAYER + "shared_head.norm.weight", "final_norm.scale", "norm -> norm"),
)
V3_COPIES = {
    _LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
    _LAYER + "shared_head.head.weight": "lm_head.weight",
}
V3_YARN: dict[str, Any] = dict(original_length=4096, mscale=1.0, mscale_all_dim=1.0, pairing="interleaved")


def v3_model(*, vocab_size: int, num_heads: int, rope: Rope, **options: Any) -> DecoderConfig:
    """Return a decoder of the published sizes of DeepSeek-V3; the options are those of `deepseek`."""
    shape = DecoderSizes(
        vocab_size=vocab_size, embed_dim=7168, num_layers=61, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=192, mlp_dim=18_432,
    )  # fmt: skip
    mixer = latent_attention(shape, rope=rope, q_rank=1536)
    return deepseek(shape, mixer, num_experts_per_token=8, num_shared=1, expert_dim=2048, **options)


def v3_671b() -> DecoderConfig:
    """Return DeepSeek-V3."""
    return v3_model(
        vocab_size=129_280, num_heads=128, num_experts=256, num_dense_layers=3,
        rope=YarnRope(factor=40.0, **V3_YARN),
        router=v3_router(groups=8, groups_per_token=4, scaling_factor=2.5),
    )  # fmt: skip
