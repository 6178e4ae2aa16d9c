"""Normalization of 8-bit pixels, by lookup in a table of the 256 values of each color."""

import dataclasses
import functools
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import CheckedFields, ConversionError


Triple = tuple[float, float, float]
Rounding = Literal["separate", "fused", "bfloat16"]

HALVES: Triple = (0.5, 0.5, 0.5)  # mean and std that map 0 to 1 to -1 to 1
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalization(CheckedFields):
    """Normalization of pixels: `(x * factor - mean) / std` for x from 0 to 255.

    **Arguments:**

    - `factor`: factor by which pixels are rescaled; None: 1.
    - `mean`, `std`: mean and standard deviation of red, green and blue; None: pixels are only rescaled.
    - `rounding`: how intermediate results are rounded. "separate": each step to float32. "fused":
        `(x - mean / factor) / (std / factor)` in float32, or `x * factor` in float32 without `mean` and `std`.
        "bfloat16": each step to bfloat16.
    """

    factor: float | None = 1 / 255
    mean: Triple | None = HALVES
    std: Triple | None = HALVES
    rounding: Rounding = "separate"

    def __call__(self, pixels: UInt8[np.ndarray, "height width 3"]) -> Float[np.ndarray, "3 height width"]:
        """Return the normalized pixels in float32, with the color axis first."""
        return np.stack([table[pixels[:, :, channel]] for channel, table in enumerate(self._tables)])

    @functools.cached_property
    def _tables(self) -> Float[np.ndarray, "3 256"]:
        raw = np.tile(np.arange(256), (3, 1))
        if self.rounding == "bfloat16":
            return self._bfloat16_tables(raw)
        mean = None if self.mean is None else np.asarray(self.mean, np.float32)[:, None]
        std = None if self.std is None else np.asarray(self.std, np.float32)[:, None]
        if self.rounding == "fused" and self.factor is not None:
            if mean is None:
                return raw.astype(np.float32) * np.float32(self.factor)
            if std is not None:
                inverse_factor = np.float32(1 / self.factor)
                return (raw.astype(np.float32) - mean * inverse_factor) / (std * inverse_factor)
        values = raw.astype(np.float32) if self.factor is None else (raw * self.factor).astype(np.float32)
        return values if mean is None or std is None else (values - mean) / std

    def _bfloat16_tables(self, raw: np.ndarray) -> Float[np.ndarray, "3 256"]:
        def to_bfloat16(x: Any) -> np.ndarray:
            return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

        values = to_bfloat16(raw)
        if self.factor is not None:
            values = to_bfloat16(values * np.float32(self.factor))
        if self.mean is None or self.std is None:
            return values
        mean = to_bfloat16(self.mean)[:, None]
        std = to_bfloat16(self.std)[:, None]
        return to_bfloat16(to_bfloat16(values - mean) / std)


def read_normalization(
    fields: Fields, mean: Triple, std: Triple, *, normalize: bool = True, rounding: Rounding = "separate"
) -> Normalization:
    """Read the normalization from the settings of a processor.

    `mean`, `std` and `normalize` are the defaults of `image_mean`, `image_std` and `do_normalize`.
    """
    factor = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else None
    mean = _read_triple(fields, "image_mean", mean)
    std = _read_triple(fields, "image_std", std)
    if not fields.flag("do_normalize", normalize):
        return Normalization(factor=factor, mean=None, std=None, rounding=rounding)
    if not all(std):
        raise ConversionError(f"{fields.where}: image_std={list(std)} must not contain 0.")
    return Normalization(factor=factor, mean=mean, std=std, rounding=rounding)


def _read_triple(fields: Fields, key: str, default: Triple) -> Triple:
    value = fields.take(key, default)
    value = [value] * 3 if isinstance(value, int | float) else value
    is_valid = isinstance(value, list | tuple) and all(type(x) in (int, float) and abs(x) < 1e6 for x in value)
    if not is_valid or len(value) != 3:
        raise fields.error(f"{key}={abbreviate(value)} must be a list of 3 numbers, for red, green and blue.")
    red, green, blue = map(float, value)
    return red, green, blue
