"""M-RoPE positions (time, row and column) of text, images, videos and audio, computed on the host in NumPy.

Sources: Wang et al. 2024 (Qwen2-VL), Qwen3-VL.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, check


TEXT, IMAGE, VIDEO, AUDIO = range(4)  # kinds of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridPositions(CheckedFields):
    """Configuration of M-RoPE positions: rotary positions of time, row and column.

    A token of text or audio advances all three positions by one. The positions of an image start at the next position
    after the text before it; the next token after an image starts after the maximum of its positions.

    **Arguments:**

    - `frames`: `"apart"`, each frame of a video is an image, separated by text (Qwen3-VL); `"together"`, the frames of
        a video are adjacent and have different time positions.
    - `per_second`: time positions per second, for `frames="together"`.
    - `whole`: whether time positions are rounded down to integers.
    - `behind_times`: whether the next token after a video starts after the maximum of time, row and column; False: of
        row and column only (Qwen2.5-VL).
    """

    frames: Literal["apart", "together"] = "apart"
    per_second: PositiveFloat = 1.0
    whole: bool = False
    behind_times: bool = True


def grid_positions(
    config: GridPositions,
    kinds: np.ndarray,
    segments: np.ndarray,
    grids: dict[int, Sequence[tuple[int, int, int]]],
    merge: int,
    seconds: np.ndarray | None = None,
) -> np.ndarray:
    """Return the time, row and column position of each token, `[batch, length, 3]` in float32; 0 for padding.

    Raises DataError if the runs of placeholders do not match the grids.

    **Arguments:**

    - `kinds`: kind of each token, `[batch, length]`: TEXT, IMAGE, VIDEO or AUDIO.
    - `segments`: document of each token, `[batch, length]`; positions start again at 0 in each document. 0: padding.
    - `grids`: for each kind, the numbers of frames, and of rows and columns of patches, of all images, in the order of
        their tokens.
    - `merge`: `merge x merge` patches become one token.
    - `seconds`: seconds between the frames of each video; None: 1.
    """
    images = {kind: _image_positions(config, kind, grids.get(kind, ()), merge, seconds) for kind in (IMAGE, VIDEO)}
    positions = np.zeros((*kinds.shape, 3), np.float32)
    for row, (row_kinds, row_segments) in enumerate(zip(kinds, segments, strict=True)):
        next_position = np.float32(0)
        previous_segment = 0
        for start, end in _find_runs(row_kinds, row_segments):
            if row_segments[start] == 0:  # padding; the document may continue after it
                continue
            if row_segments[start] != previous_segment:
                next_position = np.float32(0)
            previous_segment = row_segments[start]
            run_kinds = row_kinds[start:end]
            if row_kinds[start] in (TEXT, AUDIO) and not _is_video_with_audio(run_kinds):
                positions[row, start:end] = (next_position + np.arange(end - start, dtype=np.float32))[:, None]
                next_position += np.float32(end - start)
            else:
                positions[row, start:end] = next_position + _run_positions(config, run_kinds, images)
                next_position = _position_after(config, positions[row, start:end], run_kinds)
    return positions


def _position_after(config: GridPositions, positions: np.ndarray, kinds: np.ndarray) -> np.float32:
    """Return the next position after a run of images.

    For a video with audio, only the tokens after the last change between video and audio count.
    """
    if _is_video_with_audio(kinds):
        positions = positions[np.flatnonzero(kinds != kinds[-1])[-1] + 1 :]
    return positions[:, 0 if config.behind_times else 1 :].max() + np.float32(1)


def _is_video_with_audio(kinds: np.ndarray) -> bool:
    return VIDEO in kinds and AUDIO in kinds


def _find_runs(kinds: np.ndarray, segments: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return start and end of each run of text, audio or adjacent images; a video with its audio is one run."""
    is_visual = np.isin(kinds, (IMAGE, VIDEO))
    is_audio = kinds == AUDIO
    starts_run = np.concatenate([[True], (is_visual[1:] != is_visual[:-1]) | (segments[1:] != segments[:-1]), [True]])
    # Audio adjacent to the tokens of a video in the same document belongs to the video.
    for index in np.flatnonzero(starts_run[1:-1]) + 1:
        adjacent_kinds = {int(kinds[index - 1]), int(kinds[index])}
        if adjacent_kinds == {VIDEO, AUDIO} and segments[index] == segments[index - 1]:
            starts_run[index] = False
    # Text adjacent to audio starts a new run, and vice versa.
    for index in np.flatnonzero(is_audio[1:] != is_audio[:-1]) + 1:
        starts_run[index] |= {int(kinds[index - 1]), int(kinds[index])} == {TEXT, AUDIO}
    bounds = np.flatnonzero(starts_run)
    return zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)


def _run_positions(config: GridPositions, kinds: np.ndarray, images: dict[int, Iterator[np.ndarray]]) -> np.ndarray:
    """Return the positions of a run of images, starting at 0; the audio of a video starts at 0, too."""
    positions = np.zeros((len(kinds), 3), np.float32)
    for kind in (IMAGE, VIDEO):
        tokens = np.flatnonzero(kinds == kind)
        start = 0
        next_position = np.float32(0)
        while start < len(tokens):
            image_positions = next(images[kind], None)
            check(
                image_positions is not None,
                f"Media.create: input_ids has a run of {len(tokens)} placeholders, but the grids of the remaining "
                "images have fewer tokens.",
                DataError,
            )
            assert image_positions is not None
            span = tokens[start : start + len(image_positions)]
            check(
                len(span) == len(image_positions),
                f"Media.create: the {len(image_positions)} placeholders of an image must be adjacent in input_ids, but "
                "text or the end of the sequence interrupts them.",
                DataError,
            )
            positions[span] = next_position + image_positions
            start += len(image_positions)
            next_position = _position_after(config, positions[span], kinds[span])
    audio = np.flatnonzero(kinds == AUDIO)
    positions[audio] = np.arange(len(audio), dtype=np.float32)[:, None]
    return positions


def _image_positions(
    config: GridPositions, kind: int, grids: Sequence[tuple[int, int, int]], merge: int, seconds: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Yield the time, row and column of the tokens of each image, `[tokens, 3]`, starting at 0."""
    for index, (num_frames, height, width) in enumerate(grids):
        rows = np.arange(height // merge, dtype=np.float32)
        columns = np.arange(width // merge, dtype=np.float32)
        frames_apart = kind == VIDEO and config.frames == "apart"
        interval = np.float32(1 if seconds is None or kind == IMAGE else seconds[index])
        times = np.arange(1 if frames_apart else num_frames, dtype=np.float32)
        rate = np.float32(config.per_second)
        # The order of the products must be the same as in transformers, because it affects the rounding.
        times = np.floor(times * (interval * rate)) if config.whole else times * interval * rate
        grid = np.meshgrid(times, rows, columns, indexing="ij")
        token_positions = np.stack(grid, axis=-1).reshape(-1, 3)
        for _ in range(num_frames if frames_apart else 1):
            yield token_positions
