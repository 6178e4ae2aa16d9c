"""Images of LLaVA, resized and cropped to a square, and of LLaVA-NeXT: the whole, and tiles of one of several sizes."""

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
class LlavaImages(CheckedFields):
    """Images of LLaVA, whose middle is a square of `side` pixels, or which are stretched to one.

    **Arguments:**

    - `side`: side of the square, in pixels.
    - `crop`: whether an image keeps its shape, and what exceeds the square is cut off.
    - `patch`: side of a patch, which becomes one token.
    - `token`: text of the special token.
    """

    side: PositiveInt = 336
    crop: bool = True
    patch: PositiveInt = 14
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    token: str = "<image>"

    @classmethod
    def read(cls, settings: Settings) -> "LlavaImages":
        """Read the rules from the settings of a directory."""
        fields = settings.images
        side, keeps = _read_side(fields)
        return cls(side=side, crop=keeps, **_read_shared(settings))

    @property
    def placeholder(self) -> str:
        """Text of the special token."""
        return self.token

    def process(self, pixels: Pixels, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`."""
        side, size = self.side, (self.side, self.side)
        count = (side // self.patch) ** 2
        check_tokens(where, count)
        if self.crop:
            short = min(pixels.shape[:2])
            height, width = (side if length == short else int(side * length / short) for length in pixels.shape[:2])
            size = height, width
        small = resize(pixels, size, self.resample, limits, where)
        top, left = ((length - side) // 2 for length in size)
        values = self.normalization(small[top : top + side, left : left + side])
        return ProcessedFile({"pixel_values": values[None]}, self.token * count)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, 3, side, side]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNextImages(CheckedFields):
    """Images of LLaVA-NeXT: the whole, stretched to a square, and tiles of the image, in its shape, of some size.

    **Arguments:**

    - `tiles`: the side of a tile, and the sizes.
    - `patch`: side of a patch, which becomes one token.
    - `token`: text of the special token.
    """

    tiles: TilesConfig = TilesConfig(side=336, sizes=SIZES)
    patch: PositiveInt = 14
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    token: str = "<image>"

    @classmethod
    def read(cls, settings: Settings) -> "LlavaNextImages":
        """Read the rules from the settings of a directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        side, _ = _read_side(fields)
        return cls(
            tiles=TilesConfig(side=side, sizes=fields.pairs("image_grid_pinpoints", SIZES)), **_read_shared(settings)
        )

    @property
    def placeholder(self) -> str:
        """Text of the special token."""
        return self.token

    def process(self, pixels: Pixels, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, one image's tiles, and `image_sizes`, its height and width."""
        (height, width), side = pixels.shape[:2], self.tiles.side
        order = token_order(self.tiles, height, width, side // self.patch)
        check_tokens(where, len(order))
        room = best_size(height, width, self.tiles.sizes)
        small = resize(pixels, fitting(height, width, room), self.resample, limits, where)
        more = [divmod(most - length, 2) for most, length in zip(room, small.shape[:2], strict=True)]
        padded = np.pad(small, [*((half, half + odd) for half, odd in more), (0, 0)])
        whole = resize(pixels, (side, side), self.resample, limits, where)
        values = np.concatenate([self.normalization(whole)[None], cut_tiles(self.normalization(padded), side)])
        sizes = np.asarray([[height, width]], np.int32)
        return ProcessedFile({"pixel_values": values[None], "image_sizes": sizes}, self.token * len(order))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, tiles, 3, side, side]`, where tiles that an image lacks are zeros."""
        most = max((one.arrays["pixel_values"].shape[1] for one in files), default=0)
        padded = []
        for one in files:
            values = one.arrays["pixel_values"]
            more = [(0, 0)] * values.ndim
            more[1] = (0, most - values.shape[1])
            padded.append(ProcessedFile({**one.arrays, "pixel_values": np.pad(values, more)}, one.text))
        return concatenate_arrays(padded)


def fitting(height: int, width: int, room: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that fills a room in its own shape."""
    across, down = room[1] / width, room[0] / height
    if across < down:
        return min(math.ceil(height * across), room[0]), room[1]
    return room[0], min(math.ceil(width * down), room[1])


def _read_side(fields: Fields) -> tuple[int, bool]:
    """Read the side of a square, and whether images keep their shape and are cropped to it."""
    size = read_size(fields, "size", {"shortest_edge": 224})
    keeps = "shortest_edge" in size
    sides = {size.get("shortest_edge"), size.get("height", 0), size.get("width", 0)} - {None, 0}
    if fields.flag("do_center_crop", keeps):
        crop = read_size(fields, "crop_size", {"height": 224, "width": 224})
        sides |= {crop.get("height"), crop.get("width")}
    elif keeps:
        raise fields.error("do_center_crop=false: images of other shapes than a square are not implemented.")
    if len(sides) != 1 or None in sides:
        raise fields.error(f"size={abbreviate(size)} and crop_size must be one square.")
    return sides.pop(), keeps


def _read_shared(settings: Settings) -> dict[str, Any]:
    fields, processor = settings.images, settings.processor
    more = processor.integer("num_additional_image_tokens", 0, least=0)
    if more != (processor.take("vision_feature_select_strategy", "default") == "default"):
        rule = "must be 1 with vision_feature_select_strategy='default', and else 0: class tokens have no placeholder"
        raise processor.error(f"num_additional_image_tokens={more} {rule}.")
    return dict(
        patch=processor.integer("patch_size"),
        resample=read_resample(fields, BICUBIC),
        normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
        token=settings.token("image_token", "<image>"),
    )
