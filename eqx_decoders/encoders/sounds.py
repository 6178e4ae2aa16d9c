"""Sounds that an encoder reads as a whole: their frames, and rows in which several stand one behind the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.encoders.frame_stem import FrameStemConfig
from eqx_decoders.encoders.packing import Packing
from eqx_decoders.encoders.rows import FrameRows
from eqx_decoders.errors import DataError, check


Sound = tuple[np.ndarray, int]  # frames, and how many tokens they make


def from_frames(stem: FrameStemConfig, features: Any, mask: Any, name: str) -> list[Sound]:
    """The sounds in `[sounds, frames, bands]`, of which a mask `[sounds, frames]` of this name says what is real."""
    features = np.asarray(features, np.float32)
    good = features.ndim == 3 and features.shape[2] == stem.mel_bands
    rule = f"must be [sounds, frames, {stem.mel_bands}]"
    check(good, f"Media.create: input_features of shape {features.shape} {rule}.", DataError)
    real = np.ones(features.shape[:2], bool) if mask is None else np.asarray(mask) > 0
    rule = f"must be {features.shape[:2]}: one number for each frame of input_features"
    check(real.shape == features.shape[:2], f"Media.create: {name} of shape {real.shape} {rule}.", DataError)
    counts = real.sum(axis=1)
    rule = "leaves nothing of a sound: give at least one frame"
    check(bool((counts > 0).all()), f"Media.create: {name} {rule}.", DataError)
    first = np.array_equal(real, np.arange(features.shape[1]) < counts[:, None])
    check(first, f"Media.create: {name} must be 1 for the first frames of a sound, and 0 behind them.", DataError)
    return [(own[:count], stem.halved(int(count))) for own, count in zip(features, counts, strict=True)]


def pack_frames(stem: FrameStemConfig, groups: Sequence[Sequence[Sound]]) -> tuple[FrameRows, list[np.ndarray]]:
    """The rows, and for each sound which of their tokens are its own.

    Between two sounds of a row stands a token of silence, a document of its own: convolutions reach over borders.
    """
    sounds = [sound for group in groups for sound in group]
    packing = Packing.of([[count + 1 for _, count in group] for group in groups])
    length = packing.length - 1  # none is needed behind the last one
    frames = np.zeros((packing.rows, length * stem.stride, stem.mel_bands), np.float32)
    real = np.zeros(frames.shape[:2], bool)
    positions, segments = np.full((packing.rows, length), -1, np.int32), np.zeros((packing.rows, length), np.int32)
    rows_of = []
    for (own, count), (row, begin) in zip(sounds, packing.places, strict=True):
        if begin > 0:
            positions[row, begin - 1], segments[row, begin - 1] = 0, segments[row, begin - 2] + 1
        number = segments[row, begin - 1] + 1 if begin > 0 else 1
        here, first = np.s_[row, begin : begin + count], begin * stem.stride
        frames[row, first : first + len(own)], real[row, first : first + len(own)] = own, True
        positions[here], segments[here] = np.arange(count), number
        rows_of.append(row * length + begin + np.arange(count))
    return FrameRows(frames=frames, real=real, positions=positions, segment_ids=segments), rows_of
