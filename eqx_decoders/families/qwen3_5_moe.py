"""Qwen3.5 with experts, text (Qwen Team 2026): Qwen3.5's layers, and experts whose weights always sum to 1."""

import functools
from typing import Any

from eqx_decoders.families import moe
from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    EXPERTS,
    FUSED_EXPERTS,
    IGNORED_STATE_KEYS,
    QWEN3_5_SETTINGS,
    QWEN3_5_WEIGHTS,
    delta_net,
    expert_settings,
    qwen3_5,
    qwen_experts,
    with_depth_rows,
    with_depths,
)
from eqx_decoders.families.common import ENDS, NO_BIAS, DecoderSizes, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Group
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        moe.mlp_like_experts(512),
        decoder_sizes(num_kv_heads=2, head_dim=256, keys=NO_BIAS, paths={"intermediate_size": None}),
        Group("mlp", qwen_experts, expert_settings(num=256, chosen=8), uses=("shape",)),
        *QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *EXPERTS)), *DEPTH),
    fused=with_depth_rows(FUSED_EXPERTS),
    ignored_keys=moe.IGNORED_ROUTER_KEYS | IGNORED_STATE_KEYS,
    with_depths=with_depths,
)

_shape = functools.partial(DecoderSizes, vocab_size=248_320, num_kv_heads=2, head_dim=256)


def _sparse(shape: DecoderSizes, heads: int, **experts: Any) -> DecoderConfig:
    experts_config = qwen_experts(shape, shared_dim=shape.mlp_dim, **experts)
    return qwen3_5(shape, delta=delta_net(shape, num_heads=heads), mlp=experts_config)


_35B = _shape(embed_dim=2048, num_layers=40, num_heads=16, mlp_dim=512)
_122B = _shape(embed_dim=3072, num_layers=48, num_heads=32, mlp_dim=1024)
_397B = _shape(embed_dim=4096, num_layers=60, num_heads=32, mlp_dim=1024)

MODELS = {
    "qwen3.5-35b-a3b": lambda: _sparse(_35B, 32, num_experts=256, num_experts_per_token=8),
    "qwen3.5-122b-a10b": lambda: _sparse(_122B, 64, num_experts=256, num_experts_per_token=8),
    "qwen3.5-397b-a17b": lambda: _sparse(_397B, 64, num_experts=512, num_experts_per_token=10),
}
