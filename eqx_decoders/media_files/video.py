"""Decoding of videos with PyAV, frame by frame and with limits on their size. A list of frames is also a video."""

import dataclasses
import functools
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, missing_package
from eqx_decoders.media_files.files import as_data_error, check_file
from eqx_decoders.media_files.images import composite_on_white, name_of, open_image
from eqx_decoders.media_files.limits import MediaLimits


# FFmpeg's names of containers that include the video. Other formats, such as playlists, would open files and URLs.
_CONTAINERS = "mov,matroska,avi,gif,mpeg,mpegts,flv,ogg,asf,mjpeg,apng,h264,hevc"
_FORMATS = (
    "MP4", "MOV", "Matroska", "WebM", "AVI", "GIF", "MPEG", "FLV", "Ogg", "ASF", "APNG", "MJPEG", "H.264", "H.265",
)  # fmt: skip
_DEFAULT_FPS = 24.0
_MAX_THREADS = 8
_MAX_THREAD_PIXELS = 1 << 26  # maximum pixels of the frames that all decoding threads hold
_STREAMED_SIZE = 0x7FFF_0000  # programs that stream an AVI file write at least this size

Frame = UInt8[np.ndarray, "height width 3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video(CheckedFields):
    """List of frames of equal size. Processors use all frames, without sampling.

    **Arguments:**

    - `frames`: frames, each a source of `open_image`.
    - `fps`: frames per second; None: unknown, 24 is assumed.
    """

    frames: Sequence[Any]
    fps: PositiveFloat | None = None


@dataclasses.dataclass(kw_only=True)
class Clip:
    """An opened video.

    **Arguments:**

    - `where`: name of the video in error messages.
    - `num_frames`: number of frames.
    - `fps`: frames per second.
    - `height`, `width`: size of the frames in pixels.
    - `use_all_frames`: whether processors use all frames, without sampling.
    - `iterate`: returns an iterator over all frames in order. An item is a function that returns the frame's pixels.
    """

    where: str
    num_frames: int
    fps: float
    height: int
    width: int
    use_all_frames: bool
    iterate: Callable[[], Iterator[Callable[[], Frame]]]

    @property
    def duration(self) -> float:
        """Duration in seconds."""
        return self.num_frames / self.fps

    def frames(self, indices: Sequence[int]) -> Iterator[Frame]:
        """Yield the frames at `indices`, which must be in ascending order and may repeat.

        Raises DataError for frames of different sizes, and for a video that ends before the last index.
        """
        remaining = iter(indices)
        next_index: int | None = next(remaining)
        for index, decode in enumerate(self.iterate()):
            if index != next_index:
                continue
            pixels = decode()
            height, width = pixels.shape[:2]
            if (height, width) != (self.height, self.width):
                raise DataError(
                    f"{self.where}: frame {index} has {width} x {height} pixels, but the first frame has "
                    f"{self.width} x {self.height}. Resize all frames to the same size."
                )
            while next_index == index:
                yield pixels
                next_index = next(remaining, None)
            if next_index is None:
                return
        raise DataError(
            f"{self.where} should have {self.num_frames:,} frames, but ends before frame {next_index:,}. The file is "
            "truncated or damaged: copy it again."
        )


@contextmanager
def open_video(source: Any, limits: MediaLimits = MediaLimits(), where: str | None = None) -> Iterator[Clip]:
    """Return a context manager that opens a video.

    Raises DataError for files that are not videos in a supported format, and for videos longer or larger than `limits`
    allow.

    **Arguments:**

    - `source`: the path of a file, its bytes, a `Video`, a list of frames, or an array of frames as 8-bit integers.
    - `limits`: maximum size and length of the video.
    - `where`: name of the video in error messages; None: the path or type of `source`.
    """
    where = name_of(source, "video", 0) if where is None else where
    if isinstance(source, list | tuple) or (isinstance(source, np.ndarray) and source.ndim == 4):
        source = Video(frames=list(source))
    if isinstance(source, Video):
        yield _from_frames(source, limits, where)
        return
    if not isinstance(source, str | Path | bytes):
        raise DataError(f"{where} must be a path, bytes, a Video or a list of frames.")
    if isinstance(source, str | Path):
        check_file(source, where)
    yield _from_file(source, limits, where)


def _from_frames(video: Video, limits: MediaLimits, where: str) -> Clip:
    num_frames = len(video.frames)
    fps = video.fps or _DEFAULT_FPS
    if num_frames == 0:
        raise DataError(f"{where} has no frames: a video must have at least one.")
    _check_length(num_frames, fps, limits, where)
    height, width = open_image(video.frames[0], limits, f"{where}: frame 0").shape[:2]

    def iterate() -> Iterator[Callable[[], Frame]]:
        for index, frame in enumerate(video.frames):
            yield functools.partial(open_image, frame, limits, f"{where}: frame {index}")

    return Clip(
        where=where, num_frames=num_frames, fps=fps, height=height, width=width, use_all_frames=True, iterate=iterate
    )


def _check_length(num_frames: int, fps: float, limits: MediaLimits, where: str) -> None:
    """Raise DataError for a video with too many frames or a too long duration."""
    if num_frames > limits.max_frames:
        raise DataError(
            f"{where} has {num_frames:,} frames, more than MediaLimits.max_frames={limits.max_frames:,}. Shorten the "
            "video or raise the limit."
        )
    if num_frames > limits.max_seconds * fps:
        raise DataError(
            f"{where} has {num_frames / fps:,.1f} s, more than MediaLimits.max_seconds={limits.max_seconds:g}. Shorten "
            "the video or raise the limit."
        )


def _describe(error: Exception) -> str:
    """Return FFmpeg's message."""
    message = getattr(error, "strerror", None) or str(error)
    return "the file has another format or is damaged" if message.startswith("Invalid ") else message


_as_data_error = functools.partial(
    as_data_error, kind="video", formats=_FORMATS, memory_remedy="Resize the video", describe=_describe
)


@contextmanager
def _open_stream(source: str | Path | bytes, limits: MediaLimits, where: str) -> Iterator[tuple[Any, Any]]:
    """Open a container, and yield the container and its video stream at the first frame.

    Every pass over a video opens the container again, because not all formats are seekable.
    """
    try:
        import av
    except ImportError as error:
        raise missing_package("av", "media") from error
    # FFmpeg decodes the first frames of each stream when it opens a file, so the limit must be set before. The constant
    # allows for sizes in a stream, which are rounded up.
    max_pixels = str(2 * limits.max_pixels + (1 << 16))
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file", "max_pixels": max_pixels}
    stream = io.BytesIO(source) if isinstance(source, bytes) else str(Path(source).resolve())
    # Metadata may be invalid Unicode. PyAV 19 ignores this and removes the keyword.
    keywords: Any = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
    with _as_data_error(where):
        container = av.open(stream, options=options, **keywords)
    with container:
        with _as_data_error(where):
            video = _select_stream(container, where)
            if video.width <= 0 or video.height <= 0:  # FFmpeg sets a size that it cannot decode to 0
                raise DataError(
                    f"{where} has frames of unknown size, or larger than FFmpeg supports. Resize the video."
                )
            limits.check_pixels(where, video.width, video.height)
            video.thread_type = "AUTO"
            num_threads = min(_MAX_THREADS, _MAX_THREAD_PIXELS // (video.width * video.height))
            video.codec_context.thread_count = max(1, num_threads)
            video.codec_context.options = {"max_pixels": max_pixels}
        yield container, video


def _select_stream(container: Any, where: str) -> Any:
    """Return the video stream that players show. The cover image of an audio file is not a video stream."""
    from av.stream import Disposition

    video: Any = container.streams.best("video")
    if video is None or video.disposition & Disposition.attached_pic:
        raise DataError(f"{where} has no video stream. Pass it as an audio or image file, or remove it from the input.")
    if video.codec_context is None:
        raise DataError(f"{where} has an unsupported video codec. Convert it, for example to H.264.")
    return video


def _from_file(source: str | Path | bytes, limits: MediaLimits, where: str) -> Clip:
    num_frames, fps = _measure(source, limits, where)
    if num_frames == 0:
        raise DataError(f"{where} has no frames: a video must have at least one.")
    if not 0 < fps < 1e6:
        raise DataError(f"{where} has {fps:g} frames per second, which must be above 0 and below 1,000,000.")
    first = next(_decode_frames(source, limits, where), None)
    if first is None:
        raise DataError(f"{where} has no frame that can be decoded. The file is truncated or damaged: copy it again.")
    height, width = (first.width, first.height) if _quarter_turns(first) % 2 else (first.height, first.width)

    def to_pixels(frame: Any) -> Frame:
        with _as_data_error(where):
            pixels = frame.to_ndarray(format="rgb24")
            has_alpha = any(component.is_alpha for component in frame.format.components)
            if has_alpha or frame.format.name == "pal8":  # a palette may contain transparent colors
                pixels = composite_on_white(frame.to_ndarray(format="rgba"))
            return np.ascontiguousarray(np.rot90(pixels, _quarter_turns(frame)))

    def iterate() -> Iterator[Callable[[], Frame]]:
        for frame in _decode_frames(source, limits, where):
            yield functools.partial(to_pixels, frame)

    return Clip(
        where=where, num_frames=num_frames, fps=fps, height=height, width=width, use_all_frames=False, iterate=iterate
    )


def _measure(source: str | Path | bytes, limits: MediaLimits, where: str) -> tuple[int, float]:
    """Return the number of frames and the frame rate.

    Both are computed from the frames, because the values in a header may be wrong.
    """
    count = 0
    start = math.inf
    end = -math.inf
    has_durations = False
    with _open_stream(source, limits, where) as (container, video):
        default_fps = float(video.average_rate or video.guessed_rate or _DEFAULT_FPS)
        time_base = float(video.time_base or 0)
        has_index = container.format.name.startswith("mov")  # each entry of the index is a frame
        _check_complete(container, video, source, where)
        if not has_index:
            _check_num_packets(source, limits, where)
        for item in _read_packets(container, video, where) if has_index else _decode_frames(source, limits, where):
            count += 1
            if item.pts is not None:
                start = min(start, item.pts)
                end = max(end, item.pts + (item.duration or 0))
                has_durations = has_durations or bool(item.duration)
            has_times = end > start and time_base > 0
            _check_length(count, count / ((end - start) * time_base) if has_times else default_fps, limits, where)
            limits.check_decoded_pixels(where, count, video.width, video.height)
        if not end > start or time_base <= 0:
            return count, default_fps
        # Without durations, `end` is the start of the last frame.
        num_intervals = count if has_durations else count - 1
        return count, float(num_intervals / (int(end - start) * video.time_base))


def _check_num_packets(source: str | Path | bytes, limits: MediaLimits, where: str) -> None:
    """Raise DataError for too many frames, before any frame is decoded. Counts packets, not the header's value."""
    with _open_stream(source, limits, where) as (container, video):
        for count, _ in enumerate(_read_packets(container, video, where), 1):
            limits.check_decoded_pixels(where, count, video.width, video.height)


def _check_complete(container: Any, video: Any, source: str | Path | bytes, where: str) -> None:
    """Raise DataError for a file that is shorter than its header says. FFmpeg would accept it."""
    if container.format.name.startswith("mov"):
        size = max((entry.pos + entry.size for entry in video.index_entries), default=0)
    else:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            size = _declared_size(file.read(256))
    if size > container.size:
        raise DataError(
            f"{where} is truncated: its header declares {size:,} bytes, but the file has {container.size:,} bytes. "
            "Copy the file again."
        )


def _declared_size(header: bytes) -> int:
    """Return the file size in bytes that the header of a Matroska or AVI file declares; 0 if there is none.

    Streamed files do not declare their size.
    """
    if header[:4] == b"RIFF":
        size = int.from_bytes(header[4:8], "little")
        return size if size < _STREAMED_SIZE else 0
    position = 0
    for name in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):  # EBML header and segment
        if header[position : position + 4] != name or len(header) < position + 12:
            return 0
        # the number of leading zero bits of the first byte, plus 1, is the number of bytes of the element's length
        num_bytes = 9 - header[position + 4].bit_length()
        length_field = header[position + 4 : position + 4 + num_bytes]
        length = int.from_bytes(length_field, "big") & ((1 << 7 * num_bytes) - 1)
        if num_bytes > 8 or length == (1 << 7 * num_bytes) - 1:
            return 0
        position += 4 + num_bytes + length
    return position


def _read_packets(container: Any, video: Any, where: str) -> Iterator[Any]:
    """Yield the packets of all frames that players show, without decoding them."""
    with _as_data_error(where):
        for packet in container.demux(video):
            if packet.size and not packet.is_discard:
                yield packet


def _decode_frames(source: str | Path | bytes, limits: MediaLimits, where: str) -> Iterator[Any]:
    with _open_stream(source, limits, where) as (container, video), _as_data_error(where):
        for frame in container.decode(video):
            limits.check_pixels(where, frame.width, frame.height)
            yield frame


def _quarter_turns(frame: Any) -> int:
    """Return the number of counterclockwise rotations by 90 degrees that bring a frame upright."""
    return round(frame.rotation / 90) % 4


def format_time(seconds: float) -> str:
    """Return a time as minutes and seconds: 75.9 is `01:15`."""
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def check_video_pixels(clip: Clip, num_frames: int, size: tuple[int, int], limits: MediaLimits) -> None:
    """Raise DataError if `num_frames` frames of `size = (height, width)` have too many pixels in total."""
    pixels = num_frames * size[0] * size[1]
    if pixels > limits.max_video_pixels:
        raise DataError(
            f"{clip.where}: {num_frames:,} frames of {size[1]} x {size[0]} have {pixels:,} pixels, more than "
            f"MediaLimits.max_video_pixels={limits.max_video_pixels:,}. Sample fewer frames or raise the limit."
        )
