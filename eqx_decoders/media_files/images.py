"""Decoding of images to RGB arrays with Pillow, with limits on their size.

Images with transparency are composited on white, whether the source is a file, bytes, a `PIL.Image` or an array. The
EXIF orientation of a file is applied; a `PIL.Image` or an array is not rotated.
"""

import functools
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.errors import DataError, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.limits import MediaLimits


# Formats whose decoders start no other program (as EPS starts Ghostscript) and whose headers contain the decoded size.
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_MAX_NAME = 120  # maximum characters of a file's name in an error message

Pixels = UInt8[np.ndarray, "height width 3"]


def name_of(source: Any, kind: str, index: int) -> str:
    """Return the name of a file in error messages: its path if it has one, otherwise its number among the files."""
    if isinstance(source, str | Path):
        return f"{kind} {str(source)[:_MAX_NAME]!r}"
    return f"{kind} {index + 1} ({type(source).__name__})"


def open_image(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Pixels:
    """Decode an image to pixels from 0 to 255, `[height, width, 3]`.

    Returns the first frame of an animated image. Raises DataError for files that are not images in a supported format,
    and for images with more pixels than `limits` allow. The size is checked before the pixels are decoded.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `PIL.Image`, or an array of 8-bit integers. An array is
        `[height, width]`, or has an axis of 1, 3 or 4 channels, first or last; the fourth channel is alpha.
    - `limits`: maximum size of the image.
    - `where`: name of the image in error messages; None: the path or type of `source`.
    """
    where = name_of(source, "image", 0) if where is None else where
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, where)
    pillow = _import_pillow()
    if isinstance(source, pillow.Image):
        with _as_data_error(where):
            limits.check_pixels(where, *source.size)
            return _to_rgb(pillow, source, where)
    with _open_file(pillow, source, limits, where) as image:
        has_16_bits = any(";16" in str(tile[3]) for tile in image.tile)
        image.load()
        if image.mode == "I" and image.format in ("PPM", "PNG"):  # 16-bit grayscale
            levels = pillow.fromarray(np.asarray(image).clip(0, 65535).astype(np.uint16))
            levels.info.update(image.info)
            return _to_rgb(pillow, _apply_orientation(levels), where)
        return _to_rgb(pillow, _apply_orientation(image), where, has_16_bits)


def image_size(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> tuple[int, int]:
    """Return the width and height of an image from its header. Arguments and errors are the same as of `open_image`."""
    where = name_of(source, "image", 0) if where is None else where
    if isinstance(source, np.ndarray):
        height, width = _from_array(source, limits, where).shape[:2]
        return width, height
    pillow = _import_pillow()
    if isinstance(source, pillow.Image):
        limits.check_pixels(where, *source.size)
        return source.size
    with _open_file(pillow, source, limits, where) as image:
        return image.size


@contextmanager
def _open_file(pillow: Any, source: Any, limits: MediaLimits, where: str) -> Iterator[Any]:
    """Open an image and check the size in its header."""
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} must be a path, bytes, a PIL.Image or an array of 8-bit integers.")
    if isinstance(source, str | Path):
        check_file(source, where)
    with _as_data_error(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the size, which is checked here, and about damaged EXIF data
        pillow.init()
        formats = [name for name in FORMATS if name in pillow.OPEN]
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with pillow.open(stream, formats=formats) as image:
            limits.check_pixels(where, *image.size)
            yield image


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("pillow", "media") from error
    return Image


def _describe(error: Exception) -> str:
    """Return Pillow's message, without the address of a buffer."""
    return "unknown file signature" if str(error).startswith("cannot identify") else str(error)


_as_data_error = functools.partial(
    as_data_error, kind="image", formats=FORMATS, memory_remedy="Resize the image", describe=_describe
)


def _apply_orientation(image: Any) -> Any:
    """Rotate and flip an image by the orientation in its EXIF data."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _to_rgb(pillow: Any, image: Any, where: str, has_16_bits: bool = False) -> Pixels:
    """Convert an image to RGB, composited on white. `has_16_bits`: whether the file has 16 bits per color."""
    if image.mode in ("I", "F"):
        raise DataError(
            f"{where} has the Pillow mode {image.mode!r}, whose range of values is unknown. Convert it to 8 or 16 bits."
        )
    transparent = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(transparent, tuple) and (has_16_bits or max(transparent) > 255):
        transparent = tuple(level >> 8 for level in transparent)  # Pillow reduces only the pixels to 8 bits
        image = image.copy()
        image.info["transparency"] = transparent
    if image.mode.startswith("I;16"):  # Pillow would clip the values at 255
        levels = np.asarray(image).astype(np.uint16)
        alpha = np.where(levels == transparent, 0, 255) if isinstance(transparent, int) else np.full(levels.shape, 255)
        gray = np.round(levels / 257).astype(np.uint8)
        image = pillow.fromarray(np.stack([gray, alpha.astype(np.uint8)], -1), "LA")
    if {"A", "a"} & set(image.getbands()) or transparent is not None:
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def composite_on_white(pixels: UInt8[np.ndarray, "height width 4"]) -> Pixels:
    """Composite RGBA pixels on white."""
    alpha = pixels[:, :, 3:] / 255
    return np.round(alpha * pixels[:, :, :3] + (1 - alpha) * 255).astype(np.uint8)


def _from_array(pixels: np.ndarray, limits: MediaLimits, where: str) -> Pixels:
    shape = pixels.shape
    is_valid = pixels.dtype == np.uint8 and pixels.ndim in (2, 3)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif is_valid and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    if not is_valid or pixels.shape[-1] not in (1, 3, 4):
        raise DataError(
            f"{where} of shape {shape}, {pixels.dtype} must be an array of 8-bit integers, [height, width] or with an "
            "axis of 1, 3 or 4 channels, first or last."
        )
    height, width, channels = pixels.shape
    limits.check_pixels(where, width, height)
    if channels == 4:
        pixels = composite_on_white(pixels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3)))
