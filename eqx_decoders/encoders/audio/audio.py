"""Audio clips for an encoder: log-mel spectra, split into chunks or frames, and packed into sequences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eqx_decoders.encoders.audio.audio_stem import AudioStemConfig
from eqx_decoders.encoders.audio.frame_stem import FrameStemConfig
from eqx_decoders.encoders.packed_rows import AudioRows, PackedChunks, PackedFrames
from eqx_decoders.encoders.packing import Packing
from eqx_decoders.errors import DataError, check


class AudioClip(NamedTuple):
    """Audio clip for an encoder.

    **Arguments:**

    - `spectrum`: log-mel spectrum; `[chunks, bands, frames]` for an `AudioStemConfig`, and `[frames, bands]` for a
        `FrameStemConfig`.
    - `num_tokens`: number of tokens in the encoder's layers.
    - `num_features`: number of features that replace placeholder tokens.
    """

    spectrum: np.ndarray
    num_tokens: int
    num_features: int


def from_spectra(
    stem: AudioStemConfig | FrameStemConfig, features: Any, mask: Any, mask_name: str, *, whole_chunks: bool
) -> list[AudioClip]:
    """Return the audio clips in a batch of padded log-mel spectra.

    **Arguments:**

    - `features`: `[audio, bands, frames]` for a stem that reads chunks; `[audio, frames, bands]` for a stem that reads
        complete clips.
    - `mask`: 1 for the frames of a clip and 0 for padding, `[audio, frames]`; None without padding.
    - `mask_name`: name of the mask in error messages.
    - `whole_chunks`: pad chunks to `chunk_frames` even if all clips are shorter.
    """
    if isinstance(stem, FrameStemConfig):
        features, is_frame = _check_spectra(features, mask, mask_name, stem.mel_bands, bands_axis=2)
        return _split_frames(stem, features, is_frame, mask_name)
    features, is_frame = _check_spectra(features, mask, mask_name, stem.mel_bands, bands_axis=1)
    return _split_chunks(stem, features, is_frame, whole_chunks=whole_chunks)


def pack_audio(
    stem: AudioStemConfig | FrameStemConfig, groups: Sequence[Sequence[AudioClip]]
) -> tuple[AudioRows, list[np.ndarray]]:
    """Pack the clips of each group into sequences.

    Returns the packed sequences, and for each clip the indices of its features among the features of all sequences.
    """
    return _pack_frames(stem, groups) if isinstance(stem, FrameStemConfig) else _pack_chunks(stem, groups)


def _check_spectra(
    features: Any, mask: Any, mask_name: str, num_bands: int, *, bands_axis: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the spectra as float32, and a Boolean mask of the frames that are not padding. Raises DataError."""
    features = np.asarray(features, np.float32)
    expected = f"[audio, {num_bands}, frames]" if bands_axis == 1 else f"[audio, frames, {num_bands}]"
    check(
        features.ndim == 3 and features.shape[bands_axis] == num_bands,
        f"Media.create: input_features of shape {features.shape} must be {expected}.",
        DataError,
    )
    mask_shape = features.shape[0], features.shape[3 - bands_axis]
    is_frame = np.ones(mask_shape, bool) if mask is None else np.asarray(mask) > 0
    check(
        is_frame.shape == mask_shape,
        f"Media.create: {mask_name} of shape {is_frame.shape} must have shape {mask_shape}: one value for each frame "
        "of input_features.",
        DataError,
    )
    check(
        bool(is_frame.any(axis=1).all()),
        f"Media.create: {mask_name} is 0 for all frames of an audio clip. Pass at least one frame per clip.",
        DataError,
    )
    return features, is_frame


def _split_chunks(
    stem: AudioStemConfig, features: np.ndarray, is_frame: np.ndarray, *, whole_chunks: bool
) -> list[AudioClip]:
    """Split each audio clip into chunks, and pad the last chunk with zeros."""
    # Convolutions read the zeros after the last frame of a clip. If all clips are shorter than a chunk, transformers
    # pads to the longest clip only, so this must do the same.
    size = stem.chunk_frames if whole_chunks else min(stem.chunk_frames, int(is_frame.sum(axis=1).max(initial=1)))
    clips = []
    for padded_spectrum, mask in zip(features, is_frame, strict=True):
        spectrum = padded_spectrum[:, mask]
        num_full, num_rest = divmod(spectrum.shape[1], stem.chunk_frames)
        count = num_full + (num_rest > 0)
        padded = np.pad(spectrum, ((0, 0), (0, max(0, count * size - spectrum.shape[1]))))
        chunks = padded.reshape(spectrum.shape[0], count, size).swapaxes(0, 1)
        num_tokens = num_full * stem.chunk_tokens + (stem.output_size(num_rest) if num_rest else 0)
        clips.append(AudioClip(chunks, num_tokens, num_tokens))
    return clips


def _split_frames(stem: FrameStemConfig, features: np.ndarray, is_frame: np.ndarray, mask_name: str) -> list[AudioClip]:
    """Return each audio clip with the frames that its tokens depend on."""
    counts = is_frame.sum(axis=1)
    check(
        np.array_equal(is_frame, np.arange(features.shape[1]) < counts[:, None]),
        f"Media.create: {mask_name} must be 1 for the first frames of an audio clip, and 0 for all frames after them.",
        DataError,
    )
    clips = []
    for spectrum, count in zip(features, counts.tolist(), strict=True):
        num_tokens = stem.output_size(count)
        num_features = -(-num_tokens // stem.group)
        max_features = stem.rows_per_clip
        check(
            max_features is None or num_features <= max_features,
            f"Media.create: an audio clip of {count} frames has {num_features} features, more than "
            f"FrameStemConfig.rows_per_clip={max_features}. Pass a shorter clip.",
            DataError,
        )
        # With frames="behind", the last tokens depend on frames after the end of the clip, so these are included.
        end = stem.stride * (num_tokens + 1) if stem.frames == "behind" else count
        clips.append(AudioClip(spectrum[:end], stem.filled(num_tokens), max_features or num_features))
    return clips


def _pack_chunks(stem: AudioStemConfig, groups: Sequence[Sequence[AudioClip]]) -> tuple[PackedChunks, list[np.ndarray]]:
    clips = [clip for group in groups for clip in group]
    chunk_tokens = stem.output_size(clips[0].spectrum.shape[-1])
    packing = Packing.of([[len(clip.spectrum) for clip in group] for group in groups])
    chunks = np.zeros((packing.rows, packing.length, *clips[0].spectrum.shape[1:]), np.float32)
    shape = packing.rows, packing.length * chunk_tokens
    positions = np.full(shape, -1, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    num_clips = np.zeros(packing.rows, np.int64)
    feature_indices = []
    for clip, (row, start) in zip(clips, packing.starts, strict=True):
        num_clips[row] += 1
        chunks[row, start : start + len(clip.spectrum)] = clip.spectrum
        first = start * chunk_tokens
        tokens = np.s_[row, first : first + clip.num_tokens]
        positions[tokens] = np.arange(clip.num_tokens)
        segment_ids[tokens] = num_clips[row]
        feature_indices.append(row * shape[1] + first + np.arange(clip.num_tokens))
    return PackedChunks(chunks=chunks, positions=positions, segment_ids=segment_ids), feature_indices


def _pack_frames(stem: FrameStemConfig, groups: Sequence[Sequence[AudioClip]]) -> tuple[PackedFrames, list[np.ndarray]]:
    """Pack clips with `stem.group` tokens between two clips of a sequence, because convolutions read adjacent frames.

    The tokens in between are one token of silence, which is a separate document; or, for `frames="behind"`, the
    padding frames that the last tokens of the clip before them read.
    """
    clips = [clip for group in groups for clip in group]
    group_size = stem.group
    reads_behind = stem.frames == "behind"
    lengths = [[-(-clip.num_tokens // group_size) * group_size + group_size for clip in group] for group in groups]
    packing = Packing.of(lengths, group_size)
    # The tokens after the last clip of a sequence are needed only for the frames behind the clip, or as the padding
    # features of clips with fewer than `rows_per_clip` features.
    keep_last = reads_behind or stem.rows_per_clip is not None
    length = packing.length if keep_last else packing.length - group_size
    frames = np.zeros((packing.rows, length * stem.stride, stem.mel_bands), np.float32)
    is_frame = np.zeros(frames.shape[:2], bool)
    positions = np.full((packing.rows, length), -1, np.int32)
    segment_ids = np.zeros((packing.rows, length), np.int32)
    feature_indices = []
    for clip, (row, start) in zip(clips, packing.starts, strict=True):
        segment_id = int(segment_ids[row].max(initial=0)) + 1
        if start > 0 and not reads_behind:
            positions[row, start - group_size] = 0
            segment_ids[row, start - group_size] = segment_id
            segment_id += 1
        first_frame = start * stem.stride
        frames[row, first_frame : first_frame + len(clip.spectrum)] = clip.spectrum
        is_frame[row, first_frame : first_frame + len(clip.spectrum)] = True
        index = np.arange(clip.num_tokens)
        tokens = np.s_[row, start : start + clip.num_tokens]
        max_length = stem.longest or max(clip.num_tokens, 1)
        positions[tokens] = index % max_length
        segment_ids[tokens] = segment_id + index // max_length
        feature_index = (row * length + start) // group_size + np.arange(clip.num_features)
        # features beyond the clip's tokens: the last feature of the sequence, which is padding
        feature_index[-(-clip.num_tokens // group_size) :] = (row + 1) * length // group_size - 1
        feature_indices.append(feature_index)
    packed = PackedFrames(frames=frames, real=is_frame, positions=positions, segment_ids=segment_ids, group=group_size)
    return packed, feature_indices
