"""Images of LFM2-VL: patches of an image of any aspect ratio, or tiles of a large image and a thumbnail after them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from eqx_decoders.errors import AtLeast, CheckedFields, PositiveFloat, PositiveInt, check
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, concatenate_arrays, read_resample
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BILINEAR, FIXED_POINT_FILTERS, Size, resize_fixed_point
from eqx_decoders.media_files.tiles import MAX_TILES, cut_tiles, tile_grid


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2VLImageText(CheckedFields):
    """Text of images in a prompt.

    If an image has several tiles, each tile also has a token such as `<|img_row_1_col_1|>`, unless `start_token` is
    empty.

    **Arguments:**

    - `image_token`: image token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after an image; empty: no special tokens.
    - `thumbnail_token`: special token before the thumbnail of an image with several tiles.
    """

    image_token: str = "<image>"
    start_token: str = "<|image_start|>"
    end_token: str = "<|image_end|>"
    thumbnail_token: str = "<|img_thumbnail|>"

    @classmethod
    def read(cls, settings: Settings) -> "Lfm2VLImageText":
        """Create the texts from the settings of a model's directory."""
        image_token = settings.token("image_token", "<image>")
        if not settings.processor.flag("use_image_special_tokens", True):
            return cls(image_token=image_token, start_token="", end_token="", thumbnail_token="")
        return cls(
            image_token=image_token,
            start_token=settings.token("image_start_token", "<|image_start|>"),
            end_token=settings.token("image_end_token", "<|image_end|>"),
            thumbnail_token=settings.token("image_thumbnail_token", "<|img_thumbnail|>"),
        )

    def render(self, rows: int, columns: int, tokens_per_tile: int, thumbnail_tokens: int) -> str:
        """Return the text of an image with `rows` x `columns` tiles.

        `thumbnail_tokens`: number of tokens of the thumbnail, or of an image without tiles; 0: there is no thumbnail.
        """
        text = self.start_token
        for row in range(rows):
            for column in range(columns):
                if self.start_token:
                    text += f"<|img_row_{row + 1}_col_{column + 1}|>"
                text += self.image_token * tokens_per_tile
        if rows and thumbnail_tokens:
            text += self.thumbnail_token
        return text + self.image_token * thumbnail_tokens + self.end_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2VLImageProcessor(CheckedFields):
    """Images of LFM2-VL: resized to between `min_tokens` and `max_tokens` tokens, or split into tiles.

    Small images keep their aspect ratio.

    **Arguments:**

    - `patch_size`: height and width of a patch in pixels.
    - `merge_size`: number of rows and of columns of patches that are merged into one token.
    - `min_tokens`, `max_tokens`: bounds of the number of tokens of an image without tiles, and of a thumbnail.
    - `tolerance`: an image is split into tiles if it would have more than `tolerance * max_tokens` tokens.
    - `tile_size`: height and width of a tile in pixels.
    - `min_tiles`, `max_tiles`: bounds of the number of tiles; both 1: images are not split.
    - `use_thumbnail`: whether tiles are followed by a thumbnail of the full image.
    - `image_text`: text of an image in a prompt.
    """

    patch_size: PositiveInt = 16
    merge_size: PositiveInt = 2
    min_tokens: PositiveInt = 64
    max_tokens: PositiveInt = 256
    tolerance: PositiveFloat = 2.0
    tile_size: PositiveInt = 512
    min_tiles: PositiveInt = 2
    max_tiles: Annotated[int, AtLeast(1, maximum=MAX_TILES)] = 10
    use_thumbnail: bool = True
    resample: int = BILINEAR
    normalization: Normalization = Normalization(rounding="fused")
    image_text: Lfm2VLImageText = Lfm2VLImageText()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.min_tiles <= self.max_tiles,
            f"Lfm2VLImageProcessor.min_tiles={self.min_tiles} must be at most max_tiles={self.max_tiles}.",
        )
        check(
            self.tile_size % self.token_size == 0,
            f"Lfm2VLImageProcessor.tile_size={self.tile_size} must be a multiple of {self.token_size}, the height and "
            "width of a token in pixels.",
        )

    @property
    def token_size(self) -> int:
        """Height and width of a token in pixels."""
        return self.patch_size * self.merge_size

    @classmethod
    def read(cls, settings: Settings) -> "Lfm2VLImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        is_split = fields.flag("do_image_splitting", True)
        min_tiles = fields.integer("min_tiles", 2)
        max_tiles = fields.integer("max_tiles", 10)
        return cls(
            patch_size=fields.integer("encoder_patch_size", 16),
            merge_size=fields.integer("downsample_factor", 2),
            min_tokens=fields.integer("min_image_tokens", 64),
            max_tokens=fields.integer("max_image_tokens", 256),
            tolerance=fields.number("max_pixels_tolerance", 2.0),
            tile_size=fields.integer("tile_size", 512),
            min_tiles=min_tiles if is_split else 1,
            max_tiles=max_tiles if is_split else 1,
            use_thumbnail=fields.flag("use_thumbnail", True),
            resample=read_resample(fields, BILINEAR, FIXED_POINT_FILTERS),
            normalization=read_normalization(fields, HALVES, HALVES, rounding="fused"),
            image_text=Lfm2VLImageText.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Image token."""
        return self.image_text.image_token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `pixel_attention_mask` and `spatial_shapes`: padded patches of each tile."""
        rows, columns = self._tile_grid(*pixels.shape[:2])
        num_tiles = rows * columns
        is_split = num_tiles > 1
        sizes = [(rows * self.tile_size, columns * self.tile_size)] if num_tiles else []
        if num_tiles == 0 or (is_split and self.use_thumbnail):
            sizes.append(self._fit_size(*pixels.shape[:2]))
        tokens_per_tile = (self.tile_size // self.token_size) ** 2
        last_tokens = 0  # tokens of the thumbnail, or of an image without tiles
        if not is_split or self.use_thumbnail:
            last_tokens = sizes[-1][0] * sizes[-1][1] // self.token_size**2
        check_tokens(where, num_tiles * tokens_per_tile + last_tokens)
        images = [self.normalization(resize_fixed_point(pixels, size, self.resample, limits, where)) for size in sizes]
        if num_tiles:
            images = [*cut_tiles(images[0], self.tile_size), *images[1:]]
        text = self.image_text.render(rows if is_split else 0, columns, tokens_per_tile, last_tokens)
        return ProcessedFile(self._arrays(images), text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[tiles, patches, features]`; the mask, `[tiles, patches]`; shapes, `[tiles, 2]`."""
        return concatenate_arrays(files)

    def _arrays(self, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the patches of images, padded to the maximum number of patches of an image or tile."""
        size = self.patch_size
        patches_per_tile = (self.tile_size // size) ** 2 if self.max_tiles > 1 else 0
        max_patches = max(self.max_tokens * self.merge_size**2, patches_per_tile)
        values = np.zeros((len(images), max_patches, size * size * 3), np.float32)
        shapes = np.array([[length // size for length in image.shape[1:]] for image in images])
        for patches, image, (rows, columns) in zip(values, images, shapes.tolist(), strict=True):
            split = image.reshape(3, rows, size, columns, size).transpose(1, 3, 2, 4, 0)
            patches[: rows * columns] = split.reshape(rows * columns, -1)
        mask = (np.arange(max_patches) < shapes.prod(axis=1)[:, None]).astype(np.int32)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}

    def _tile_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of a large image; (0, 0) for an image without tiles."""
        rounded_height, rounded_width = (
            max(self.patch_size, round(length / self.token_size) * self.token_size) for length in (height, width)
        )
        max_pixels = self.max_tokens * self.token_size**2 * self.tolerance
        if self.max_tiles == 1 or rounded_height * rounded_width <= max_pixels:
            return 0, 0
        return tile_grid(height, width, self.tile_size, self.min_tiles, self.max_tiles)

    def _fit_size(self, height: int, width: int) -> Size:
        """Return the size within the bounds that is closest to (height, width), in multiples of `token_size`."""
        unit = self.token_size
        min_pixels = self.min_tokens * unit**2
        max_pixels = self.max_tokens * unit**2
        rows = max(1, round(height / unit))
        columns = max(1, round(width / unit))
        if rows * columns * unit**2 > max_pixels:
            factor = math.sqrt(height * width / max_pixels)
            rows = max(1, math.floor(height / factor / unit))
            columns = max(1, math.floor(width / factor / unit))
        elif rows * columns * unit**2 < min_pixels:
            factor = math.sqrt(min_pixels / (height * width))
            rows = math.ceil(height * factor / unit)
            columns = math.ceil(width * factor / unit)
        return rows * unit, columns * unit
