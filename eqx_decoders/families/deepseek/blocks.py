"""Blocks, settings and weight rows of DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention and experts."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.families import moe
from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import (
    ENDS,
    GATED_MLP,
    LAYER,
    PRE_NORMS,
    DecoderSizes,
    decoder_sizes,
    map_blocks,
    with_masks,
)
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.setting_rows import (
    AUTO_MAP,
    Check,
    Flag,
    Group,
    Integer,
    Number,
    Only,
    Path,
    Rule,
    Setting,
    Unused,
    Values,
    value_at,
)
from eqx_decoders.families.weight_rows import Weight, joined_kernels
from eqx_decoders.layers.attention.indexer import IndexerConfig
from eqx_decoders.layers.attention.mla import LatentAttentionConfig
from eqx_decoders.layers.base import MixerConfig
from eqx_decoders.layers.mask import Mask
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


def latent_attention(
    shape: DecoderSizes, *, rope: Rope | None = None, q_rank: int | None, kv_rank: int = 512, nope_dim: int = 128,
    value_dim: int = 128,
) -> LatentAttentionConfig:  # fmt: skip
    """Return multi-head latent attention (MLA) with the sizes of `shape`.

    Queries and keys have `shape.head_dim` features per head. `rope` rotates all but `nope_dim` of these features.
    """
    # transformers does not use rms_norm_eps for the norms of latents, so `norm` keeps its default eps
    return LatentAttentionConfig(
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
    shape: DecoderSizes, mixer: MixerConfig, *, router: RouterConfig, dense_layers: Collection[int],
    mlp_bias: bool = False, **expert_sizes: int,
) -> DecoderConfig:  # fmt: skip
    """Return a decoder of DeepSeek blocks. Raises ConfigError if all layers are dense.

    **Arguments:**

    - `shape`: sizes of the decoder. `shape.mlp_dim` is the MLP size of dense layers.
    - `mixer`: attention of every layer.
    - `router`: router of the experts.
    - `dense_layers`: indices of the layers that have an MLP instead of experts.
    - `mlp_bias`: whether the MLPs of dense layers and the shared experts have biases.
    - `expert_sizes`: arguments of `moe.experts_with_shared` and `ExpertsConfig`.
    """
    experts = moe.experts_with_shared(shape, router=router, shared_bias=mlp_bias, **expert_sizes)
    mixers = (mixer,) * shape.num_layers
    return moe.sparse_decoder(shape, mixers, experts, dense_layers, shape.mlp(bias=mlp_bias))


_LATENT_PATHS: dict[str, Path] = {
    "num_attention_heads": "latent.num_heads",
    "num_key_value_heads": "latent.num_heads",
    "attention_bias": "latent.bias",
}
_SAME_HEADS = Check(
    lambda values: values["shape"].num_kv_heads == values["shape"].num_heads,
    "num_key_value_heads={shape.num_kv_heads} must equal num_attention_heads={shape.num_heads}, because latent "
    "attention has a key and a value for each query head. Remove num_key_value_heads or change it.",
)


def latent_sizes(*, nope_dim: int = 128, keys: Mapping[str, str | None] = {}, **options: Any) -> tuple[Setting, ...]:
    """Return the settings of `DecoderSizes` for a decoder with latent attention.

    `nope_dim`: default number of features per head without rotation. `keys` and `options`: arguments of
    `decoder_sizes`.
    """
    return (
        Unused("head_dim", "transformers replaces it by qk_rope_head_dim; published files have other values"),
        AUTO_MAP,
        Integer("qk_nope_head_dim", "latent.nope_dim", nope_dim, name="_nope_dim"),
        Integer("qk_rope_head_dim", "latent.rope_dim", 64, name="_rope_dim"),
        Only("qk_head_dim", lambda values: values["_nope_dim"] + values["_rope_dim"]),
        decoder_sizes(
            head_dim=lambda values: values["_nope_dim"] + values["_rope_dim"],
            keys={"head_dim": None, **keys},
            paths=_LATENT_PATHS,
            **options,
        ),
        _SAME_HEADS,
    )


def latent_ranks(q_rank: int | None, value_dim: int = 128) -> tuple[Setting, ...]:
    """Return the settings of latent attention besides `latent_sizes`. The arguments are transformers' defaults."""
    return (
        Integer("q_lora_rank", "latent.q_rank", q_rank, null=None),
        Integer("kv_lora_rank", "latent.kv_rank", 512),
        Integer("v_head_dim", "latent.value_dim", value_dim),
    )


def latent_mixer(q_rank: int | None, value_dim: int = 128) -> Group:
    """Return the setting of latent attention. It must follow `latent_sizes` and the rotary embedding `_rope`."""
    return Group("mixer", latent_attention, latent_ranks(q_rank, value_dim), uses=("shape", "_rope", "_nope_dim"))


def router_settings(
    make: Callable[..., RouterConfig], *options: Setting, scale: float, groups: int, groups_per_token: int
) -> Group:
    """Return the settings of a router with expert groups, which `make` builds from these settings and `options`.

    The numbers are transformers' defaults.
    """
    group_settings = (
        Integer("n_group", "experts.router.num_groups", groups, name="groups"),
        Integer("topk_group", "experts.router.groups_per_token", groups_per_token, name="groups_per_token"),
        Number("routed_scaling_factor", "experts.router.scaling_factor", scale),
    )
    return Group("router", make, (*options, *group_settings))


def expert_settings(*, num_experts: int, chosen: int, shared: int, expert_dim: int) -> tuple[Setting, ...]:
    """Return the settings of experts besides their router. The numbers are transformers' defaults."""
    return (
        Only("moe_layer_freq", 1),
        Only("ep_size", 1),
        *moe.expert_counts("n_routed_experts", num=num_experts, chosen=chosen, width=expert_dim),
        moe.num_shared("n_shared_experts", shared),
    )


def deepseek_settings(
    rope: Rule, *, num_experts: int, shared: int, expert_dim: int, num_dense_layers: int
) -> tuple[Setting, ...]:
    """Return the settings that DeepSeek-V2 and V3 share.

    `rope`: setting of the rotary embedding `_rope`. The numbers are transformers' defaults.
    """
    return (
        *latent_sizes(),
        rope,
        latent_mixer(1536),
        *expert_settings(num_experts=num_experts, chosen=8, shared=shared, expert_dim=expert_dim),
        moe.dense_layers_setting(num_dense_layers),
    )


_ATTENTION = LAYER + "self_attn."
MLP = LAYER + "mlp."
LATENT = (
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
)
WEIGHTS = (*LATENT, *moe.separate_experts(MLP, shared="shared_experts"))


# --- V3 ---


def v3_router(
    *, groups: int = 1, groups_per_token: int = 1, scaling_factor: float, renormalize: bool = True
) -> RouterConfig:
    """Return a router with sigmoid scores and selection biases.

    The score of an expert group is the sum of its two highest expert scores.
    """
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
    """Return the decoder with this indexer in all layers, including multi-token prediction (MTP) layers."""

    def replace_indexer(block: Any) -> Any:
        return dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, indexer=indexer))

    mtp = config.mtp
    if mtp is not None:
        mtp = dataclasses.replace(mtp, block=replace_indexer(mtp.block))
    return dataclasses.replace(map_blocks(config, replace_indexer), mtp=mtp)


def _read_v3_rope(fields: Fields, values: Values) -> Rope:
    return read_rope(fields, pairing="interleaved" if fields.flag("rope_interleave", True) else "half")


def _write_v3_rope(config: DecoderConfig) -> dict[str, Any]:
    rope = value_at(config, "latent").rope
    return {"rope_interleave": rope is not None and rope.pairing == "interleaved", **write_rope(config)}


def v3_router_settings(
    *, scale: float, groups: int = 1, groups_per_token: int = 1, renormalize: bool = True
) -> tuple[Setting, ...]:
    """Return the settings of `v3_router`. The arguments are transformers' defaults."""
    renormalize_setting = Flag("norm_topk_prob", "experts.router.renormalize", renormalize)
    return (
        Only("topk_method", "noaux_tc"),
        Only("scoring_func", "sigmoid", "noaux_tc"),  # dots.llm1 has "noaux_tc" in its configuration files
        router_settings(v3_router, renormalize_setting, scale=scale, groups=groups, groups_per_token=groups_per_token),
    )


V3_ROPE = Rule("_rope", _read_v3_rope, _write_v3_rope)


def indexer_settings(num_heads: int, pairing: Literal["half", "interleaved"] = "half") -> Group:
    """Return the settings of an indexer. `num_heads` is transformers' default."""
    make = functools.partial(IndexerConfig, pairing=pairing)
    settings = (
        Integer("index_n_heads", "num_heads", num_heads),
        Integer("index_head_dim", "head_dim", 128),
        Integer("index_topk", "top_k", 2048),
    )
    return Group("indexer", make, settings, path="latent.indexer")


V3_SETTINGS = (
    *v3_router_settings(scale=2.5, groups=8, groups_per_token=4),
    *deepseek_settings(V3_ROPE, num_experts=256, shared=1, expert_dim=2048, num_dense_layers=3),
    DEPTHS,
)


def deepseek_v3(*, depths: int = 0, normed_depths: bool = False, **options: Any) -> DecoderConfig:
    """Return a decoder of DeepSeek blocks with multi-token prediction (MTP).

    `depths`: number of MTP layers. `normed_depths`: see `MTPConfig`. `options`: arguments of `deepseek`.
    """
    config = deepseek(**options)
    if depths == 0:
        return config
    assert config.final_norm is not None
    mtp = MTPConfig(
        num_depths=depths,
        block=config.blocks[-1],
        norm=config.final_norm,
        normed_stream=True,  # vLLM and SGLang also apply MTP layers to the output of the final norm
        normed_depths=normed_depths,
    )
    return dataclasses.replace(config, mtp=mtp)


def v3_experts_decoder(
    shape: DecoderSizes,
    *,
    rope: Rope,
    normalized: bool = False,
    output_bias: bool = True,
    masks: tuple[Mask, ...] = (),
    **options: Any,
) -> DecoderConfig:
    """Return a decoder with grouped-query attention and DeepSeek-V3's experts.

    **Arguments:**

    - `shape`: sizes of the decoder.
    - `rope`: rotary embedding of all layers.
    - `normalized`: whether each head's queries and keys are normalized.
    - `output_bias`: whether `shape.attention_bias` also applies to the output projection.
    - `masks`: attention mask of each layer. An empty tuple: all layers are causal.
    - `options`: arguments of `deepseek_v3`.
    """
    qk_norm = shape.qk_norm if normalized else None
    out_bias = shape.attention_bias and output_bias
    mixer = shape.attention(rope=rope, qk_norm=qk_norm, out_bias=out_bias)
    return with_masks(deepseek_v3(shape=shape, mixer=mixer, **options), masks)


V3_EXPERTS = moe.separate_experts(MLP, bias="gate.e_score_correction_bias", shared="shared_experts")
DEPTH = (
    Weight(LAYER + "enorm.weight", "embed_norm.scale", "norm -> norm"),
    Weight(LAYER + "hnorm.weight", "stream_norm.scale", "norm -> norm"),
    *joined_kernels(LAYER + "eh_proj.weight"),
    Weight(LAYER + "shared_head.norm.weight", "final_norm.scale", "norm -> norm"),
)
_INDEXER = _ATTENTION + "indexer."
INDEXER = (
    Weight(_INDEXER + "wq_b.weight", "mixer.indexer.query", "(heads head_dim) q_rank -> q_rank heads head_dim"),
    Weight(_INDEXER + "wk.weight", "mixer.indexer.key", "head_dim embed -> embed head_dim"),
    Weight(_INDEXER + "k_norm.weight", "mixer.indexer.key_norm.scale", "norm -> norm"),
    Weight(_INDEXER + "k_norm.bias", "mixer.indexer.key_norm.bias", "norm -> norm"),
    Weight(_INDEXER + "weights_proj.weight", "mixer.indexer.head_weight", "heads embed -> embed heads"),
)
V3_WEIGHTS = (*LATENT, *V3_EXPERTS, *DEPTH)
V3_COPIES = {
    LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
    LAYER + "shared_head.head.weight": "lm_head.weight",
}
