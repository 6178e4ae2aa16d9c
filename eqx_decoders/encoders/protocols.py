"""Protocols of configurations with encoders, for code that must not import the encoders or the decoder."""

from typing import Protocol, runtime_checkable

from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.geometry import TilesConfig
from eqx_decoders.encoders.rope_positions import GridPositions
from eqx_decoders.encoders.stem import PatchStemConfig, WholeImageStem


@runtime_checkable
class EncoderInputs(Protocol):
    """Properties of `MediaConfig` that describe the inputs of the encoders."""

    @property
    def image_token(self) -> int | None: ...

    @property
    def video_token(self) -> int | None: ...

    @property
    def audio_token(self) -> int | None: ...

    @property
    def spans(self) -> bool: ...

    @property
    def positions(self) -> GridPositions | None: ...

    @property
    def patch_stem(self) -> PatchStemConfig | WholeImageStem | None: ...

    @property
    def tiles(self) -> TilesConfig | None: ...

    @property
    def audio_stem(self) -> AudioStemConfig | FrameStemConfig | None: ...


@runtime_checkable
class HasMedia(Protocol):
    """Configuration with encoders, such as a `DecoderConfig`."""

    @property
    def media(self) -> EncoderInputs | None: ...
