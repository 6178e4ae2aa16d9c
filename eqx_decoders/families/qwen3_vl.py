"""Qwen3-VL, dense (Bai et al. 2025): Qwen3 with images and videos that enter at three depths."""

import dataclasses
import functools

from eqx_decoders.families._qwen import VL_ROPE, VL_SECTIONS, qwen3
from eqx_decoders.families._qwen_vision import (
    IGNORED_KEYS,
    IMAGE,
    LARGE,
    LARGE_DEEPSTACK,
    VIDEO,
    VL_NAMES,
    VL_WEIGHTS,
    qwen3_vl,
    qwen_vision,
    read_media,
    write_media,
)
from eqx_decoders.families.common import DecoderSizes, read_shape, write_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import MultimodalFamily
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.model.decoder_config import DecoderConfig


def _read_text(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=32, head_dim=128)
    return qwen3(shape, rope=read_rope(fields, theta=500_000.0, sections=VL_SECTIONS))


def _adapt(text: Family) -> Family:
    return dataclasses.replace(
        text,
        model_type="qwen3_vl_text",
        architecture="Qwen3VLTextModel",
        read=_read_text,
        write=lambda config: write_shape(config) | write_rope(config),
        ignored_keys={},
    )


FAMILY = MultimodalFamily(
    text="qwen3",
    adapt=_adapt,
    reads_as_text=True,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    read=functools.partial(read_media, image=IMAGE, video=VIDEO, deepstack=LARGE_DEEPSTACK),
    write=write_media("qwen3_vl"),
    weights=VL_WEIGHTS,
    names=VL_NAMES,
    ignored_keys=IGNORED_KEYS,
)

_SMALL_DEEPSTACK = (5, 11, 17)
_small = functools.partial(EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=16)
_shape = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=8, head_dim=128)
_2B = _shape(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144, tied=True)
_4B = _shape(embed_dim=2560, num_layers=36, num_heads=32, mlp_dim=9728, tied=True)
_8B = _shape(embed_dim=4096, num_layers=36, num_heads=32, mlp_dim=12_288)
_32B = _shape(embed_dim=5120, num_layers=64, num_heads=64, mlp_dim=25_600)


def _model(
    shape: DecoderSizes, encoder: functools.partial[EncoderSizes], deepstack: tuple[int, ...] = LARGE_DEEPSTACK
) -> DecoderConfig:
    vision = qwen_vision(encoder(out_dim=shape.embed_dim), deepstack=deepstack)
    return qwen3_vl(qwen3(shape, rope=VL_ROPE), vision)


MODELS = {
    "qwen3-vl-2b": lambda: _model(_2B, _small, _SMALL_DEEPSTACK),
    "qwen3-vl-4b": lambda: _model(_4B, _small, _SMALL_DEEPSTACK),
    "qwen3-vl-8b": lambda: _model(_8B, LARGE),
    "qwen3-vl-32b": lambda: _model(_32B, LARGE),
}
