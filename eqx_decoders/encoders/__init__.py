"""Encoders of images and audio; the configurations of their stems are imported on first use."""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


if TYPE_CHECKING:
    from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig as AudioStemConfig
    from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig as FrameStemConfig
    from eqx_decoders.encoders.stem import PatchStemConfig as PatchStemConfig, StemConfig as StemConfig
    from eqx_decoders.families.gemma.mobilenet import MobileNetConfig as MobileNetConfig

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "encoders.audio.audio_stem": "AudioStemConfig",
        "encoders.audio.frame_stem": "FrameStemConfig",
        "families.gemma.mobilenet": "MobileNetConfig",
        "encoders.stem": "PatchStemConfig StemConfig",
    },
)
