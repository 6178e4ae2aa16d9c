"""Splitting of images into a grid of square tiles."""

import numpy as np
from jaxtyping import Float

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.media_files.base import read_height_width


MAX_TILES = 256


def tile_grid(height: int, width: int, tile_size: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return the rows and columns of the grid whose aspect ratio is closest to the image's.

    The grid has between `min_tiles` and `max_tiles` tiles. Among equally close aspect ratios, a larger grid is
    preferred if the image has more than half of the grid's pixels.
    """
    all_grids = [(rows, columns) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles + 1)]
    grids = [grid for grid in all_grids if min_tiles <= grid[0] * grid[1] <= max_tiles]
    best = (1, 1)
    min_distance = float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_large = height * width > 0.5 * tile_size * tile_size * rows * columns
        if distance < min_distance or (distance == min_distance and is_large):
            best = (rows, columns)
            min_distance = distance
    return best


def read_tile_size(fields: Fields, default: int) -> int:
    """Read `size`, the height and width of a square tile. Raises ConversionError if they differ."""
    height, width = read_height_width(fields, "size", default)
    if height != width:
        raise fields.error(f"size={height} x {width} must be a square: height and width must be equal.")
    return height


def cut_tiles(
    values: Float[np.ndarray, "3 height width"], tile_size: int
) -> Float[np.ndarray, "tiles 3 tile_size tile_size"]:
    """Return the tiles of an image in row order. `height` and `width` must be multiples of `tile_size`."""
    rows = values.shape[1] // tile_size
    columns = values.shape[2] // tile_size
    split = values.reshape(3, rows, tile_size, columns, tile_size)
    return split.transpose(1, 3, 0, 2, 4).reshape(-1, 3, tile_size, tile_size)
