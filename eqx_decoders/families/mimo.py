"""MiMo 7B (Xiaomi 2025): Qwen2 blocks, and multi-token prediction."""

import dataclasses
from typing import Any

from eqx_decoders.families._mtp import DEPTHS
from eqx_decoders.families.common import LAYER, NO_BIAS, DecoderSizes, decoder_sizes, llama_weights
from eqx_decoders.families.family import Family
from eqx_decoders.families.qwen.text import IGNORED_QWEN2_KEYS, LATE_WINDOWS, qwen2
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.setting_rows import AUTO_MAP
from eqx_decoders.families.weight_rows import depth_rows, mtp_rows
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp_config import MTPConfig


def mimo(shape: DecoderSizes, *, depths: int = 0, **options: Any) -> DecoderConfig:
    """Return a decoder of Qwen2 blocks with `depths` layers of multi-token prediction.

    `options`: arguments of `qwen2`.
    """
    config = qwen2(shape, **options)
    if depths == 0:
        return config
    # layers of multi-token prediction read the stream after the final norm, as in vLLM and SGLang
    mtp = MTPConfig(num_depths=depths, block=config.blocks[-1], norm=shape.norm, normed_stream=True)
    return dataclasses.replace(config, mtp=mtp)


_WEIGHTS = llama_weights()
_DEPTH = "model.mtp_layers.{depth}."
FAMILY = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    settings=(
        AUTO_MAP,
        decoder_sizes(num_kv_heads=32, keys=NO_BIAS),
        rope_settings(),
        LATE_WINDOWS,
        DEPTHS,
    ),
    build=mimo,
    weights=(
        *_WEIGHTS,
        *mtp_rows(_WEIGHTS, LAYER, _DEPTH),
        *depth_rows(
            _DEPTH, embed_norm="token_layernorm", stream_norm="hidden_layernorm", kernels="input_proj",
            final_norm="final_layernorm", stream_first=True,
        ),
    ),
    ignored_keys=IGNORED_QWEN2_KEYS,
)  # fmt: skip


MODELS = {
    "mimo-7b": dict(
        model_type="mimo", vocab_size=151_680, hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=11_008, rms_norm_eps=1e-05, rope_theta=640_000.0,
    ),
}  # fmt: skip
