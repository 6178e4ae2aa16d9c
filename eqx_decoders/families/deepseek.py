"""DeepSeek-V2, V2-Lite, V3 and V3.1 (DeepSeek-AI 2024), and Kimi K2 (Moonshot 2025), which has V3's blocks.

Latent attention, a few dense layers, then layers with many small experts, some of which every token uses.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from eqx_decoders.block import BlockConfig
from eqx_decoders.decoder import DecoderConfig
from eqx_decoders.errors import ConversionError
from eqx_decoders.families.family import Family, Weight
from eqx_decoders.families.fields import ACTIVATIONS, Fields, activation_name
from eqx_decoders.families.moe import (
    HARMLESS,
    dense_of,
    experts_of,
    fused_experts,
    is_sparse,
    need_experts,
    separate_experts,
    shared_mlp,
    write_experts,
)
from eqx_decoders.families.ropes import read_rope, spelled_twice, write_rope, yarn_mscale
from eqx_decoders.families.shape import ENDS, GATED_MLP, PRE_NORMS, Shape, write_outer
from eqx_decoders.layers.experts import ExpertsConfig
from eqx_decoders.layers.latent import LatentAttentionConfig
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import Rope, YarnRope
from eqx_decoders.layers.router import RouterConfig
from eqx_decoders.mtp import MTPConfig


def score_factor(rope: Rope, mscale: float) -> float:
    """By what YaRN multiplies scores here: m², m = 0.1 `mscale` ln(factor) + 1; 1 where it is 0."""
    if not isinstance(rope, YarnRope) or rope.factor <= 1 or mscale == 0:
        return 1.0
    return yarn_mscale(rope.factor, mscale) ** 2


def deepseek(
    shape: Shape,
    *,
    q_rank: int | None,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    rope: Rope,
    mscale: float,
    router: RouterConfig,
    num_experts: int,
    num_experts_per_token: int,
    num_shared: int,
    expert_dim: int,
    num_dense_layers: int,
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderConfig:
    """A decoder of DeepSeek blocks.

    `shape`'s MLP is that of the first `num_dense_layers`; scores are multiplied by `mscale` beside the root.
    """
    norm = RMSNormConfig(eps=shape.eps)
    mixer = LatentAttentionConfig(
        num_heads=shape.num_heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        rope=rope,
        query_scale=(nope_dim + rope_dim) ** -0.5 * mscale,
        norm=RMSNormConfig(eps=1e-6),  # whatever the eps of the other norms is
        bias=attention_bias,
    )
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        mlp_dim=expert_dim,
        activation=shape.activation,
        router=router,
        shared=MLPConfig(mlp_dim=expert_dim * num_shared, activation=shape.activation, bias=mlp_bias),
    )
    dense = BlockConfig(mixer=mixer, mlp=shape.mlp(bias=mlp_bias), pre_mixer_norm=norm, pre_mlp_norm=norm)
    sparse = BlockConfig(mixer=mixer, mlp=experts, pre_mixer_norm=norm, pre_mlp_norm=norm)
    layers = range(shape.num_layers)
    return shape.layered([dense if index < num_dense_layers else sparse for index in layers], norm)


def _common(fields: Fields, *, q_rank: int, dense: int, interleaved: bool) -> dict[str, Any]:
    """What both generations read alike; the arguments are transformers' defaults."""
    heads, layers = fields.integer("num_attention_heads"), fields.layers("num_hidden_layers")
    if fields.integer("num_key_value_heads", heads) != heads:
        raise fields.error("num_key_value_heads must be num_attention_heads: latent attention has as many of both.")
    for key in ("head_dim", "qk_head_dim"):  # both follow from the others
        fields.take(key, None)
    fields.take("auto_map", None)  # code that lies beside: not run, and no part of an export
    fields.off("moe_layer_freq", 1)
    fields.off("ep_size", 1)
    rope = read_rope(fields, pairing="interleaved" if interleaved else "half")
    table = fields.content.get("rope_parameters") or fields.content.get("rope_scaling") or {}  # checked by read_rope
    nope, rotated = fields.integer("qk_nope_head_dim", 128), fields.integer("qk_rope_head_dim", 64)
    shape = Shape(
        vocab_size=fields.integer("vocab_size"),
        embed_dim=fields.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rotated,
        mlp_dim=fields.integer("intermediate_size"),
        eps=fields.number("rms_norm_eps", 1e-6),
        tied=fields.flag("tie_word_embeddings", False),
        activation=fields.word("hidden_act", ACTIVATIONS, "silu"),
        init_std=fields.number("initializer_range", 0.02),
    )
    return dict(
        shape=shape,
        q_rank=fields.integer("q_lora_rank", q_rank, null=None),
        kv_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=fields.integer("v_head_dim", 128),
        rope=rope,
        mscale=score_factor(rope, float(table.get("mscale_all_dim") or 0.0)),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        num_dense_layers=min(fields.integer("first_k_dense_replace", dense, least=0), layers),
        attention_bias=fields.flag("attention_bias", False),
    )


def _read_v2(fields: Fields) -> DecoderConfig:
    common = _common(fields, q_rank=1536, dense=0, interleaved=True)
    grouped = fields.word("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    groups, kept = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    fields.off("scoring_func", "softmax")
    router = RouterConfig(
        order="score_first",
        num_groups=groups if grouped else 1,
        groups_per_token=kept if grouped else 1,
        scaling_factor=fields.number("routed_scaling_factor", 1.0),
    )
    config = deepseek(
        **common,
        router=router,
        num_experts=fields.integer("n_routed_experts", 64),
        num_shared=fields.integer("n_shared_experts", 2),
        expert_dim=fields.integer("moe_intermediate_size", 1407),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return need_experts(fields, config)


def _read_v3(fields: Fields) -> DecoderConfig:
    common = _common(fields, q_rank=1536, dense=3, interleaved=fields.flag("rope_interleave", True))
    fields.off("topk_method", "noaux_tc")
    fields.off("scoring_func", "sigmoid")
    groups = fields.integer("n_group", 8)
    router = RouterConfig(
        score="sigmoid",
        order="score_first",
        renormalize=fields.flag("norm_topk_prob", True),
        selection_bias=True,
        num_groups=groups,
        groups_per_token=fields.integer("topk_group", 4),
        group_score="top2_sum" if groups > 1 else "max",
        scaling_factor=fields.number("routed_scaling_factor", 2.5),
    )
    config = deepseek(
        **common,
        router=router,
        num_experts=fields.integer("n_routed_experts", 256),
        num_shared=fields.integer("n_shared_experts", 1),
        expert_dim=fields.integer("moe_intermediate_size", 2048),
    )
    depths = fields.integer("num_nextn_predict_layers", 0, least=0)
    return _with_depths(need_experts(fields, config), depths)


def _with_depths(config: DecoderConfig, depths: int) -> DecoderConfig:
    """With multi-token prediction that reads the stream after the final norm: vLLM and SGLang run these weights so."""
    if depths == 0:
        return config
    assert config.final_norm is not None
    mtp = MTPConfig(num_depths=depths, block=config.blocks[-1], norm=config.final_norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


def _write_common(config: DecoderConfig) -> dict[str, Any]:
    mixer, experts, dense = config.blocks[0].mixer, experts_of(config), dense_of(config)
    if not isinstance(mixer, LatentAttentionConfig) or experts.shared is None or mixer.query_scale is None:
        raise ConversionError("DecoderConfig.blocks must have latent attention with a query_scale, and shared experts.")
    return (
        write_outer(config)
        | write_experts(experts, "n_routed_experts")
        | {
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_heads,
            "q_lora_rank": mixer.q_rank,
            "kv_lora_rank": mixer.kv_rank,
            "qk_nope_head_dim": mixer.nope_dim,
            "qk_rope_head_dim": mixer.rope_dim,
            "v_head_dim": mixer.value_dim,
            "attention_bias": mixer.bias,
            "intermediate_size": experts.mlp_dim if dense is None else dense.mlp_dim,
            "moe_intermediate_size": experts.mlp_dim,
            "n_shared_experts": max(1, experts.shared.mlp_dim // experts.mlp_dim),
            "hidden_act": activation_name(experts.activation),
            "first_k_dense_replace": sum(not is_sparse(block) for block in config.blocks),
            "routed_scaling_factor": experts.router.scaling_factor,
            "n_group": experts.router.num_groups,
            "topk_group": experts.router.groups_per_token,
        }
        | _write_rope(mixer)
    )


def _recovered(guess: float, gives: Callable[[float], bool]) -> float:
    """A number near a guess of which `gives` is true, short if possible; the guess if there is none."""
    short = [round(guess, digits) for digits in range(1, 16)]
    below = above = guess
    for _ in range(64):
        below, above = math.nextafter(below, -math.inf), math.nextafter(above, math.inf)
        short += [below, above]
    return next((number for number in short if gives(number)), guess)


def _write_rope(mixer: LatentAttentionConfig) -> dict[str, Any]:
    """The rotary table with the factors that give the same scores again."""
    table, rope = write_rope(mixer.rope), mixer.rope
    if isinstance(rope, YarnRope) and rope.factor > 1 and mixer.query_scale is not None:
        log, root = 0.1 * math.log(rope.factor), (mixer.nope_dim + mixer.rope_dim) ** -0.5
        m = math.sqrt(mixer.query_scale / root)
        whole = _recovered((m - 1.0) / log, lambda mscale: root * score_factor(rope, mscale) == mixer.query_scale)
        if whole > 0:
            table["mscale_all_dim"] = whole
            factor = rope.attention_factor
            if factor is not None:

                def gives(mscale: float) -> bool:
                    again = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, whole)
                    return mscale > 0 and again == factor  # 0 would be read as none

                mscale = _recovered((factor * m - 1.0) / log, gives)
                if gives(mscale):  # else the factor itself says it
                    table["mscale"] = mscale
                    del table["attention_factor"]
    return spelled_twice(table)


def _write_v2(config: DecoderConfig) -> dict[str, Any]:
    grouped = experts_of(config).router.num_groups > 1
    shared = experts_of(config).shared
    own = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    return _write_common(config) | own | {"mlp_bias": shared is not None and shared.bias}


def _write_v3(config: DecoderConfig) -> dict[str, Any]:
    mixer, router = config.blocks[0].mixer, experts_of(config).router
    interleaved = isinstance(mixer, LatentAttentionConfig) and mixer.rope.pairing == "interleaved"
    return _write_common(config) | {
        "norm_topk_prob": router.renormalize,
        "rope_interleave": interleaved,
        "num_nextn_predict_layers": 0 if config.mtp is None else config.mtp.num_depths,
    }


_ATTENTION = "model.layers.{layer}.self_attn."
_MLP = "model.layers.{layer}.mlp."
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
    *separate_experts(_MLP, "gate_proj", "up_proj", "down_proj", "gate"),
    Weight(_MLP + "gate.e_score_correction_bias", "mlp.router.selection_bias", "experts -> experts"),
    *shared_mlp(_MLP + "shared_experts."),
)
_LAYER = "model.layers.{layer}."
DEPTHS = (
    Weight(_LAYER + "enorm.weight", "embed_norm.scale", "norm -> norm"),
    Weight(_LAYER + "hnorm.weight", "stream_norm.scale", "norm -> norm"),
    Weight(_LAYER + "eh_proj.weight", "kernel", "embed joined -> joined embed"),
    Weight(_LAYER + "shared_head.norm.weight", "final_norm.scale", "norm -> norm"),
)
FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    weights=(*WEIGHTS, *DEPTHS),
    fused=fused_experts(_MLP),
    harmless=HARMLESS,
    aliases=("kimi_k2",),
    copies={
        _LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
        _LAYER + "shared_head.head.weight": "lm_head.weight",
    },
)
FAMILY_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    read=_read_v2,
    write=_write_v2,
    weights=WEIGHTS,
    fused=fused_experts(_MLP),
    harmless=HARMLESS
    | {
        "num_nextn_predict_layers": "V2 was published without such layers",
        "norm_topk_prob": "transformers never divides",
    },
)


def _published(
    *,
    vocab_size: int,
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    mlp_dim: int,
    factor: float,
    all_dim: float,
    theta: float = 10_000.0,
    beta_fast: float = 32.0,
    **options: Any,
) -> DecoderConfig:
    shape = Shape(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=192,
        mlp_dim=mlp_dim,
    )
    rope = YarnRope(
        theta=theta,
        factor=factor,
        original_length=4096,
        beta_fast=beta_fast,
        attention_factor=1.0,
        pairing="interleaved",
    )
    return deepseek(
        shape,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope=rope,
        mscale=score_factor(rope, all_dim),
        **options,
    )


def _v3(num_heads: int, groups: int, kept: int, scaling: float, **options: Any) -> DecoderConfig:
    router = RouterConfig(
        score="sigmoid",
        order="score_first",
        renormalize=True,
        selection_bias=True,
        num_groups=groups,
        groups_per_token=kept,
        group_score="top2_sum" if groups > 1 else "max",
        scaling_factor=scaling,
    )
    common = dict(embed_dim=7168, num_layers=61, mlp_dim=18_432, all_dim=1.0, q_rank=1536, num_shared=1)
    return _published(**common, num_heads=num_heads, router=router, expert_dim=2048, num_experts_per_token=8, **options)


MODELS = {
    "deepseek2-16b": lambda: _published(
        vocab_size=102_400, embed_dim=2048, num_layers=27, num_heads=16, mlp_dim=10_944, factor=40.0, all_dim=0.707,
        q_rank=None, router=RouterConfig(order="score_first"), num_experts=64, num_experts_per_token=6, num_shared=2,
        expert_dim=1408, num_dense_layers=1,
    ),
    "deepseek2-236b": lambda: _published(
        vocab_size=102_400, embed_dim=5120, num_layers=60, num_heads=128, mlp_dim=12_288, factor=40.0, all_dim=0.707,
        q_rank=1536,
        router=RouterConfig(order="score_first", num_groups=8, groups_per_token=3, scaling_factor=16.0),
        num_experts=160, num_experts_per_token=6, num_shared=2, expert_dim=1536, num_dense_layers=1,
    ),
    "deepseek3-671b": lambda: _v3(128, 8, 4, 2.5, vocab_size=129_280, factor=40.0, num_experts=256, num_dense_layers=3),
    "kimi-k2-1t": lambda: _v3(
        64, 1, 1, 2.827, vocab_size=163_840, factor=32.0, theta=50_000.0, beta_fast=1.0, num_experts=384,
        num_dense_layers=1,
    ),
}  # fmt: skip
