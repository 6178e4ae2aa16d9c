"""Images and videos from transformers' processors, cut into patches that stand in groups.

This runs on the host, in NumPy, since the number of patches of an image is data.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.encoders.geometry import cubic_weights
from eqx_decoders.encoders.stem import ImageStem, LearnedAxes, LearnedGrid, PatchStemConfig, WholeImageStem
from eqx_decoders.errors import DataError, check


Taps = tuple[np.ndarray, np.ndarray]  # rows of a table for each patch, and their weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """Patches of an image or a video, `merge x merge` neighbors one behind the other.

    **Arguments:**

    - `patches`: `[patches, numbers]`.
    - `grid`: frames, rows and columns of patches.
    - `rows`, `columns`, `frames`: position of each patch; -1 for one that fills a group up.
    - `unseen`: True for patches of padding behind the image's rows or columns, which none attends to; None for none.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    rows: np.ndarray
    columns: np.ndarray
    frames: np.ndarray
    unseen: np.ndarray | None = None


def from_pixels(
    stem: PatchStemConfig | WholeImageStem,
    pixels: Any,
    name: str = "pixel_values",
    *,
    sizes: Any = None,
    mask: Any = None,
) -> list[Image]:
    """Cut images that are padded to one size, `[images, channels, height, width]`.

    Or `[batch, images, channels, height, width]`, where an image of zeros is absent. Pixels behind the last whole patch
    are not read, as those behind the last whole step of a convolution.

    **Arguments:**

    - `sizes`: height and width of each image, `[images, 2]`.
    - `mask`: 0 where a pixel is padding: the shape of the pixels without their channels. A patch needs one real pixel.
    """
    pixels = np.asarray(pixels)
    shape = pixels.shape
    rule = f"must be [images, {stem.channels}, height, width], or [batch, images, {stem.channels}, height, width]"
    good = pixels.ndim in (4, 5) and shape[-3] == stem.channels
    check(good, f"Media.create: {name} of shape {shape} {rule}.", DataError)
    pixels, size = pixels.reshape(-1, *shape[-3:]), _patch_size(stem, shape[-2:], name)
    grids = np.tile([side // size for side in shape[-2:]], (len(pixels), 1))
    if sizes is not None:
        grids = _sizes_of(sizes, pixels, name) // size
    present = np.flatnonzero(pixels.any(axis=(1, 2, 3))) if len(shape) == 5 else np.arange(len(pixels))
    if mask is not None:
        real, expected = np.asarray(mask), (*shape[:-3], *shape[-2:])
        rule = f"must be {expected}: a number for each pixel of {name}"
        check(real.shape == expected, f"Media.create: pixel_attention_mask of shape {real.shape} {rule}.", DataError)
        for index in present:
            grids[index] = _real_grid(real.reshape(-1, *shape[-2:])[index], size)
    return [_cut(stem, pixels[index], size, grids[index].tolist(), name) for index in present]


def _patch_size(stem: PatchStemConfig | WholeImageStem, shape: Sequence[int], name: str) -> int:
    """Return the rows and columns of pixels of a patch; raise DataError for an image that a network cannot divide."""
    if not isinstance(stem, WholeImageStem):
        return stem.size
    height, width = shape
    rule = f"must be square, and a multiple of {stem.multiple}, of which {stem.side} x {stem.side} tokens are made"
    good = height == width and height % stem.multiple == 0
    check(good, f"Media.create: {name}: {height} x {width} pixels {rule}.", DataError)
    return height // stem.side


def _sizes_of(sizes: Any, pixels: np.ndarray, name: str) -> np.ndarray:
    """Return the height and width of each image; raise DataError where they exceed the pixels."""
    extents, most = np.asarray(sizes), pixels.shape[2:]
    good = extents.shape == (len(pixels), 2) and bool(np.all((extents > 0) & (extents <= most)))
    rule = f"must be height and width of the {len(pixels)} images of {name}, at most {list(most)}"
    check(good, f"Media.create: image_sizes={extents.tolist()} {rule}.", DataError)
    return extents


def _real_grid(mask: np.ndarray, size: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of patches that have a real pixel."""
    rows, columns = (side // size for side in mask.shape)
    split = mask[: rows * size, : columns * size].reshape(rows, size, columns, size)
    real = np.asarray(split.any(axis=(1, 3)))
    height, width = (len(np.unique(indices)) for indices in np.nonzero(real))
    rule = "must leave an image whole, from its first row and column on: one rectangle of patches"
    counts = {int(np.count_nonzero(each)) for each in (real, real[:height, :width])}
    whole = height > 0 and counts == {height * width}
    check(whole, f"Media.create: pixel_attention_mask {rule}.", DataError)
    return height, width


def _cut(stem: ImageStem, pixels: np.ndarray, size: int, grid: Sequence[int], name: str) -> Image:
    """Cut an image, `[channels, height, width]`, into the rows and columns of patches of `grid`."""
    (rows, columns), merge = grid, stem.merge
    rule = f"must be multiples of {merge}, as many as become one token"
    good = rows > 0 and columns > 0 and rows % merge == columns % merge == 0
    message = f"Media.create: {name}: {rows} rows and {columns} columns of patches of {size} x {size} pixels"
    check(good, f"{message} {rule}.", DataError)
    pixels = pixels[:, : rows * size, : columns * size]
    split = pixels.reshape(len(pixels), rows // merge, merge, size, columns // merge, merge, size)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
    return _on_grid(split, (1, rows, columns), merge)


def from_patches(stem: PatchStemConfig, patches: Any, grids: Any, name: str, grid_name: str) -> list[Image]:
    """Split the patches of all images, already in groups: `[patches, numbers]`, with grids `[images, 3]`."""
    patches, grids, merge = np.asarray(patches), np.asarray(grids), stem.merge
    good = grids.ndim == 2 and grids.shape[1] == 3 and bool(np.all(grids > 0))
    check(good, f"Media.create: {grid_name} of shape {grids.shape} must be [images, 3], above 0.", DataError)
    even = bool(np.all(grids[:, 1:] % merge == 0))
    rule = f"must be multiples of {merge}, as many patches as become one token"
    check(even, f"Media.create: rows and columns of {grid_name}={grids.tolist()} {rule}.", DataError)
    counts, numbers = grids.prod(axis=1), int(np.prod(stem.shape))
    rule = f"must be [{counts.sum()}, {numbers}]: so many patches have {grid_name}={grids.tolist()}"
    check(patches.shape == (counts.sum(), numbers), f"Media.create: {name} of shape {patches.shape} {rule}.", DataError)
    parts = np.split(patches, np.cumsum(counts)[:-1])
    return [_on_grid(part, (int(t), int(h), int(w)), merge) for part, (t, h, w) in zip(parts, grids, strict=True)]


def from_positions(stem: PatchStemConfig, patches: Any, positions: Any, name: str, position_name: str) -> list[Image]:
    """Order the padded patches of each image, `[images, patches, numbers]`, by their positions, -1 for padding.

    Positions are `[images, patches, 2]`: column and row. A pixel's channels follow one another (Gemma 4).
    """
    patches, positions = np.asarray(patches), np.asarray(positions)
    numbers = int(np.prod(stem.shape))
    good = patches.ndim == 3 and patches.shape[2] == numbers and positions.shape == (*patches.shape[:2], 2)
    rule = f"must be [images, patches, {numbers}], and [images, patches, 2]"
    check(
        good, f"Media.create: {name} of shape {patches.shape}, {position_name} of {positions.shape} {rule}.", DataError
    )
    patches = patches.reshape(*patches.shape[:2], stem.frames, stem.size, stem.size, stem.channels)
    patches = np.moveaxis(patches, -1, 2).reshape(*patches.shape[:2], numbers)
    return [
        _in_groups(stem, patches_of_image, positions_of_image, position_name)
        for patches_of_image, positions_of_image in zip(patches, positions, strict=True)
    ]


def positions_within(shapes: Any, padded: Sequence[int], mask: Any = None) -> np.ndarray:
    """Return the column and row of each patch, `[images, patches, 2]`, -1 for padding behind `shapes` (SigLIP 2).

    **Arguments:**

    - `shapes`: rows and columns of each image's patches, `[images, 2]`.
    - `padded`: the shape of the patches.
    - `mask`: 0 where a patch is padding, `[images, patches]`; None for no such array.
    """
    shapes, index = np.asarray(shapes), np.arange(padded[1] if len(padded) == 3 else 0)
    good = shapes.shape == (padded[0], 2) and bool(np.all(shapes > 0))
    good = good and int(shapes.prod(axis=1).max(initial=0)) <= len(index)
    rule = f"must be rows and columns of images whose patches, pixel_values of shape {tuple(padded)}, are no fewer"
    check(good, f"Media.create: spatial_shapes={shapes.tolist()} {rule}.", DataError)
    real = index < shapes.prod(axis=1)[:, None]
    same = mask is None or np.array_equal(np.asarray(mask) > 0, real)
    check(same, "Media.create: pixel_attention_mask differs from spatial_shapes.", DataError)
    width = shapes[:, 1:]
    return np.where(real[:, :, None], np.stack([index % width, index // width], axis=2), -1)


def _in_groups(stem: PatchStemConfig, patches: np.ndarray, positions: np.ndarray, name: str) -> Image:
    real = (positions >= 0).all(axis=1)
    patches, columns, rows = patches[real], positions[real, 0], positions[real, 1]
    height, width = (int(x.max(initial=-1)) + 1 for x in (rows, columns))
    whole = len(patches) == height * width and len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == len(patches)
    check(
        whole and len(patches) > 0, f"Media.create: {name}: an image's patches must fill rows and columns.", DataError
    )
    merge = stem.merge
    rule = f"must be multiples of {merge}, as many patches as become one token"
    check(
        height % merge == width % merge == 0,
        f"Media.create: {name}: {height} rows and {width} columns {rule}.",
        DataError,
    )
    raster = np.empty_like(patches)
    raster[rows * width + columns] = patches
    split = raster.reshape(height // merge, merge, width // merge, merge, -1).swapaxes(1, 2)
    return _on_grid(split.reshape(height * width, -1), (1, height, width), merge)


def _on_grid(patches: np.ndarray, grid: tuple[int, int, int], merge: int) -> Image:
    frames, height, width = grid
    place = np.arange(height * width).reshape(height // merge, merge, width // merge, merge).swapaxes(1, 2).reshape(-1)
    return Image(
        patches=patches,
        grid=grid,
        rows=np.tile(place // width, frames),
        columns=np.tile(place % width, frames),
        frames=np.repeat(np.arange(frames), height * width),
    )


def separate_frames(videos: Sequence[Image]) -> list[Image]:
    """Return the frames of videos, each an image."""
    images = []
    for video in videos:
        count = video.grid[0]
        parts = (np.split(x, count) for x in (video.patches, video.rows, video.columns))
        for patches, rows, columns in zip(*parts, strict=True):
            first = np.zeros(len(rows), video.frames.dtype)
            images.append(Image(patches=patches, grid=(1, *video.grid[1:]), rows=rows, columns=columns, frames=first))
    return images


def learned_positions(stem: ImageStem, image: Image) -> Taps | None:
    """Return the rows of the position table for each patch, and their weights."""
    positions, (_, height, width) = stem.positions, image.grid
    if image.unseen is not None and not image.unseen.all():
        height, width = (int(x[~image.unseen].max()) + 1 for x in (image.rows, image.columns))
    if positions is None:
        return None
    if isinstance(positions, LearnedAxes):
        largest = max(height, width)
        rule = f"must be at most LearnedAxes.size={positions.size}"
        check(largest <= positions.size, f"Media.create: an image of {height} x {width} patches {rule}.", DataError)
        index = np.stack([image.columns, image.rows + positions.size], axis=1)
        return index, np.ones(index.shape, np.float32)
    index, weights = _on_learned_grid(positions, image, height, width)
    index = index if image.unseen is None else np.where(image.unseen[:, None], 0, index)
    return index + int(positions.class_first), weights


def _on_learned_grid(positions: LearnedGrid, image: Image, height: int, width: int) -> Taps:
    """Return the places of a grid for each patch, and their weights."""
    side = positions.side
    if positions.resample == "bilinear":
        return _bilinear(side, (image.rows, height), (image.columns, width))
    if positions.resample in ("antialias", "bicubic"):
        taps = _triangles if positions.resample == "antialias" else _cubics
        return _pairs(side, *(taps(side, *axis) for axis in ((image.rows, height), (image.columns, width))))
    if positions.resample == "fraction":
        rows, columns = (_at_fraction(side, *axis) for axis in ((image.rows, height), (image.columns, width)))
    else:
        rule = f"must have LearnedGrid.side={side} rows and columns: its positions are not resampled"
        check(height == width == side, f"Media.create: an image of {height} x {width} patches {rule}.", DataError)
        rows, columns = image.rows, image.columns
    return (rows * side + columns)[:, None], np.ones((len(rows), 1), np.float32)


def _bilinear(side: int, *axes: tuple[np.ndarray, int]) -> Taps:
    """Return the four neighbors of each patch in the table and their weights, corners on corners."""
    ends = []
    for index, count in axes:
        real = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(real).astype(np.int64)
        far = real - low
        ends.append((np.stack([low, np.minimum(low + 1, side - 1)], axis=1), np.stack([1 - far, far], axis=1)))
    return _pairs(side, *ends)


def _pairs(side: int, rows: Taps, columns: Taps) -> Taps:
    """Return the places of a grid, and their weights, from those of its rows and columns."""
    index = rows[0][:, :, None] * side + columns[0][:, None]
    weights = rows[1][:, :, None] * columns[1][:, None]
    return index.reshape(len(index), -1), weights.reshape(len(weights), -1).astype(np.float32)


def _triangles(side: int, index: np.ndarray, count: int) -> Taps:
    """Return the rows of a grid that a resized one takes for each patch, and their weights, as PyTorch has them."""
    scale = side / count
    reach = max(scale, 1.0)
    center = scale * (index + 0.5)
    first = np.maximum((center - reach + 0.5).astype(np.int64), 0)
    taps = first[:, None] + np.arange(2 * math.ceil(reach) + 1)
    weights = np.maximum(1 - np.abs((taps - center[:, None] + 0.5) / reach), 0) * (taps < side)
    most = int(np.count_nonzero(weights, axis=1).max(initial=1))
    order = np.argsort(weights == 0, axis=1, kind="stable")[:, :most]
    taps, weights = (np.take_along_axis(x, order, axis=1) for x in (np.minimum(taps, side - 1), weights))
    return taps, weights / weights.sum(axis=1, keepdims=True)


def _cubics(side: int, index: np.ndarray, count: int) -> Taps:
    """Return the four rows of a grid around each patch, and their weights: cubic convolution with a = -0.75."""
    center = (index.astype(np.float32) + np.float32(0.5)) / np.float32(count) * np.float32(side) - np.float32(0.5)
    low = np.floor(center).astype(np.int64)
    taps = low[:, None] + np.arange(-1, 3)
    return np.clip(taps, 0, side - 1), cubic_weights(np.abs(center[:, None] - taps))


def _at_fraction(side: int, index: np.ndarray, count: int) -> np.ndarray:
    """Return the table's position at the same fraction of its side: the largest k with `k / side <= index / count`.

    In float32 as transformers has it, since rounding decides where both are equal: `index * (1 / count)`.
    """
    bounds = (np.arange(1, side) / side).astype(np.float32)
    fraction = np.minimum(index.astype(np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6))
    return np.searchsorted(bounds, fraction, side="right")


def window_order(stem: ImageStem, image: Image) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of an image's patches by windows, and their positions: each window has a block of its own.

    Without windows the order does not change, and positions are 0, 1, 2, … in each frame.
    """
    _, height, width = image.grid
    if stem.window is None:
        return np.arange(len(image.patches)), np.arange(len(image.patches)) % (height * width)
    side, room = stem.window * stem.merge, (stem.window * stem.merge) ** 2
    window = image.rows // side * -(-width // side) + image.columns // side
    order = np.lexsort((np.arange(len(window)), window, image.frames))
    frame, window = image.frames[order], window[order]
    new = np.concatenate([[True], (window[1:] != window[:-1]) | (frame[1:] != frame[:-1])])
    index = np.arange(len(window))
    return order, window * room + index - np.maximum.accumulate(np.where(new, index, 0))


def coordinates(stem: ImageStem, image: Image) -> np.ndarray:
    """Return the coordinates of each patch for rotary embeddings: `[patches, 2]`."""
    axes: Sequence[np.ndarray] = (image.rows, image.columns)
    axes = axes if stem.coordinates == "row_column" else axes[::-1]
    return np.stack(axes, axis=1) + stem.first_coordinate
