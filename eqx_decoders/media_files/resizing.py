"""Resizing of images with the filters of Pillow or PyTorch."""

import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, UInt8

from eqx_decoders.encoders.geometry import cubic_weights
from eqx_decoders.media_files.limits import MediaLimits


Pixels = UInt8[np.ndarray, "height width 3"]
Resized = UInt8[np.ndarray, "new_height new_width 3"]
Size = tuple[int, int]  # height and width

# Values of `PIL.Image.Resampling`, which the settings of processors use
LANCZOS = 1
BILINEAR = 2
BICUBIC = 3
FILTERS = {0: "nearest", LANCZOS: "lanczos", BILINEAR: "bilinear", BICUBIC: "bicubic", 4: "box", 5: "hamming"}
_MAX_ACCUMULATORS = 1 << 22  # maximum int32 accumulators of the rows that are resized at a time


def resize(pixels: Pixels, size: Size, resample: int, limits: MediaLimits, where: str) -> Resized:
    """Resize an image to `size = (height, width)` with Pillow and the filter `resample`.

    Raises DataError, with the image's name `where`, if this needs more pixels than `limits` allow.
    """
    from PIL import Image

    limits.check_resize(where, pixels.shape[:2], size)
    return np.array(Image.fromarray(pixels).resize((size[1], size[0]), resample=Image.Resampling(resample)))


def resize_fixed_point(pixels: Pixels, size: Size, resample: int, limits: MediaLimits, where: str) -> Resized:
    """Resize an image to `size = (height, width)` as PyTorch's `interpolate(..., antialias=True)`.

    The result equals PyTorch's for 8-bit images on a CPU with AVX2: a sum over the taps of `weight * pixel` in
    integers, with 16-bit weights. The width is resized first, and the intermediate image is rounded to 8 bits. Raises
    DataError, with the image's name `where`, if this needs more pixels than `limits` allow.
    """
    limits.check_resize(where, pixels.shape[:2], size)
    if size[1] != pixels.shape[1]:
        pixels = _resize_rows(pixels, size[1], resample)
    if size[0] != pixels.shape[0]:
        pixels = _resize_rows(pixels.swapaxes(0, 1), size[0], resample).swapaxes(0, 1)
    return np.ascontiguousarray(pixels)


def resize_cubic(
    values: Float[np.ndarray, "3 height width"], size: Size
) -> Float[np.ndarray, "3 new_height new_width"]:
    """Resize an array to `size = (height, width)` as PyTorch's `interpolate(mode="bicubic")`.

    There is no antialiasing: each result depends on 4 x 4 neighbors, for any ratio of the sizes.
    """
    for axis, new_size in ((2, size[1]), (1, size[0])):
        old_size = values.shape[axis]
        offsets = np.arange(new_size, dtype=np.float32) + np.float32(0.5)
        centers = offsets * np.float32(old_size / new_size) - np.float32(0.5)
        taps = np.floor(centers).astype(np.int64)[:, None] + np.arange(-1, 3)
        weights = cubic_weights(np.abs(centers[:, None] - taps))
        neighbors = np.take(values, np.clip(taps, 0, old_size - 1), axis=axis)
        shape = [1] * neighbors.ndim
        shape[axis : axis + 2] = weights.shape
        values = (neighbors * weights.reshape(shape).astype(np.float32)).sum(axis=axis + 1)
    return values


def _resize_rows(pixels: np.ndarray, size: int, resample: int) -> np.ndarray:
    """Resize each row to `size` pixels, some rows at a time, because accumulators need 4 times the memory of pixels."""
    first, weights, bits = _fixed_point_weights(pixels.shape[1], size, resample)
    resized = np.empty((pixels.shape[0], size, pixels.shape[2]), np.uint8)
    step = max(1, _MAX_ACCUMULATORS // (size * pixels.shape[2]))
    for start in range(0, pixels.shape[0], step):
        rows = pixels[start : start + step]
        total = np.full((len(rows), *resized.shape[1:]), 1 << (bits - 1), np.int32)
        for tap, weight in enumerate(weights):
            columns = np.minimum(first + tap, pixels.shape[1] - 1)  # the weight of a clipped column is 0
            total += rows[:, columns] * weight[:, None]
        resized[start : start + step] = np.clip(total >> bits, 0, 255)
    return resized


@functools.lru_cache(maxsize=64)
def _fixed_point_weights(old_size: int, new_size: int, resample: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the index of the first old pixel of each new pixel, weights, and the number of fractional bits.

    Weights are integers, `[taps, new_size]`.
    """
    radius, kernel = _KERNELS[resample]
    scale = old_size / new_size
    support = radius * max(scale, 1.0)
    center = scale * (np.arange(new_size) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), old_size) - first
    taps = math.ceil(support) * 2 + 1
    count = np.clip(count, 0, taps)
    tap = np.arange(taps)[:, None]
    weights = np.where(tap < count, kernel((tap + first - center + 0.5) / max(scale, 1.0)), 0.0)
    weights = weights / weights.sum(axis=0)
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    fixed_point = np.trunc(weights * (1 << bits) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return first, fixed_point, bits


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray, a: float = -0.5) -> np.ndarray:
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


# radius in pixels, and the filter
_KERNELS: dict[int, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    BILINEAR: (1.0, _triangle),
    BICUBIC: (2.0, _cubic),
    LANCZOS: (3.0, _lanczos),
}
FIXED_POINT_FILTERS = tuple(_KERNELS)  # filters that `resize_fixed_point` supports
