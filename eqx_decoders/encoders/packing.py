"""Packing of images and audio clips of different sizes into sequences of one length, without padding them to a square.

The number of sequences and their length are rounded up to a small set of sizes, to limit the number of compilations.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eqx_decoders.encoders.images import Image, coordinates, learned_positions, window_order
from eqx_decoders.encoders.packed_rows import PackedPatches
from eqx_decoders.encoders.stem import ImageStem


def padded_count(count: int) -> int:
    """Round up to one of 1, 2, …, 8, 10, 12, 14, 16, 20, …: four sizes between powers of two."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def padded_length(length: int) -> int:
    """Round up to one of 1, 2, …, 16, 18, 20, 22, …: eight sizes between powers of two."""
    step = max(1, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


@dataclasses.dataclass(frozen=True)
class Packing:
    """Positions of items (images or audio clips) in packed sequences.

    **Arguments:**

    - `rows`, `length`: number of sequences and their length.
    - `starts`: sequence and first position in it, of each item in order.
    """

    rows: int
    length: int
    starts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], unit: int = 1) -> "Packing":
        """Pack items by first fit. All groups of items get the same number of sequences.

        `groups`: for each group, the lengths of its items, multiples of `unit`.
        """
        lengths = {length for group in groups for length in group}
        max_length = max(lengths, default=0)
        length = max_length if len(lengths) < 2 else padded_length(max_length // unit) * unit
        max_rows = 0
        starts_by_group: list[list[tuple[int, int]]] = []
        for group in groups:
            used_lengths: list[int] = []  # of each sequence of this group
            starts = []
            for size in group:
                fitting = (row for row, used in enumerate(used_lengths) if used + size <= length)
                row = next(fitting, len(used_lengths))
                if row == len(used_lengths):
                    used_lengths.append(0)
                starts.append((row, used_lengths[row]))
                used_lengths[row] += size
            max_rows = max(max_rows, len(used_lengths))
            starts_by_group.append(starts)
        rows_per_group = padded_count(max_rows) if lengths else 0
        all_starts = tuple(
            (group * rows_per_group + row, start)
            for group, starts in enumerate(starts_by_group)
            for row, start in starts
        )
        return cls(rows_per_group * len(groups), length, all_starts)


def pack_images(stem: ImageStem, groups: Sequence[Sequence[Image]]) -> tuple[PackedPatches, list[np.ndarray]]:
    """Pack the images of each group into sequences of patches.

    Returns the packed sequences, and for each image the indices of its features among the features of all sequences.
    """
    class_patches = stem.group if stem.class_token else 0  # a class token takes as many patches as a feature
    images = [image for group in groups for image in group]
    packing = Packing.of([[len(image.patches) + class_patches for image in group] for group in groups], stem.group)
    shape = packing.rows, packing.length
    patches = np.zeros((*shape, images[0].patches.shape[1]), np.float32)
    positions = np.full(shape, -1, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    patch_coordinates = np.zeros((*shape, 2), np.int32)
    class_tokens = np.zeros(shape, bool) if stem.class_token else None
    tables = [learned_positions(stem, image) for image in images]
    # rounded up to a power of two, so that images of different shapes share few programs
    max_neighbors = max((table[0].shape[1] for table in tables if table is not None), default=0)
    num_neighbors = 1 << (max_neighbors - 1).bit_length() if max_neighbors else 0
    position_index = np.zeros((*shape, num_neighbors), np.int32)
    position_weights = np.zeros((*shape, num_neighbors), np.float32)
    masked = np.zeros(shape, bool) if any(image.masked is not None for image in images) else None
    num_segments = np.zeros(packing.rows, np.int64)
    feature_indices = []
    for image, (row, start), table in zip(images, packing.starts, tables, strict=True):
        order, window_positions = window_order(stem, image)
        num_patches = len(image.patches)
        span = np.s_[row, start : start + num_patches]
        patches[span] = image.patches[order]
        positions[span] = window_positions
        segment_ids[span] = num_segments[row] + 1 + image.frames[order]
        patch_coordinates[span] = coordinates(stem, image)[order]
        if table is not None:
            index, weights = table
            position_index[span][:, : index.shape[1]] = index[order]
            position_weights[span][:, : index.shape[1]] = weights[order]
        if masked is not None and image.masked is not None:
            masked[span] = image.masked[order]
        if class_tokens is not None:
            token = row, start + num_patches
            class_tokens[token] = True
            positions[token] = num_patches
            segment_ids[token] = segment_ids[row, start]
            position_index[token] = stem.class_position
            position_weights[token] = np.arange(num_neighbors) == 0
        num_segments[row] += image.grid[0]
        first_feature = (row * packing.length + start) // stem.group
        inverse_order = np.argsort(order[:: stem.group] // stem.group)  # windows consist of complete groups of patches
        feature_indices.append(first_feature + inverse_order)
    # Sequences with a single image need no segment ids: padding has position -1.
    one_image_each = num_segments.max(initial=0) <= 1
    packed = PackedPatches(
        patches=patches,
        positions=positions,
        segment_ids=None if one_image_each else segment_ids,
        coordinates=patch_coordinates,
        position_index=position_index if num_neighbors else None,
        position_weights=position_weights if num_neighbors else None,
        class_tokens=class_tokens,
        masked=masked,
        group=stem.group,
    )
    return packed, feature_indices
