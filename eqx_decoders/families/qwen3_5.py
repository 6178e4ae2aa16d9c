"""Qwen3.5, dense, text (Qwen Team 2026): Qwen3-Next's layers, and positions of several dimensions for images."""

import functools

from eqx_decoders.families._qwen_hybrid import (
    DEPTH,
    IGNORED_STATE_KEYS,
    QWEN3_5_SETTINGS,
    QWEN3_5_WEIGHTS,
    delta_net,
    qwen3_5,
    with_depth_rows,
    with_depths,
)
from eqx_decoders.families.common import ENDS, GATED_MLP, NO_BIAS, DecoderSizes, decoder_sizes
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.settings_table import Defaults, Rule
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    settings=(
        Defaults({"intermediate_size": 12_288}),
        decoder_sizes(num_kv_heads=4, head_dim=256, keys=NO_BIAS),
        Rule("mlp", lambda fields, values: values["shape"].mlp()),
        *QWEN3_5_SETTINGS,
    ),
    build=qwen3_5,
    weights=(*ENDS, *with_depth_rows((*QWEN3_5_WEIGHTS, *GATED_MLP)), *DEPTH),
    ignored_keys=IGNORED_STATE_KEYS,
    with_depths=with_depths,
)

_shape = functools.partial(DecoderSizes, vocab_size=248_320, head_dim=256)


def _dense(shape: DecoderSizes, heads: int) -> DecoderConfig:
    return qwen3_5(shape, delta=delta_net(shape, num_heads=heads), mlp=shape.mlp())


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
