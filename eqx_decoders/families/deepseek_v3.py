"""DeepSeek-V3 and V3.1 (DeepSeek-AI 2024), and Kimi K2 (Moonshot 2025), which has V3's blocks.

Sigmoid scores with selection biases, and layers of multi-token prediction, which follow the others in a checkpoint.
"""

import dataclasses
from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.deepseek import MLP, WEIGHTS, deepseek, read_deepseek, write_deepseek
from eqx_decoders.families.hf_table import Family, Weight
from eqx_decoders.layers.moe.router import RouterConfig
from eqx_decoders.layers.norm import RMSNormConfig
from eqx_decoders.layers.rope import YarnRope
from eqx_decoders.model.decoder import DecoderConfig
from eqx_decoders.model.mtp import MTPConfig


def v3_router(*, groups: int, groups_per_token: int, scaling_factor: float, renormalize: bool = True) -> RouterConfig:
    """Sigmoid scores and selection biases; a group's score is the sum of its two best."""
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


def _read(fields: Fields) -> DecoderConfig:
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


def _write(config: DecoderConfig) -> dict[str, Any]:
    mixer = config.blocks[0].mixer
    return write_deepseek(config) | {
        "norm_topk_prob": moe.experts_of(config).router.renormalize,
        "rope_interleave": getattr(getattr(mixer, "rope", None), "pairing", None) == "interleaved",
        "num_nextn_predict_layers": 0 if config.mtp is None else config.mtp.num_depths,
    }


_LAYER = "model.layers.{layer}."
FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    weights=(
        *WEIGHTS,
        Weight(MLP + "gate.e_score_correction_bias", "mlp.router.selection_bias", "experts -> experts"),
        Weight(_LAYER + "enorm.weight", "embed_norm.scale", "norm -> norm"),
        Weight(_LAYER + "hnorm.weight", "stream_norm.scale", "norm -> norm"),
        Weight(_LAYER + "eh_proj.weight", "kernel", "embed joined -> joined embed"),
        Weight(_LAYER + "shared_head.norm.weight", "final_norm.scale", "norm -> norm"),
    ),
    fused=moe.fused_experts(MLP),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    aliases=("kimi_k2",),
    copies={
        _LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
        _LAYER + "shared_head.head.weight": "lm_head.weight",
    },
)


def _published(*, vocab_size: int, num_heads: int, **options: Any) -> DecoderConfig:
    shape = DecoderSizes(
        vocab_size=vocab_size, embed_dim=7168, num_layers=61, num_heads=num_heads, num_kv_heads=num_heads,
        head_dim=192, mlp_dim=18_432,
    )  # fmt: skip
    return deepseek(shape, q_rank=1536, num_experts_per_token=8, num_shared=1, expert_dim=2048, **options)


_YARN: dict[str, Any] = dict(original_length=4096, mscale=1.0, mscale_all_dim=1.0, pairing="interleaved")

MODELS = {
    "deepseek3-671b": lambda: _published(
        vocab_size=129_280, num_heads=128, num_experts=256, num_dense_layers=3,
        rope=YarnRope(factor=40.0, **_YARN),
        router=v3_router(groups=8, groups_per_token=4, scaling_factor=2.5),
    ),
    "kimi-k2-1t": lambda: _published(
        vocab_size=163_840, num_heads=64, num_experts=384, num_dense_layers=1,
        rope=YarnRope(theta=50_000.0, factor=32.0, beta_fast=1.0, **_YARN),
        router=v3_router(groups=1, groups_per_token=1, scaling_factor=2.827),
    ),
}  # fmt: skip
