"""Images of Llama 4: tiles of a canvas, and the whole image as one more."""

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
from eqx_decoders.media_files.resizing import BILINEAR, resize_with_short_weights
from eqx_decoders.media_files.tiles import MOST_TILES, cut_tiles, read_side


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4Images(CheckedFields):
    """Images of Llama 4, which keep their shape on a canvas of at most `tiles` tiles.

    **Arguments:**

    - `side`: side of a tile, in pixels.
    - `largest`: whether small images are enlarged to the largest canvas.
    - `patch`: side of a patch; `shrink` patches become one token.
    - `placeholder`, `token`, `begin`, `end`, `column_separator`, `row_separator`: texts of the special tokens.
    """

    side: PositiveInt = 336
    tiles: Annotated[int, AtLeast(1, maximum=MOST_TILES)] = 16
    largest: bool = False
    resample: int = BILINEAR
    normalization: Normalization = Normalization(steps="bfloat16")
    patch: PositiveInt = 14
    shrink: PositiveInt = 4
    placeholder: str = "<|image|>"
    token: str = "<|patch|>"
    begin: str = "<|image_start|>"
    end: str = "<|image_end|>"
    column_separator: str = "<|tile_x_separator|>"
    row_separator: str = "<|tile_y_separator|>"

    @classmethod
    def read(cls, settings: Settings) -> "Llama4Images":
        """Read the rules from the settings of a directory."""
        fields, processor = settings.images, settings.processor
        ratio = processor.number("pixel_shuffle_ratio", 0.5)
        check_number(f"{processor.where}: pixel_shuffle_ratio", ratio, minimum=0.01)
        return cls(
            side=read_side(fields, 336),
            tiles=fields.integer("max_patches", 16),
            largest=fields.flag("resize_to_max_canvas", False),
            resample=read_resample(fields, BILINEAR),
            normalization=read_normalization(fields, HALVES, HALVES, steps="bfloat16"),
            patch=processor.integer("patch_size", 14),
            shrink=max(1, round(1 / ratio**2)),
            placeholder=settings.token("image_token", "<|image|>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: tiles row by row, and the whole image behind them if there are several."""
        size, side = pixels.shape[:2], self.side
        rows, columns = canvas(size, self.tiles, side, largest=self.largest)
        room = (rows * side, columns * side)
        limits.check_pixels(where, *room)
        check_tokens(where, (rows * columns + 1) * self._tokens)
        if not self.largest:  # a small image is not made larger than a tile
            room = tuple(min(max(old, side), most) for old, most in zip(size, room, strict=True))
        small = resize_with_short_weights(pixels, within(size, room), self.resample, limits, where)
        more = [(0, whole * side - length) for whole, length in zip((rows, columns), small.shape, strict=False)]
        values = self.normalization(np.pad(small, (*more, (0, 0))))
        tiles = cut_tiles(values, side)
        if len(tiles) > 1:
            whole = resize_with_short_weights(pixels, (side, side), self.resample, limits, where)
            tiles = np.concatenate([tiles, self.normalization(whole)[None]])
        return ProcessedFile({"pixel_values": tiles}, self._text(rows, columns))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[tiles, 3, side, side]`."""
        return concatenate_arrays(files)

    @property
    def _tokens(self) -> int:
        """Number of tokens of one tile."""
        return (self.side // self.patch) ** 2 // self.shrink

    def _text(self, rows: int, columns: int) -> str:
        tile = self.token * self._tokens
        split = (self.column_separator.join([tile] * columns) + self.row_separator) * rows if rows * columns > 1 else ""
        return f"{self.begin}{split}{self.placeholder}{tile}{self.end}"


def canvas(size: tuple[int, int], tiles: int, side: int, *, largest: bool) -> tuple[int, int]:
    """Return the rows and columns of the canvas of at most `tiles` tiles that changes the image's size least."""
    known = list(_canvases(tiles))
    # in float32, in which canvases that fit equally well are equal
    fits = np.array([[side * count for count in one] for one in known], np.float32) / np.array(size, np.float32)
    scales = fits.min(axis=1)
    growing = scales[scales >= 1]
    best = scales.max() if not growing.size or largest else growing.min()
    return min((one for one, scale in zip(known, scales, strict=True) if scale == best), key=math.prod)


def _canvases(tiles: int) -> Iterator[tuple[int, int]]:
    """Yield all canvases: those of one shape together, the largest first."""
    shapes: dict[float, list[tuple[int, int]]] = {}
    for count in range(tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                shapes.setdefault(rows / (count // rows), []).append((rows, count // rows))
    for one in shapes.values():
        yield from one


def within(size: tuple[int, int], room: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width of the same shape that fit into a room, at least 1."""
    (height, width), (most_height, most_width) = size, room
    if most_width / width < most_height / height:
        return max(1, min(math.floor(height * (most_width / width)), most_height)), most_width
    return most_height, max(1, min(math.floor(width * (most_height / height)), most_width))
