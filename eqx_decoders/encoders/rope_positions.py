"""Rotary positions of time, row and column (M-RoPE; Wang et al. 2024, Qwen3-VL), counted on the host."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, check


TEXT, IMAGE, VIDEO, AUDIO = range(4)  # kinds of tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridPositions(CheckedFields):
    """Rotary positions of time, row and column (M-RoPE): an image's tokens count on from the text before it.

    Text and audio move all three by one; tokens behind an image begin behind the largest of its positions.

    **Arguments:**

    - `frames`: whether the frames of a video are `"apart"`, each an image with text before it (Qwen3-VL), or
        `"together"`, with times of their own.
    - `per_second`: positions of time in a second, for frames that are together.
    - `whole`: whether times are rounded down to whole numbers.
    - `behind_times`: whether tokens behind a video begin behind its times, too, or behind its rows and columns only
        (Qwen2.5-VL).
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
    """Return positions `[rows, length, 3]` in float32: 0 for padding.

    **Arguments:**

    - `kinds`: kind of each token, `[rows, length]`.
    - `segments`: document of each token, in which positions begin anew; 0 for padding.
    - `grids`: by kind, the frames, rows and columns of patches of all images, in the order of their tokens.
    - `merge`: rows and columns of patches that become one token.
    - `seconds`: time between the frames of each video; None for 1.
    """
    images = {kind: _tokens_of(config, kind, grids.get(kind, ()), merge, seconds) for kind in (IMAGE, VIDEO)}
    positions = np.zeros((*kinds.shape, 3), np.float32)
    for row, (row_kinds, document) in enumerate(zip(kinds, segments, strict=True)):
        begin, latest = np.float32(0), 0
        for first, last in _runs(row_kinds, document):
            if document[first] == 0:  # a document goes on behind it
                continue
            begin = begin if document[first] == latest else np.float32(0)
            latest = document[first]
            if row_kinds[first] in (TEXT, AUDIO) and not _is_mixed(row_kinds[first:last]):
                positions[row, first:last] = (begin + np.arange(last - first, dtype=np.float32))[:, None]
                begin += np.float32(last - first)
            else:
                positions[row, first:last] = begin + _run_of_images(config, row_kinds[first:last], images)
                begin = _behind(config, positions[row, first:last], row_kinds[first:last])
    return positions


def _behind(config: GridPositions, positions: np.ndarray, kinds: np.ndarray) -> np.float32:
    """Return the next position: for a video with audio, behind the rest of the longer one."""
    if _is_mixed(kinds):
        positions = positions[np.flatnonzero(kinds != kinds[-1])[-1] + 1 :]
    return positions[:, 0 if config.behind_times else 1 :].max() + np.float32(1)


def _is_mixed(kinds: np.ndarray) -> bool:
    """Return True for tokens of a video and of its audio."""
    return VIDEO in kinds and AUDIO in kinds


def _runs(kinds: np.ndarray, document: np.ndarray) -> Iterator[tuple[int, int]]:
    """Return the runs of text, audio or adjacent images in one document; a video with its audio is one run."""
    visual = np.isin(kinds, (IMAGE, VIDEO))
    audio = kinds == AUDIO
    # audio that touches a video's tokens belongs to it
    change = np.concatenate([[True], (visual[1:] != visual[:-1]) | (document[1:] != document[:-1]), [True]])
    for at in np.flatnonzero(change[1:-1]) + 1:
        pair = {int(kinds[at - 1]), int(kinds[at])}
        if pair == {VIDEO, AUDIO} and document[at] == document[at - 1]:
            change[at] = False
    for at in np.flatnonzero(audio[1:] != audio[:-1]) + 1:  # and adjacent text does not
        change[at] |= {int(kinds[at - 1]), int(kinds[at])} == {TEXT, AUDIO}
    ends = np.flatnonzero(change)
    return zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)


def _run_of_images(config: GridPositions, kinds: np.ndarray, images: dict[int, Iterator[np.ndarray]]) -> np.ndarray:
    """Return the positions of adjacent images, from 0; a video's audio is counted from 0, too."""
    positions = np.zeros((len(kinds), 3), np.float32)
    for kind in (IMAGE, VIDEO):
        tokens = np.flatnonzero(kinds == kind)
        begin, base = 0, np.float32(0)
        while begin < len(tokens):
            grid = next(images[kind], None)
            rule = "are more than images say: their grids have fewer"
            check(grid is not None, f"Media.create: {len(tokens)} placeholders in a row {rule}.", DataError)
            assert grid is not None
            span = tokens[begin : begin + len(grid)]
            rule = "is cut by text, or by the end of its row"
            check(len(span) == len(grid), f"Media.create: an image of {len(grid)} tokens {rule}.", DataError)
            positions[span] = base + grid
            begin, base = begin + len(grid), _behind(config, positions[span], kinds[span])
    audio = np.flatnonzero(kinds == AUDIO)
    positions[audio] = np.arange(len(audio), dtype=np.float32)[:, None]
    return positions


def _tokens_of(
    config: GridPositions, kind: int, grids: Sequence[tuple[int, int, int]], merge: int, seconds: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Yield the time, row and column of the tokens of each image, from 0."""
    for number, (frames, height, width) in enumerate(grids):
        rows, columns = height // merge, width // merge
        separate = kind == VIDEO and config.frames == "apart"
        interval = np.float32(1 if seconds is None or kind == IMAGE else seconds[number])
        times, rate = np.arange(1 if separate else frames, dtype=np.float32), np.float32(config.per_second)
        # the order of the products decides their rounding: this is transformers' order
        times = np.floor(times * (interval * rate)) if config.whole else times * interval * rate
        grid = np.meshgrid(
            times, np.arange(rows, dtype=np.float32), np.arange(columns, dtype=np.float32), indexing="ij"
        )
        tokens = np.stack(grid, axis=-1).reshape(-1, 3)
        for _ in range(frames if separate else 1):
            yield tokens
