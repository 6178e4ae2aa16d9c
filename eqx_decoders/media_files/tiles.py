"""Grids of tiles for an image of any shape."""

import numpy as np
from jaxtyping import Float

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.media_files.base import read_square


MOST_TILES = 256


def tile_grid(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return rows and columns of `least` to `most` tiles whose shape is nearest to the image's.

    Of equally near shapes the larger one counts if the image has more than half of its pixels.
    """
    sizes = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    fitting = sorted((size for size in sizes if least <= size[0] * size[1] <= most), key=lambda size: size[0] * size[1])
    best, nearest = (1, 1), float("inf")
    for rows, columns in fitting:
        distance = abs(width / height - columns / rows)
        large = height * width > 0.5 * side * side * rows * columns
        if distance < nearest or (distance == nearest and large):
            best, nearest = (rows, columns), distance
    return best


def read_side(fields: Fields, default: int) -> int:
    """Read the side of a square."""
    height, width = read_square(fields, "size", default)
    if height != width:
        raise fields.error(f"size={height} x {width} must be a square: tiles are.")
    return height


def cut_tiles(values: Float[np.ndarray, "3 height width"], side: int) -> Float[np.ndarray, "tiles 3 side side"]:
    """Return the tiles of an image, row by row."""
    rows, columns = values.shape[1] // side, values.shape[2] // side
    return values.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
