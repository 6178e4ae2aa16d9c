"""Images of LFM2-VL: patches of an image of any shape; of large images tiles, and a small whole behind them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from eqx_decoders.errors import AtLeast, CheckedFields, PositiveFloat, PositiveInt, check
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, concatenate_arrays, read_resample
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BILINEAR, SHORT, Size, resize_with_short_weights
from eqx_decoders.media_files.tiles import MOST_TILES, cut_tiles, tile_grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2VLWords(CheckedFields):
    """Text of images in a prompt.

    **Arguments:**

    - `token`, `begin`, `end`, `whole`: texts of the special tokens; each tile of several also has
        `<|img_row_1_col_1|>` and so on. `begin` is empty where there is none of them but `token`.
    """

    token: str = "<image>"
    begin: str = "<|image_start|>"
    end: str = "<|image_end|>"
    whole: str = "<|img_thumbnail|>"

    @classmethod
    def read(cls, settings: Settings) -> "Lfm2VLWords":
        """Read the rules from the settings of a directory."""
        token = settings.token("image_token", "<image>")
        if not settings.processor.flag("use_image_special_tokens", True):
            return cls(token=token, begin="", end="", whole="")
        return cls(
            token=token,
            begin=settings.token("image_start_token", "<|image_start|>"),
            end=settings.token("image_end_token", "<|image_end|>"),
            whole=settings.token("image_thumbnail_token", "<|img_thumbnail|>"),
        )

    def image(self, rows: int, columns: int, tile: int, whole: int) -> str:
        """Return the text of an image with these tiles, of `tile` tokens each, and a whole of `whole` tokens; or 0."""
        parts = []
        for row in range(rows):
            for column in range(columns):
                parts += [f"<|img_row_{row + 1}_col_{column + 1}|>" if self.begin else "", self.token * tile]
        parts += [self.whole if rows and whole else "", self.token * whole]
        return "".join([self.begin, *parts, self.end])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2VLImages(CheckedFields):
    """Images of LFM2-VL, which keep their shape, with between `least` and `most` tokens, or are cut into tiles.

    **Arguments:**

    - `size`: rows and columns of pixels in a patch.
    - `merge`: rows and columns of patches that become one token.
    - `tolerance`: an image is cut into tiles if it would have more than this many times `most` tokens.
    - `tile`: side of a tile, in pixels.
    - `least_tiles`, `most_tiles`: bounds on the number of tiles; 1 and 1 for none.
    - `whole`: whether the whole image stands behind its tiles.
    """

    size: PositiveInt = 16
    merge: PositiveInt = 2
    least: PositiveInt = 64
    most: PositiveInt = 256
    tolerance: PositiveFloat = 2.0
    tile: PositiveInt = 512
    least_tiles: PositiveInt = 2
    most_tiles: Annotated[int, AtLeast(1, maximum=MOST_TILES)] = 10
    whole: bool = True
    resample: int = BILINEAR
    normalization: Normalization = Normalization(steps="joint")
    words: Lfm2VLWords = Lfm2VLWords()

    def __post_init__(self):
        super().__post_init__()
        fewer = self.least_tiles <= self.most_tiles
        check(fewer, f"Lfm2VLImages.least_tiles={self.least_tiles} must be at most most_tiles={self.most_tiles}.")
        whole = self.tile % (self.size * self.merge) == 0
        check(whole, f"Lfm2VLImages.tile={self.tile} must be a multiple of {self.size * self.merge}: those of a token.")

    @classmethod
    def read(cls, settings: Settings) -> "Lfm2VLImages":
        """Read the rules from the settings of a directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        split = fields.flag("do_image_splitting", True)
        tiles = fields.integer("min_tiles", 2), fields.integer("max_tiles", 10)
        return cls(
            size=fields.integer("encoder_patch_size", 16),
            merge=fields.integer("downsample_factor", 2),
            least=fields.integer("min_image_tokens", 64),
            most=fields.integer("max_image_tokens", 256),
            tolerance=fields.number("max_pixels_tolerance", 2.0),
            tile=fields.integer("tile_size", 512),
            least_tiles=tiles[0] if split else 1,
            most_tiles=tiles[1] if split else 1,
            whole=fields.flag("use_thumbnail", True),
            resample=read_resample(fields, BILINEAR, SHORT),
            normalization=read_normalization(fields, HALVES, HALVES, steps="joint"),
            words=Lfm2VLWords.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Text of the special token."""
        return self.words.token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: the patches of each tile, padded; `pixel_attention_mask`, and `spatial_shapes`."""
        rows, columns = self._grid(*pixels.shape[:2])
        sizes = [(rows * self.tile, columns * self.tile)] if rows else []
        if rows * columns == 0 or (rows * columns > 1 and self.whole):
            sizes.append(self._fit(*pixels.shape[:2]))
        side, alone = self.size * self.merge, rows * columns < 2
        tile, tokens = (self.tile // side) ** 2, sizes[-1][0] * sizes[-1][1] // side**2
        tokens = tokens if alone or self.whole else 0
        check_tokens(where, rows * columns * tile + tokens)
        parts = [
            self.normalization(resize_with_short_weights(pixels, size, self.resample, limits, where)) for size in sizes
        ]
        parts = [*cut_tiles(parts[0], self.tile), *parts[1:]] if rows else parts
        text = self.words.image(0 if alone else rows, columns, tile, tokens)
        return ProcessedFile(self._arrays(parts), text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[tiles, patches, numbers]`, `[tiles, patches]`, `[tiles, 2]`."""
        return concatenate_arrays(files)

    def _arrays(self, parts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of some images, padded to the most that one may have."""
        tiles = (self.tile // self.size) ** 2 if self.most_tiles > 1 else 0
        most, size = max(self.most * self.merge**2, tiles), self.size
        values = np.zeros((len(parts), most, size * size * 3), np.float32)
        shapes = np.array([[length // size for length in part.shape[1:]] for part in parts])
        for row, part, (rows, columns) in zip(values, parts, shapes.tolist(), strict=True):
            split = part.reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
            row[: rows * columns] = split.reshape(rows * columns, -1)
        mask = (np.arange(most) < shapes.prod(axis=1)[:, None]).astype(np.int32)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of a large image; 0 and 0 for another one."""
        side = self.size * self.merge
        rows, columns = (max(self.size, round(length / side) * side) for length in (height, width))
        if self.most_tiles == 1 or rows * columns <= self.most * side**2 * self.tolerance:
            return 0, 0
        return tile_grid(height, width, self.tile, self.least_tiles, self.most_tiles)

    def _fit(self, height: int, width: int) -> Size:
        """Return the height and width, multiples of a token's, that are nearest to a shape within the bounds."""
        side = self.size * self.merge
        least, most = (count * side**2 for count in (self.least, self.most))
        rows, columns = (max(1, round(length / side)) for length in (height, width))
        if rows * columns * side**2 > most:
            factor = math.sqrt(height * width / most)
            rows, columns = (max(1, math.floor(length / factor / side)) for length in (height, width))
        elif rows * columns * side**2 < least:
            factor = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(length * factor / side) for length in (height, width))
        return rows * side, columns * side
