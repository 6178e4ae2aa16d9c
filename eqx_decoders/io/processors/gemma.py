"""Pictures and films of Gemma 3 (one size) and Gemma 4 (a number of patches)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import DataError, check, check_integer, check_number
from eqx_decoders.io.processors.colours import HALVES, Colours, read_colours
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.resizing import BICUBIC, BILINEAR, resize
from eqx_decoders.io.processors.rules import Seen, Settings, check_tokens, joined, read_resample, read_square


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Pictures:
    """All pictures have one size, whatever their shape.

    **Arguments:**

    - `size`: height and width.
    - `pan_and_scan`: whether a long picture is followed by up to `most_crops` parts of it, if it is at least
        `least_ratio` times as long as wide and each part has sides of at least `least_crop`.
    - `tokens`: how many tokens stand for a picture.
    - `placeholder`, `token`, `begin`, `end`: texts of the special tokens.
    """

    size: tuple[int, int] = (896, 896)
    resample: int = BILINEAR
    colours: Colours = Colours()
    pan_and_scan: bool = False
    least_crop: int = 256
    most_crops: int = 4
    least_ratio: float = 1.2
    tokens: int = 256
    placeholder: str = "<start_of_image>"
    token: str = "<image_soft_token>"
    begin: str = "<start_of_image>"
    end: str = "<end_of_image>"

    def __post_init__(self):
        for name in ("least_crop", "most_crops", "tokens"):
            check_integer(f"Gemma3Pictures.{name}", getattr(self, name))
        check_number("Gemma3Pictures.least_ratio", self.least_ratio, above=0)

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3Pictures":
        """From the files of a directory. Whether to pan and scan is no setting of these in transformers either."""
        fields = settings.pictures
        begin = settings.token("boi_token", "<start_of_image>")
        return cls(
            size=read_square(fields, "size", 224),
            resample=read_resample(fields, BILINEAR),
            colours=read_colours(fields, HALVES, HALVES),
            tokens=settings.processor.integer("image_seq_length", 256),
            placeholder=begin,
            begin=begin,
            token=settings.token("image_token", "<image_soft_token>"),
            end=settings.token("eoi_token", "<end_of_image>"),
        )

    def one(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> Seen:
        """`pixel_values`: the picture, and its parts."""
        parts = [pixels, *self._crops(pixels)]
        check_tokens(where, self.tokens * len(parts))
        values = [self.colours(resize(part, self.size, self.resample, limits, where)) for part in parts]
        own = f"\n\n{self.begin}{self.token * self.tokens}{self.end}\n\n"
        text = own
        if len(parts) > 1:
            crops = " ".join([own] * (len(parts) - 1))
            text = f"Here is the original image {own} and here are some crops to help you see better {crops}"
        return Seen({"pixel_values": np.stack(values)}, text)

    def join(self, seen: Sequence[Seen]) -> dict[str, np.ndarray]:
        """`[pictures, 3, height, width]`."""
        return joined(seen)

    def _crops(self, pixels: np.ndarray) -> list[np.ndarray]:
        height, width = pixels.shape[:2]
        long, short = max(height, width), min(height, width)
        if not self.pan_and_scan or long / short < self.least_ratio:
            return []
        count = min(long // self.least_crop, math.floor(long / short + 0.5))
        count = min(max(count, 2), self.most_crops)
        side = math.ceil(long / count)
        if min(side, short) < self.least_crop:
            return []
        cuts = [slice(side * number, side * (number + 1)) for number in range(count)]
        return [pixels[:, cut] if width >= height else pixels[cut] for cut in cuts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Pictures:
    """A picture keeps its shape, and has at most `tokens` squares of `merge x merge` patches.

    **Arguments:**

    - `size`: of a patch.
    - `merge`: as many patches, in rows and columns, become one token.
    - `placeholder`, `token`, `begin`, `end`: texts of the special tokens.
    """

    size: int = 16
    merge: int = 3
    tokens: int = 280
    resample: int = BICUBIC
    colours: Colours = Colours(mean=None, std=None)
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    begin: str = "<|image>"
    end: str = "<image|>"

    def __post_init__(self):
        for name in ("size", "merge", "tokens"):
            check_integer(f"Gemma4Pictures.{name}", getattr(self, name))

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4Pictures":
        """From the files of a directory."""
        fields, token = settings.pictures, settings.token("image_token", "<|image|>")
        return cls(
            size=fields.integer("patch_size", 16),
            merge=fields.integer("pooling_kernel_size", 3),
            tokens=fields.integer("max_soft_tokens", 280),
            resample=read_resample(fields, BICUBIC),
            colours=read_colours(fields, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalised=False),
            placeholder=token,
            token=token,
            begin=settings.token("boi_token", "<|image>"),
            end=settings.token("eoi_token", "<image|>"),
        )

    def one(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> Seen:
        """`pixel_values` and `image_position_ids` of the picture, padded with 0 and -1."""
        limits.check_pixels(where, self.tokens * self.merge**2, self.size**2)
        check_tokens(where, self.tokens)
        pixels = self.resized(pixels, limits, where)
        patches, positions, tokens = self.patches(self.colours(pixels))
        arrays = {"pixel_values": patches[None], "image_position_ids": positions[None]}
        return Seen(arrays, f"{self.begin}{self.token * tokens}{self.end}")

    def join(self, seen: Sequence[Seen]) -> dict[str, np.ndarray]:
        """`[pictures, patches, numbers]`, `[pictures, patches, 2]`."""
        return joined(seen)

    def resized(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> np.ndarray:
        """The largest picture of about the same shape that has no more patches."""
        target = self.target(pixels.shape[0], pixels.shape[1], where)
        return pixels if target == pixels.shape[:2] else resize(pixels, target, self.resample, limits, where)

    def target(self, height: int, width: int, where: str) -> tuple[int, int]:
        """The height and width to which it is resized: multiples of `merge * size`."""
        side, most = self.merge * self.size, self.tokens * self.merge**2 * self.size**2
        factor = math.sqrt(most / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        check(rows + columns > 0, f"{where}: {width} x {height} pixels leave nothing of a picture.", DataError)
        if rows == 0:
            rows, columns = 1, min(width // height, self.tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.tokens), 1
        return rows * side, columns * side

    def patches(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Patches `[most, numbers]`, where they stand (column, row), and how many tokens they become."""
        rows, columns = (length // self.size for length in values.shape[1:])
        split = values.reshape(3, rows, self.size, columns, self.size).transpose(1, 3, 2, 4, 0)
        place = np.arange(rows * columns)
        more = ((0, self.tokens * self.merge**2 - rows * columns), (0, 0))
        patches = np.pad(split.reshape(rows * columns, -1), more)
        positions = np.stack([place % columns, place // columns], axis=1)
        return patches, np.pad(positions, more, constant_values=-1), rows * columns // self.merge**2
