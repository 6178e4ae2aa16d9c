"""Images of LLaVA, cropped to a square, and of LLaVA-NeXT, a thumbnail and the tiles of a larger image."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.encoders.geometry import SIZES, TilesConfig, best_size, token_order
from eqx_decoders.errors import CheckedFields, PositiveInt
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
    read_size,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, resize
from eqx_decoders.media_files.tiles import cut_tiles


Pixels = UInt8[np.ndarray, "height width 3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaImageProcessor(CheckedFields):
    """Images of LLaVA, resized to a square of `size` x `size` pixels.

    **Arguments:**

    - `size`: height and width of resized images in pixels.
    - `center_crop`: whether the shorter side is resized to `size` and the center of the image is cropped. Otherwise the
        image is resized to a square without preserving the aspect ratio.
    - `patch_size`: height and width of a patch in pixels. A patch is one token.
    - `image_token`: image token, which is the placeholder and is repeated once per token.
    """

    size: PositiveInt = 336
    center_crop: bool = True
    patch_size: PositiveInt = 14
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    image_token: str = "<image>"

    @classmethod
    def read(cls, settings: Settings) -> "LlavaImageProcessor":
        """Create the processor from the settings of a model's directory."""
        size, center_crop = _read_square(settings.images)
        return cls(size=size, center_crop=center_crop, **_read_shared_fields(settings))

    @property
    def placeholder(self) -> str:
        """Image token."""
        return self.image_token

    def process(self, pixels: Pixels, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `[1, 3, size, size]`."""
        size = self.size
        num_tokens = (size // self.patch_size) ** 2
        check_tokens(where, num_tokens)
        height = size
        width = size
        if self.center_crop:
            shorter = min(pixels.shape[:2])
            height, width = (size if length == shorter else int(size * length / shorter) for length in pixels.shape[:2])
        resized = resize(pixels, (height, width), self.resample, limits, where)
        top = (height - size) // 2
        left = (width - size) // 2
        values = self.normalization(resized[top : top + size, left : left + size])
        return ProcessedFile({"pixel_values": values[None]}, self.image_token * num_tokens)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, 3, size, size]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNextImageProcessor(CheckedFields):
    """Images of LLaVA-NeXT: a thumbnail, resized to a square, and tiles of the image, padded to one of several sizes.

    **Arguments:**

    - `tiles`: size of a tile, and possible sizes of the padded image.
    - `patch_size`: height and width of a patch in pixels. A patch is one token.
    - `image_token`: image token, which is the placeholder and is repeated once per token.
    """

    tiles: TilesConfig = TilesConfig(side=336, sizes=SIZES)
    patch_size: PositiveInt = 14
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    image_token: str = "<image>"

    @classmethod
    def read(cls, settings: Settings) -> "LlavaNextImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        tile_size, _ = _read_square(fields)
        tiles = TilesConfig(side=tile_size, sizes=fields.pairs("image_grid_pinpoints", SIZES))
        return cls(tiles=tiles, **_read_shared_fields(settings))

    @property
    def placeholder(self) -> str:
        """Image token."""
        return self.image_token

    def process(self, pixels: Pixels, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `[1, tiles, 3, side, side]`, and `image_sizes`, `[1, 2]`: height and width."""
        height, width = pixels.shape[:2]
        tile_size = self.tiles.side
        num_tokens = len(token_order(self.tiles, height, width, tile_size // self.patch_size))
        check_tokens(where, num_tokens)
        padded_size = best_size(height, width, self.tiles.sizes)
        resized = resize(pixels, fit_within(height, width, padded_size), self.resample, limits, where)
        top, odd_row = divmod(padded_size[0] - resized.shape[0], 2)
        left, odd_column = divmod(padded_size[1] - resized.shape[1], 2)
        padded = np.pad(resized, ((top, top + odd_row), (left, left + odd_column), (0, 0)))
        thumbnail = resize(pixels, (tile_size, tile_size), self.resample, limits, where)
        tiles = cut_tiles(self.normalization(padded), tile_size)
        values = np.concatenate([self.normalization(thumbnail)[None], tiles])
        sizes = np.asarray([[height, width]], np.int32)
        return ProcessedFile({"pixel_values": values[None], "image_sizes": sizes}, self.image_token * num_tokens)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, tiles, 3, side, side]`, and `image_sizes`, `[images, 2]`.

        Images with fewer tiles are padded with tiles of 0.
        """
        max_tiles = max((file.arrays["pixel_values"].shape[1] for file in files), default=0)
        padded = []
        for file in files:
            values = file.arrays["pixel_values"]
            padding = [(0, 0)] * values.ndim
            padding[1] = (0, max_tiles - values.shape[1])
            padded.append(ProcessedFile({**file.arrays, "pixel_values": np.pad(values, padding)}, file.text))
        return concatenate_arrays(padded)


def fit_within(height: int, width: int, max_size: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width within `max_size` that have the aspect ratio of an image."""
    width_scale = max_size[1] / width
    height_scale = max_size[0] / height
    if width_scale < height_scale:
        return min(math.ceil(height * width_scale), max_size[0]), max_size[1]
    return max_size[0], min(math.ceil(width * height_scale), max_size[1])


def _read_square(fields: Fields) -> tuple[int, bool]:
    """Read the side of resized images, and whether `size` has shortest_edge: then images are cropped."""
    size = read_size(fields, "size", {"shortest_edge": 224})
    center_crop = "shortest_edge" in size
    sides = {size.get("shortest_edge"), size.get("height", 0), size.get("width", 0)} - {None, 0}
    if fields.flag("do_center_crop", center_crop):
        crop_size = read_size(fields, "crop_size", {"height": 224, "width": 224})
        sides |= {crop_size.get("height"), crop_size.get("width")}
    elif center_crop:
        raise fields.error(
            "do_center_crop=false with a shortest_edge in size is not supported, because images would not be square. "
            "Set do_center_crop to true, or give size a height and width."
        )
    if len(sides) != 1 or None in sides:
        raise fields.error(
            f"size={abbreviate(size)} and crop_size must be the same square. Set all their heights and widths to the "
            "same value."
        )
    return sides.pop(), center_crop


def _read_shared_fields(settings: Settings) -> dict[str, Any]:
    fields = settings.images
    processor = settings.processor
    class_tokens = processor.integer("num_additional_image_tokens", 0, least=0)
    strategy = processor.take("vision_feature_select_strategy", "default")
    if class_tokens != (strategy == "default"):
        raise processor.error(
            f"num_additional_image_tokens={class_tokens} must be 1 with vision_feature_select_strategy='default' and 0 "
            "otherwise: the class token must not have a placeholder."
        )
    return dict(
        patch_size=processor.integer("patch_size"),
        resample=read_resample(fields, BICUBIC),
        normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
        image_token=settings.token("image_token", "<image>"),
    )
