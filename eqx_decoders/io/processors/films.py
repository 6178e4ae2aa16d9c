"""Films from files, or from lists of frames: which frames are taken, decoded with PyAV, one by one and with bounds."""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.errors import DataError, check, check_number, need_extra
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.pictures import check_file, name_of, open_picture


# Containers that hold a film themselves: others, such as playlists, would have further files and addresses opened.
FORMATS = "mov,matroska,avi,gif,mpeg,mpegts,flv,ogg,asf,mjpeg,apng"
FPS = 24.0  # of frames whose rate nothing tells


@dataclasses.dataclass(frozen=True, kw_only=True)
class Film:
    """Frames that have been taken already: pictures of one size, and how many a second has.

    **Arguments:**

    - `frames`: as `open_picture` takes them.
    - `fps`: frames per second; None for unknown, which counts as 24.
    """

    frames: Sequence[Any]
    fps: float | None = None

    def __post_init__(self):
        if self.fps is not None:
            check_number("Film.fps", self.fps, above=0)


@dataclasses.dataclass(kw_only=True)
class Clip:
    """An opened film.

    **Arguments:**

    - `where`: how errors call it.
    - `count`: of its frames.
    - `fps`: frames per second.
    - `height`, `width`: of its frames.
    - `chosen`: whether its frames are those to take: there is nothing to choose.
    - `source`: gives all frames in order, each as a function that decodes its colours.
    """

    where: str
    count: int
    fps: float
    height: int
    width: int
    chosen: bool
    source: Any

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.count / self.fps

    def frames(self, indices: Sequence[int]) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """The frames of these numbers, which must not fall."""
        wanted, number = iter(indices), next(iter(indices))
        next(wanted)
        for index, decode in enumerate(self.source()):
            if index != number:
                continue
            pixels = decode()
            size = f"{pixels.shape[1]} x {pixels.shape[0]}"
            same = pixels.shape[:2] == (self.height, self.width)
            rule = f"but the first one has {self.width} x {self.height}: all must have one size"
            check(same, f"{self.where}: frame {index} has {size} pixels, {rule}.", DataError)
            while number == index:
                yield pixels
                number = next(wanted, None)
            if number is None:
                return
        told = f"should have {self.count:,} frames, and ends before frame {number:,}"
        raise DataError(f"{self.where} {told}: it is cut short, or damaged.")


@contextmanager
def open_film(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Iterator[Clip]:
    """A film, open as long as the block lasts.

    Raises DataError, with the file's name, for what is no film, and for one that is longer or larger than `limits`
    allow.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `Film`, a list of its frames, or these as an array of 8-bit integers.
    - `where`: how errors call it.
    """
    where = name_of(source, "film", 0) if where is None else where
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        source = Film(frames=list(source))
    if isinstance(source, Film):
        yield _from_frames(source, limits, where)
        return
    rule = "must be a path, bytes, a Film or a list of frames"
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} {rule}.")
    if isinstance(source, str | Path):
        check_file(source, where)
    with _as_data_error(where), _container(source) as container:
        yield _from_container(container, limits, where)


def _from_frames(film: Film, limits: MediaLimits, where: str) -> Clip:
    count = len(film.frames)
    check(count > 0, f"{where} has no frame: a film must have some.", DataError)
    _check_length(count, film.fps or FPS, limits, where)
    height, width = open_picture(film.frames[0], limits, f"{where}: frame 0").shape[:2]

    def source() -> Iterator[Any]:
        for index, frame in enumerate(film.frames):
            yield lambda frame=frame, index=index: open_picture(frame, limits, f"{where}: frame {index}")

    return Clip(where=where, count=count, fps=film.fps or FPS, height=height, width=width, chosen=True, source=source)


def _check_length(count: int, fps: float, limits: MediaLimits, where: str) -> None:
    rule = f"more than MediaLimits.max_frames={limits.max_frames:,}. Cut it, or raise the limit"
    check(count <= limits.max_frames, f"{where} has {count:,} frames: {rule}.", DataError)
    rule = f"longer than MediaLimits.max_seconds={limits.max_seconds:g}. Cut it, or raise the limit"
    check(count <= limits.max_seconds * fps, f"{where} has {count / fps:,.1f} s: {rule}.", DataError)


@contextmanager
def _as_data_error(where: str) -> Iterator[None]:
    try:
        import av
    except ImportError as error:
        raise need_extra("av", "media") from error
    try:
        yield
    except (av.error.FFmpegError, OSError, ValueError, IndexError, KeyError) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataError(f"{where} is no sound film of a known format: {cause.rstrip('.')}.") from error


def _container(source: str | Path | bytes) -> Any:
    import av

    stream = io.BytesIO(source) if isinstance(source, bytes) else str(Path(source).resolve())
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "file"}
    return av.open(stream, options={} if isinstance(source, bytes) else options, container_options=options)


def _from_container(container: Any, limits: MediaLimits, where: str) -> Clip:
    check(len(container.streams.video) > 0, f"{where} has no pictures: it is no film.", DataError)
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    limits.check_pixels(where, stream.width, stream.height)
    fps = float(stream.average_rate or stream.guessed_rate or FPS)
    good = 0 < fps < 1e6
    check(good, f"{where} has {fps:g} frames per second: must be above 0, below a million.", DataError)
    count = stream.frames
    if count <= 0:  # its header does not say
        count = 0
        for _ in _decoded(container, stream, limits, where):
            count += 1
            _check_length(count, fps, limits, where)
    _check_length(count, fps, limits, where)
    check(count > 0, f"{where} has no frame: a film must have some.", DataError)

    def source() -> Iterator[Any]:
        for frame in _decoded(container, stream, limits, where):
            yield lambda frame=frame: frame.to_ndarray(format="rgb24")

    return Clip(
        where=where, count=count, fps=fps, height=stream.height, width=stream.width, chosen=False, source=source
    )


def _decoded(container: Any, stream: Any, limits: MediaLimits, where: str) -> Iterator[Any]:
    container.seek(0)
    for frame in container.decode(stream):
        limits.check_pixels(where, frame.width, frame.height)
        yield frame


def check_taken(clip: Clip, count: int, size: tuple[int, int], limits: MediaLimits) -> None:
    """DataError where so many frames of this height and width are too many together."""
    pixels = count * size[0] * size[1]
    rule = f"more than MediaLimits.max_film_pixels={limits.max_film_pixels:,}. Take fewer frames, or raise the limit"
    told = f"{clip.where}: {count:,} frames of {size[1]} x {size[0]} have {pixels:,} pixels"
    check(pixels <= limits.max_film_pixels, f"{told}: {rule}.", DataError)
