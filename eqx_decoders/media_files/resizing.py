"""Resizing of 8-bit images: by Pillow, or as PyTorch does, whose weights have fewer bits."""

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, UInt8

from eqx_decoders.encoders.geometry import cubic_weights
from eqx_decoders.media_files.limits import MediaLimits


Pixels = UInt8[np.ndarray, "height width 3"]
Size = tuple[int, int]  # height and width

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers, which processors' settings use
FILTERS = {0: "nearest", LANCZOS: "lanczos", BILINEAR: "bilinear", BICUBIC: "bicubic", 4: "box", 5: "hamming"}
ROWS_AT_ONCE = 1 << 22  # numbers in the sums of a block of rows


Resized = UInt8[np.ndarray, "new_height new_width 3"]


def resize(pixels: Pixels, size: Size, resample: int, limits: MediaLimits, where: str) -> Resized:
    """Resize the image to `size = (height, width)` by Pillow, whose number of the filter is `resample`."""
    from PIL import Image

    limits.check_resizing(where, pixels.shape[:2], size)
    return np.array(Image.fromarray(pixels).resize((size[1], size[0]), resample=Image.Resampling(resample)))


def resize_with_short_weights(pixels: Pixels, size: Size, resample: int, limits: MediaLimits, where: str) -> Resized:
    """Resize as PyTorch's `interpolate(..., antialias=True)` does 8-bit images on a CPU with AVX2.

    Rows and then columns: `sum_k w_k x_k` in whole numbers, each weight having 16 bits, rounded to 8 bits in between.
    """
    limits.check_resizing(where, pixels.shape[:2], size)
    if size[1] != pixels.shape[1]:
        pixels = _along_rows(pixels, size[1], resample)
    if size[0] != pixels.shape[0]:
        pixels = _along_rows(pixels.swapaxes(0, 1), size[0], resample).swapaxes(0, 1)
    return np.ascontiguousarray(pixels)


def resize_cubic(values: Float[np.ndarray, "3 height width"], size: Size) -> Float[np.ndarray, "3 rows columns"]:
    """Resize numbers as PyTorch's `interpolate(mode="bicubic")` does: between 4 x 4 neighbors, whatever the sizes."""
    for axis, new in ((2, size[1]), (1, size[0])):
        old = values.shape[axis]
        place = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * np.float32(old / new) - np.float32(0.5)
        taps = np.floor(place).astype(np.int64)[:, None] + np.arange(-1, 3)
        weights = cubic_weights(np.abs(place[:, None] - taps))
        taken = np.take(values, np.clip(taps, 0, old - 1), axis=axis)
        shape = [1] * taken.ndim
        shape[axis : axis + 2] = weights.shape
        values = (taken * weights.reshape(shape).astype(np.float32)).sum(axis=axis + 1)
    return values


def _along_rows(pixels: np.ndarray, size: int, resample: int) -> np.ndarray:
    """Resize each row to `size` pixels; some rows at a time, since sums take four times as much memory."""
    first, weights, bits = _short_weights(pixels.shape[1], size, resample)
    resized = np.empty((pixels.shape[0], size, pixels.shape[2]), np.uint8)
    step = max(1, ROWS_AT_ONCE // (size * pixels.shape[2]))
    for begin in range(0, pixels.shape[0], step):
        rows = pixels[begin : begin + step]
        total = np.full((len(rows), *resized.shape[1:]), 1 << (bits - 1), np.int32)
        for tap, weight in enumerate(weights):
            columns = np.minimum(first + tap, pixels.shape[1] - 1)  # those beyond have the weight 0
            total += rows[:, columns] * weight[:, None]
        resized[begin : begin + step] = np.clip(total >> bits, 0, 255)
    return resized


@functools.lru_cache(maxsize=64)
def _short_weights(old: int, new: int, resample: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return, for each new pixel, the first old one, integer weights `[taps, new]`, and their binary digits."""
    reach, kernel = _KERNELS[resample]
    scale = old / new
    support = reach * max(scale, 1.0)
    center = scale * (np.arange(new) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), old) - first
    taps = math.ceil(support) * 2 + 1
    count = np.clip(count, 0, taps)
    tap = np.arange(taps)[:, None]
    weights = np.where(tap < count, kernel((tap + first - center + 0.5) / max(scale, 1.0)), 0.0)
    weights = weights / weights.sum(axis=0)
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    whole = np.trunc(weights * (1 << bits) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return first, whole, bits


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


_KERNELS: dict[int, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    BILINEAR: (1.0, _triangle),
    BICUBIC: (2.0, _cubic),
    LANCZOS: (3.0, _lanczos),
}
SHORT = tuple(_KERNELS)  # filters of `resize_with_short_weights`
