"""Images cut into tiles, each of which an encoder sees by itself, and the order of their tokens in a prompt."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from eqx_decoders.encoders.images import Image, from_pixels
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import CheckedFields, DataError, NonEmpty, PositiveInt, check


Size = tuple[PositiveInt, PositiveInt]  # height and width
SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # where settings have none


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesConfig(CheckedFields):
    """Configuration of images as tiles: the whole image, and parts of a larger one (LLaVA-NeXT, Liu et al. 2024).

    An image is resized to fill one of several sizes without a change of its shape. What is padding there has no tokens.
    Tokens of the whole stand first, then rows of tokens of the parts, each of which ends with the same learned vector.

    **Arguments:**

    - `side`: rows and columns of pixels in a tile.
    - `sizes`: heights and widths, multiples of `side`: the one counts in which most of an image's pixels are kept.
    """

    side: PositiveInt
    sizes: Annotated[tuple[Size, ...], NonEmpty("height and width")]

    def __post_init__(self):
        super().__post_init__()
        for size in self.sizes:
            good = all(length % self.side == 0 for length in size)
            check(good, f"TilesConfig.sizes: {size} must be multiples of TilesConfig.side={self.side}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledImage:
    """Tiles of an image.

    **Arguments:**

    - `tiles`: the whole image, and its parts.
    - `order`: for each token of the image the index of its row among those of all tiles; -1 for the learned vector.
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
    """Return the rows of features of each image's tokens, -1 for the learned vector, from those of all tiles."""
    each, found = iter(rows), []
    for image in images:
        known = np.concatenate([next(each) for _ in tiles_of(image)])
        tiled = isinstance(image, TiledImage)
        found.append(np.where(image.order < 0, -1, known[image.order]) if tiled else known)
    return found


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size in which most pixels of an image are kept, and of those the one with the least padding."""

    def worth(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=worth)


def padded_rows(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return how many of the first rows, and columns, of tokens are padding; as many of the last ones are."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def token_order(tiles: TilesConfig, height: int, width: int, side: int) -> tuple[int, np.ndarray]:
    """Return the number of an image's tiles, each with `side x side` tokens, and `TiledImage.order`."""
    down, across = (length // tiles.side for length in best_size(height, width, tiles.sizes))
    rows, columns, whole = down * side, across * side, np.arange(side**2)
    parts = len(whole) + np.arange(rows * columns).reshape(down, across, side, side)
    top, left = padded_rows(height, width, rows, columns)
    parts = parts.swapaxes(1, 2).reshape(rows, columns)[top : rows - top, left : columns - left]
    lines = np.pad(parts, ((0, 0), (0, 1)), constant_values=-1)
    return 1 + down * across, np.concatenate([whole, lines.reshape(-1)])


def tiled_images(stem: PatchStemConfig, tiles: TilesConfig, pixels: Any, sizes: Any) -> list[TiledImage]:
    """Return images from their tiles, one behind the other, or `[images, tiles, channels, height, width]`.

    Of the latter, tiles behind an image's own are padding. `sizes` are the images' heights and widths in pixels.
    """
    pixels, extents = np.asarray(pixels), np.asarray(sizes if sizes is not None else np.zeros(0))
    good = extents.ndim == 2 and extents.shape[1] == 2 and bool(np.all(extents > 0))
    rule = "this model cuts images into tiles: give the height and width of each, [images, 2]"
    check(good, f"Media.create: image_sizes of shape {extents.shape}: {rule}.", DataError)
    shape, side = pixels.shape, tiles.side // stem.size // stem.merge
    square = pixels.ndim in (4, 5) and shape[-2:] == (tiles.side, tiles.side)
    rule = f"must have tiles of {tiles.side} x {tiles.side} pixels"
    check(square, f"Media.create: pixel_values of shape {shape} {rule}.", DataError)
    counts, orders = zip(*(token_order(tiles, height, width, side) for height, width in extents.tolist()), strict=True)
    if len(shape) == 5:
        enough = len(pixels) == len(counts) and max(counts) <= shape[1]
        rule = f"must be [{len(counts)}, at least {max(counts)}, ...]: so many images and tiles have image_sizes"
        check(enough, f"Media.create: pixel_values of shape {shape} {rule}.", DataError)
        pixels = np.concatenate([each[:count] for each, count in zip(pixels, counts, strict=True)])
    rule = f"has {len(pixels)} tiles, and image_sizes={extents.tolist()} {sum(counts)}"
    check(len(pixels) == sum(counts), f"Media.create: pixel_values {rule}.", DataError)
    found, ends = from_pixels(stem, pixels), np.cumsum(counts)
    parts = [tuple(found[end - count : end]) for end, count in zip(ends.tolist(), counts, strict=True)]
    return [TiledImage(tiles=one, order=order) for one, order in zip(parts, orders, strict=True)]
