"""Images of Llama 4: tiles of an image that is padded to a grid of tiles, and a thumbnail of the full image."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np

from eqx_decoders.errors import AtLeast, CheckedFields, PositiveInt, check_number
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BILINEAR, resize_fixed_point
from eqx_decoders.media_files.tiles import MAX_TILES, cut_tiles, read_tile_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4ImageProcessor(CheckedFields):
    """Images of Llama 4: resized without changing the aspect ratio, and padded to a grid of at most `max_tiles` tiles.

    **Arguments:**

    - `tile_size`: height and width of a tile in pixels.
    - `max_tiles`: maximum number of tiles of an image, without the thumbnail.
    - `resize_to_max_canvas`: whether small images are enlarged to the largest grid.
    - `patch_size`: height and width of a patch in pixels.
    - `patches_per_token`: number of patches that are merged into one token.
    - `placeholder`, `patch_token`, `start_token`, `end_token`: texts of special tokens. The patch token is repeated
        once per token; the placeholder precedes the thumbnail.
    - `column_separator`, `row_separator`: special tokens between tiles of a row, and after each row of tiles.
    """

    tile_size: PositiveInt = 336
    max_tiles: Annotated[int, AtLeast(1, maximum=MAX_TILES)] = 16
    resize_to_max_canvas: bool = False
    resample: int = BILINEAR
    normalization: Normalization = Normalization(rounding="bfloat16")
    patch_size: PositiveInt = 14
    patches_per_token: PositiveInt = 4
    placeholder: str = "<|image|>"
    patch_token: str = "<|patch|>"
    start_token: str = "<|image_start|>"
    end_token: str = "<|image_end|>"
    column_separator: str = "<|tile_x_separator|>"
    row_separator: str = "<|tile_y_separator|>"

    @classmethod
    def read(cls, settings: Settings) -> "Llama4ImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        processor = settings.processor
        ratio = processor.number("pixel_shuffle_ratio", 0.5)
        check_number(f"{processor.where}: pixel_shuffle_ratio", ratio, minimum=0.01)
        return cls(
            tile_size=read_tile_size(fields, 336),
            max_tiles=fields.integer("max_patches", 16),
            resize_to_max_canvas=fields.flag("resize_to_max_canvas", False),
            resample=read_resample(fields, BILINEAR),
            normalization=read_normalization(fields, HALVES, HALVES, rounding="bfloat16"),
            patch_size=processor.integer("patch_size", 14),
            patches_per_token=max(1, round(1 / ratio**2)),
            placeholder=settings.token("image_token", "<|image|>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: tiles in row order, and a thumbnail after them if there are several tiles."""
        size = pixels.shape[:2]
        tile_size = self.tile_size
        rows, columns = select_grid(size, self.max_tiles, tile_size, resize_to_max_canvas=self.resize_to_max_canvas)
        padded_size = (rows * tile_size, columns * tile_size)
        limits.check_pixels(where, *padded_size)
        check_tokens(where, (rows * columns + 1) * self._tokens_per_tile)
        max_height, max_width = padded_size
        if not self.resize_to_max_canvas:  # a small image is enlarged to one tile at most
            max_height = min(max(size[0], tile_size), max_height)
            max_width = min(max(size[1], tile_size), max_width)
        resized = resize_fixed_point(pixels, fit_within(size, (max_height, max_width)), self.resample, limits, where)
        padding = ((0, padded_size[0] - resized.shape[0]), (0, padded_size[1] - resized.shape[1]), (0, 0))
        tiles = cut_tiles(self.normalization(np.pad(resized, padding)), tile_size)
        if len(tiles) > 1:
            thumbnail = resize_fixed_point(pixels, (tile_size, tile_size), self.resample, limits, where)
            tiles = np.concatenate([tiles, self.normalization(thumbnail)[None]])
        return ProcessedFile({"pixel_values": tiles}, self._text(rows, columns))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[tiles, 3, tile_size, tile_size]`."""
        return concatenate_arrays(files)

    @property
    def _tokens_per_tile(self) -> int:
        return (self.tile_size // self.patch_size) ** 2 // self.patches_per_token

    def _text(self, rows: int, columns: int) -> str:
        tile_text = self.patch_token * self._tokens_per_tile
        tiles_text = ""
        if rows * columns > 1:
            tiles_text = (self.column_separator.join([tile_text] * columns) + self.row_separator) * rows
        return f"{self.start_token}{tiles_text}{self.placeholder}{tile_text}{self.end_token}"


def select_grid(
    size: tuple[int, int], max_tiles: int, tile_size: int, *, resize_to_max_canvas: bool
) -> tuple[int, int]:
    """Return the rows and columns of tiles for an image of `size = (height, width)`.

    Selects the grid that needs the least enlargement of the image. If the image exceeds all grids, or with
    `resize_to_max_canvas`, selects the grid in which the resized image is largest.
    """
    grids = list(_all_grids(max_tiles))
    # in float32, because grids that fit equally well must have equal scales
    side_scales = np.array(grids, np.float32) * np.float32(tile_size) / np.array(size, np.float32)
    scales = side_scales.min(axis=1)
    enlarging_scales = scales[scales >= 1]
    best = scales.max() if not enlarging_scales.size or resize_to_max_canvas else enlarging_scales.min()
    return min((grid for grid, scale in zip(grids, scales, strict=True) if scale == best), key=math.prod)


def _all_grids(max_tiles: int) -> Iterator[tuple[int, int]]:
    """Yield the rows and columns of all grids, grouped by aspect ratio; in a group, the largest grid is first."""
    groups: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                groups.setdefault(rows / (count // rows), []).append((rows, count // rows))
    for group in groups.values():
        yield from group


def fit_within(size: tuple[int, int], max_size: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width within `max_size` that have the aspect ratio of `size`."""
    height, width = size
    max_height, max_width = max_size
    if max_width / width < max_height / height:
        return max(1, min(math.floor(height * (max_width / width)), max_height)), max_width
    return max_height, max(1, min(math.floor(width * (max_height / height)), max_width))
