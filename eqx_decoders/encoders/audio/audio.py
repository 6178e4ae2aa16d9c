"""Audio clips for an encoder: their chunks or frames, packed into rows of several clips each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.packed_rows import AudioRows, ChunkRows, FrameRows
from eqx_decoders.encoders.packing import Packing
from eqx_decoders.errors import DataError, check


class Audio(NamedTuple):
    """Audio clip: its chunks or frames, the tokens that they make, and its rows of features."""

    frames: np.ndarray
    tokens: int
    rows: int


def from_spectra(
    stem: AudioStemConfig | FrameStemConfig, features: Any, mask: Any, name: str, *, whole_chunks: bool
) -> list[Audio]:
    """Return the audio clips in log-mel spectra; the mask `[audio, frames]`, called `name`, is 1 for real frames.

    Spectra are `[audio, bands, frames]` for an encoder that reads chunks, and `[audio, frames, bands]` for one that
    reads whole clips. `whole_chunks`: chunks are not shortened where all clips are short.
    """
    if isinstance(stem, FrameStemConfig):
        features, real = _checked(features, mask, name, stem.mel_bands, axis=2)
        return _in_frames(stem, features, real, name)
    features, real = _checked(features, mask, name, stem.mel_bands, axis=1)
    return _in_chunks(stem, features, real, whole=whole_chunks)


def pack_audio(
    stem: AudioStemConfig | FrameStemConfig, groups: Sequence[Sequence[Audio]]
) -> tuple[AudioRows, list[np.ndarray]]:
    """Return the rows, and for each audio clip the indices of its tokens in them."""
    return _pack_frames(stem, groups) if isinstance(stem, FrameStemConfig) else _pack_chunks(stem, groups)


def _checked(features: Any, mask: Any, name: str, bands: int, *, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the spectra, whose bands are along `axis`, and a mask of their real frames."""
    features = np.asarray(features, np.float32)
    words = f"{bands}, frames" if axis == 1 else f"frames, {bands}"
    good = features.ndim == 3 and features.shape[axis] == bands
    rule = f"must be [audio, {words}]"
    check(good, f"Media.create: input_features of shape {features.shape} {rule}.", DataError)
    shape = features.shape[0], features.shape[3 - axis]
    real = np.ones(shape, bool) if mask is None else np.asarray(mask) > 0
    rule = f"must be {shape}: one number for each frame of input_features"
    check(real.shape == shape, f"Media.create: {name} of shape {real.shape} {rule}.", DataError)
    rule = "leaves nothing of an audio clip: give at least one frame"
    check(bool(real.any(axis=1).all()), f"Media.create: {name} {rule}.", DataError)
    return features, real


def _in_chunks(stem: AudioStemConfig, features: np.ndarray, real: np.ndarray, *, whole: bool) -> list[Audio]:
    """Return the chunks of each audio clip, the last one padded."""
    # convolutions see the zeros behind a clip's last frame: where all are short there are no more than in transformers
    size = stem.chunk_frames if whole else min(stem.chunk_frames, int(real.sum(axis=1).max(initial=1)))
    clips = []
    for spectrum, frames in zip(features, real, strict=True):
        spectrum = spectrum[:, frames]
        full, rest = divmod(spectrum.shape[1], stem.chunk_frames)
        count = full + (rest > 0)
        padded = np.pad(spectrum, ((0, 0), (0, max(0, count * size - spectrum.shape[1]))))
        chunks = padded.reshape(spectrum.shape[0], count, size).swapaxes(0, 1)
        tokens = full * stem.chunk_tokens + (stem.output_size(rest) if rest else 0)
        clips.append(Audio(chunks, tokens, tokens))
    return clips


def _in_frames(stem: FrameStemConfig, features: np.ndarray, real: np.ndarray, name: str) -> list[Audio]:
    """Return the frames of each audio clip."""
    counts = real.sum(axis=1)
    first = np.array_equal(real, np.arange(features.shape[1]) < counts[:, None])
    check(first, f"Media.create: {name} must be 1 for the first frames of an audio clip, and 0 behind them.", DataError)
    clips = []
    for spectrum, count in zip(features, counts.tolist(), strict=True):
        tokens = stem.output_size(count)
        rows, most = -(-tokens // stem.group), stem.rows_per_clip
        rule = f"more than FrameStemConfig.rows_per_clip={most}: give a shorter clip"
        message = f"Media.create: an audio clip of {count} frames makes {rows} rows of features"
        check(most is None or rows <= most, f"{message}, {rule}.", DataError)
        # the last tokens look at frames behind the clip, too
        end = stem.stride * (tokens + 1) if stem.frames == "behind" else count
        clips.append(Audio(spectrum[:end], stem.filled(tokens), most or rows))
    return clips


def _pack_chunks(stem: AudioStemConfig, groups: Sequence[Sequence[Audio]]) -> tuple[ChunkRows, list[np.ndarray]]:
    audio = [audio for group in groups for audio in group]
    chunk_tokens = stem.output_size(audio[0].frames.shape[-1])
    packing = Packing.of([[len(clip.frames) for clip in group] for group in groups])
    chunks = np.zeros((packing.rows, packing.length, *audio[0].frames.shape[1:]), np.float32)
    shape = packing.rows, packing.length * chunk_tokens
    positions, segments = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    rows_of, number = [], np.zeros(packing.rows, np.int64)
    for (clip, count, _), (row, begin) in zip(audio, packing.starts, strict=True):
        first, number[row] = begin * chunk_tokens, number[row] + 1
        chunks[row, begin : begin + len(clip)] = clip
        positions[row, first : first + count] = np.arange(count)
        segments[row, first : first + count] = number[row]
        rows_of.append(row * shape[1] + first + np.arange(count))
    return ChunkRows(chunks=chunks, positions=positions, segment_ids=segments), rows_of


def _pack_frames(stem: FrameStemConfig, groups: Sequence[Sequence[Audio]]) -> tuple[FrameRows, list[np.ndarray]]:
    """Put tokens between two clips of a row, since convolutions reach over borders.

    They are one of silence, a document of its own, or the frames behind a clip that its last tokens look at.
    """
    audio, unit = [audio for group in groups for audio in group], stem.group
    behind = stem.frames == "behind"
    packing = Packing.of([[-(-clip.tokens // unit) * unit + unit for clip in group] for group in groups], unit)
    # the last tokens of a row are those of no clip: they are filled up from there, or none are needed
    length = packing.length if behind or stem.rows_per_clip is not None else packing.length - unit
    frames = np.zeros((packing.rows, length * stem.stride, stem.mel_bands), np.float32)
    real = np.zeros(frames.shape[:2], bool)
    positions, segments = np.full((packing.rows, length), -1, np.int32), np.zeros((packing.rows, length), np.int32)
    rows_of = []
    for (clip, count, rows), (row, begin) in zip(audio, packing.starts, strict=True):
        number = int(segments[row].max(initial=0)) + 1
        if begin > 0 and not behind:
            positions[row, begin - unit], segments[row, begin - unit] = 0, number
            number += 1
        tokens, first = np.s_[row, begin : begin + count], begin * stem.stride
        frames[row, first : first + len(clip)], real[row, first : first + len(clip)] = clip, True
        longest = stem.longest or max(count, 1)
        positions[tokens], segments[tokens] = np.arange(count) % longest, number + np.arange(count) // longest
        index = (row * length + begin) // unit + np.arange(rows)
        index[-(-count // unit) :] = (row + 1) * length // unit - 1
        rows_of.append(index)
    return FrameRows(frames=frames, real=real, positions=positions, segment_ids=segments, group=unit), rows_of
