"""Pictures from files: decoded with Pillow, with bounds, as arrays of red, green and blue.

A file is turned upright as its EXIF data say, and then converted to RGB, which drops transparency but for that of one
colour: as transformers does with the name of a file. A `PIL.Image`, or an array, is taken as it stands, and put on
white where it is transparent: as transformers does with these.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.errors import DataError, MissingPackage, check, need_extra
from eqx_decoders.io.processors.limits import MediaLimits


# Formats whose decoders run nothing else (EPS starts Ghostscript) and whose headers tell the size that is decoded.
FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
SHOWN = 120  # characters of a name in an error message

Pixels = UInt8[np.ndarray, "height width 3"]


def name_of(source: Any, kind: str, number: int) -> str:
    """How errors call a file: its name, or which of the given ones it is."""
    named = isinstance(source, str | Path)
    return f"{kind} {str(source)[:SHOWN]!r}" if named else f"{kind} {number + 1} ({type(source).__name__})"


def open_picture(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Pixels:
    """The pixels of a picture, `[height, width, 3]`, 0 to 255.

    Of an animated picture it is the first frame. Raises DataError, with the file's name, for what is no sound picture
    of a known format, and for one that has more pixels than `limits` allow, before these are decoded.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `PIL.Image`, or an array of 8-bit integers, `[height, width]` or with
        1, 3 or 4 channels (the last of four is transparency), first or last.
    - `where`: how errors call it.
    """
    where = name_of(source, "picture", 0) if where is None else where
    if isinstance(source, np.ndarray):
        return _from_array(source, limits, where)
    pillow = _pillow()
    if isinstance(source, pillow.Image):
        with _as_data_error(where):
            limits.check_pixels(where, *source.size)
            return _on_white(pillow, source)
    check(
        isinstance(source, str | Path | bytes),
        f"{where} must be a path, bytes, a PIL.Image or an array of 8-bit integers.",
        DataError,
    )
    if isinstance(source, str | Path):
        check_file(source, where)
    with _as_data_error(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which are checked here, and of damaged EXIF data
        pillow.init()
        known = [name for name in FORMATS if name in pillow.OPEN]
        stream = io.BytesIO(source) if isinstance(source, bytes) else source
        with pillow.open(stream, formats=known) as picture:
            limits.check_pixels(where, *picture.size)
            picture.load()
            return _on_white(pillow, _upright(picture).convert("RGB"))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise need_extra("pillow", "media") from error
    return Image


def check_file(source: str | Path, where: str) -> None:
    """DataError unless it is a file here: nothing is fetched from a network."""
    remote = "://" in str(source)[:20] or str(source).startswith("data:")
    check(not remote, f"{where} is an address: download it, and give the file.", DataError)
    try:
        good, size = Path(source).is_file(), Path(source).stat().st_size
    except (OSError, ValueError) as error:  # also too long, or with a NUL
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{where} cannot be opened: {cause}. Give the path of a file.") from error
    check(good, f"{where} is no file, but a directory, pipe or device: give the path of a file.", DataError)
    check(size > 0, f"{where} is empty, it has 0 bytes: write it anew, or leave it out.", DataError)


@contextmanager
def _as_data_error(where: str) -> Iterator[None]:
    try:
        yield
    except (DataError, MissingPackage):
        raise
    except MemoryError as error:
        raise DataError(f"{where} takes more memory than there is: make it smaller.") from error
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error, and others
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        cause = "it begins like none of them" if cause.startswith("cannot identify") else cause.rstrip(".")
        rule = f"is no sound picture of a known format ({', '.join(FORMATS)}): {cause}"
        raise DataError(f"{where} {rule}. Convert it to one of these, or leave it out.") from error


def _upright(picture: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(picture)


def _on_white(pillow: Any, picture: Any) -> np.ndarray:
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        white = pillow.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = pillow.alpha_composite(white, picture)
    return np.array(picture.convert("RGB"))


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
        share = pixels[:, :, 3:] / 255
        pixels = np.round(share * pixels[:, :, :3] + (1 - share) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(pixels, (height, width, 3)))
