"""Images cut into tiles, each of which an encoder sees by itself, and the order of their tokens in a prompt."""

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
    """Tiles of an image.

    **Arguments:**

    - `tiles`: the whole image, and its parts.
    - `order`: for each token of the image the index of its row among those of all tiles; `LINE_END` or `DIVIDER` for
        learned vectors.
    """

    tiles: tuple[Image, ...]
    order: np.ndarray


def tiles_of(image: Image | TiledImage) -> tuple[Image, ...]:
    """Return what an encoder sees of an image: its tiles, or itself."""
    return image.tiles if isinstance(image, TiledImage) else (image,)


def count_tokens(image: Image | TiledImage, group: int) -> int:
    """Return the number of an image's tokens, each of which is made of `group` patches."""
    return len(image.order) if isinstance(image, TiledImage) else len(image.patches) // group


def in_order(images: Sequence[Image | TiledImage], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the rows of features of each image's tokens, below 0 for learned vectors, from those of all tiles."""
    each, tables = iter(rows), []
    for image in images:
        known = np.concatenate([next(each) for _ in tiles_of(image)])
        tiled = isinstance(image, TiledImage)
        tables.append(np.where(image.order < 0, image.order, known[image.order]) if tiled else known)
    return tables


def tiled_images(
    stem: PatchStemConfig, tiles: TilesConfig, pixels: Any, sizes: Any, mask: Any = None
) -> list[TiledImage]:
    """Return images from their tiles, one behind the other, or `[images, tiles, channels, height, width]`.

    Of the latter, tiles behind an image's own are padding.

    **Arguments:**

    - `sizes`: height and width of each image in pixels, or those of its parts together.
    - `mask`: 0 where a patch is padding, `[images, tiles, rows, columns]`, in the latter case; None for no padding.
    """
    extents = _checked_sizes(tiles, sizes)
    counts = [1 + math.prod(grid_of(tiles, *size)) for size in extents]
    features, ends = from_pixels(stem, _checked_pixels(tiles, np.asarray(pixels), counts)), np.cumsum(counts).tolist()
    parts = [features[end - count : end] for end, count in zip(ends, counts, strict=True)]
    masks = _checked_masks(stem, tiles, counts, mask)
    return [_tiled(stem, tiles, *each) for each in zip(extents, parts, masks, strict=True)]


def _tiled(
    stem: PatchStemConfig, tiles: TilesConfig, size: tuple[int, int], parts: list[Image], mask: np.ndarray | None
) -> TiledImage:
    side, real = tiles.side // stem.size // stem.merge, None
    if mask is not None:
        down, across = grid_of(tiles, *size)
        whole = mask[1:].reshape(down, across, *mask.shape[1:]).swapaxes(1, 2)
        whole = whole.reshape(down * mask.shape[1], across * mask.shape[2])
        of_tokens = whole[:: stem.merge, :: stem.merge]  # a token is one of its first patch
        real = int(of_tokens[:, 0].sum()), int(of_tokens[0].sum())
        rows, columns = int(whole[:, 0].sum()), int(whole[0].sum())
        rule = "must leave an image whole, from its first row and column on: one rectangle of patches"
        first = bool(mask[0].all()) and int(whole.sum()) == int(whole[:rows, :columns].sum()) == rows * columns > 0
        check(first, f"Media.create: image_attention_mask {rule}.", DataError)
        unseen = (~seen[part.rows, part.columns] for part, seen in zip(parts, mask, strict=True))
        parts = [dataclasses.replace(part, unseen=x) for part, x in zip(parts, unseen, strict=True)]
    return TiledImage(tiles=tuple(parts), order=token_order(tiles, *size, side, real))


def _checked_sizes(tiles: TilesConfig, sizes: Any) -> list[tuple[int, int]]:
    """Return heights and widths; raise DataError for others."""
    extents = np.asarray(sizes if sizes is not None else np.zeros(0))
    good = extents.ndim == 2 and extents.shape[1] == 2 and bool(np.all(extents > 0))
    rule = "this model cuts images into tiles: give the height and width of each, [images, 2]"
    check(good, f"Media.create: image_sizes of shape {extents.shape}: {rule}.", DataError)
    whole = bool(tiles.sizes) or bool(np.all(extents % tiles.side == 0))
    rule = f"must be multiples of {tiles.side}, the side of a tile"
    check(whole, f"Media.create: image_sizes={extents.tolist()} {rule}.", DataError)
    return [(height, width) for height, width in extents.tolist()]


def _checked_pixels(tiles: TilesConfig, pixels: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return the tiles of all images, one behind the other."""
    shape = pixels.shape
    square = pixels.ndim in (4, 5) and shape[-2:] == (tiles.side, tiles.side)
    rule = f"must have tiles of {tiles.side} x {tiles.side} pixels"
    check(square, f"Media.create: pixel_values of shape {shape} {rule}.", DataError)
    if len(shape) == 5:
        enough = len(pixels) == len(counts) and max(counts) <= shape[1]
        rule = f"must be [{len(counts)}, at least {max(counts)}, ...]: so many images and tiles have image_sizes"
        check(enough, f"Media.create: pixel_values of shape {shape} {rule}.", DataError)
        pixels = np.concatenate([each[:count] for each, count in zip(pixels, counts, strict=True)])
    rule = f"has {len(pixels)} tiles, but by image_sizes there are {sum(counts)}"
    check(len(pixels) == sum(counts), f"Media.create: pixel_values {rule}.", DataError)
    return pixels


def _checked_masks(
    stem: PatchStemConfig, tiles: TilesConfig, counts: Sequence[int], mask: Any
) -> list[np.ndarray | None]:
    """Return the mask of each image's patches, `[tiles, rows, columns]`; None for no padding."""
    if mask is None:
        return [None] * len(counts)
    check(not tiles.sizes, "Media.create: image_attention_mask: leave it out: image_sizes say the same.", DataError)
    mask, side = np.asarray(mask) > 0, tiles.side // stem.size
    good = (
        mask.ndim == 4 and mask.shape[2:] == (side, side) and len(mask) == len(counts) and mask.shape[1] >= max(counts)
    )
    rule = f"must be [{len(counts)}, at least {max(counts)}, {side}, {side}]"
    check(good, f"Media.create: image_attention_mask of shape {mask.shape} {rule}.", DataError)
    return [each[:count] for each, count in zip(mask, counts, strict=True)]
