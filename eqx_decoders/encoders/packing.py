"""Items of different sizes in rows of one size, and images in such rows: nothing is padded to a square.

Their number and sizes are data, a program's shapes are not: rows and their lengths are rounded up to few sizes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eqx_decoders.encoders.images import Image, coordinates, in_windows, learned_places
from eqx_decoders.encoders.packed_rows import PatchRows
from eqx_decoders.encoders.stem import PatchStemConfig


def few_sizes(count: int) -> int:
    """The next of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, …: four an octave."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def finer_sizes(length: int) -> int:
    """The next of few lengths: eight an octave."""
    step = max(1, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each item stands: its row, and its first place there.

    **Arguments:**

    - `rows`, `length`: of the array.
    - `places`: row and first place of each item, in order.
    """

    rows: int
    length: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], unit: int = 1) -> "Packing":
        """First fit of items of these lengths, multiples of `unit`; each group of items has equally many rows."""
        lengths = {length for group in groups for length in group}
        longest = max(lengths, default=0)
        length = longest if len(lengths) < 2 else finer_sizes(longest // unit) * unit
        taken: list[list[int]] = []
        found: list[list[tuple[int, int]]] = []
        for group in groups:
            rows: list[int] = []
            places = []
            for size in group:
                row = next((index for index, used in enumerate(rows) if used + size <= length), len(rows))
                rows += [0] if row == len(rows) else []
                places.append((row, rows[row]))
                rows[row] += size
            taken.append(rows)
            found.append(places)
        each = few_sizes(max(map(len, taken), default=0)) if lengths else 0
        where = ((group * each + row, begin) for group, places in enumerate(found) for row, begin in places)
        return cls(each * len(groups), length, tuple(where))


def pack_images(stem: PatchStemConfig, groups: Sequence[Sequence[Image]]) -> tuple[PatchRows, list[np.ndarray]]:
    """The rows, and for each image which of the rows' groups of patches its tokens are, in their order."""
    further = stem.group if stem.class_token else 0  # a class token has a group of its own
    images = [image for group in groups for image in group]
    packing = Packing.of([[len(each.patches) + further for each in group] for group in groups], stem.group)
    shape = packing.rows, packing.length
    patches = np.zeros((*shape, int(np.prod(stem.shape))), np.float32)
    positions, segments = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    where = np.zeros((*shape, 2), np.int32)
    classes = np.zeros(shape, bool) if stem.class_token else None
    learned = [learned_places(stem, each) for each in images]
    taps = learned[0][0].shape[1] if learned and learned[0] is not None else 0
    places, weights = np.zeros((*shape, taps), np.int32), np.zeros((*shape, taps), np.float32)
    rows_of, number = [], np.zeros(packing.rows, np.int64)
    for image, (row, begin), at in zip(images, packing.places, learned, strict=True):
        order, own = in_windows(stem, image)
        count, here = len(image.patches), np.s_[row, begin : begin + len(image.patches)]
        patches[here], positions[here] = image.patches[order], own
        segments[here] = number[row] + 1 + image.frames[order]
        where[here] = coordinates(stem, image)[order]
        if at is not None:
            places[here], weights[here] = at[0][order], at[1][order]
        if classes is not None:
            token = row, begin + count
            classes[token], positions[token], segments[token] = True, count, segments[row, begin]
            places[token], weights[token] = stem.class_place, 1.0
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
        coordinates=where,
        places=places if taps else None,
        place_weights=weights if taps else None,
        class_tokens=classes,
        group=stem.group,
    ), rows_of
