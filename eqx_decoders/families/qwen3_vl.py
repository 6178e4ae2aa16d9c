"""Qwen3-VL, dense (Bai et al. 2025): Qwen3 with images and videos that enter at three depths."""

import functools

from eqx_decoders.families._qwen import VL_SECTIONS
from eqx_decoders.families._qwen_vision import qwen3_vl_family, with_vl_vision
from eqx_decoders.families.common import decoder_sizes
from eqx_decoders.families.multimodal import ExtendedModel
from eqx_decoders.families.rope_config import rope_settings
from eqx_decoders.families.vision_fields import EncoderSizes
from eqx_decoders.model.decoder_config import DecoderConfig


# with experts and without, the layers have full attention
FAMILY = qwen3_vl_family(
    "qwen3",
    dict(
        model_type="qwen3_vl_text",
        architecture="Qwen3VLTextModel",
        settings=(
            decoder_sizes(num_kv_heads=32, head_dim=128),
            rope_settings(theta=500_000.0, sections=VL_SECTIONS),
        ),
        ignored_keys={},
    ),
    model_type="qwen3_vl",
    kind="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
)

_small = functools.partial(EncoderSizes, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, size=16)


def _with_small_vision(text: DecoderConfig) -> DecoderConfig:
    return with_vl_vision(text, _small, (5, 11, 17))


MODELS = {
    "qwen3-vl-2b": ExtendedModel("qwen3-1.7b", _with_small_vision),
    "qwen3-vl-4b": ExtendedModel("qwen3-4b", _with_small_vision),
    "qwen3-vl-8b": ExtendedModel("qwen3-8b", with_vl_vision),
    "qwen3-vl-32b": ExtendedModel("qwen3-32b", with_vl_vision),
}
