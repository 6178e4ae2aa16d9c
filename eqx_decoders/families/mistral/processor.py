"""Images of Pixtral and Mistral 3: rows of patches, with a special token after each row."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveInt
from eqx_decoders.media_files.base import ProcessedFile, Settings, check_tokens, read_resample, read_size
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, resize


_MAX_PADDED_PIXELS = 1 << 29  # maximum pixels of all images of a prompt, padded to one size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixtralImageProcessor(CheckedFields):
    """Images of Pixtral: shrunk to at most `max_size`, and resized to multiples of the size of a token.

    **Arguments:**

    - `max_size`: maximum height and width in pixels.
    - `patch_size`: height and width of a patch in pixels.
    - `merge_size`: number of rows and of columns of patches that are merged into one token.
    - `placeholder`: image token, which is repeated once per token.
    - `break_token`: special token after each row of tokens except the last.
    - `end_token`: special token after the last row.
    """

    max_size: tuple[int, int] = (1024, 1024)
    patch_size: PositiveInt = 16
    merge_size: PositiveInt = 1
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    placeholder: str = "[IMG]"
    break_token: str = "[IMG_BREAK]"
    end_token: str = "[IMG_END]"

    @classmethod
    def read(cls, settings: Settings) -> "PixtralImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        processor = settings.processor
        fields.allow_only("do_pad", True)
        size = read_size(fields, "size", {"longest_edge": 1024})
        longest_edge = size.get("longest_edge")
        if longest_edge is None and not {"height", "width"} <= size.keys():
            raise fields.error(f"size={size} must have the key longest_edge, or the keys height and width.")
        return cls(
            max_size=(size["height"], size["width"]) if longest_edge is None else (longest_edge, longest_edge),
            patch_size=processor.integer("patch_size", 16),
            merge_size=processor.integer("spatial_merge_size", 1),
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            placeholder=settings.token("image_token", "[IMG]"),
            break_token=settings.token("image_break_token", "[IMG_BREAK]"),
            end_token=settings.token("image_end_token", "[IMG_END]"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `[1, 3, height, width]`, and `image_sizes`, `[1, 2]`: height and width."""
        rows, columns = self._token_grid(*pixels.shape[:2])
        check_tokens(where, rows * (columns + 1))
        unit = self.patch_size * self.merge_size
        values = self.normalization(resize(pixels, (rows * unit, columns * unit), self.resample, limits, where))
        row_text = self.placeholder * columns
        text = (row_text + self.break_token) * (rows - 1) + row_text + self.end_token
        return ProcessedFile({"pixel_values": values[None], "image_sizes": np.array([values.shape[1:]])}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, 3, height, width]`, and `image_sizes`, `[images, 2]`.

        Smaller images are padded with 0 at the bottom and on the right. Raises DataError if the padded images have too
        many pixels.
        """
        if not files:
            return {}
        sizes = np.concatenate([file.arrays["image_sizes"] for file in files])
        height, width = sizes.max(axis=0).tolist()
        num_pixels = len(files) * height * width
        if num_pixels > _MAX_PADDED_PIXELS:
            raise DataError(
                f"{len(files)} images, padded to {width} x {height}, have {num_pixels:,} pixels. The maximum is "
                f"{_MAX_PADDED_PIXELS:,}. Pass fewer images, or images of similar aspect ratios."
            )
        values = np.zeros((len(files), 3, height, width), np.float32)
        for padded, file in zip(values, files, strict=True):
            image = file.arrays["pixel_values"][0]
            padded[:, : image.shape[1], : image.shape[2]] = image
        return {"pixel_values": values, "image_sizes": sizes}

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of tokens."""
        unit = self.patch_size * self.merge_size
        ratio = max(height / self.max_size[0], width / self.max_size[1])
        if ratio > 1:
            height = math.floor(height / ratio)
            width = math.floor(width / ratio)
        return max(1, -(-height // unit)), max(1, -(-width // unit))
