"""Images split into tiles that are encoded separately, and the order of their tokens in a prompt."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eqx_decoders.encoders.geometry import TilesConfig, grid_of, token_order
from eqx_decoders.encoders.images import Image, from_pixels
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import DataError, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledImage:
    """Image that is encoded as several tiles.

    **Arguments:**

    - `tiles`: thumbnail of the full image, followed by its tiles.
    - `order`: for each token of the image, the index of its feature among the features of all tiles; `LINE_END` or
        `DIVIDER` for learned vectors. See `token_order`.
    """

    tiles: tuple[Image, ...]
    order: np.ndarray


def tiles_of(image: Image | TiledImage) -> tuple[Image, ...]:
    """Return the images that the encoder processes: the tiles of a tiled image, or the image itself."""
    return image.tiles if isinstance(image, TiledImage) else (image,)


def count_tokens(image: Image | TiledImage, group: int) -> int:
    """Return the number of tokens of an image, with `group` patches per token."""
    return len(image.order) if isinstance(image, TiledImage) else len(image.patches) // group


def in_order(images: Sequence[Image | TiledImage], tile_indices: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the feature index of each token of each image; below 0 for learned vectors.

    `tile_indices`: the feature indices of each tile, from `pack_images`.
    """
    remaining = iter(tile_indices)
    token_indices = []
    for image in images:
        index = np.concatenate([next(remaining) for _ in tiles_of(image)])
        if isinstance(image, TiledImage):
            index = np.where(image.order < 0, image.order, index[image.order])
        token_indices.append(index)
    return token_indices


def tiled_images(
    stem: PatchStemConfig, tiles: TilesConfig, pixels: Any, sizes: Any, mask: Any = None
) -> list[TiledImage]:
    """Return tiled images from the pixels of their tiles.

    **Arguments:**

    - `pixels`: tiles of all images, `[tiles, channels, height, width]`; or the tiles of each image, padded to the same
        number of tiles, `[images, tiles, channels, height, width]`.
    - `sizes`: height and width of each image in pixels, `[images, 2]`; if `tiles.sizes` is empty, height and width of
        all its tiles together.
    - `mask`: 0 where a patch is padding, `[images, tiles, rows, columns]`; None without padding.
    """
    image_sizes = _check_sizes(tiles, sizes)
    counts = [1 + math.prod(grid_of(tiles, *size)) for size in image_sizes]
    all_tiles = from_pixels(stem, _flatten_pixels(tiles, np.asarray(pixels), counts))
    ends = np.cumsum(counts).tolist()
    tiles_by_image = [all_tiles[end - count : end] for end, count in zip(ends, counts, strict=True)]
    masks = _split_mask(stem, tiles, counts, mask)
    return [_tiled_image(stem, tiles, *arguments) for arguments in zip(image_sizes, tiles_by_image, masks, strict=True)]


def _tiled_image(
    stem: PatchStemConfig, tiles: TilesConfig, size: tuple[int, int], images: list[Image], mask: np.ndarray | None
) -> TiledImage:
    side = tiles.side // stem.size // stem.merge
    num_tokens = None
    if mask is not None:
        tile_rows, tile_columns = grid_of(tiles, *size)
        image_mask = mask[1:].reshape(tile_rows, tile_columns, *mask.shape[1:]).swapaxes(1, 2)
        image_mask = image_mask.reshape(tile_rows * mask.shape[1], tile_columns * mask.shape[2])
        token_mask = image_mask[:: stem.merge, :: stem.merge]  # a token is padding if its first patch is padding
        num_tokens = int(token_mask[:, 0].sum()), int(token_mask[0].sum())
        rows = int(image_mask[:, 0].sum())
        columns = int(image_mask[0].sum())
        is_rectangle = int(image_mask.sum()) == int(image_mask[:rows, :columns].sum()) == rows * columns > 0
        check(
            bool(mask[0].all()) and is_rectangle,
            "Media.create: image_attention_mask must be 1 for all patches of the first tile, and for one rectangle of "
            "patches from the first row and column of the other tiles.",
            DataError,
        )
        images = [
            dataclasses.replace(image, masked=~tile_mask[image.rows, image.columns])
            for image, tile_mask in zip(images, mask, strict=True)
        ]
    return TiledImage(tiles=tuple(images), order=token_order(tiles, *size, side, num_tokens))


def _check_sizes(tiles: TilesConfig, sizes: Any) -> list[tuple[int, int]]:
    """Return the height and width of each image. Raises DataError for invalid sizes."""
    array = np.asarray(sizes if sizes is not None else np.zeros(0))
    check(
        array.ndim == 2 and array.shape[1] == 2 and bool(np.all(array > 0)),
        f"Media.create: image_sizes of shape {array.shape} must be [images, 2]: this model splits images into tiles, "
        "and needs the height and width of each image.",
        DataError,
    )
    check(
        bool(tiles.sizes) or bool(np.all(array % tiles.side == 0)),
        f"Media.create: image_sizes={array.tolist()} must be multiples of the tile size {tiles.side}.",
        DataError,
    )
    return [(height, width) for height, width in array.tolist()]


def _flatten_pixels(tiles: TilesConfig, pixels: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the tiles of all images, `[tiles, channels, height, width]`. Raises DataError for invalid shapes."""
    shape = pixels.shape
    check(
        pixels.ndim in (4, 5) and shape[-2:] == (tiles.side, tiles.side),
        f"Media.create: pixel_values of shape {shape} must have tiles of {tiles.side} x {tiles.side} pixels.",
        DataError,
    )
    if len(shape) == 5:
        check(
            len(pixels) == len(counts) and max(counts) <= shape[1],
            f"Media.create: pixel_values of shape {shape} must be [{len(counts)}, at least {max(counts)}, ...]: the "
            "numbers of images and of tiles according to image_sizes.",
            DataError,
        )
        pixels = np.concatenate([image_tiles[:count] for image_tiles, count in zip(pixels, counts, strict=True)])
    check(
        len(pixels) == sum(counts),
        f"Media.create: pixel_values has {len(pixels)} tiles, but image_sizes requires {sum(counts)}.",
        DataError,
    )
    return pixels


def _split_mask(stem: PatchStemConfig, tiles: TilesConfig, counts: Sequence[int], mask: Any) -> list[np.ndarray | None]:
    """Return the patch mask of each image, `[tiles, rows, columns]`; None without padding."""
    if mask is None:
        return [None] * len(counts)
    check(
        not tiles.sizes,
        "Media.create: image_attention_mask is not used by this model, because image_sizes determines the padding. "
        "Remove it.",
        DataError,
    )
    mask = np.asarray(mask) > 0
    side = tiles.side // stem.size
    check(
        mask.ndim == 4 and mask.shape[2:] == (side, side) and len(mask) == len(counts) and mask.shape[1] >= max(counts),
        f"Media.create: image_attention_mask of shape {mask.shape} must be [{len(counts)}, at least {max(counts)}, "
        f"{side}, {side}].",
        DataError,
    )
    return [image_mask[:count] for image_mask, count in zip(mask, counts, strict=True)]
