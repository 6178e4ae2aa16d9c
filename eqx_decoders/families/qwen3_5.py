"""Qwen3.5, dense, text (Qwen Team 2026): Qwen3-Next's layers, and positions of several dimensions for images."""

import functools
from typing import Any

from eqx_decoders.families.common import ENDS, GATED_MLP, NO_BIAS, DecoderSizes, read_shape, write_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family, Weight, sharing
from eqx_decoders.families.qwen3_next import (
    DEPTH,
    INTO_KEYS,
    INTO_VALUES,
    LINEAR,
    ROPE,
    SHARED_WEIGHTS,
    delta_net,
    every_fourth,
    qwen3_next,
    read_depth,
    read_hybrid,
    with_depth,
    with_depths,
    write_depth,
    write_hybrid,
)
from eqx_decoders.families.rope_config import read_rope
from eqx_decoders.layers.mlp import MLPConfig
from eqx_decoders.layers.moe.experts import ExpertsConfig
from eqx_decoders.layers.recurrent.gated_delta_net import GatedDeltaNetConfig
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig


SECTIONS = (11, 11, 10)
DEPTH_KEY = "mtp_num_hidden_layers"
IGNORED_KEYS = {"mamba_ssm_dtype": "states are in float32"}


def qwen3_5(
    shape: DecoderSizes,
    *,
    delta: GatedDeltaNetConfig,
    mlp: MLPConfig | ExpertsConfig,
    full: tuple[bool, ...] = (),
    rope: Rope = Rope(theta=ROPE.theta, fraction=ROPE.fraction, sections=SECTIONS),
) -> DecoderConfig:
    """A decoder of Qwen3.5 blocks; `full` says which layers have attention, or is empty: every fourth."""
    full = full or every_fourth(shape.num_layers)
    return qwen3_next(shape, delta=delta, full=full, mlps=(mlp,) * shape.num_layers, rope=rope)


def read_qwen3_5(fields: Fields, shape: DecoderSizes, mlp: MLPConfig | ExpertsConfig) -> DecoderConfig:
    """The configuration with this MLP."""
    fields.allow_only("attn_output_gate", True)
    fields.allow_only("output_gate_type", "swish")
    fields.allow_only("mtp_use_dedicated_embeddings", False)
    delta, full = read_hybrid(fields, shape)
    rope = read_rope(fields, fraction=0.25, sections=SECTIONS)
    return read_depth(fields, DEPTH_KEY, qwen3_5(shape, delta=delta, mlp=mlp, full=full, rope=rope))


def _read(fields: Fields) -> DecoderConfig:
    fields.content.setdefault("intermediate_size", 12288)
    shape = read_shape(fields, num_kv_heads=4, head_dim=256, keys=NO_BIAS)
    return read_qwen3_5(fields, shape, shape.mlp())


def write_qwen3_5(config: DecoderConfig) -> dict[str, Any]:
    """What `read_qwen3_5` reads."""
    return write_hybrid(config) | write_depth(config, DEPTH_KEY)


# queries, keys and values of all heads one after the other, and tensors for the rest
WEIGHTS = (
    *SHARED_WEIGHTS,
    *sharing(
        LINEAR + "in_proj_qkv.weight",
        *(("mixer.query", INTO_KEYS), ("mixer.key", INTO_KEYS), ("mixer.value", INTO_VALUES)),
    ),
    Weight(LINEAR + "in_proj_z.weight", "mixer.gate", INTO_VALUES),
    Weight(LINEAR + "in_proj_b.weight", "mixer.beta", "heads embed -> embed heads"),
    Weight(LINEAR + "in_proj_a.weight", "mixer.dt", "heads embed -> embed heads"),
)
FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=_read,
    write=lambda config: write_shape(config, NO_BIAS) | write_qwen3_5(config),
    weights=(*ENDS, *with_depths((*WEIGHTS, *GATED_MLP)), *DEPTH),
    ignored_keys=IGNORED_KEYS,
    with_depth=with_depth,
)

_shape = functools.partial(DecoderSizes, vocab_size=248_320, head_dim=256)


def _dense(shape: DecoderSizes, heads: int) -> DecoderConfig:
    return qwen3_5(shape, delta=delta_net(shape, heads=heads), mlp=shape.mlp())


_0_8B = _shape(embed_dim=1024, num_layers=24, num_heads=8, num_kv_heads=2, mlp_dim=3584, tied=True)
_2B = _shape(embed_dim=2048, num_layers=24, num_heads=8, num_kv_heads=2, mlp_dim=6144, tied=True)
_4B = _shape(embed_dim=2560, num_layers=32, num_heads=16, num_kv_heads=4, mlp_dim=9216, tied=True)
_9B = _shape(embed_dim=4096, num_layers=32, num_heads=16, num_kv_heads=4, mlp_dim=12_288)
_27B = _shape(embed_dim=5120, num_layers=64, num_heads=24, num_kv_heads=4, mlp_dim=17_408)

MODELS = {
    "qwen3.5-0.8b": lambda: _dense(_0_8B, 16),
    "qwen3.5-2b": lambda: _dense(_2B, 16),
    "qwen3.5-4b": lambda: _dense(_4B, 32),
    "qwen3.5-9b": lambda: _dense(_9B, 32),
    "qwen3.5-27b": lambda: _dense(_27B, 48),
}
