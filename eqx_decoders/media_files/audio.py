"""Decoding of audio files with soundfile, resampling with soxr, and log-mel spectrograms (Radford et al. 2022)."""

import dataclasses
import functools
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import AtLeast, CheckedFields, DataError, PositiveInt, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.images import name_of
from eqx_decoders.media_files.limits import MediaLimits


MIN_RATE = 1000  # Hz
MAX_RATE = 768_000  # Hz
CHUNK = 1 << 20  # numbers that are decoded or transformed at a time
MAX_BANDS = 1024
MAX_WINDOW = 1 << 16
_MAX_AMPLITUDE = 1e6  # valid samples are about -1 to 1
_UNKNOWN_LENGTH = 1 << 62  # number of samples that libsndfile reports if the header has none
_STREAMED_LENGTH = 0x7FFF_0000  # bytes; programs that stream a WAV file write at least this length
_MAX_WAV_CHUNKS = 1000
# libsndfile supports further formats. Their readers are old and print to the terminal.
_FORMATS = ("WAV", "FLAC", "Ogg Vorbis", "Opus", "MP3", "AIFF", "AU", "CAF")
_SIGNATURES = (b"RIFF", b"RIFX", b"RF64", b"riff", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"dns.", b"caff")
_MEL_MAX_FREQUENCY = 8000.0  # Hz

Samples = Float[np.ndarray, "samples"]


def open_audio(source: Any, rate: int, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Samples:
    """Decode an audio clip to float32 samples at `rate` Hz. The channels are averaged.

    Raises DataError for files that are not audio in a supported format, and for clips longer than `limits` allow.

    **Arguments:**

    - `source`: the path of a file (WAV, FLAC, Ogg, MP3, AIFF, AU, CAF), its bytes, a one-dimensional array of floats
        that is sampled at `rate`, or a pair `(array, sampling rate)`.
    - `rate`: sampling rate of the result in Hz.
    - `limits`: maximum length of the clip.
    - `where`: name of the clip in error messages; None: the path or type of `source`.
    """
    where = name_of(source, "audio", 0) if where is None else where
    if isinstance(source, np.ndarray):
        source = (source, rate)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray):
        return _from_array(*source, rate, limits, where)
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} must be a path, bytes, an array of floats, or a pair (array, sampling rate).")
    return _from_file(source, rate, limits, where)


def _from_array(samples: np.ndarray, old_rate: Any, new_rate: int, limits: MediaLimits, where: str) -> Samples:
    if not isinstance(old_rate, int | np.integer) or isinstance(old_rate, bool):
        raise DataError(f"{where}: the sampling rate {str(old_rate)[:40]} must be an integer, in Hz.")
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise DataError(
            f"{where} of shape {samples.shape}, {samples.dtype} must be a one-dimensional array of floats, -1 to 1."
        )
    _check_length(len(samples), 1, int(old_rate), limits, where)
    chunks = (samples[start : start + CHUNK] for start in range(0, len(samples), CHUNK))
    return _resample(chunks, int(old_rate), new_rate, where)


def _from_file(source: str | Path | bytes, rate: int, limits: MediaLimits, where: str) -> Samples:
    if not isinstance(source, bytes):
        check_file(source, where)
    try:
        import soundfile
    except ImportError as error:
        raise missing_package("soundfile", "media") from error
    # an absolute path, because libsndfile reads standard input for the path "-"
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else str(Path(source).resolve())
    with _as_data_error(where):
        _check_header(source, where)
        with soundfile.SoundFile(stream) as file:
            if file.frames >= _UNKNOWN_LENGTH:  # libsndfile fails at the end of such a file
                raise DataError(f"{where} has no length in its header. Encode it again, for example with `flac`.")
            return _resample(_decode(file, limits, where), file.samplerate, rate, where)


def _decode(file: Any, limits: MediaLimits, where: str) -> Iterator[np.ndarray]:
    """Yield chunks of samples, averaged over the channels."""
    _check_length(max(file.frames, 0), file.channels, file.samplerate, limits, where)
    count = 0
    while len(chunk := file.read(max(1, CHUNK // file.channels), dtype="float32", always_2d=True)):
        count += len(chunk)
        _check_length(count, file.channels, file.samplerate, limits, where)
        yield chunk.T.mean(axis=0) if file.channels > 1 else chunk[:, 0]


def _describe(error: Exception) -> str:
    """Return libsndfile's message, or the message of a Python error: soundfile raises TypeError for .raw files."""
    return getattr(error, "error_string", None) or str(error)


_as_data_error = functools.partial(
    as_data_error, kind="audio", formats=_FORMATS, memory_remedy="Shorten the clip", describe=_describe
)


def _check_header(source: str | Path | bytes, where: str) -> None:
    """Raise an error for unknown formats and for truncated WAV files, which libsndfile would accept."""
    size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        header = file.read(12)
        is_known = header.startswith(_SIGNATURES) or int.from_bytes(header[:2], "big") >= 0xFFE0  # MP3 without header
        if not is_known:
            raise ValueError("unknown file signature")
        if header[:4] != b"RIFF" or header[8:] != b"WAVE":
            return
        position = len(header)
        for _ in range(_MAX_WAV_CHUNKS):
            file.seek(position)
            name = file.read(4)
            length = int.from_bytes(file.read(4), "little")
            end = position + 8 + length
            if name == b"data" and length < _STREAMED_LENGTH and end > size:
                raise DataError(
                    f"{where} is truncated: its samples end at byte {end:,}, but the file has {size:,} bytes. Copy the "
                    "file again."
                )
            if name in (b"", b"data"):
                return
            position = end + length % 2


def _check_length(samples: int, channels: int, rate: int, limits: MediaLimits, where: str) -> None:
    """Raise DataError if the sampling rate, duration or size of a clip is out of range."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise DataError(
            f"{where} has a sampling rate of {rate:,} Hz, which must be {MIN_RATE:,} to {MAX_RATE:,} Hz. Resample it."
        )
    if samples > limits.max_seconds * rate:
        raise DataError(
            f"{where} has {samples / rate:,.1f} s, more than MediaLimits.max_seconds={limits.max_seconds:g}. Shorten "
            "the clip or raise the limit."
        )
    if samples * channels > limits.max_samples:
        raise DataError(
            f"{where} has {samples * channels:,} samples in {channels} channels, more than "
            f"MediaLimits.max_samples={limits.max_samples:,}. Shorten the clip or raise the limit."
        )


def _resample(chunks: Iterable[np.ndarray], old_rate: int, new_rate: int, where: str) -> Samples:
    """Resample the chunks of a clip. The result equals resampling the complete clip, with less memory."""
    resampler = None
    count = 0
    pieces = [np.zeros(0, np.float32)]
    for chunk in chunks:
        if not np.all(np.abs(chunk) <= _MAX_AMPLITUDE):  # false for NaN
            raise DataError(
                f"{where} has samples that are NaN, infinite or larger than {_MAX_AMPLITUDE:g}. Samples must be about "
                "-1 to 1: rescale the clip or encode it again."
            )
        count += len(chunk)
        piece = np.ascontiguousarray(chunk, np.float32)
        if old_rate != new_rate:
            resampler = _create_resampler(old_rate, new_rate) if resampler is None else resampler
            piece = resampler.resample_chunk(piece)
        pieces.append(piece)
    if count == 0:
        raise DataError(f"{where} has 0 s: an audio clip must have at least one sample.")
    if resampler is not None:
        pieces.append(resampler.resample_chunk(pieces[0], last=True))
        count = math.ceil(count * new_rate / old_rate)
        pieces.append(np.zeros(max(0, count - sum(map(len, pieces))), np.float32))
    return np.concatenate(pieces)[:count]


def _create_resampler(old_rate: int, new_rate: int) -> Any:
    try:
        import soxr
    except ImportError as error:
        raise missing_package("soxr", "media") from error
    return soxr.ResampleStream(old_rate, new_rate, 1, dtype="float32", quality="soxr_hq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMel(CheckedFields):
    """Log-mel spectrogram of overlapping windows (Whisper): `max(log10(mel), max(log10(mel)) - 8) / 4 + 1`.

    `mel` is the power in each mel band.

    **Arguments:**

    - `rate`: sampling rate in Hz.
    - `bands`: number of mel bands from 0 to 8 kHz, of equal width on Slaney's mel scale.
    - `window`: length of a window in samples.
    - `hop`: distance between the starts of windows in samples.
    """

    rate: Annotated[int, AtLeast(1, maximum=MAX_RATE)] = 16_000
    bands: Annotated[int, AtLeast(1, maximum=MAX_BANDS)] = 128
    window: Annotated[int, AtLeast(1, maximum=MAX_WINDOW)] = 400
    hop: PositiveInt = 160

    @classmethod
    def read(cls, fields: Fields) -> "LogMel":
        """Read the settings of the feature extractor in a model's directory."""
        fields.allow_only("dither", 0, 0.0)
        fields.allow_only("padding_value", 0, 0.0)
        fields.allow_only("do_normalize", False)
        return cls(
            rate=fields.integer("sampling_rate", 16_000, least=MIN_RATE),
            bands=fields.integer("feature_size", 80),
            window=fields.integer("n_fft", 400),
            hop=fields.integer("hop_length", 160),
        )

    def __call__(self, samples: Samples) -> Float[np.ndarray, "bands frames"]:
        """Return the spectrogram in float32, with `len(samples) // hop` frames. Both ends are padded by reflection."""
        padded = np.pad(samples.astype(np.float64), self.window // 2, mode="reflect")
        num_frames = len(samples) // self.hop
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][:num_frames]
        window = np.hanning(self.window + 1)[:-1]
        log_mel = np.empty((self.bands, len(frames)), np.float32)
        step = max(1, CHUNK // self.window)
        for start in range(0, len(frames), step):
            power = np.abs(np.fft.rfft(frames[start : start + step] * window)) ** 2
            log_mel[:, start : start + step] = np.log10(np.maximum(self._filters @ power.T, 1e-10))
        return (np.maximum(log_mel, log_mel.max() - 8) + 4) / 4

    @functools.cached_property
    def _filters(self) -> Float[np.ndarray, "bands frequencies"]:
        """Triangular filters of equal area."""
        mel = np.linspace(0, _mel(_MEL_MAX_FREQUENCY), self.bands + 2)
        edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * math.log(6.4) / 27))
        frequencies = np.linspace(0, self.rate // 2, self.window // 2 + 1)
        rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
        falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
        return np.maximum(np.minimum(rising, falling), 0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def _mel(frequency: float) -> float:
    """Convert a frequency of at least 1000 Hz to Slaney's mel scale."""
    return 15 + math.log(frequency / 1000) * 27 / math.log(6.4)
