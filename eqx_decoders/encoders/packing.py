"""Items of different sizes packed into rows of one size, and images in such rows: nothing is padded to a square.

The number and sizes of items are data, a program's shapes are not: rows and their lengths are rounded up to few sizes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eqx_decoders.encoders.images import Image, coordinates, learned_positions, window_order
from eqx_decoders.encoders.packed_rows import PatchRows
from eqx_decoders.encoders.stem import ImageStem


def padded_count(count: int) -> int:
    """Round up to one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, …: four an octave."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def padded_length(length: int) -> int:
    """Round up to one of eight lengths an octave."""
    step = max(1, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclasses.dataclass(frozen=True)
class Packing:
    """Position of each item: its row, and its first column there.

    **Arguments:**

    - `rows`, `length`: shape of the array.
    - `starts`: row and first column of each item, in order.
    """

    rows: int
    length: int
    starts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], unit: int = 1) -> "Packing":
        """Pack items of these lengths, multiples of `unit`, by first fit; each group of items has equally many rows."""
        lengths = {length for group in groups for length in group}
        longest = max(lengths, default=0)
        length = longest if len(lengths) < 2 else padded_length(longest // unit) * unit
        taken: list[list[int]] = []
        starts_by_group: list[list[tuple[int, int]]] = []
        for group in groups:
            rows: list[int] = []
            starts = []
            for size in group:
                row = next((index for index, used in enumerate(rows) if used + size <= length), len(rows))
                rows += [0] if row == len(rows) else []
                starts.append((row, rows[row]))
                rows[row] += size
            taken.append(rows)
            starts_by_group.append(starts)
        each = padded_count(max(map(len, taken), default=0)) if lengths else 0
        flat = ((group * each + row, begin) for group, starts in enumerate(starts_by_group) for row, begin in starts)
        return cls(each * len(groups), length, tuple(flat))


def pack_images(stem: ImageStem, groups: Sequence[Sequence[Image]]) -> tuple[PatchRows, list[np.ndarray]]:
    """Return the rows, and for each image the indices of its tokens among the rows' groups of patches, in order."""
    class_group = stem.group if stem.class_token else 0  # a class token has a group of its own
    images = [image for group in groups for image in group]
    packing = Packing.of([[len(each.patches) + class_group for each in group] for group in groups], stem.group)
    shape = packing.rows, packing.length
    patches = np.zeros((*shape, images[0].patches.shape[1]), np.float32)
    positions, segments = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    coords = np.zeros((*shape, 2), np.int32)
    classes = np.zeros(shape, bool) if stem.class_token else None
    learned = [learned_positions(stem, each) for each in images]
    # a power of two, so that images of different shapes have few programs
    most = max((at[0].shape[1] for at in learned if at is not None), default=0)
    taps = 1 << (most - 1).bit_length() if most else 0
    indices, weights = np.zeros((*shape, taps), np.int32), np.zeros((*shape, taps), np.float32)
    unseen = np.zeros(shape, bool) if any(each.unseen is not None for each in images) else None
    rows_of, number = [], np.zeros(packing.rows, np.int64)
    for image, (row, begin), at in zip(images, packing.starts, learned, strict=True):
        order, order_positions = window_order(stem, image)
        count, span = len(image.patches), np.s_[row, begin : begin + len(image.patches)]
        patches[span], positions[span] = image.patches[order], order_positions
        segments[span] = number[row] + 1 + image.frames[order]
        coords[span] = coordinates(stem, image)[order]
        if at is not None:
            count_of_taps = at[0].shape[1]
            indices[span][:, :count_of_taps], weights[span][:, :count_of_taps] = at[0][order], at[1][order]
        if unseen is not None and image.unseen is not None:
            unseen[span] = image.unseen[order]
        if classes is not None:
            token = row, begin + count
            classes[token], positions[token], segments[token] = True, count, segments[row, begin]
            indices[token], weights[token] = stem.class_position, np.arange(taps) == 0
        number[row] += image.grid[0]
        first = (row * packing.length + begin) // stem.group
        back = np.argsort(order[:: stem.group] // stem.group)  # windows are made of whole groups
        rows_of.append(first + back)
    # rows that are one whole image each need no segments; empty ones have no tokens
    whole = number.max(initial=0) <= 1
    return PatchRows(
        patches=patches,
        positions=positions,
        segment_ids=None if whole else segments,
        coordinates=coords,
        position_index=indices if taps else None,
        position_weights=weights if taps else None,
        class_tokens=classes,
        unseen=unseen,
        group=stem.group,
    ), rows_of
