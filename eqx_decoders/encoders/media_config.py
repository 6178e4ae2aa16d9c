"""What a decoder sees and hears: its encoders, and which tokens their features stand for."""

import dataclasses
from typing import Literal

from eqx_decoders.encoders.audio_stem import AudioStemConfig
from eqx_decoders.encoders.encoder import EncoderConfig
from eqx_decoders.encoders.frame_stem import FrameStemConfig
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import check, check_integer, check_number, check_word


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridPositions:
    """Rotary positions of time, row and column (M-RoPE): an image's tokens count from where the text stopped.

    Text, and audio, moves all three by one; what follows an image begins behind the largest of its numbers.

    **Arguments:**

    - `frames`: whether the frames of a video are `"apart"`, each an image with text before it (Qwen3-VL), or
        `"together"`, with times of their own.
    - `per_second`: by how much time moves in a second, for frames that are together.
    - `whole`: whether times are rounded down to whole numbers.
    - `behind_times`: whether what follows a video begins behind its times, too, or behind its rows and columns only
        (Qwen2.5-VL).
    """

    frames: Literal["apart", "together"] = "apart"
    per_second: float = 1.0
    whole: bool = False
    behind_times: bool = True

    def __post_init__(self):
        check_word("GridPositions.frames", self.frames, ("apart", "together"))
        check_number("GridPositions.per_second", self.per_second, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaConfig:
    """Encoders, and the placeholder tokens whose embeddings their features replace, in order.

    **Arguments:**

    - `vision`, `audio`: encoders of images and of audio; None for none.
    - `image_token`, `video_token`, `audio_token`: ids of placeholders; None where there are none of the kind.
    - `spans`: whether the tokens of an image see each other whole, in layers whose attention has spans.
    - `positions`: rotary positions of several dimensions; None where an image's tokens are counted like text.
    - `lookup_token`: the id that tables beside the embedding see in place of a placeholder (Gemma 4).
    """

    vision: EncoderConfig | None = None
    audio: EncoderConfig | None = None
    image_token: int | None = None
    video_token: int | None = None
    audio_token: int | None = None
    spans: bool = False
    positions: GridPositions | None = None
    lookup_token: int = 0

    @property
    def patch_stem(self) -> PatchStemConfig | None:
        """What makes features of patches; None where a model sees nothing."""
        stem = None if self.vision is None else self.vision.stem
        return stem if isinstance(stem, PatchStemConfig) else None

    @property
    def audio_stem(self) -> AudioStemConfig | FrameStemConfig | None:
        """What makes features of audio; None where a model hears nothing."""
        stem = None if self.audio is None else self.audio.stem
        return stem if isinstance(stem, AudioStemConfig | FrameStemConfig) else None

    def __post_init__(self):
        given = {name: getattr(self, name) for name in ("image_token", "video_token", "audio_token")}
        for name, token in given.items():
            if token is not None:
                check_integer(f"MediaConfig.{name}", token, minimum=0)
        check_integer("MediaConfig.lookup_token", self.lookup_token, minimum=0)
        ids = [token for token in given.values() if token is not None]
        check(len(ids) == len({*ids}), f"MediaConfig: {given} must be different ids.")
        for kind, encoder, stems, tokens in (
            ("vision", self.vision, (PatchStemConfig,), (self.image_token, self.video_token)),
            ("audio", self.audio, (AudioStemConfig, FrameStemConfig), (self.audio_token,)),
        ):
            if encoder is not None:
                names = " or a ".join(stem.__name__ for stem in stems)
                check(isinstance(encoder.stem, stems), f"MediaConfig.{kind}.stem must be a {names}.")
                rule = "needs a placeholder token for its features"
                check(any(token is not None for token in tokens), f"MediaConfig.{kind} {rule}.")
