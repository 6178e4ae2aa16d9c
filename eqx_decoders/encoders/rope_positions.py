"""Rotary positions of time, row and column (M-RoPE; Wang et al. 2024, Qwen3-VL), counted on the host."""

from collections.abc import Iterator, Sequence

import numpy as np

from eqx_decoders.encoders.media_config import GridPositions
from eqx_decoders.errors import DataError, check


TEXT, IMAGE, VIDEO, AUDIO = range(4)  # kinds of tokens


def grid_positions(
    config: GridPositions,
    kinds: np.ndarray,
    segments: np.ndarray,
    grids: dict[int, Sequence[tuple[int, int, int]]],
    merge: int,
    seconds: np.ndarray | None = None,
) -> np.ndarray:
    """Positions `[rows, length, 3]` in float32: 0 for padding.

    **Arguments:**

    - `kinds`: of each token, `[rows, length]`.
    - `segments`: of each token its document, counted anew in each; 0 for padding.
    - `grids`: by kind, frames, rows and columns of patches of all images, in the order of their tokens.
    - `merge`: rows and columns of patches that become one token.
    - `seconds`: of each video the time between its frames; None for 1.
    """
    images = {kind: _tokens_of(config, kind, grids.get(kind, ()), merge, seconds) for kind in (IMAGE, VIDEO)}
    found = np.zeros((*kinds.shape, 3), np.float32)
    for row, (own, document) in enumerate(zip(kinds, segments, strict=True)):
        begin, latest = np.float32(0), 0
        for first, last in _runs(own, document):
            if document[first] == 0:  # a document goes on behind it
                continue
            begin = begin if document[first] == latest else np.float32(0)
            latest = document[first]
            if own[first] in (TEXT, AUDIO) and not _is_mixed(own[first:last]):
                found[row, first:last] = (begin + np.arange(last - first, dtype=np.float32))[:, None]
                begin += np.float32(last - first)
            else:
                found[row, first:last] = begin + _run_of_images(config, own[first:last], images)
                begin = _behind(config, found[row, first:last], own[first:last])
    return found


def _behind(config: GridPositions, positions: np.ndarray, kinds: np.ndarray) -> np.float32:
    """Where counting goes on. Of a video and its audio that is behind what is left of one where the other has ended."""
    if _is_mixed(kinds):
        positions = positions[np.flatnonzero(kinds != kinds[-1])[-1] + 1 :]
    return positions[:, 0 if config.behind_times else 1 :].max() + np.float32(1)


def _is_mixed(kinds: np.ndarray) -> bool:
    """Whether these are a video's tokens and those of its audio."""
    return VIDEO in kinds and AUDIO in kinds


def _runs(kinds: np.ndarray, document: np.ndarray) -> Iterator[tuple[int, int]]:
    """Stretches of text or audio, and of images that touch, in one document; a video with its audio is one stretch."""
    seen = np.isin(kinds, (IMAGE, VIDEO))
    audio = kinds == AUDIO
    # audio that touches a video's tokens belongs to it
    change = np.concatenate([[True], (seen[1:] != seen[:-1]) | (document[1:] != document[:-1]), [True]])
    for at in np.flatnonzero(change[1:-1]) + 1:
        pair = {int(kinds[at - 1]), int(kinds[at])}
        if pair == {VIDEO, AUDIO} and document[at] == document[at - 1]:
            change[at] = False
    for at in np.flatnonzero(audio[1:] != audio[:-1]) + 1:  # and text beside that audio does not
        change[at] |= {int(kinds[at - 1]), int(kinds[at])} == {TEXT, AUDIO}
    ends = np.flatnonzero(change)
    return zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)


def _run_of_images(config: GridPositions, kinds: np.ndarray, images: dict[int, Iterator[np.ndarray]]) -> np.ndarray:
    """The positions of images that follow one another, from 0; a video's audio is counted beside it."""
    found = np.zeros((len(kinds), 3), np.float32)
    for kind in (IMAGE, VIDEO):
        places = np.flatnonzero(kinds == kind)
        begin, base = 0, np.float32(0)
        while begin < len(places):
            own = next(images[kind], None)
            rule = "are more than images say: their grids have fewer"
            check(own is not None, f"Media.create: {len(places)} placeholders in a row {rule}.", DataError)
            assert own is not None
            here = places[begin : begin + len(own)]
            rule = "is cut by text, or by the end of its row"
            check(len(here) == len(own), f"Media.create: an image of {len(own)} tokens {rule}.", DataError)
            found[here] = base + own
            begin, base = begin + len(own), _behind(config, found[here], kinds[here])
    audio = np.flatnonzero(kinds == AUDIO)
    found[audio] = np.arange(len(audio), dtype=np.float32)[:, None]
    return found


def _tokens_of(
    config: GridPositions, kind: int, grids: Sequence[tuple[int, int, int]], merge: int, seconds: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Time, row and column of the tokens of each image, from 0."""
    for number, (frames, height, width) in enumerate(grids):
        rows, columns = height // merge, width // merge
        apart = kind == VIDEO and config.frames == "apart"
        between = np.float32(1 if seconds is None or kind == IMAGE else seconds[number])
        times, rate = np.arange(1 if apart else frames, dtype=np.float32), np.float32(config.per_second)
        # the order of the products tells how they are rounded: here as in the families
        times = np.floor(times * (between * rate)) if config.whole else times * between * rate
        grid = np.meshgrid(
            times, np.arange(rows, dtype=np.float32), np.arange(columns, dtype=np.float32), indexing="ij"
        )
        tokens = np.stack(grid, axis=-1).reshape(-1, 3)
        for _ in range(frames if apart else 1):
            yield tokens
