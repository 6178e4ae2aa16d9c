"""Images from files: decoded with Pillow, with bounds, as arrays of red, green and blue.

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

from eqx_decoders.errors import DataError, check, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.limits import MediaLimits


# Formats whose decoders run nothing else (EPS starts Ghostscript) and whose headers tell the size that is decoded.
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MOST_SHOWN = 120  # characters of a name in an error message

Pixels = UInt8[np.ndarray, "height width 3"]


def name_of(source: Any, kind: str, number: int) -> str:
    """Return the name of a file in errors: its path, or its number among the files."""
    named = isinstance(source, str | Path)
    return f"{kind} {str(source)[:MOST_SHOWN]!r}" if named else f"{kind} {number + 1} ({type(source).__name__})"


def open_image(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Pixels:
    """Return the pixels of an image, `[height, width, 3]`, 0 to 255.

    An animated image gives its first frame. Raises DataError, with the file's name, for files that are no image of a
    known format, or have more pixels than `limits` allow, before these are decoded.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `PIL.Image`, or an array of 8-bit integers, `[height, width]` or with
        1, 3 or 4 channels (the last of four is transparency), first or last.
    - `where`: its name in errors.
    """
    where = name_of(source, "image", 0) if where is None else where
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, where)
    pillow = _pillow()
    if isinstance(source, pillow.Image):
        with _as_data_error(where):
            limits.check_pixels(where, *source.size)
            return _to_rgb(pillow, source, where)
    with _opened(pillow, source, limits, where) as image:
        has_16_bits = any(";16" in str(tile[3]) for tile in image.tile)
        image.load()
        if image.mode == "I" and image.format in ("PPM", "PNG"):  # gray levels of 16 bits
            levels = pillow.fromarray(np.asarray(image).clip(0, 65535).astype(np.uint16))
            levels.info.update(image.info)
            return _to_rgb(pillow, _upright(levels), where)
        return _to_rgb(pillow, _upright(image), where, has_16_bits)


def image_size(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> tuple[int, int]:
    """Return width and height of a source of `open_image`, from its header; the errors are the same."""
    where = name_of(source, "image", 0) if where is None else where
    pillow = _pillow()
    if isinstance(source, np.ndarray):
        height, width = _from_array(source, limits, where).shape[:2]
        return width, height
    if isinstance(source, pillow.Image):
        return source.size
    with _opened(pillow, source, limits, where) as image:
        return image.size


@contextmanager
def _opened(pillow: Any, source: Any, limits: MediaLimits, where: str) -> Iterator[Any]:
    """Open an image whose header is read, and checked."""
    rule = "must be a path, bytes, a PIL.Image or an array of 8-bit integers"
    check(isinstance(source, str | Path | bytes), f"{where} {rule}.", DataError)
    if isinstance(source, str | Path):
        check_file(source, where)
    with _as_data_error(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which are checked here, and of damaged EXIF data
        pillow.init()
        known = [name for name in FORMATS if name in pillow.OPEN]
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with pillow.open(stream, formats=known) as image:
            limits.check_pixels(where, *image.size)
            yield image


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("pillow", "media") from error
    return Image


def _cause(error: Exception) -> str:
    """Return Pillow's message."""
    return "it begins like none of them" if str(error).startswith("cannot identify") else str(error)


_as_data_error = functools.partial(
    as_data_error, kind="image", formats=FORMATS, smaller="make it smaller", cause=_cause
)


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _to_rgb(pillow: Any, image: Any, where: str, has_16_bits: bool = False) -> np.ndarray:
    """Return the colors of an image, composited on white. `has_16_bits`: the file has 16 bits per color."""
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
        grey = np.round(levels / 257).astype(np.uint8)
        image = pillow.fromarray(np.stack([grey, alpha.astype(np.uint8)], -1), "LA")
    if {"A", "a"} & set(image.getbands()) or transparent is not None:
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        white = pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def composite_on_white(pixels: np.ndarray) -> np.ndarray:
    """Composite pixels with an alpha channel, `[height, width, 4]`, on white."""
    alpha = pixels[:, :, 3:] / 255
    return np.round(alpha * pixels[:, :, :3] + (1 - alpha) * 255).astype(np.uint8)


def _from_array(pixels: np.ndarray, limits: MediaLimits, where: str) -> np.ndarray:
    rule = "must have 8-bit integers, [height, width] or with 1, 3 or 4 channels first or last"
    good = pixels.dtype == np.uint8 and pixels.ndim in (2, 3)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif good and pixels.shape[0] in (1, 3, 4):
        pixels = np.moveaxis(pixels, 0, -1)
    good = good and pixels.shape[-1] in (1, 3, 4)
    check(good, f"{where} of shape {pixels.shape}, {pixels.dtype} {rule}.", DataError)
    height, width, channels = pixels.shape
    limits.check_pixels(where, width, height)
    if channels == 4:
        pixels = composite_on_white(pixels)
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3)))
