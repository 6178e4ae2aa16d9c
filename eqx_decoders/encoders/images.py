"""Images and videos from transformers' processors, split into patches; the patches of one token are adjacent.

This runs on the host in NumPy, because the number of patches depends on the image.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.encoders.geometry import cubic_weights
from eqx_decoders.encoders.stem import ImageStem, LearnedAxes, LearnedGrid, PatchStemConfig, WholeImageStem
from eqx_decoders.errors import DataError, check


# Interpolation from a table: the rows that are read for each patch, and their weights, `[patches, neighbors]` each.
Taps = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Image:
    """Patches of an image or a video. The `merge x merge` patches that become one token are adjacent.

    **Arguments:**

    - `patches`: `[patches, values]`.
    - `grid`: number of frames, and of rows and columns of patches.
    - `rows`, `columns`, `frames`: position of each patch, `[patches]`.
    - `masked`: True for padding patches after the rows or columns of the image, which are masked in attention,
        `[patches]`; None without padding.
    """

    patches: np.ndarray
    grid: tuple[int, int, int]
    rows: np.ndarray
    columns: np.ndarray
    frames: np.ndarray
    masked: np.ndarray | None = None


def from_pixels(
    stem: PatchStemConfig | WholeImageStem,
    pixels: Any,
    name: str = "pixel_values",
    *,
    sizes: Any = None,
    mask: Any = None,
) -> list[Image]:
    """Split images of the same padded size into patches.

    Pixels after the last complete patch are ignored, as in a convolution without padding. Raises DataError for shapes
    that do not fit the stem.

    **Arguments:**

    - `pixels`: `[images, channels, height, width]`; or `[batch, images, channels, height, width]`, where images of
        zeros are skipped.
    - `name`: name of `pixels` in error messages.
    - `sizes`: height and width of each image without padding, `[images, 2]`.
    - `mask`: 0 where a pixel is padding, in the shape of `pixels` without channels. A patch is padding if all of its
        pixels are.
    """
    pixels = np.asarray(pixels)
    shape = pixels.shape
    check(
        pixels.ndim in (4, 5) and shape[-3] == stem.channels,
        f"Media.create: {name} of shape {shape} must be [images, {stem.channels}, height, width], or [batch, images, "
        f"{stem.channels}, height, width].",
        DataError,
    )
    pixels = pixels.reshape(-1, *shape[-3:])
    size = _patch_size(stem, shape[-2:], name)
    grids = np.tile([side // size for side in shape[-2:]], (len(pixels), 1))
    if sizes is not None:
        grids = _check_image_sizes(sizes, pixels, name) // size
    present = np.flatnonzero(pixels.any(axis=(1, 2, 3))) if len(shape) == 5 else np.arange(len(pixels))
    if mask is not None:
        mask = np.asarray(mask)
        expected_shape = (*shape[:-3], *shape[-2:])
        check(
            mask.shape == expected_shape,
            f"Media.create: pixel_attention_mask of shape {mask.shape} must have shape {expected_shape}: one value for "
            f"each pixel of {name}.",
            DataError,
        )
        for index in present:
            grids[index] = _unpadded_grid(mask.reshape(-1, *shape[-2:])[index], size)
    return [_split_image(stem, pixels[index], size, grids[index].tolist(), name) for index in present]


def _patch_size(stem: PatchStemConfig | WholeImageStem, shape: Sequence[int], name: str) -> int:
    """Return the height and width of a patch in pixels."""
    if not isinstance(stem, WholeImageStem):
        return stem.size
    height, width = shape
    check(
        height == width and height % stem.multiple == 0,
        f"Media.create: {name}: images of {height} x {width} pixels must be square, with a multiple of {stem.multiple} "
        f"as height, since the encoder returns {stem.side} x {stem.side} tokens.",
        DataError,
    )
    return height // stem.side


def _check_image_sizes(sizes: Any, pixels: np.ndarray, name: str) -> np.ndarray:
    """Return the height and width of each image. Raises DataError if they exceed the padded size."""
    array = np.asarray(sizes)
    max_size = pixels.shape[2:]
    check(
        array.shape == (len(pixels), 2) and bool(np.all((array > 0) & (array <= max_size))),
        f"Media.create: image_sizes={array.tolist()} must have the height and width of each of the {len(pixels)} "
        f"images of {name}, at most {list(max_size)}.",
        DataError,
    )
    return array


def _unpadded_grid(mask: np.ndarray, size: int) -> tuple[int, int]:
    """Return the number of rows and columns of patches with a pixel that is not padding."""
    rows, columns = (side // size for side in mask.shape)
    split = mask[: rows * size, : columns * size].reshape(rows, size, columns, size)
    has_pixels = np.asarray(split.any(axis=(1, 3)))
    height, width = (len(np.unique(indices)) for indices in np.nonzero(has_pixels))
    counts = {int(np.count_nonzero(patches)) for patches in (has_pixels, has_pixels[:height, :width])}
    check(
        height > 0 and counts == {height * width},
        "Media.create: pixel_attention_mask must be 1 for one rectangle of patches from the first row and column on.",
        DataError,
    )
    return height, width


def _split_image(stem: ImageStem, pixels: np.ndarray, size: int, grid: Sequence[int], name: str) -> Image:
    """Split an image, `[channels, height, width]`, into the rows and columns of patches in `grid`."""
    rows, columns = grid
    merge = stem.merge
    check(
        rows > 0 and columns > 0 and rows % merge == columns % merge == 0,
        f"Media.create: {name}: an image has {rows} rows and {columns} columns of patches of {size} x {size} pixels; "
        f"both numbers must be positive multiples of {merge}, since {merge} x {merge} patches become one token.",
        DataError,
    )
    pixels = pixels[:, : rows * size, : columns * size]
    split = pixels.reshape(len(pixels), rows // merge, merge, size, columns // merge, merge, size)
    split = split.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1)
    return _on_grid(split, (1, rows, columns), merge)


def from_patches(stem: PatchStemConfig, patches: Any, grids: Any, name: str, grid_name: str) -> list[Image]:
    """Return images from the concatenated patches of all images, in which the patches of one token are adjacent.

    Raises DataError for shapes that do not fit the stem or each other.

    **Arguments:**

    - `patches`: `[patches, values]`.
    - `grids`: number of frames, and of rows and columns of patches, of each image, `[images, 3]`.
    - `name`, `grid_name`: names of these arrays in error messages.
    """
    patches = np.asarray(patches)
    grids = np.asarray(grids)
    merge = stem.merge
    check(
        grids.ndim == 2 and grids.shape[1] == 3 and bool(np.all(grids > 0)),
        f"Media.create: {grid_name} of shape {grids.shape} must be [images, 3], with positive values.",
        DataError,
    )
    check(
        bool(np.all(grids[:, 1:] % merge == 0)),
        f"Media.create: {grid_name}={grids.tolist()} must have rows and columns that are multiples of {merge}, since "
        f"{merge} x {merge} patches become one token.",
        DataError,
    )
    counts = grids.prod(axis=1)
    num_values = int(np.prod(stem.shape))
    check(
        patches.shape == (counts.sum(), num_values),
        f"Media.create: {name} of shape {patches.shape} must be [{counts.sum()}, {num_values}]: the number of patches "
        f"in {grid_name}={grids.tolist()}, and the number of values of a patch.",
        DataError,
    )
    patches_by_image = np.split(patches, np.cumsum(counts)[:-1])
    return [
        _on_grid(image_patches, (int(frames), int(rows), int(columns)), merge)
        for image_patches, (frames, rows, columns) in zip(patches_by_image, grids, strict=True)
    ]


def from_padded_patches(
    stem: PatchStemConfig, patches: Any, positions: Any, name: str, position_name: str
) -> list[Image]:
    """Return images from padded patches with positions, in any order (Gemma 4, SigLIP 2).

    Raises DataError for shapes that do not fit the stem or each other.

    **Arguments:**

    - `patches`: `[images, patches, values]`; the channels are the last axis of a patch.
    - `positions`: column and row of each patch, `[images, patches, 2]`; -1 for padding.
    - `name`, `position_name`: names of these arrays in error messages.
    """
    patches = np.asarray(patches)
    positions = np.asarray(positions)
    num_values = int(np.prod(stem.shape))
    check(
        patches.ndim == 3 and patches.shape[2] == num_values and positions.shape == (*patches.shape[:2], 2),
        f"Media.create: {name} of shape {patches.shape} must be [images, patches, {num_values}], and {position_name} "
        f"of shape {positions.shape} must be [images, patches, 2].",
        DataError,
    )
    patches = patches.reshape(*patches.shape[:2], stem.frames, stem.size, stem.size, stem.channels)
    patches = np.moveaxis(patches, -1, 2).reshape(*patches.shape[:2], num_values)
    return [
        _sort_patches(stem, image_patches, image_positions, position_name)
        for image_patches, image_positions in zip(patches, positions, strict=True)
    ]


def positions_within(shapes: Any, padded: Sequence[int], mask: Any = None) -> np.ndarray:
    """Return the column and row of each patch, `[images, patches, 2]`; -1 for padding (SigLIP 2).

    **Arguments:**

    - `shapes`: number of rows and columns of patches of each image, `[images, 2]`.
    - `padded`: shape of the padded patches, `(images, patches, values)`.
    - `mask`: 0 where a patch is padding, `[images, patches]`; it must agree with `shapes`. None: not checked.
    """
    shapes = np.asarray(shapes)
    index = np.arange(padded[1] if len(padded) == 3 else 0)
    check(
        shapes.shape == (padded[0], 2)
        and bool(np.all(shapes > 0))
        and int(shapes.prod(axis=1).max(initial=0)) <= len(index),
        f"Media.create: spatial_shapes={shapes.tolist()} must have the rows and columns of each image, with at most as "
        f"many patches as pixel_values of shape {tuple(padded)}.",
        DataError,
    )
    is_patch = index < shapes.prod(axis=1)[:, None]
    check(
        mask is None or np.array_equal(np.asarray(mask) > 0, is_patch),
        "Media.create: pixel_attention_mask differs from spatial_shapes. Pass only spatial_shapes.",
        DataError,
    )
    width = shapes[:, 1:]
    return np.where(is_patch[:, :, None], np.stack([index % width, index // width], axis=2), -1)


def _sort_patches(stem: PatchStemConfig, patches: np.ndarray, positions: np.ndarray, name: str) -> Image:
    """Return an image from its patches in any order; patches at negative positions are padding."""
    is_patch = (positions >= 0).all(axis=1)
    patches = patches[is_patch]
    columns = positions[is_patch, 0]
    rows = positions[is_patch, 1]
    height, width = (int(x.max(initial=-1)) + 1 for x in (rows, columns))
    num_positions = len({*zip(rows.tolist(), columns.tolist(), strict=True)})
    check(
        len(patches) == height * width and num_positions == len(patches) and len(patches) > 0,
        f"Media.create: {name}: the patches of an image must fill a rectangle, with one patch at each position.",
        DataError,
    )
    merge = stem.merge
    check(
        height % merge == width % merge == 0,
        f"Media.create: {name}: an image has {height} rows and {width} columns of patches; both numbers must be "
        f"multiples of {merge}, since {merge} x {merge} patches become one token.",
        DataError,
    )
    raster = np.empty_like(patches)
    raster[rows * width + columns] = patches
    split = raster.reshape(height // merge, merge, width // merge, merge, -1).swapaxes(1, 2)
    return _on_grid(split.reshape(height * width, -1), (1, height, width), merge)


def _on_grid(patches: np.ndarray, grid: tuple[int, int, int], merge: int) -> Image:
    """Return an image from its patches, in which the patches of one token are adjacent."""
    frames, height, width = grid
    index = np.arange(height * width).reshape(height // merge, merge, width // merge, merge).swapaxes(1, 2).reshape(-1)
    return Image(
        patches=patches,
        grid=grid,
        rows=np.tile(index // width, frames),
        columns=np.tile(index % width, frames),
        frames=np.repeat(np.arange(frames), height * width),
    )


def separate_frames(videos: Sequence[Image]) -> list[Image]:
    """Return the frames of videos as separate images."""
    images = []
    for video in videos:
        count = video.grid[0]
        arrays_by_frame = (np.split(x, count) for x in (video.patches, video.rows, video.columns))
        for patches, rows, columns in zip(*arrays_by_frame, strict=True):
            frames = np.zeros(len(rows), video.frames.dtype)
            images.append(Image(patches=patches, grid=(1, *video.grid[1:]), rows=rows, columns=columns, frames=frames))
    return images


def learned_positions(stem: ImageStem, image: Image) -> Taps | None:
    """Return the rows of the position table that are read for each patch, and their weights; None without a table."""
    positions = stem.positions
    _, height, width = image.grid
    if image.masked is not None and not image.masked.all():
        height, width = (int(x[~image.masked].max()) + 1 for x in (image.rows, image.columns))
    if positions is None:
        return None
    if isinstance(positions, LearnedAxes):
        check(
            max(height, width) <= positions.size,
            f"Media.create: an image has {height} x {width} patches, more than LearnedAxes.size={positions.size} rows "
            "or columns. Resize the image.",
            DataError,
        )
        index = np.stack([image.columns, image.rows + positions.size], axis=1)
        return index, np.ones(index.shape, np.float32)
    index, weights = _on_learned_grid(positions, image, height, width)
    index = index if image.masked is None else np.where(image.masked[:, None], 0, index)
    return index + int(positions.class_first), weights


def _on_learned_grid(positions: LearnedGrid, image: Image, height: int, width: int) -> Taps:
    """Return the positions of the learned grid that are read for each patch, and their weights."""
    side = positions.side
    row_axis = image.rows, height
    column_axis = image.columns, width
    if positions.resample == "bilinear":
        return _bilinear_taps(side, row_axis, column_axis)
    if positions.resample in ("antialias", "bicubic"):
        taps = _antialias_taps if positions.resample == "antialias" else _cubic_taps
        return _combine_axes(side, taps(side, *row_axis), taps(side, *column_axis))
    if positions.resample == "fraction":
        rows = _nearest_by_fraction(side, *row_axis)
        columns = _nearest_by_fraction(side, *column_axis)
    else:
        check(
            height == width == side,
            f"Media.create: an image has {height} x {width} patches, but LearnedGrid.side={side} requires "
            f"{side} x {side} patches, since resample='none'. Resize the image.",
            DataError,
        )
        rows, columns = image.rows, image.columns
    return (rows * side + columns)[:, None], np.ones((len(rows), 1), np.float32)


def _bilinear_taps(side: int, *axes: tuple[np.ndarray, int]) -> Taps:
    """Return the four neighbors of each patch in the grid, and their bilinear weights, with aligned corners."""
    taps_by_axis = []
    for index, count in axes:
        position = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(position).astype(np.int64)
        high_weight = position - low
        neighbors = np.stack([low, np.minimum(low + 1, side - 1)], axis=1)
        taps_by_axis.append((neighbors, np.stack([1 - high_weight, high_weight], axis=1)))
    return _combine_axes(side, *taps_by_axis)


def _combine_axes(side: int, rows: Taps, columns: Taps) -> Taps:
    """Return the outer product of the taps of the grid's rows and of its columns."""
    row_index, row_weights = rows
    column_index, column_weights = columns
    index = row_index[:, :, None] * side + column_index[:, None]
    weights = row_weights[:, :, None] * column_weights[:, None]
    return index.reshape(len(index), -1), weights.reshape(len(weights), -1).astype(np.float32)


def _antialias_taps(side: int, index: np.ndarray, count: int) -> Taps:
    """Return the grid rows for each patch and their weights in antialiased bilinear resizing, as in PyTorch."""
    scale = side / count
    radius = max(scale, 1.0)
    center = scale * (index + 0.5)
    first = np.maximum((center - radius + 0.5).astype(np.int64), 0)
    taps = first[:, None] + np.arange(2 * math.ceil(radius) + 1)
    weights = np.maximum(1 - np.abs((taps - center[:, None] + 0.5) / radius), 0) * (taps < side)
    max_taps = int(np.count_nonzero(weights, axis=1).max(initial=1))
    order = np.argsort(weights == 0, axis=1, kind="stable")[:, :max_taps]
    taps, weights = (np.take_along_axis(x, order, axis=1) for x in (np.minimum(taps, side - 1), weights))
    return taps, weights / weights.sum(axis=1, keepdims=True)


def _cubic_taps(side: int, index: np.ndarray, count: int) -> Taps:
    """Return the four grid rows around each patch and their weights in bicubic resizing, with aligned centers."""
    center = (index.astype(np.float32) + np.float32(0.5)) / np.float32(count) * np.float32(side) - np.float32(0.5)
    low = np.floor(center).astype(np.int64)
    taps = low[:, None] + np.arange(-1, 3)
    return np.clip(taps, 0, side - 1), cubic_weights(np.abs(center[:, None] - taps))


def _nearest_by_fraction(side: int, index: np.ndarray, count: int) -> np.ndarray:
    """Return the grid row at the same fraction of the side: the largest k with `k / side <= index / count`.

    Computed in float32 as `index * (1 / count)`, as in transformers, because rounding decides if both sides are equal.
    """
    bounds = (np.arange(1, side) / side).astype(np.float32)
    fraction = np.minimum(index.astype(np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6))
    return np.searchsorted(bounds, fraction, side="right")


def window_order(stem: ImageStem, image: Image) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the patches sorted by attention window, and the position of each sorted patch.

    The positions of window w are `w * size, w * size + 1, …`, where `size` is the number of patches of a full window.
    Without windows, the order does not change, and positions are 0, 1, 2, … in each frame.
    """
    _, height, width = image.grid
    if stem.window is None:
        return np.arange(len(image.patches)), np.arange(len(image.patches)) % (height * width)
    side = stem.window * stem.merge
    window = image.rows // side * -(-width // side) + image.columns // side
    order = np.lexsort((np.arange(len(window)), window, image.frames))
    frame = image.frames[order]
    window = window[order]
    starts_window = np.concatenate([[True], (window[1:] != window[:-1]) | (frame[1:] != frame[:-1])])
    index = np.arange(len(window))
    index_in_window = index - np.maximum.accumulate(np.where(starts_window, index, 0))
    return order, window * side**2 + index_in_window


def coordinates(stem: ImageStem, image: Image) -> np.ndarray:
    """Return the coordinates of each patch for rotary embeddings, `[patches, 2]`."""
    axes: Sequence[np.ndarray] = (image.rows, image.columns)
    axes = axes if stem.coordinates == "row_column" else axes[::-1]
    return np.stack(axes, axis=1) + stem.first_coordinate
