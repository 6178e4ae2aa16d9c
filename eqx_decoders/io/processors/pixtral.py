"""Images of Pixtral and Mistral 3: patches in lines, each with a token at its end."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import DataError, check, check_integer
from eqx_decoders.io.processors.base import ProcessedFile, Settings, check_tokens, read_resample, read_size
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.normalize import CLIP_MEAN, CLIP_STD, Normalization, read_colours
from eqx_decoders.io.processors.resizing import BICUBIC, resize


MOST_PADDED = 1 << 29  # pixels of all images of a prompt together, as they are padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImages:
    """An image keeps its shape; its longer side has at most one length, and both are multiples of a token's.

    **Arguments:**

    - `longest`: most pixels of its height, and of its width.
    - `size`: of a patch.
    - `merge`: as many patches, in rows and columns, become one token.
    - `placeholder`: the text of the special token, which is repeated; `next_line` and `end` stand behind lines.
    """

    longest: tuple[int, int] = (1024, 1024)
    size: int = 16
    merge: int = 1
    resample: int = BICUBIC
    colours: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    placeholder: str = "[IMG]"
    next_line: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    def __post_init__(self):
        for name in ("size", "merge"):
            check_integer(f"PixtralImages.{name}", getattr(self, name))

    @classmethod
    def read(cls, settings: Settings) -> "PixtralImages":
        """From the files of a directory."""
        fields, processor = settings.images, settings.processor
        fields.allow_only("do_pad", True)
        size = read_size(fields, "size", {"longest_edge": 1024})
        longest = size.get("longest_edge")
        if longest is None and not {"height", "width"} <= size.keys():
            raise fields.error(f"size={size} must have longest_edge, or height and width.")
        return cls(
            longest=(size["height"], size["width"]) if longest is None else (longest, longest),
            size=processor.integer("patch_size", 16),
            merge=processor.integer("spatial_merge_size", 1),
            resample=read_resample(fields, BICUBIC),
            colours=read_colours(fields, CLIP_MEAN, CLIP_STD),
            placeholder=settings.token("image_token", "[IMG]"),
            next_line=settings.token("image_break_token", "[IMG_BREAK]"),
            end=settings.token("image_end_token", "[IMG_END]"),
        )

    def one(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """`pixel_values` of the image, and `image_sizes`: its height and width."""
        rows, columns = self._tokens(*pixels.shape[:2])
        check_tokens(where, rows * (columns + 1))
        side = self.size * self.merge
        values = self.colours(resize(pixels, (rows * side, columns * side), self.resample, limits, where))
        line = self.placeholder * columns
        text = (line + self.next_line) * (rows - 1) + line + self.end
        return ProcessedFile({"pixel_values": values[None], "image_sizes": np.array([values.shape[1:]])}, text)

    def join(self, seen: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """`[images, 3, height, width]`, padded with 0 below and on the right; `[images, 2]`."""
        if not seen:
            return {}
        sizes = np.concatenate([one.arrays["image_sizes"] for one in seen])
        height, width = sizes.max(axis=0).tolist()
        count = len(seen) * height * width
        rule = f"more than {MOST_PADDED:,}. Give fewer, or images of like shapes"
        check(
            count <= MOST_PADDED, f"{len(seen)} images, padded to one size, have {count:,} pixels: {rule}.", DataError
        )
        values = np.zeros((len(seen), 3, height, width), np.float32)
        for row, one in zip(values, seen, strict=True):
            own = one.arrays["pixel_values"][0]
            row[:, : own.shape[1], : own.shape[2]] = own
        return {"pixel_values": values, "image_sizes": sizes}

    def _tokens(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens."""
        ratio, side = max(height / self.longest[0], width / self.longest[1]), self.size * self.merge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(1, -(-height // side)), max(1, -(-width // side))
