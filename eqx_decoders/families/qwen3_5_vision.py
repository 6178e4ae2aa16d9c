"""Qwen3.5 with images and videos (Qwen Team 2026): positions turn heads of the layers that have attention."""

import functools

from eqx_decoders.families._qwen_vision import qwen3_5_family, qwen3_5_vision, qwen_vision, with_large_vision
from eqx_decoders.families.multimodal import ExtendedModel
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.model.decoder_config import DecoderConfig


FAMILY = qwen3_5_family("qwen3_5_text", model_type="qwen3_5", architecture="Qwen3_5ForConditionalGeneration")

_small = functools.partial(EncoderSizes, embed_dim=768, layers=12, heads=12, mlp_dim=3072, size=16)
_middle = functools.partial(EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=16)


def _with_small_vision(text: DecoderConfig) -> DecoderConfig:
    return qwen3_5_vision(text, qwen_vision(_small(out_dim=text.embed_dim)))


def _with_middle_vision(text: DecoderConfig) -> DecoderConfig:
    return qwen3_5_vision(text, qwen_vision(_middle(out_dim=text.embed_dim)))


MODELS = {
    "qwen3.5-0.8b-vision": ExtendedModel("qwen3.5-0.8b", _with_small_vision),
    "qwen3.5-2b-vision": ExtendedModel("qwen3.5-2b", _with_middle_vision),
    "qwen3.5-4b-vision": ExtendedModel("qwen3.5-4b", _with_middle_vision),
    "qwen3.5-9b-vision": ExtendedModel("qwen3.5-9b", with_large_vision),
    "qwen3.5-27b-vision": ExtendedModel("qwen3.5-27b", with_large_vision),
}
