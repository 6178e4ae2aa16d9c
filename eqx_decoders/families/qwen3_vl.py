"""Qwen3-VL, dense and with experts (Bai et al. 2025): Qwen3 that sees images and videos, at three depths."""

import dataclasses
import functools

from eqx_decoders.encoders.encoder import EncoderConfig
from eqx_decoders.encoders.media_config import GridPositions, MediaConfig
from eqx_decoders.families import qwen3
from eqx_decoders.families.common import DecoderSizes, read_shape, write_shape
from eqx_decoders.families.config_reader import Fields
from eqx_decoders.families.multimodal import multimodal
from eqx_decoders.families.qwen_vision import (
    IGNORED_KEYS,
    qwen_vision,
    read_media,
    vision_weights,
    with_media,
    write_media,
)
from eqx_decoders.families.rope_config import read_rope, write_rope
from eqx_decoders.layers.rope import Rope
from eqx_decoders.model.decoder import DecoderConfig


SECTIONS = (24, 20, 20)
IMAGE, VIDEO = 151_655, 151_656
NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
WEIGHTS = vision_weights(
    "model.visual.",
    "model.visual.merger.",
    "model.visual.deepstack_merger_list.",
    first="linear_fc1",
    second="linear_fc2",
    normed="norm",
)


def _read_text(fields: Fields) -> DecoderConfig:
    shape = read_shape(fields, num_kv_heads=32, head_dim=128)
    return qwen3.qwen3(shape, rope=read_rope(fields, theta=500_000.0, sections=SECTIONS))


TEXT = dataclasses.replace(
    qwen3.FAMILY,
    model_type="qwen3_vl_text",
    architecture="Qwen3VLTextModel",
    read=_read_text,
    write=lambda config: write_shape(config) | write_rope(config),
    ignored_keys={},
)

FAMILY = multimodal(
    TEXT,
    model_type="qwen3_vl",
    architecture="Qwen3VLForConditionalGeneration",
    read=functools.partial(read_media, image=IMAGE, video=VIDEO, deepstack=(8, 16, 24)),
    write=write_media("qwen3_vl"),
    weights=WEIGHTS,
    names=NAMES,
    ignored_keys=IGNORED_KEYS,
    alone=qwen3.FAMILY,
)


def qwen3_vl(text: DecoderConfig, vision: EncoderConfig) -> DecoderConfig:
    """A decoder with this encoder, and the published placeholders."""
    media = MediaConfig(vision=vision, image_token=IMAGE, video_token=VIDEO, positions=GridPositions())
    return with_media(text, media)


_small = functools.partial(qwen_vision, embed_dim=1024, layers=24, heads=16, mlp_dim=4096, deepstack=(5, 11, 17))
LARGE = functools.partial(qwen_vision, embed_dim=1152, layers=27, heads=16, mlp_dim=4304, deepstack=(8, 16, 24))
ROPE = Rope(theta=5e6, sections=SECTIONS)
_shape = functools.partial(DecoderSizes, vocab_size=151_936, num_kv_heads=8, head_dim=128)
_2B = _shape(embed_dim=2048, num_layers=28, num_heads=16, mlp_dim=6144, tied=True)
_4B = _shape(embed_dim=2560, num_layers=36, num_heads=32, mlp_dim=9728, tied=True)
_8B = _shape(embed_dim=4096, num_layers=36, num_heads=32, mlp_dim=12_288)
_32B = _shape(embed_dim=5120, num_layers=64, num_heads=64, mlp_dim=25_600)

MODELS = {
    "qwen3-vl-2b": lambda: qwen3_vl(qwen3.qwen3(_2B, rope=ROPE), _small(out_dim=2048)),
    "qwen3-vl-4b": lambda: qwen3_vl(qwen3.qwen3(_4B, rope=ROPE), _small(out_dim=2560)),
    "qwen3-vl-8b": lambda: qwen3_vl(qwen3.qwen3(_8B, rope=ROPE), LARGE(out_dim=4096)),
    "qwen3-vl-32b": lambda: qwen3_vl(qwen3.qwen3(_32B, rope=ROPE), LARGE(out_dim=5120)),
}
