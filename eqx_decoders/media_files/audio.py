"""Audio from files, as log-mel spectra (Radford et al. 2022): decoded with soundfile, resampled with soxr."""

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
from eqx_decoders.errors import AtLeast, CheckedFields, DataError, PositiveInt, check, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.images import name_of
from eqx_decoders.media_files.limits import MediaLimits


RATES = (1000, 768_000)  # in Hz
BLOCK = 1 << 20  # numbers that are decoded, or transformed, at once
LOUDEST = 1e6  # samples are -1 to 1
UNKNOWN = 1 << 62  # libsndfile's number of samples where the header has none
STREAMED = 0x7FFF_0000  # bytes; programs that stream a WAV file write at least this length
MOST_CHUNKS = 1000  # of a WAV file
# Formats that are in use; libsndfile has others, whose readers are old and print to the terminal.
KNOWN = ("WAV", "FLAC", "Ogg Vorbis", "Opus", "MP3", "AIFF", "AU", "CAF")
BEGINNINGS = (b"RIFF", b"RIFX", b"RF64", b"riff", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"dns.", b"caff")
MOST_BANDS, MOST_WINDOW = 1024, 1 << 16

Samples = Float[np.ndarray, "samples"]


def open_audio(source: Any, rate: int, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Samples:
    """Return the samples of an audio clip at `rate` per second, its channels being averaged, float32.

    Raises DataError, with the file's name, for files that are no audio, or longer than `limits` allow.

    **Arguments:**

    - `source`: the path of a file (WAV, FLAC, Ogg, MP3, AIFF, AU, CAF), its bytes, an array of floats at this rate, or
        a pair of an array and its rate.
    - `where`: its name in errors.
    """
    where = name_of(source, "audio", 0) if where is None else where
    if isinstance(source, np.ndarray):
        source = (source, rate)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray):
        samples, old_rate = source
        whole = isinstance(old_rate, int | np.integer) and not isinstance(old_rate, bool)
        check(
            whole, f"{where}: the rate {str(old_rate)[:40]} must be a whole number of samples in a second.", DataError
        )
        good = samples.ndim == 1 and samples.dtype.kind == "f"
        check(good, f"{where} of shape {samples.shape}, {samples.dtype} must be one row of floats, -1 to 1.", DataError)
        _check_length(len(samples), 1, int(old_rate), limits, where)
        parts = (samples[begin : begin + BLOCK] for begin in range(0, len(samples), BLOCK))
        return _resampled(parts, int(old_rate), rate, where)
    rule = "must be a path, bytes, an array of floats, or a pair of an array and its rate"
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} {rule}.")
    return _from_file(source, rate, limits, where)


def _from_file(source: str | Path | bytes, rate: int, limits: MediaLimits, where: str) -> Samples:
    if not isinstance(source, bytes):
        check_file(source, where)
    try:
        import soundfile
    except ImportError as error:
        raise missing_package("soundfile", "media") from error
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else str(Path(source).resolve())  # "-" is a file
    with _as_data_error(where):
        _check_whole(source, where)
        with soundfile.SoundFile(stream) as file:
            has_length = file.frames < UNKNOWN  # libsndfile fails at the end of others
            check(has_length, f"{where} does not tell its length: write it anew, such as with `flac`.", DataError)
            return _resampled(_decoded(file, limits, where), file.samplerate, rate, where)


def _decoded(file: Any, limits: MediaLimits, where: str) -> Iterator[np.ndarray]:
    """Yield some samples at a time, the mean of all channels."""
    _check_length(max(file.frames, 0), file.channels, file.samplerate, limits, where)
    count = 0
    while len(block := file.read(max(1, BLOCK // file.channels), dtype="float32", always_2d=True)):
        count += len(block)
        _check_length(count, file.channels, file.samplerate, limits, where)
        yield block.T.mean(axis=0) if file.channels > 1 else block[:, 0]


def _cause(error: Exception) -> str:
    """Return libsndfile's message; TypeError comes from a file whose name ends with .raw."""
    return getattr(error, "error_string", None) or str(error)


_as_data_error = functools.partial(as_data_error, kind="audio", formats=KNOWN, smaller="cut it", cause=_cause)


def _check_whole(source: str | Path | bytes, where: str) -> None:
    """Raise DataError for unknown formats, and for truncated WAV files, whose rest libsndfile would accept."""
    size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        head, position = file.read(12), 12
        known = head.startswith(BEGINNINGS) or int.from_bytes(head[:2], "big") >= 0xFFE0  # MP3 without a header
        if not known:
            raise ValueError("it begins like none of them")
        if head[:4] != b"RIFF" or head[8:] != b"WAVE":
            return
        for _ in range(MOST_CHUNKS):
            file.seek(position)
            name, length = file.read(4), int.from_bytes(file.read(4), "little")
            if name == b"data" and length < STREAMED:
                rule = f"is cut short: its samples reach to byte {position + 8 + length:,}, and it has {size:,}"
                check(position + 8 + length <= size, f"{where} {rule}. Copy it again.", DataError)
            if name in (b"", b"data"):
                return
            position += 8 + length + length % 2


def _check_length(samples: int, channels: int, rate: int, limits: MediaLimits, where: str) -> None:
    good = RATES[0] <= rate <= RATES[1]
    check(good, f"{where} has {rate:,} samples in a second: must be {RATES[0]:,} to {RATES[1]:,}.", DataError)
    rule = f"longer than MediaLimits.max_seconds={limits.max_seconds:g}. Cut it, or raise the limit"
    check(samples <= limits.max_seconds * rate, f"{where} has {samples / rate:,.1f} s: {rule}.", DataError)
    rule = f"more than MediaLimits.max_samples={limits.max_samples:,}. Cut it, or raise the limit"
    message = f"{where} has {samples * channels:,} samples in {channels} channels"
    check(samples * channels <= limits.max_samples, f"{message}: {rule}.", DataError)


def _resampled(parts: Iterable[np.ndarray], old: int, new: int, where: str) -> Samples:
    """Resample the parts of a clip as if they were one, in less memory."""
    stream, count, pieces = None, 0, [np.zeros(0, np.float32)]
    for part in parts:
        finite = bool(np.all(np.abs(part) <= LOUDEST))  # not of NaN
        check(finite, f"{where} has samples that are no numbers, or infinite: they must be about -1 to 1.", DataError)
        count, part = count + len(part), np.ascontiguousarray(part, np.float32)
        if old != new:
            stream = _resampler(old, new) if stream is None else stream
            part = stream.resample_chunk(part)
        pieces.append(part)
    check(count > 0, f"{where} has 0 s: an audio clip must have some.", DataError)
    if stream is not None:
        pieces.append(stream.resample_chunk(pieces[0], last=True))
        count = math.ceil(count * new / old)
        pieces.append(np.zeros(max(0, count - sum(map(len, pieces))), np.float32))
    return np.concatenate(pieces)[:count]


def _resampler(old: int, new: int) -> Any:
    try:
        import soxr
    except ImportError as error:
        raise missing_package("soxr", "media") from error
    return soxr.ResampleStream(old, new, 1, dtype="float32", quality="soxr_hq")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogMel(CheckedFields):
    """Log-mel spectrum of overlapping windows: `max(log10(mel), largest - 8) / 4 + 1`, mel being powers in bands.

    **Arguments:**

    - `rate`: samples in a second.
    - `bands`: number of bands of frequencies from 0 to 8 kHz, equally wide on Slaney's mel scale.
    - `window`, `hop`: samples in a window, and from one window to the next.
    """

    rate: Annotated[int, AtLeast(1, maximum=RATES[1])] = 16_000
    bands: Annotated[int, AtLeast(1, maximum=MOST_BANDS)] = 128
    window: Annotated[int, AtLeast(1, maximum=MOST_WINDOW)] = 400
    hop: PositiveInt = 160

    @classmethod
    def read(cls, fields: Fields) -> "LogMel":
        """Read the settings of a directory's feature extractor."""
        for name, allowed in (("dither", (0, 0.0)), ("padding_value", (0, 0.0)), ("do_normalize", (False,))):
            fields.allow_only(name, *allowed)
        return cls(
            rate=fields.integer("sampling_rate", 16_000, least=RATES[0]),
            bands=fields.integer("feature_size", 80),
            window=fields.integer("n_fft", 400),
            hop=fields.integer("hop_length", 160),
        )

    def __call__(self, samples: Samples) -> Float[np.ndarray, "bands frames"]:
        """Return the spectrum, float32, a frame for each whole hop; the ends are padded by reflection."""
        reach = self.window // 2
        padded = np.pad(samples.astype(np.float64), reach, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.window)[:: self.hop][: len(samples) // self.hop]
        window = np.hanning(self.window + 1)[:-1]
        powers = np.empty((self.bands, len(frames)), np.float32)
        step = max(1, BLOCK // self.window)
        for begin in range(0, len(frames), step):
            spectrum = np.abs(np.fft.rfft(frames[begin : begin + step] * window)) ** 2
            powers[:, begin : begin + step] = np.log10(np.maximum(self._filters @ spectrum.T, 1e-10))
        return (np.maximum(powers, powers.max() - 8) + 4) / 4

    @functools.cached_property
    def _filters(self) -> np.ndarray:
        """Triangles of equal area, `[bands, frequencies]`."""
        mel = np.linspace(0, _mel(8000.0), self.bands + 2)
        edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * math.log(6.4) / 27))
        frequencies = np.linspace(0, self.rate // 2, self.window // 2 + 1)
        rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
        falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
        return np.maximum(np.minimum(rising, falling), 0) * (2 / (edges[2:] - edges[:-2]))[:, None]


def _mel(hertz: float) -> float:
    return 15 + math.log(hertz / 1000) * 27 / math.log(6.4)
