"""Sizes of tiles, the order of their tokens, and weights of neighbors: in NumPy alone.

Processes that read files use this too, and import neither JAX nor the layers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from eqx_decoders.errors import CheckedFields, PositiveInt, check


Size = tuple[PositiveInt, PositiveInt]  # height and width
SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # where settings have none
LINE_END, DIVIDER = -1, -2  # learned vectors in the place of a row of a tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesConfig(CheckedFields):
    """Configuration of images as tiles: the whole image, and parts of a larger one.

    The tokens of the parts stand in rows of the image, each of which ends with the same learned vector. An image fills
    the parts without a change of its shape, and what is padding has no tokens.

    **Arguments:**

    - `side`: rows and columns of pixels in a tile.
    - `sizes`: heights and widths of all parts, multiples of `side`: the one counts in which most of an image's pixels
        are kept, and the image stands in its middle (LLaVA-NeXT; Liu et al. 2024). Empty where `image_sizes` are those
        of all parts, and a mask shows the padding behind the image (Phi-4).
    - `whole`: `"first"`, its tokens stand before the parts'; or `"last"`, in rows as these, behind them and another
        learned vector (Phi-4).
    - `projected`: whether learned vectors are features, of which the projector's layers make rows (Phi-4).
    """

    side: PositiveInt
    sizes: tuple[Size, ...] = SIZES
    whole: Literal["first", "last"] = "first"
    projected: bool = False

    def __post_init__(self):
        super().__post_init__()
        for size in self.sizes:
            good = all(length % self.side == 0 for length in size)
            check(good, f"TilesConfig.sizes: {size} must be multiples of TilesConfig.side={self.side}.")


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the size in which most pixels of an image are kept, and of those the one with the least padding."""

    def worth(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        pixels = min(int(width * scale) * int(height * scale), width * height)
        return pixels, pixels - size[0] * size[1]

    return max(sizes, key=worth)


def padded_rows(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return how many of the first rows, and columns, of tokens are padding; as many of the last ones are."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def grid_of(tiles: TilesConfig, height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of tiles of an image's parts."""
    down, across = best_size(height, width, tiles.sizes) if tiles.sizes else (height, width)
    return down // tiles.side, across // tiles.side


def token_order(
    tiles: TilesConfig, height: int, width: int, side: int, real: tuple[int, int] | None = None
) -> np.ndarray:
    """Return `tiles.TiledImage.order` of an image, each of whose tiles has `side x side` tokens.

    real: the rows and columns of tokens that are no padding, where `tiles.sizes` is empty; None for all.
    """
    down, across = grid_of(tiles, height, width)
    rows, columns, count = down * side, across * side, side**2
    top, left = padded_rows(height, width, rows, columns) if tiles.sizes else (0, 0)
    bottom, right = (rows - top, columns - left) if real is None else real
    parts = count + np.arange(rows * columns).reshape(down, across, side, side)
    lines = _in_lines(parts.swapaxes(1, 2).reshape(rows, columns)[top:bottom, left:right])
    if tiles.whole == "first":
        return np.concatenate([np.arange(count), lines])
    return np.concatenate([lines, [DIVIDER], _in_lines(np.arange(count).reshape(side, side))])


def _in_lines(tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, 1)), constant_values=LINE_END).reshape(-1)


def cubic_weights(x: np.ndarray) -> np.ndarray:
    """Return the weights of neighbors at distances below 2: cubic convolution with a = -0.75."""
    near, far = (1.25 * x - 2.25) * x * x + 1, ((-0.75 * x + 3.75) * x - 6) * x + 3
    return np.where(x <= 1, near, far)
