"""Images of Pixtral and Mistral 3: patches in lines, each with a token at its end."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveInt, check
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, read_resample, read_size
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, resize


MOST_PADDED = 1 << 29  # pixels of all images of a prompt together, as they are padded


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImages(CheckedFields):
    """Images of Pixtral, which keep their shape, with bounded sides that are multiples of those of a token.

    **Arguments:**

    - `longest`: largest height and width, in pixels.
    - `size`: rows and columns of pixels in a patch.
    - `merge`: rows and columns of patches that become one token.
    - `placeholder`: text of the special token, which is repeated; `next_line` and `end` stand behind lines.
    """

    longest: tuple[int, int] = (1024, 1024)
    size: PositiveInt = 16
    merge: PositiveInt = 1
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    placeholder: str = "[IMG]"
    next_line: str = "[IMG_BREAK]"
    end: str = "[IMG_END]"

    @classmethod
    def read(cls, settings: Settings) -> "PixtralImages":
        """Read the rules from the settings of a directory."""
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
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            placeholder=settings.token("image_token", "[IMG]"),
            next_line=settings.token("image_break_token", "[IMG_BREAK]"),
            end=settings.token("image_end_token", "[IMG_END]"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values` of the image, and `image_sizes`: its height and width."""
        rows, columns = self._tokens(*pixels.shape[:2])
        check_tokens(where, rows * (columns + 1))
        side = self.size * self.merge
        values = self.normalization(resize(pixels, (rows * side, columns * side), self.resample, limits, where))
        line = self.placeholder * columns
        text = (line + self.next_line) * (rows - 1) + line + self.end
        return ProcessedFile({"pixel_values": values[None], "image_sizes": np.array([values.shape[1:]])}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, 3, height, width]`, padded with 0 below and on the right; `[images, 2]`."""
        if not files:
            return {}
        sizes = np.concatenate([one.arrays["image_sizes"] for one in files])
        height, width = sizes.max(axis=0).tolist()
        count = len(files) * height * width
        rule = f"more than {MOST_PADDED:,}. Give fewer, or images of like shapes"
        check(
            count <= MOST_PADDED, f"{len(files)} images, padded to one size, have {count:,} pixels: {rule}.", DataError
        )
        values = np.zeros((len(files), 3, height, width), np.float32)
        for row, one in zip(values, files, strict=True):
            image = one.arrays["pixel_values"][0]
            row[:, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": values, "image_sizes": sizes}

    def _tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens."""
        ratio, side = max(height / self.longest[0], width / self.longest[1]), self.size * self.merge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return max(1, -(-height // side)), max(1, -(-width // side))
