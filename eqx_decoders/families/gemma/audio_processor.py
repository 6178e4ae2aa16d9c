"""Audio of Gemma 3n and Gemma 4: logarithms of mel magnitudes."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool, Float

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import (
    CheckedFields,
    DataError,
    NonNegativeFloat,
    OneOf,
    PositiveFloat,
    PositiveInt,
    check,
    check_number,
)
from eqx_decoders.media_files.audio import CHUNK, MAX_BANDS, MAX_WINDOW, MIN_RATE, Samples, open_audio
from eqx_decoders.media_files.base import Settings
from eqx_decoders.media_files.limits import MediaLimits


_LENGTH_MULTIPLE = 128  # clips are padded to a multiple of this number of samples
_MAX_SAMPLES = 480_000  # 30 s; later samples are dropped
_FRAMES_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMagnitudes(CheckedFields):
    """Log-mel spectrogram with one frame per hop: `(log(filters |fft(window x)| + mel_floor) - mean) / std`.

    **Arguments:**

    - `rate`: sampling rate in Hz.
    - `bands`: number of mel bands, of equal width on the mel scale of HTK.
    - `window_ms`: length of a window in milliseconds.
    - `hop_ms`: distance between the starts of windows in milliseconds.
    - `min_frequency`, `max_frequency`: frequency range of the bands in Hz.
    - `fft_overdrive`: whether the FFT has twice the length.
    - `preemphasis`: factor of the previous sample, which is subtracted from each sample; 0: no preemphasis.
    - `preemphasis_htk`: whether the first sample of a window remains unchanged (HTK). Otherwise the window is moved by
        one sample, so that each of its samples has a previous sample.
    - `input_scale`: factor of the samples.
    - `mel_floor`: constant that bounds the argument of the logarithm, see `floor_mode`.
    - `floor_mode`: "add": `mel_floor` is added to the magnitudes; "max": it is their minimum (Gemma 3n).
    - `window_dtype`: dtype in which the Hann window is computed. Its rounding affects bands of low magnitude.
    - `mean`, `std`: mean and standard deviation of each band; None: 0 and 1.
    - `padding_side`: side on which a clip is padded to a multiple of 128 samples: "left" or "right".
    """

    rate: PositiveInt = 16_000
    bands: PositiveInt = 128
    window_ms: PositiveFloat = 20.0
    hop_ms: PositiveFloat = 10.0
    min_frequency: NonNegativeFloat = 0.0
    max_frequency: float = 8000.0
    fft_overdrive: bool = False
    preemphasis: NonNegativeFloat = 0.0
    preemphasis_htk: bool = True
    input_scale: PositiveFloat = 1.0
    mel_floor: PositiveFloat = 1e-3
    floor_mode: Literal["add", "max"] = "add"
    window_dtype: Literal["float64", "float32"] = "float64"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    padding_side: Annotated[str, OneOf(("left", "right"))] = "right"

    def __post_init__(self):
        super().__post_init__()
        check_number("LogMagnitudes.max_frequency", self.max_frequency, above=self.min_frequency)
        check(
            self.bands <= MAX_BANDS and 0 < self.window <= MAX_WINDOW and self.hop > 0,
            f"LogMagnitudes has {self.bands} bands, windows of {self.window} samples, and a hop of {self.hop} samples. "
            f"The number of bands must be at most {MAX_BANDS}, a window must have 1 to {MAX_WINDOW} samples, and a hop "
            "at least 1.",
        )
        check(
            self.padding_side == "right" or self.window - self.window // 2 >= _LENGTH_MULTIPLE - 1,
            f"LogMagnitudes.padding_side='left' needs longer windows than {self.window} samples, because the first "
            "window would contain padding only. Increase window_ms or use padding_side='right'.",
        )
        for name in ("mean", "std"):
            values = getattr(self, name)
            check(
                values is None or len(values) == self.bands,
                f"LogMagnitudes.{name} must have {self.bands} elements, one for each of {self.bands} bands.",
            )
        check(
            self.std is None or 0 not in self.std,
            "LogMagnitudes.std must not contain 0, because bands are divided by it.",
        )

    @classmethod
    def read(cls, fields: Fields, defaults: "LogMagnitudes | None" = None) -> "LogMagnitudes":
        """Read the settings of the feature extractor in a model's directory.

        `defaults`: defaults of the feature extractor in transformers; None: the defaults of this class.
        """
        defaults = cls() if defaults is None else defaults
        fields.allow_only("dither", 0, 0.0)
        fields.allow_only("padding_value", 0, 0.0)
        return dataclasses.replace(
            defaults,
            rate=fields.integer("sampling_rate", defaults.rate, least=MIN_RATE),
            bands=fields.integer("feature_size", defaults.bands),
            window_ms=fields.number("frame_length_ms", defaults.window_ms),
            hop_ms=fields.number("hop_length_ms", defaults.hop_ms),
            min_frequency=_read_non_negative(fields, "min_frequency", defaults.min_frequency),
            max_frequency=fields.number("max_frequency", defaults.max_frequency),
            fft_overdrive=fields.flag("fft_overdrive", defaults.fft_overdrive),
            preemphasis=_read_non_negative(fields, "preemphasis", defaults.preemphasis),
            preemphasis_htk=fields.flag("preemphasis_htk_flavor", defaults.preemphasis_htk),
            input_scale=fields.number("input_scale_factor", defaults.input_scale),
            mel_floor=fields.number("mel_floor", defaults.mel_floor),
            mean=_read_numbers(fields, "per_bin_mean"),
            std=_read_numbers(fields, "per_bin_stddev"),
            padding_side=fields.word("padding_side", {"left": "left", "right": "right"}, "right"),
        )

    @property
    def window(self) -> int:
        """Length of a window in samples."""
        return round(self.rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Distance between the starts of windows in samples."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def fft_length(self) -> int:
        """Length of the FFT, a power of two. Windows are padded with zeros."""
        return 2 ** math.ceil(math.log2(self.window)) * (2 if self.fft_overdrive else 1)

    def __call__(self, samples: Samples) -> tuple[Float[np.ndarray, "frames bands"], Bool[np.ndarray, "frames"]]:
        """Return the spectrogram in float32, and a mask of frames. Other frames are 0.

        The first window starts half a window before the clip. The mask contains frames whose windows end in the clip.
        """
        samples = samples[:_MAX_SAMPLES]
        padding = -len(samples) % _LENGTH_MULTIPLE
        left, right = (padding, 0) if self.padding_side == "left" else (0, padding)
        left += self.window // 2
        bands = self.log_magnitudes(np.pad(samples, (left, right)))
        ends = np.arange(len(bands)) * self.hop + self.window
        mask = ends < left + len(samples)
        return bands * mask[:, None], mask

    def log_magnitudes(self, samples: Samples) -> Float[np.ndarray, "frames bands"]:
        """Return the spectrogram of all windows that end at least one sample before the end, in float32."""
        if len(samples) <= self.window:
            return np.zeros((0, self.bands), np.float32)
        samples = samples.astype(np.float32) * np.float32(self.input_scale)
        frames = np.lib.stride_tricks.sliding_window_view(samples, self.window + 1)[:: self.hop]
        bands = np.empty((len(frames), self.bands), np.float32)
        step = max(1, CHUNK // self.window)
        for start in range(0, len(frames), step):
            bands[start : start + step] = self._frame_magnitudes(frames[start : start + step])
        return bands

    def _frame_magnitudes(self, frames: Float[np.ndarray, "frames window_plus_1"]) -> Float[np.ndarray, "frames bands"]:
        """Return the log-mel magnitudes of windows. Each window has one more sample, for the preemphasis."""
        angles = 2 * np.pi * np.arange(self.window, dtype=self.window_dtype) / self.window
        hann = (0.5 * (1 - np.cos(angles))).astype(np.float32)
        spectrum = np.abs(np.fft.rfft(self._emphasize(frames) * hann, n=self.fft_length, axis=-1))
        bands = spectrum @ self._filters
        bands = np.log(bands + self.mel_floor if self.floor_mode == "add" else np.maximum(bands, self.mel_floor))
        bands = bands if self.mean is None else bands - np.asarray(self.mean)
        return bands if self.std is None else bands / np.asarray(self.std)

    def _emphasize(self, frames: np.ndarray) -> np.ndarray:
        if self.preemphasis == 0:
            return frames[:, :-1]
        factor = np.float32(self.preemphasis)
        if not self.preemphasis_htk:
            return frames[:, 1:] - factor * frames[:, :-1]
        # The first sample has no effect, because the Hann window starts with 0.
        return np.concatenate([frames[:, :1], frames[:, 1:-1] - factor * frames[:, :-2]], axis=1)

    @functools.cached_property
    def _filters(self) -> Float[np.ndarray, "frequencies bands"]:
        """Triangular filters of equal height."""
        mel = np.linspace(_mel(self.min_frequency), _mel(self.max_frequency), self.bands + 2)
        edges = 700 * (10 ** (mel / 2595) - 1)
        frequencies = np.linspace(0, self.rate // 2, self.fft_length // 2 + 1)[:, None]
        rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
        falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
        return np.maximum(np.minimum(rising, falling), 0)


def _mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)


def _read_non_negative(fields: Fields, key: str, default: float) -> float:
    value = fields.take(key, default)
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise fields.error(f"{key}={abbreviate(value)} must be a finite number of at least 0.")
    return float(value)


def _read_numbers(fields: Fields, key: str) -> tuple[float, ...] | None:
    values = fields.take(key, None)
    if values is None:
        return None
    if not isinstance(values, list) or any(type(x) not in (int, float) or not abs(x) < 1e30 for x in values):
        raise fields.error(f"{key}={abbreviate(values)} must be a list of finite numbers.")
    return tuple(map(float, values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4AudioProcessor:
    """Audio of Gemma 4, at most 30 s per clip. A token has 4 frames.

    The features of a clip do not depend on the other clips. In contrast, transformers pads all clips of a prompt to the
    longest clip before it computes windows: with `padding_side="left"`, the windows of shorter clips are shifted.

    **Arguments:**

    - `spectrum`: log-mel spectrogram of a clip.
    - `placeholder`: audio token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after a clip.
    """

    spectrum: LogMagnitudes = LogMagnitudes()
    placeholder: str = "<|audio|>"
    start_token: str = "<|audio>"
    end_token: str = "<audio|>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4AudioProcessor":
        """Create the processor from the settings of a model's directory."""
        return cls(
            spectrum=LogMagnitudes.read(settings.audio),
            placeholder=settings.token("audio_token", "<|audio|>"),
            start_token=settings.token("boa_token", "<|audio>"),
            end_token=settings.token("eoa_token", "<audio|>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Process all clips of a prompt. `names`: names of the clips in error messages.

        Returns `input_features`, `[clips, frames, bands]`, and `input_features_mask`, `[clips, frames]`; and the text
        of each clip. Raises DataError for clips that cannot be decoded, are too short, or exceed `limits`.
        """
        rate = self.spectrum.rate
        spectra: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        for samples, name in zip(_open_clips(audio, rate, limits, names), names, strict=True):
            spectrum, mask = self.spectrum(samples)
            if not mask.any():
                raise DataError(
                    f"{name} has {len(samples)} samples: an audio clip must have more than half a window of "
                    f"{self.spectrum.window} samples at {rate:,} Hz. Pass a longer clip."
                )
            spectra.append(spectrum)
            masks.append(mask)
        max_frames = max(map(len, masks))
        arrays = {
            "input_features": np.stack(
                [np.pad(spectrum, ((0, max_frames - len(spectrum)), (0, 0))) for spectrum in spectra]
            ),
            "input_features_mask": np.stack([np.pad(mask, (0, max_frames - len(mask))) for mask in masks]),
        }
        num_tokens = [-(-int(mask.sum()) // _FRAMES_PER_TOKEN) for mask in masks]
        return arrays, [f"{self.start_token}{self.placeholder * count}{self.end_token}" for count in num_tokens]


USM = LogMagnitudes(
    window_ms=32.0, min_frequency=125.0, max_frequency=7600.0, fft_overdrive=True, preemphasis=0.97, mel_floor=1e-5,
    floor_mode="max", window_dtype="float32",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nAudioProcessor:
    """Audio of Gemma 3n, at most 30 s per clip. All clips have the same number of tokens.

    As in transformers, clips are padded to the longest clip of the prompt before the spectrogram is computed, so that
    windows at the end of a shorter clip extend into the padding.

    **Arguments:**

    - `spectrum`: log-mel spectrogram of a clip.
    - `tokens_per_clip`: number of tokens of a clip.
    - `placeholder`: audio token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after a clip.
    """

    spectrum: LogMagnitudes = USM
    tokens_per_clip: PositiveInt = 188
    placeholder: str = "<audio_soft_token>"
    start_token: str = "<start_of_audio>"
    end_token: str = "<end_of_audio>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3nAudioProcessor":
        """Create the processor from the settings of a model's directory."""
        settings.audio.allow_only("padding_side", "right")
        return cls(
            spectrum=LogMagnitudes.read(settings.audio, USM),
            tokens_per_clip=settings.processor.integer("audio_seq_length", 188),
            placeholder=settings.token("audio_token", "<audio_soft_token>"),
            start_token=settings.token("boa_token", "<start_of_audio>"),
            end_token=settings.token("eoa_token", "<end_of_audio>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Process all clips of a prompt. `names`: names of the clips in error messages.

        Returns `input_features`, `[clips, frames, bands]`, and `input_features_mask`, `[clips, frames]`; and the text
        of each clip. Raises DataError for clips that cannot be decoded, are too short, or exceed `limits`.
        """
        spectrum = self.spectrum
        clips = [samples[:_MAX_SAMPLES] for samples in _open_clips(audio, spectrum.rate, limits, names)]
        max_length = max(map(len, clips))
        padded_length = -(-max_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        if padded_length <= spectrum.window:
            raise DataError(
                f"{names[0]} has {max_length} samples: the longest audio clip must have more than a window of "
                f"{spectrum.window} samples at {spectrum.rate:,} Hz. Pass a longer clip."
            )
        values = np.stack([spectrum.log_magnitudes(np.pad(clip, (0, padded_length - len(clip)))) for clip in clips])
        starts = np.arange(values.shape[1]) * spectrum.hop
        mask = starts[None] < np.asarray([len(clip) for clip in clips])[:, None]
        text = f"\n\n{self.start_token}{self.placeholder * self.tokens_per_clip}{self.end_token}\n\n"
        return {"input_features": values, "input_features_mask": mask}, [text] * len(clips)


def _open_clips(audio: Sequence[Any], rate: int, limits: MediaLimits, names: Sequence[str]) -> Iterator[Samples]:
    """Yield the samples of each clip. Raises DataError if all clips, padded to the longest, exceed `limits`."""
    max_length = 0
    for count, (source, name) in enumerate(zip(audio, names, strict=True), start=1):
        samples = open_audio(source, rate, limits, name)
        max_length = max(max_length, min(len(samples), _MAX_SAMPLES))
        padded_seconds = max_length * count / rate
        if padded_seconds > limits.max_seconds:
            raise DataError(
                f"{count} audio clips up to {name}, padded to the longest clip, have {padded_seconds:,.1f} s, more "
                f"than MediaLimits.max_seconds={limits.max_seconds:g}. Pass fewer clips or raise the limit."
            )
        yield samples
