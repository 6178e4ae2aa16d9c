"""Videos from files, or from lists of frames, decoded with PyAV, frame by frame and with bounds."""

import dataclasses
import functools
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, check, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.images import composite_on_white, name_of, open_image
from eqx_decoders.media_files.limits import MediaLimits


# Containers that hold a video themselves: others, such as playlists, would open other files and addresses.
FORMATS = "mov,matroska,avi,gif,mpeg,mpegts,flv,ogg,asf,mjpeg,apng,h264,hevc"
KNOWN = ("MP4", "MOV", "Matroska", "WebM", "AVI", "GIF", "MPEG", "FLV", "Ogg", "ASF", "APNG", "MJPEG", "H.264", "H.265")
FPS = 24.0  # the rate of frames without one
THREADS, AT_ONCE = 8, 1 << 26  # decoding threads, and the pixels that several of them hold together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video(CheckedFields):
    """Frames that are chosen already: images of one size, and their rate.

    **Arguments:**

    - `frames`: as `open_image` takes them.
    - `fps`: frames per second; None for unknown, which counts as 24.
    """

    frames: Sequence[Any]
    fps: PositiveFloat | None = None


@dataclasses.dataclass(kw_only=True)
class Clip:
    """Opened video.

    **Arguments:**

    - `where`: its name in errors.
    - `count`: number of its frames.
    - `fps`: frames per second.
    - `height`, `width`: of its frames.
    - `chosen`: whether all its frames are taken, without sampling.
    - `source`: yields all frames in order, each as a function that decodes its colors.
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
        """Duration."""
        return self.count / self.fps

    def frames(self, indices: Sequence[int]) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
        """Yield the frames of these indices, which must not decrease."""
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
        message = f"should have {self.count:,} frames, and ends before frame {number:,}"
        raise DataError(f"{self.where} {message}: it is cut short, or damaged. Copy it again.")


@contextmanager
def open_video(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Iterator[Clip]:
    """Open a video for as long as the block lasts.

    Raises DataError, with the file's name, for files that are no video, or longer or larger than `limits` allow.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `Video`, a list of its frames, or these as an array of 8-bit integers.
    """
    where = name_of(source, "video", 0) if where is None else where
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        source = Video(frames=list(source))
    if isinstance(source, Video):
        yield _from_frames(source, limits, where)
        return
    rule = "must be a path, bytes, a Video or a list of frames"
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} {rule}.")
    if isinstance(source, str | Path):
        check_file(source, where)
    yield _from_file(source, limits, where)


def _from_frames(video: Video, limits: MediaLimits, where: str) -> Clip:
    count = len(video.frames)
    check(count > 0, f"{where} has no frame: a video must have some.", DataError)
    _check_length(count, video.fps or FPS, limits, where)
    height, width = open_image(video.frames[0], limits, f"{where}: frame 0").shape[:2]

    def source() -> Iterator[Any]:
        for index, frame in enumerate(video.frames):
            yield lambda frame=frame, index=index: open_image(frame, limits, f"{where}: frame {index}")

    return Clip(where=where, count=count, fps=video.fps or FPS, height=height, width=width, chosen=True, source=source)


def _check_length(count: int, fps: float, limits: MediaLimits, where: str) -> None:
    rule = f"more than MediaLimits.max_frames={limits.max_frames:,}. Cut it, or raise the limit"
    check(count <= limits.max_frames, f"{where} has {count:,} frames: {rule}.", DataError)
    rule = f"longer than MediaLimits.max_seconds={limits.max_seconds:g}. Cut it, or raise the limit"
    check(count <= limits.max_seconds * fps, f"{where} has {count / fps:,.1f} s: {rule}.", DataError)


def _cause(error: Exception) -> str:
    """Return FFmpeg's message."""
    message = getattr(error, "strerror", None) or str(error)
    return "it is of another one, or damaged" if message.startswith("Invalid ") else message


_as_data_error = functools.partial(
    as_data_error, kind="video", formats=KNOWN, smaller="make its frames smaller", cause=_cause
)


@contextmanager
def _opened(source: str | Path | bytes, limits: MediaLimits, where: str) -> Iterator[tuple[Any, Any]]:
    """Open the container and its video, from the beginning: not all can be rewound, so each pass opens it anew."""
    try:
        import av
    except ImportError as error:
        raise missing_package("av", "media") from error
    # FFmpeg decodes the first frames of each stream when it opens a file: the bound must be known before
    most = 2 * limits.max_pixels + (1 << 16)  # sizes in a stream are rounded up
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "file", "max_pixels": str(most)}
    stream = io.BytesIO(source) if isinstance(source, bytes) else str(Path(source).resolve())
    # metadata that is no Unicode: from PyAV 19 on it is no error, and there is no keyword for it
    older: Any = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with _as_data_error(where):
        container = av.open(stream, options=options, **older)
    with container:
        with _as_data_error(where):
            video = _video_of(container, where)
            sized = video.width > 0 and video.height > 0  # FFmpeg drops sizes that it does not decode
            check(sized, f"{where} has frames of no known size, or too large: make them smaller.", DataError)
            limits.check_pixels(where, video.width, video.height)
            video.thread_type = "AUTO"
            video.codec_context.thread_count = max(1, min(THREADS, AT_ONCE // (video.width * video.height)))
            video.codec_context.options = {"max_pixels": str(most)}
        yield container, video


def _video_of(container: Any, where: str) -> Any:
    """Return the stream of images that players show; not the cover of an audio file."""
    from av.stream import Disposition

    best: Any = container.streams.best("video")
    if best is None or best.disposition & Disposition.attached_pic:
        raise DataError(f"{where} has no moving images: it is no video. Give it as what it is, or leave it out.")
    known = best.codec_context is not None
    check(known, f"{where} is coded in a way that is not known here: convert it, such as to H.264.", DataError)
    return best


def _from_file(source: str | Path | bytes, limits: MediaLimits, where: str) -> Clip:
    count, fps = _measure(source, limits, where)
    check(count > 0, f"{where} has no frame: a video must have some.", DataError)
    good = 0 < fps < 1e6
    check(good, f"{where} has {fps:g} frames per second: must be above 0, below a million.", DataError)
    first = next(_decoded(source, limits, where), None)
    if first is None:
        raise DataError(f"{where} has no frame that can be decoded: it is cut short, or damaged. Copy it again.")
    height, width = (first.width, first.height) if _turns(first) % 2 else (first.height, first.width)

    def pixels(frame: Any) -> UInt8[np.ndarray, "height width 3"]:
        with _as_data_error(where):
            colors = frame.to_ndarray(format="rgb24")
            has_alpha = any(component.is_alpha for component in frame.format.components)
            if has_alpha or frame.format.name == "pal8":  # a palette may contain transparent colors
                colors = composite_on_white(frame.to_ndarray(format="rgba"))
            return np.ascontiguousarray(np.rot90(colors, _turns(frame)))

    def frames() -> Iterator[Any]:
        for frame in _decoded(source, limits, where):
            yield lambda frame=frame: pixels(frame)

    return Clip(where=where, count=count, fps=fps, height=height, width=width, chosen=False, source=frames)


def _measure(source: str | Path | bytes, limits: MediaLimits, where: str) -> tuple[int, float]:
    """Count the frames, and their rate, from the content and not from a header."""
    count, begin, end, has_durations = 0, math.inf, -math.inf, False
    with _opened(source, limits, where) as (container, video):
        rate, base = float(video.average_rate or video.guessed_rate or FPS), float(video.time_base or 0)
        listed = container.format.name.startswith("mov")  # it has an index, in which each entry is a frame
        _check_whole(container, video, source, where)
        if not listed:
            _check_packets(source, limits, where)
        for entry in _packets(container, video, where) if listed else _decoded(source, limits, where):
            count += 1
            if entry.pts is not None:
                begin, end = min(begin, entry.pts), max(end, entry.pts + (entry.duration or 0))
                has_durations = has_durations or bool(entry.duration)
            _check_length(count, count / ((end - begin) * base) if end > begin and base > 0 else rate, limits, where)
            limits.check_decoded(where, count, video.width, video.height)
        # without durations of frames, the last one lasts as long as the others
        spaces = count if has_durations else count - 1
        return count, float(spaces / (int(end - begin) * video.time_base)) if end > begin and base > 0 else rate


def _check_packets(source: str | Path | bytes, limits: MediaLimits, where: str) -> None:
    """Raise DataError for too many frames, counted in the content, before one of them is decoded."""
    with _opened(source, limits, where) as (container, video):
        for number, _ in enumerate(_packets(container, video, where), 1):
            limits.check_decoded(where, number, video.width, video.height)


def _check_whole(container: Any, video: Any, source: str | Path | bytes, where: str) -> None:
    """Raise DataError for a file that is shorter than its header says: FFmpeg accepts it."""
    if container.format.name.startswith("mov"):
        reach = max((entry.pos + entry.size for entry in video.index_entries), default=0)
    else:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            reach = _declared_size(file.read(256))
    rule = f"is cut short: it says that it reaches to byte {reach:,}, and has {container.size:,}. Copy it again"
    check(reach <= container.size, f"{where} {rule}.", DataError)


def _declared_size(head: bytes) -> int:
    """Return the size in bytes in the header of a Matroska or AVI file; 0 where it has none, as a stream."""
    if head[:4] == b"RIFF":
        size = int.from_bytes(head[4:8], "little")
        return size if size < 0x7FFF_0000 else 0
    position = 0
    for name in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):  # its header, and all that follows
        if head[position : position + 4] != name or len(head) < position + 12:
            return 0
        digits = 9 - head[position + 4].bit_length()  # bytes of a length; one bit in the first of them tells how many
        number = int.from_bytes(head[position + 4 : position + 4 + digits], "big") & ((1 << 7 * digits) - 1)
        if digits > 8 or number == (1 << 7 * digits) - 1:
            return 0
        position += 4 + digits + number
    return position


def _packets(container: Any, video: Any, where: str) -> Iterator[Any]:
    """Yield the packets of the frames that are shown, without decoding them."""
    with _as_data_error(where):
        for packet in container.demux(video):
            if packet.size and not packet.is_discard:
                yield packet


def _decoded(source: str | Path | bytes, limits: MediaLimits, where: str) -> Iterator[Any]:
    with _opened(source, limits, where) as (container, video), _as_data_error(where):
        for frame in container.decode(video):
            limits.check_pixels(where, frame.width, frame.height)
            yield frame


def _turns(frame: Any) -> int:
    """Return the quarter turns to the left by which a frame stands upright."""
    return round(frame.rotation / 90) % 4


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds: 75.9 is `01:15`."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def check_taken(clip: Clip, count: int, size: tuple[int, int], limits: MediaLimits) -> None:
    """Raise DataError if so many frames of this height and width have too many pixels together."""
    pixels = count * size[0] * size[1]
    rule = f"more than MediaLimits.max_video_pixels={limits.max_video_pixels:,}. Take fewer frames, or raise the limit"
    message = f"{clip.where}: {count:,} frames of {size[1]} x {size[0]} have {pixels:,} pixels"
    check(pixels <= limits.max_video_pixels, f"{message}: {rule}.", DataError)
