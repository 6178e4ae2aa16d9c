"""Audio of Qwen3-Omni from files: log-mel spectra that are padded to one length, and the placeholders in the prompt."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveInt, check
from eqx_decoders.media_files.audio import LogMel, open_audio
from eqx_decoders.media_files.base import Settings
from eqx_decoders.media_files.limits import MediaLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenAudio(CheckedFields):
    """Audio of Qwen3-Omni: log-mel spectra, all as long as the longest, whose chunks become tokens.

    **Arguments:**

    - `chunk`: frames that the encoder reads at once.
    - `placeholder`: the text of the special token, which is repeated.
    """

    spectrum: LogMel = LogMel()
    chunk: PositiveInt = 100
    placeholder: str = "<|audio_pad|>"

    @classmethod
    def read(cls, settings: Settings) -> "QwenAudio":
        """Read the rules from the settings of a directory."""
        placeholder = settings.token("audio_token", "<|audio_pad|>")
        return cls(spectrum=LogMel.read(settings.audio), placeholder=placeholder)

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return `input_features`, `[audio, bands, frames]`, `feature_attention_mask`, and the text of each clip."""
        rate, hop = self.spectrum.rate, self.spectrum.hop
        rows: list[np.ndarray] = []
        for source, name in zip(audio, names, strict=True):
            rows.append(open_audio(source, rate, limits, name))
            seconds = max(map(len, rows)) * len(rows) / rate
            rule = f"more than MediaLimits.max_seconds={limits.max_seconds:g}"
            message = (
                f"{len(rows)} audio clips up to {name}, each as long as the longest, have {seconds:,.1f} s: {rule}"
            )
            check(seconds <= limits.max_seconds, f"{message}. Give fewer, or raise the limit.", DataError)
        longest, least = max(map(len, rows)), max(self.spectrum.window // 2 + 1, hop)
        rule = f"an audio clip must have at least {least} samples at {rate:,} Hz"
        check(longest >= least, f"{names[0]} has {longest}: {rule}.", DataError)
        values = np.stack([self.spectrum(np.pad(row, (0, longest - len(row)))) for row in rows])
        counts = [min(-(-len(row) // hop), longest // hop) for row in rows]
        mask = (np.arange(longest // hop) < np.array(counts)[:, None]).astype(np.int32)
        texts = [self.placeholder * self._tokens(count) for count in counts]
        return {"input_features": values, "feature_attention_mask": mask}, texts

    def _tokens(self, frames: int) -> int:
        """Return the number of tokens: three convolutions halve each chunk."""
        whole, rest = divmod(frames, self.chunk)
        return whole * _halved(self.chunk) + _halved(rest)


def _halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
