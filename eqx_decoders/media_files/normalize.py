"""Conversion of 8-bit colors to an encoder's numbers, by lookup: each color has 256 values."""

import dataclasses
import functools
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import CheckedFields, ConversionError, check


Triple = tuple[float, float, float]

HALVES: Triple = (0.5, 0.5, 0.5)
CLIP_MEAN: Triple = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Triple = (0.26862954, 0.26130258, 0.27577711)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Normalization(CheckedFields):
    """Normalization of colors: `(x * factor - mean) / std`, x being 0 to 255.

    **Arguments:**

    - `factor`: scale of the colors; None for 1.
    - `mean`, `std`: of red, green and blue; None for no such step.
    - `steps`: rounding of the numbers: `"separate"`, each step to float32; `"joint"`, as `(x - mean / factor) /
        (std / factor)` in float32, or `x * factor` alone; or `"bfloat16"`, each step to that.
    """

    factor: float | None = 1 / 255
    mean: Triple | None = HALVES
    std: Triple | None = HALVES
    steps: Literal["separate", "joint", "bfloat16"] = "separate"

    def __call__(self, pixels: UInt8[np.ndarray, "height width 3"]) -> Float[np.ndarray, "3 height width"]:
        """Return the numbers, float32, colors first."""
        return np.stack([table[pixels[:, :, channel]] for channel, table in enumerate(self._tables)])

    @functools.cached_property
    def _tables(self) -> np.ndarray:
        raw = np.tile(np.arange(256), (3, 1))
        if self.steps == "bfloat16":
            return self._in_bfloat16(raw)
        mean, std = (None if x is None else np.asarray(x, np.float32)[:, None] for x in (self.mean, self.std))
        if self.steps == "joint" and self.factor is not None and mean is not None and std is not None:
            whole = np.float32(1 / self.factor)
            return (raw.astype(np.float32) - mean * whole) / (std * whole)
        if self.steps == "joint" and self.factor is not None and mean is None:
            return raw.astype(np.float32) * np.float32(self.factor)
        values = raw.astype(np.float32) if self.factor is None else (raw * self.factor).astype(np.float32)
        return values if mean is None or std is None else (values - mean) / std

    def _in_bfloat16(self, raw: np.ndarray) -> np.ndarray:
        def rounded(x: Any) -> np.ndarray:
            return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)

        values = rounded(raw) if self.factor is None else rounded(rounded(raw) * np.float32(self.factor))
        if self.mean is None or self.std is None:
            return values
        mean, std = (rounded(x)[:, None] for x in (self.mean, self.std))
        return rounded(rounded(values - mean) / std)


def read_normalization(
    fields: Fields, mean: Triple, std: Triple, *, normalize: bool = True, **steps: Any
) -> Normalization:
    """Read the settings of a processor; `mean`, `std` and `normalize` are the defaults."""
    factor = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else None
    mean, std = _triple(fields, "image_mean", mean), _triple(fields, "image_std", std)
    if not fields.flag("do_normalize", normalize):
        return Normalization(factor=factor, mean=None, std=None, **steps)
    check(all(std), f"{fields.where}: image_std={list(std)} must not be 0.", ConversionError)
    return Normalization(factor=factor, mean=mean, std=std, **steps)


def _triple(fields: Fields, key: str, default: Triple) -> Triple:
    value = fields.take(key, default)
    value = [value] * 3 if isinstance(value, int | float) else value
    number = isinstance(value, list | tuple) and all(type(one) in (int, float) and abs(one) < 1e6 for one in value)
    if not number or len(value) != 3:
        raise fields.error(f"{key}={abbreviate(value)} must be three numbers: for red, green and blue.")
    red, green, blue = map(float, value)
    return red, green, blue
