"""Audio of Qwen3-Omni: log-mel spectrograms that are padded to equal length, and placeholders in the prompt."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveInt
from eqx_decoders.media_files.audio import LogMel, open_audio
from eqx_decoders.media_files.base import Settings
from eqx_decoders.media_files.limits import MediaLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenAudioProcessor(CheckedFields):
    """Audio of Qwen3-Omni: log-mel spectrograms of all clips of a prompt, padded to the longest clip.

    **Arguments:**

    - `spectrum`: log-mel spectrogram of a clip.
    - `chunk`: number of frames that the encoder processes at a time.
    - `placeholder`: audio token, which is repeated once per token.
    """

    spectrum: LogMel = LogMel()
    chunk: PositiveInt = 100
    placeholder: str = "<|audio_pad|>"

    @classmethod
    def read(cls, settings: Settings) -> "QwenAudioProcessor":
        """Create the processor from the settings of a model's directory."""
        placeholder = settings.token("audio_token", "<|audio_pad|>")
        return cls(spectrum=LogMel.read(settings.audio), placeholder=placeholder)

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Process all clips of a prompt. `names`: names of the clips in error messages.

        Returns `input_features`, `[clips, bands, frames]`, and `feature_attention_mask`, `[clips, frames]`; and the
        text of each clip. Raises DataError for clips that cannot be decoded, are too short, or exceed `limits`.
        """
        rate = self.spectrum.rate
        hop = self.spectrum.hop
        clips: list[np.ndarray] = []
        for source, name in zip(audio, names, strict=True):
            clips.append(open_audio(source, rate, limits, name))
            padded_seconds = max(map(len, clips)) * len(clips) / rate
            if padded_seconds > limits.max_seconds:
                raise DataError(
                    f"{len(clips)} audio clips up to {name}, padded to the longest clip, have {padded_seconds:,.1f} s, "
                    f"more than MediaLimits.max_seconds={limits.max_seconds:g}. Pass fewer clips or raise the limit."
                )
        max_length = max(map(len, clips))
        min_length = max(self.spectrum.window // 2 + 1, hop)
        if max_length < min_length:
            raise DataError(
                f"{names[0]} has {max_length} samples: the longest audio clip must have at least {min_length} samples "
                f"at {rate:,} Hz. Pass a longer clip."
            )
        values = np.stack([self.spectrum(np.pad(clip, (0, max_length - len(clip)))) for clip in clips])
        max_frames = max_length // hop
        num_frames = [min(-(-len(clip) // hop), max_frames) for clip in clips]
        mask = (np.arange(max_frames) < np.array(num_frames)[:, None]).astype(np.int32)
        texts = [self.placeholder * self._num_tokens(count) for count in num_frames]
        return {"input_features": values, "feature_attention_mask": mask}, texts

    def _num_tokens(self, num_frames: int) -> int:
        """Return the number of tokens: three convolutions with stride 2 shorten each chunk."""
        full_chunks, remaining_frames = divmod(num_frames, self.chunk)
        return full_chunks * _convolved_length(self.chunk) + _convolved_length(remaining_frames)


def _convolved_length(num_frames: int) -> int:
    for _ in range(3):
        num_frames = (num_frames + 1) // 2
    return num_frames
