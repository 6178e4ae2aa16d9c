"""Qwen3.5 that sees images and videos (Qwen Team 2026): positions turn heads of the layers that have attention."""

import functools

from eqx_decoders.encoders.encoder import EncoderConfig
from eqx_decoders.encoders.media_config import GridPositions, MediaConfig
from eqx_decoders.families import qwen3_5
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.multimodal import multimodal
from eqx_decoders.families.qwen3_vl import WEIGHTS
from eqx_decoders.families.qwen_vision import IGNORED_KEYS, qwen_vision, read_media, with_media, write_media
from eqx_decoders.model.decoder import DecoderConfig


IMAGE, VIDEO = 248_056, 248_057
# layers of multi-token prediction stand beside the decoder
NAMES = {"model.": "model.language_model.", "lm_head.": "lm_head.", "mtp.": "mtp."}


def seeing(text: Family, *, model_type: str, architecture: str) -> Family:
    """The family of this text family that sees images."""
    return multimodal(
        text,
        model_type=model_type,
        architecture=architecture,
        read=functools.partial(read_media, image=IMAGE, video=VIDEO),
        write=write_media(f"{model_type}_vision"),
        weights=WEIGHTS,
        names=NAMES,
        ignored_keys=IGNORED_KEYS,
    )


FAMILY = seeing(qwen3_5.FAMILY, model_type="qwen3_5", architecture="Qwen3_5ForConditionalGeneration")


def qwen3_5_vision(text: DecoderConfig, vision: EncoderConfig) -> DecoderConfig:
    """A decoder with this encoder, and the published placeholders."""
    media = MediaConfig(vision=vision, image_token=IMAGE, video_token=VIDEO, positions=GridPositions())
    return with_media(text, media)


_small = functools.partial(qwen_vision, embed_dim=768, layers=12, heads=12, mlp_dim=3072)
_middle = functools.partial(qwen_vision, embed_dim=1024, layers=24, heads=16, mlp_dim=4096)
LARGE = functools.partial(qwen_vision, embed_dim=1152, layers=27, heads=16, mlp_dim=4304)


def _with(name: str, vision: functools.partial[EncoderConfig]) -> DecoderConfig:
    text = qwen3_5.MODELS[name]()
    return qwen3_5_vision(text, vision(out_dim=text.embed_dim))


MODELS = {
    "qwen3.5-0.8b-vision": lambda: _with("qwen3.5-0.8b", _small),
    "qwen3.5-2b-vision": lambda: _with("qwen3.5-2b", _middle),
    "qwen3.5-4b-vision": lambda: _with("qwen3.5-4b", _middle),
    "qwen3.5-9b-vision": lambda: _with("qwen3.5-9b", LARGE),
    "qwen3.5-27b-vision": lambda: _with("qwen3.5-27b", LARGE),
}
