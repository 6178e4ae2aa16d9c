"""Audio of Gemma 4, each clip by itself, and of Gemma 3n: logarithms of magnitudes in bands of frequencies."""

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
from eqx_decoders.media_files.audio import BLOCK, MOST_BANDS, MOST_WINDOW, RATES, Samples, open_audio
from eqx_decoders.media_files.base import Settings
from eqx_decoders.media_files.limits import MediaLimits


WHOLE = 128  # samples are padded to a multiple of it
MOST_SAMPLES = 480_000  # half a minute; samples behind it are dropped
STRIDE = 4  # frames that become a token


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMagnitudes(CheckedFields):
    """Log spectrum of windows, a frame for each hop: `(log(filters |fft(window x)| + floor) - mean) / std`.

    **Arguments:**

    - `rate`: samples in a second.
    - `bands`: number of bands from `lowest` to `highest` Hz, equally wide on the mel scale of HTK.
    - `window_ms`, `hop_ms`: length of a window, and from one to the next, in milliseconds.
    - `finer`: whether the transform has twice as many frequencies.
    - `emphasis`: factor of each sample that is subtracted from the next one; 0 for none.
    - `emphasis_within`: whether a window keeps its samples (HTK), or takes those one position behind.
    - `scale`: multiplies samples.
    - `floor`: added before the logarithm, or with `floor_as="least"` (Gemma 3n) the least number of which it is taken.
    - `window_dtype`: in which Hann's window is computed: of quiet bands, rounding shows.
    - `mean`, `std`: of each band; None for 0 and 1.
    - `padded`: side on which a clip is padded to a multiple of 128 samples, `"left"` or `"right"`.
    """

    rate: PositiveInt = 16_000
    bands: PositiveInt = 128
    window_ms: PositiveFloat = 20.0
    hop_ms: PositiveFloat = 10.0
    lowest: NonNegativeFloat = 0.0
    highest: float = 8000.0
    finer: bool = False
    emphasis: NonNegativeFloat = 0.0
    emphasis_within: bool = True
    scale: PositiveFloat = 1.0
    floor: PositiveFloat = 1e-3
    floor_as: Literal["sum", "least"] = "sum"
    window_dtype: Literal["float64", "float32"] = "float64"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    padded: Annotated[str, OneOf(("left", "right"))] = "right"

    def __post_init__(self):
        super().__post_init__()
        check_number("LogMagnitudes.highest", self.highest, above=self.lowest)
        small = self.bands <= MOST_BANDS and 0 < self.window <= MOST_WINDOW and self.hop > 0
        rule = f"must be at most {MOST_BANDS} bands, {MOST_WINDOW} samples a window and one a hop"
        check(small, f"LogMagnitudes: {self.bands} bands, {self.window} and {self.hop} samples {rule}.")
        covered = self.padded == "right" or self.window - self.window // 2 >= WHOLE - 1
        check(covered, f"LogMagnitudes.padded='left': windows of {self.window} samples would have nothing but padding.")
        for name in ("mean", "std"):
            values = getattr(self, name)
            rule = f"must have a number for each of {self.bands} bands"
            check(values is None or len(values) == self.bands, f"LogMagnitudes.{name} {rule}.")
        check(self.std is None or 0 not in self.std, "LogMagnitudes.std must not be 0: bands are divided by it.")

    @classmethod
    def read(cls, fields: Fields, defaults: "LogMagnitudes | None" = None) -> "LogMagnitudes":
        """Read the settings of a directory's feature extractor; `defaults` are those of transformers' class."""
        usual = cls() if defaults is None else defaults
        for name in ("dither", "padding_value"):
            fields.allow_only(name, 0, 0.0)
        return dataclasses.replace(
            usual,
            rate=fields.integer("sampling_rate", usual.rate, least=RATES[0]),
            bands=fields.integer("feature_size", usual.bands),
            window_ms=fields.number("frame_length_ms", usual.window_ms),
            hop_ms=fields.number("hop_length_ms", usual.hop_ms),
            lowest=_number(fields, "min_frequency", usual.lowest),
            highest=fields.number("max_frequency", usual.highest),
            finer=fields.flag("fft_overdrive", usual.finer),
            emphasis=_number(fields, "preemphasis", usual.emphasis),
            emphasis_within=fields.flag("preemphasis_htk_flavor", usual.emphasis_within),
            scale=fields.number("input_scale_factor", usual.scale),
            floor=fields.number("mel_floor", usual.floor),
            mean=_numbers(fields, "per_bin_mean"),
            std=_numbers(fields, "per_bin_stddev"),
            padded=fields.word("padding_side", {"left": "left", "right": "right"}, "right"),
        )

    @property
    def window(self) -> int:
        """Number of samples in a window."""
        return round(self.rate * self.window_ms / 1000)

    @property
    def hop(self) -> int:
        """Number of samples from one window to the next."""
        return round(self.rate * self.hop_ms / 1000)

    @property
    def transformed(self) -> int:
        """Number of samples of a window and the zeros behind it: a power of two."""
        return 2 ** math.ceil(math.log2(self.window)) * (2 if self.finer else 1)

    def __call__(self, samples: Samples) -> tuple[Float[np.ndarray, "frames bands"], Bool[np.ndarray, "frames"]]:
        """Return the spectrum, float32, and a mask of its complete frames; other frames are 0.

        The first window begins half before the clip.
        """
        samples, before = samples[:MOST_SAMPLES], self.window // 2
        more = -len(samples) % WHOLE
        sides = (more, 0) if self.padded == "left" else (0, more)
        first = before + sides[0]
        bands = self.of_windows(np.pad(samples, (first, sides[1])))
        last = np.arange(len(bands)) * self.hop + self.window
        real = last < first + len(samples)
        return bands * real[:, None], real

    def of_windows(self, samples: Samples) -> Float[np.ndarray, "frames bands"]:
        """Return the spectra of all windows, float32; the last one ends a sample before the clip, or earlier."""
        if len(samples) <= self.window:
            return np.zeros((0, self.bands), np.float32)
        samples = samples.astype(np.float32) * np.float32(self.scale)
        frames = np.lib.stride_tricks.sliding_window_view(samples, self.window + 1)[:: self.hop]
        bands = np.empty((len(frames), self.bands), np.float32)
        step = max(1, BLOCK // self.window)
        for begin in range(0, len(frames), step):
            bands[begin : begin + step] = self._bands(frames[begin : begin + step])
        return bands

    def _bands(self, frames: np.ndarray) -> np.ndarray:
        """Return the bands of windows, each with the sample behind it."""
        angles = 2 * np.pi * np.arange(self.window, dtype=self.window_dtype) / self.window
        shape = (0.5 * (1 - np.cos(angles))).astype(np.float32)
        spectrum = np.abs(np.fft.rfft(self._emphasize(frames) * shape, n=self.transformed, axis=-1))
        bands = spectrum @ self._filters
        bands = np.log(bands + self.floor if self.floor_as == "sum" else np.maximum(bands, self.floor))
        bands = bands if self.mean is None else bands - np.asarray(self.mean)
        return bands if self.std is None else bands / np.asarray(self.std)

    def _emphasize(self, frames: np.ndarray) -> np.ndarray:
        if self.emphasis == 0:
            return frames[:, :-1]
        part = np.float32(self.emphasis)
        if not self.emphasis_within:
            return frames[:, 1:] - part * frames[:, :-1]
        # the first sample has no weight: Hann's window begins with 0
        return np.concatenate([frames[:, :1], frames[:, 1:-1] - part * frames[:, :-2]], axis=1)

    @functools.cached_property
    def _filters(self) -> np.ndarray:
        """Triangles of equal height, `[frequencies, bands]`."""
        mel = np.linspace(_mel(self.lowest), _mel(self.highest), self.bands + 2)
        edges = 700 * (10 ** (mel / 2595) - 1)
        frequencies = np.linspace(0, self.rate // 2, self.transformed // 2 + 1)[:, None]
        rising = (frequencies - edges[:-2]) / np.diff(edges)[:-1]
        falling = (edges[2:] - frequencies) / np.diff(edges)[1:]
        return np.maximum(np.minimum(rising, falling), 0)


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


def _number(fields: Fields, key: str, default: float) -> float:
    """Read a finite number of at least 0."""
    value = fields.take(key, default)
    if type(value) not in (int, float) or not 0 <= value < 1e30:
        raise fields.error(f"{key}={abbreviate(value)} must be a finite number of at least 0.")
    return float(value)


def _numbers(fields: Fields, key: str) -> tuple[float, ...] | None:
    """Read a list of finite numbers; None where there is none."""
    value = fields.take(key, None)
    if value is None:
        return None
    if not isinstance(value, list) or any(type(one) not in (int, float) or not abs(one) < 1e30 for one in value):
        raise fields.error(f"{key}={abbreviate(value)} must be a list of finite numbers.")
    return tuple(map(float, value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Audio:
    """Audio of Gemma 4, of at most half a minute each: four frames become a token.

    A clip's features do not depend on other clips. transformers pads all clips of a prompt to the longest, on the side
    of `padding_side`; on the left that would move the windows of shorter clips.

    **Arguments:**

    - `placeholder`, `begin`, `end`: texts of the special tokens; the first one is repeated.
    """

    spectrum: LogMagnitudes = LogMagnitudes()
    placeholder: str = "<|audio|>"
    begin: str = "<|audio>"
    end: str = "<audio|>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4Audio":
        """Read the rules from the settings of a directory."""
        return cls(
            spectrum=LogMagnitudes.read(settings.audio),
            placeholder=settings.token("audio_token", "<|audio|>"),
            begin=settings.token("boa_token", "<|audio>"),
            end=settings.token("eoa_token", "<audio|>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return `input_features`, `[audio, frames, bands]`, `input_features_mask`, and the text of each clip."""
        rate, spectra = self.spectrum.rate, []
        for samples, name in zip(_clips(audio, rate, limits, names), names, strict=True):
            spectra.append(self.spectrum(samples))
            rule = f"an audio clip must have more than half a window of {self.spectrum.window} samples at {rate:,} Hz"
            check(bool(spectra[-1][1].any()), f"{name} has {len(samples)} samples: {rule}.", DataError)
        most = max(len(real) for _, real in spectra)
        values = np.stack([np.pad(spectrum, ((0, most - len(spectrum)), (0, 0))) for spectrum, _ in spectra])
        mask = np.stack([np.pad(real, (0, most - len(real))) for _, real in spectra])
        texts = [f"{self.begin}{self.placeholder * -(-int(real.sum()) // STRIDE)}{self.end}" for _, real in spectra]
        return {"input_features": values, "input_features_mask": mask}, texts


USM = LogMagnitudes(
    window_ms=32.0, lowest=125.0, highest=7600.0, finer=True, emphasis=0.97, floor=1e-5, floor_as="least",
    window_dtype="float32",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nAudio:
    """Audio of Gemma 3n, of at most half a minute each, all of which become as many tokens.

    As in transformers the clips of a prompt are padded to the longest, and their spectra go on in the silence.

    **Arguments:**

    - `tokens`: number of tokens of a clip.
    - `placeholder`, `begin`, `end`: texts of the special tokens; the first one is repeated.
    """

    spectrum: LogMagnitudes = USM
    tokens: PositiveInt = 188
    placeholder: str = "<audio_soft_token>"
    begin: str = "<start_of_audio>"
    end: str = "<end_of_audio>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3nAudio":
        """Read the rules from the settings of a directory."""
        settings.audio.allow_only("padding_side", "right")
        return cls(
            spectrum=LogMagnitudes.read(settings.audio, USM),
            tokens=settings.processor.integer("audio_seq_length", 188),
            placeholder=settings.token("audio_token", "<audio_soft_token>"),
            begin=settings.token("boa_token", "<start_of_audio>"),
            end=settings.token("eoa_token", "<end_of_audio>"),
        )

    def process_all(
        self, audio: Sequence[Any], limits: MediaLimits, names: Sequence[str]
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return `input_features`, `[audio, frames, bands]`, `input_features_mask`, and the text of each clip."""
        spectrum = self.spectrum
        clips = [samples[:MOST_SAMPLES] for samples in _clips(audio, spectrum.rate, limits, names)]
        longest = max(map(len, clips))
        rule = f"must have more than a window of {spectrum.window} samples at {spectrum.rate:,} Hz"
        length = -(-longest // WHOLE) * WHOLE
        check(length > spectrum.window, f"{names[0]} has {longest} samples: an audio clip {rule}.", DataError)
        values = np.stack([spectrum.of_windows(np.pad(samples, (0, length - len(samples)))) for samples in clips])
        begins = np.arange(values.shape[1]) * spectrum.hop
        mask = begins[None] < np.asarray([len(samples) for samples in clips])[:, None]
        text = f"\n\n{self.begin}{self.placeholder * self.tokens}{self.end}\n\n"
        return {"input_features": values, "input_features_mask": mask}, [text] * len(clips)


def _clips(audio: Sequence[Any], rate: int, limits: MediaLimits, names: Sequence[str]) -> Iterator[Samples]:
    """Yield the samples of each clip; raise DataError for more than `limits` allow, each as long as the longest."""
    longest = 0
    for count, (source, name) in enumerate(zip(audio, names, strict=True), start=1):
        samples = open_audio(source, rate, limits, name)
        longest = max(longest, min(len(samples), MOST_SAMPLES))
        seconds = longest * count / rate
        rule = f"more than MediaLimits.max_seconds={limits.max_seconds:g}"
        message = f"{count} audio clips up to {name}, each as long as the longest, have {seconds:,.1f} s: {rule}"
        check(seconds <= limits.max_seconds, f"{message}. Give fewer, or raise the limit.", DataError)
        yield samples
