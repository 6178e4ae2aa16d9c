"""Qwen3-Next (Qwen Team 2025): three gated delta nets to one gated attention, and experts.

Published checkpoints have a layer of multi-token prediction that `config.json` does not mention.
"""

from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._mtp import depth_settings
from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    EXPERTS,
    FUSED_EXPERTS,
    HYBRID_SETTINGS,
    INTO_KEYS,
    INTO_VALUES,
    LINEAR,
    SHARED_WEIGHTS,
    expert_settings,
    qwen3_next,
    qwen_experts,
    with_depth_rows,
    with_depths,
)
from eqx_decoders.families.common import ENDS, GATED_MLP, NO_BIAS, DecoderSizes, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.settings_table import Defaults, Flag, Group
from eqx_decoders.families.weight_rows import sharing
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.model.decoder_config import DecoderConfig


def _build(
    shape: DecoderSizes, *, experts: ExpertsConfig, dense_layers: frozenset[int], **options: Any
) -> DecoderConfig:
    mlps = tuple(shape.mlp() if index in dense_layers else experts for index in range(shape.num_layers))
    return moe.need_experts(qwen3_next(shape, mlps=mlps, **options))


_EXPERTS = (*expert_settings(num=512, chosen=10), Flag("norm_topk_prob", "experts.router.renormalize", True))
FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    settings=(
        Defaults({"intermediate_size": 5632}),
        decoder_sizes(num_kv_heads=2, head_dim=256, keys=NO_BIAS),
        Group("experts", qwen_experts, _EXPERTS, uses=("shape",)),
        moe.sparse_steps(),
        *HYBRID_SETTINGS,
        rope_settings(fraction=0.25),
        *depth_settings("num_nextn_predict_layers", always=False),
    ),
    build=_build,
    weights=(
        *ENDS,
        *with_depth_rows(
            (
                *SHARED_WEIGHTS,
                *GATED_MLP,
                *EXPERTS,
                *sharing(  # with each key head the value heads that use it
                    LINEAR + "in_proj_qkvz.weight",
                    *(("mixer.query", INTO_KEYS), ("mixer.key", INTO_KEYS)),
                    *(("mixer.value", INTO_VALUES), ("mixer.gate", INTO_VALUES)),
                    within="key_heads",
                ),
                *sharing(
                    LINEAR + "in_proj_ba.weight",
                    *((f"mixer.{name}", "heads embed -> embed heads") for name in ("beta", "dt")),
                    within="key_heads",
                ),
            )
        ),
        *DEPTH,
    ),
    fused=with_depth_rows(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS,
    with_depths=with_depths,
)


MODELS = {
    "qwen3-next-80b": dict(
        model_type="qwen3_next", vocab_size=151_936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=16,
        rope_theta=10_000_000.0,
    ),
}  # fmt: skip
