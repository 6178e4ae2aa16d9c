"""Sizes of image tiles, the order of their tokens, and interpolation weights, in NumPy.

This module imports neither JAX nor layers, because worker processes that read files use it, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from eqx_decoders.errors import CheckedFields, PositiveInt, check


Size = tuple[PositiveInt, PositiveInt]  # height and width
SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # default of `image_grid_pinpoints`
LINE_END, DIVIDER = -1, -2  # indices in `token_order` of the learned separator vectors


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesConfig(CheckedFields):
    """Configuration of image tiles (anyres): a thumbnail of the full image, and tiles of a larger version of it.

    The tokens of the tiles are arranged in the rows of the full image. A learned vector is appended to each row. The
    image is resized without changing its aspect ratio, and padded; padding has no tokens.

    **Arguments:**

    - `side`: height and width of a tile in pixels.
    - `sizes`: possible heights and widths of all tiles together, multiples of `side` (`image_grid_pinpoints`).
        `best_size` selects one for each image, and the image is centered in it (LLaVA-NeXT; Liu et al. 2024). Empty:
        `image_sizes` has the height and width of all tiles together, and a mask marks the padding after the image
        (Phi-4).
    - `whole`: position of the thumbnail's tokens: `"first"`, before the tiles; `"last"`, after the tiles and another
        learned vector, and arranged in rows like the tiles (Phi-4).
    - `projected`: whether the learned vectors pass through the layers of the projector (Phi-4).
    """

    side: PositiveInt
    sizes: tuple[Size, ...] = SIZES
    whole: Literal["first", "last"] = "first"
    projected: bool = False

    def __post_init__(self):
        super().__post_init__()
        for size in self.sizes:
            check(
                all(length % self.side == 0 for length in size),
                f"TilesConfig.sizes: {size} must be multiples of TilesConfig.side={self.side}.",
            )


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size that keeps the most pixels of an image; among equal sizes, the size with the least padding."""

    def score(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        return num_pixels, num_pixels - size[0] * size[1]

    return max(sizes, key=score)


def padded_rows(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the number of padding rows above and of padding columns left of a centered image, in tokens.

    The same numbers of rows below and of columns right of the image are padding.
    """
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def grid_of(tiles: TilesConfig, height: int, width: int) -> tuple[int, int]:
    """Return the number of rows and columns of tiles of an image."""
    tiled_height, tiled_width = best_size(height, width, tiles.sizes) if tiles.sizes else (height, width)
    return tiled_height // tiles.side, tiled_width // tiles.side


def token_order(
    tiles: TilesConfig, height: int, width: int, side: int, real: tuple[int, int] | None = None
) -> np.ndarray:
    """Return the feature index of each token of a tiled image (`TiledImage.order`), in the order of the prompt.

    Features are numbered through all tiles, with `side x side` features per tile; the thumbnail is the first tile.
    `LINE_END` and `DIVIDER` mark the learned vectors.

    `real`: number of token rows and columns that are not padding, if `tiles.sizes` is empty; None: all.
    """
    tile_rows, tile_columns = grid_of(tiles, height, width)
    rows = tile_rows * side
    columns = tile_columns * side
    tokens_per_tile = side**2
    top, left = padded_rows(height, width, rows, columns) if tiles.sizes else (0, 0)
    bottom, right = (rows - top, columns - left) if real is None else real
    index = tokens_per_tile + np.arange(rows * columns).reshape(tile_rows, tile_columns, side, side)
    lines = _with_line_ends(index.swapaxes(1, 2).reshape(rows, columns)[top:bottom, left:right])
    thumbnail = np.arange(tokens_per_tile)
    if tiles.whole == "first":
        return np.concatenate([thumbnail, lines])
    return np.concatenate([lines, [DIVIDER], _with_line_ends(thumbnail.reshape(side, side))])


def _with_line_ends(index: np.ndarray) -> np.ndarray:
    return np.pad(index, ((0, 0), (0, 1)), constant_values=LINE_END).reshape(-1)


def cubic_weights(x: np.ndarray) -> np.ndarray:
    """Return the interpolation weights at distances `x` below 2: cubic convolution with a = -0.75."""
    near = (1.25 * x - 2.25) * x * x + 1
    far = ((-0.75 * x + 3.75) * x - 6) * x + 3
    return np.where(x <= 1, near, far)
