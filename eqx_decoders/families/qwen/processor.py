"""Images and videos of Qwen2-VL, 2.5-VL, 3-VL, 3-Omni and 3.5: patches, whose number depends on the image."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import AtLeast, CheckedFields, DataError, PositiveInt, check
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
    read_size,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, HALVES, Normalization, Triple, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, SHORT, resize, resize_with_short_weights
from eqx_decoders.media_files.video import Clip, check_taken


MOST_RATIO = 200
MOST_FRAMES = 64  # in a patch


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImages(CheckedFields):
    """Images of Qwen, which keep their shape, with between `least` and `most` pixels.

    **Arguments:**

    - `size`: rows and columns of pixels in a patch.
    - `frames`: number of times that an image is repeated in each patch, as if it were a video.
    - `merge`: rows and columns of patches that become one token.
    - `counted`: whether bounds on pixels count the image `frames` times, and sides are first enlarged to those of a
        token (GLM-4.1V).
    - `placeholder`: text of the special token, which is repeated.
    """

    size: PositiveInt = 14
    frames: Annotated[int, AtLeast(1, maximum=MOST_FRAMES)] = 2
    merge: PositiveInt = 2
    least: PositiveInt = 56 * 56
    most: PositiveInt = 28 * 28 * 1280
    counted: bool = False
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    placeholder: str = "<|image_pad|>"

    @classmethod
    def read(cls, settings: Settings) -> "QwenImages":
        """Read the rules from the settings of a directory."""
        return cls(**cls._settings(settings, 56 * 56, 28 * 28 * 1280, "<|image_pad|>"))

    @staticmethod
    def _settings(settings: Settings, least: int, most: int, placeholder: str) -> dict[str, Any]:
        """Return the fields that the settings of a directory say, with defaults of the bounds and the placeholder."""
        fields = settings.images
        least, most = read_pixels(fields, least, most)
        return dict(
            size=fields.integer("patch_size", 14),
            frames=fields.integer("temporal_patch_size", 2),
            merge=fields.integer("merge_size", 2),
            least=least,
            most=most,
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            placeholder=settings.token("image_token", placeholder),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: patches, `merge x merge` neighbors one behind the other; `image_grid_thw`."""
        (height, width), side, count = pixels.shape[:2], self.size * self.merge, self.frames if self.counted else 1
        if self.counted:
            height, width = enlarged(height, width, side)
        target = fit(height, width, side, self.least, self.most, where, frames=count, counted=count)
        values = self.normalization(resize(pixels, target, self.resample, limits, where))
        frames = np.broadcast_to(values, (self.frames, *values.shape))
        patches, grid = cut(frames, self.size, self.frames, self.merge)
        count = math.prod(grid) // self.merge**2
        check_tokens(where, count)
        text = self.placeholder * count
        return ProcessedFile({"pixel_values": patches, "image_grid_thw": np.array([grid])}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[patches, numbers]`, `[images, 3]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVideos(CheckedFields):
    """Videos of Qwen2-VL, 2.5-VL and 3-Omni: frames of `least` to `most` pixels, `frames` of them in a patch.

    **Arguments:**

    - `size`, `frames`, `merge`: pixels and frames of a patch; rows and columns of patches that become one token.
    - `choose`: whether frames are sampled; else all are taken.
    - `fps`, `count`: number of frames sampled from a second, or from the video; None for the other one, or all.
    - `least_frames`, `most_frames`: bounds on the number of sampled frames.
    - `share`: largest number of tokens of all frames together; None for no such bound.
    - `seconds`: argument of `Media.create` with the time between patches; None for none.
    - `assumed_fps`: the rate of that time; None for the rate of the sampled frames.
    - `placeholder`: text of the special token, which is repeated.
    """

    size: PositiveInt = 14
    frames: Annotated[int, AtLeast(1, maximum=MOST_FRAMES)] = 2
    merge: PositiveInt = 2
    least: PositiveInt = 128 * 28 * 28
    most: PositiveInt = 768 * 28 * 28
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, steps="joint")
    choose: bool = False
    fps: float | None = None
    count: int | None = None
    least_frames: PositiveInt = 4
    most_frames: PositiveInt = 768
    share: int | None = None
    seconds: str | None = "second_per_grid_ts"
    assumed_fps: float | None = None
    placeholder: str = "<|video_pad|>"

    def __post_init__(self):
        super().__post_init__()
        both = self.fps is None or self.count is None
        check(both, f"{type(self).__name__}: fps={self.fps} and count={self.count} exclude each other: give one.")

    @property
    def template(self) -> None:
        """None: the directory's template is used."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "QwenVideos":
        """Read the rules from the settings of a directory, for Qwen2.5-VL."""
        least, most = read_pixels(settings.videos, 128 * 28 * 28, 768 * 28 * 28)
        capped = settings.videos.flag("cap_pixels_per_frame", False)
        tokens = settings.videos.integer("max_video_tokens", 128_000)
        sizes = read_videos(settings, 14, CLIP_MEAN, CLIP_STD, choose=False)
        return cls(**sizes, least=least, most=most, share=tokens if capped else None)

    @classmethod
    def read_untimed(cls, settings: Settings) -> "QwenVideos":
        """Read the rules from the settings of a directory, for Qwen2-VL."""
        return dataclasses.replace(cls.read(settings), seconds=None)

    @classmethod
    def read_omni(cls, settings: Settings) -> "QwenVideos":
        """Read the rules from the settings of a directory, for Qwen3-Omni: sizes and one rate are fixed there."""
        sizes = dict(least=128 * 32 * 32, most=768 * 32 * 32)
        return dataclasses.replace(cls.read(settings), **sizes, seconds="video_second_per_grid", assumed_fps=1.0)

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values_videos`, `video_grid_thw`, and the time between patches in seconds."""
        indices = np.arange(clip.count) if clip.chosen else self._frame_indices(clip)
        target = self._target(clip, len(indices))
        patches, grid = _video_patches(self, clip, indices, target, limits)
        arrays = {"pixel_values_videos": patches, "video_grid_thw": np.array([grid])}
        if self.seconds is not None:
            rate = len(indices) / clip.count * clip.fps if self.assumed_fps is None else self.assumed_fps
            arrays[self.seconds] = np.array([self.frames / rate])
        check_tokens(clip.where, math.prod(grid) // self.merge**2)
        return ProcessedFile(arrays, self._text(clip, indices, grid))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[patches, numbers]`, `[videos, 3]`, `[videos]`."""
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to take: a multiple of `frames`, if the video has enough."""
        count = self.count
        if not self.choose or (count is None and self.fps is None):
            return np.arange(clip.count)
        if count is not None:
            count = min(round(count / self.frames) * self.frames, clip.count)
        else:
            most = min(self.most_frames, clip.count) // self.frames * self.frames
            count = min(max(clip.count / clip.fps * (self.fps or 1), self.least_frames), most, clip.count)
            count = int(count // self.frames) * self.frames
        if count == 0:
            return np.arange(clip.count)
        # as PyTorch counts: in steps of float64 from every eighth number in float32
        step, number = clip.count / count, np.arange(math.ceil(clip.count / (clip.count / count)))
        begin = (step * (number // 8 * 8)).astype(np.float32)
        return (begin + step * (number % 8)).astype(np.float32).astype(np.int64)

    def _target(self, clip: Clip, count: int) -> tuple[int, int]:
        side, most = self.size * self.merge, self.most
        if self.share is not None:
            whole = int(self.share * side * side * 0.9)
            most = max(min(most, whole * self.frames // count), int(self.least * 1.05))
        return fit(clip.height, clip.width, side, self.least, most, clip.where)

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        return self.placeholder * (math.prod(grid) // self.merge**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Videos(QwenVideos):
    """Videos of Qwen3-VL and 3.5: their frames together have between `least` and `most` pixels.

    The time of its frames stands before each patch. `share` is a bound on each frame.

    **Arguments:**

    - `begin`, `end`: texts of the special tokens around each patch.
    """

    size: int = 16
    least: int = 128 * 32 * 32
    most: int = 768 * 32 * 32
    normalization: Normalization = Normalization(steps="joint")
    choose: bool = True
    fps: float | None = 2.0
    seconds: str | None = None
    begin: str = "<|vision_start|>"
    end: str = "<|vision_end|>"

    @classmethod
    def read(cls, settings: Settings) -> "Qwen3Videos":
        """Read the rules from the settings of a directory."""
        fields = settings.videos
        size = read_size(fields, "size", {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32})
        if not {"shortest_edge", "longest_edge"} <= size.keys():
            raise fields.error(f"size={size} must have shortest_edge and longest_edge.")
        options = read_videos(settings, 16, HALVES, HALVES, choose=True)
        if options["count"] is None and options["fps"] is None:
            options["fps"] = 2.0
        capped, tokens = fields.flag("cap_pixels_per_frame", False), fields.integer("max_video_tokens", 768)
        return cls(
            **options,
            least=size["shortest_edge"],
            most=size["longest_edge"],
            share=tokens if capped else None,
            begin=settings.token("vision_start_token", "<|vision_start|>"),
            end=settings.token("vision_end_token", "<|vision_end|>"),
        )

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        count = self.count
        if not self.choose:
            return np.arange(clip.count)
        if count is None and self.fps is not None:
            count = int(clip.count / clip.fps * self.fps)
            count = min(max(count, self.least_frames), self.most_frames, clip.count)
        count = min(max(clip.count, self.least_frames), self.most_frames) if count is None else count
        return np.linspace(0, clip.count - 1, count).round().astype(np.int64)

    def _target(self, clip: Clip, count: int) -> tuple[int, int]:
        side, most, (height, width) = self.size * self.merge, self.most, (clip.height, clip.width)
        if self.share is not None:
            most = max(min(self.share * side * side, most // count), int(self.least * 1.05)) * count
        height, width = enlarged(height, width, side)
        count = max(count, self.frames)
        counted = round(count / self.frames) * self.frames
        return fit(height, width, side, self.least, most, clip.where, frames=count, counted=counted)

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        times = np.pad(indices, (0, -len(indices) % self.frames), mode="edge") / clip.fps
        times = times.reshape(-1, self.frames)
        patch = self.begin + self.placeholder * (grid[1] * grid[2] // self.merge**2) + self.end
        return "".join(
            f"<{(patch_times[0] + patch_times[-1]) / 2:.1f} seconds>{patch}" for patch_times in times.tolist()
        )


def read_videos(
    settings: Settings, size: int, mean: Triple, std: Triple, *, choose: bool, placeholder: str = "<|video_pad|>"
) -> dict[str, Any]:
    """Read the rules of videos that all families with Qwen's patches share; the arguments are defaults."""
    fields = settings.videos
    fps = fields.number("fps", None)
    return dict(
        size=fields.integer("patch_size", size),
        frames=fields.integer("temporal_patch_size", 2),
        merge=fields.integer("merge_size", 2),
        resample=read_resample(fields, BICUBIC, SHORT),
        normalization=read_normalization(fields, mean, std, steps="joint"),
        choose=fields.flag("do_sample_frames", choose),
        fps=fps,
        count=fields.integer("num_frames", None),
        least_frames=fields.integer("min_frames", 4),
        most_frames=fields.integer("max_frames", 768),
        placeholder=settings.token("video_token", placeholder),
    )


def _video_patches(
    rules: QwenVideos, clip: Clip, indices: np.ndarray, target: tuple[int, int], limits: MediaLimits
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the patches of a video, cut from each few frames as soon as these are decoded."""
    indices = np.pad(indices, (0, -len(indices) % rules.frames), mode="edge")
    check_taken(clip, len(indices), target, limits)
    parts, grid, held = [], (0, 0, 0), []
    for pixels in clip.frames(indices.tolist()):
        small = resize_with_short_weights(pixels, target, rules.resample, limits, clip.where)
        held.append(rules.normalization(small))
        if len(held) == rules.frames:
            patches, grid = cut(np.stack(held), rules.size, rules.frames, rules.merge)
            parts.append(patches)
            held.clear()
    return np.concatenate(parts), (len(parts), *grid[1:])


def read_pixels(fields: Fields, least: int, most: int) -> tuple[int, int]:
    """Read the fewest and most pixels: `min_pixels` and `max_pixels`, else `size`."""
    size = read_size(fields, "size", {"shortest_edge": least, "longest_edge": most})
    least = fields.integer("min_pixels", size.get("shortest_edge", size.get("min_pixels", least)))
    return least, fields.integer("max_pixels", size.get("longest_edge", size.get("max_pixels", most)))


def fit(
    height: int, width: int, side: int, least: int, most: int, where: str, *, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """Return the height and width, multiples of `side`, that are nearest to a shape within bounds of its pixels.

    The bounds are on all `frames` of a video; the check whether they hold counts `counted` frames.
    """
    long, short = max(height, width), min(height, width)
    rule = f"is more than {MOST_RATIO} times as long as wide: crop it"
    check(long / short <= MOST_RATIO, f"{where}, of {width} x {height} pixels, {rule}.", DataError)
    rows, columns = round(height / side), round(width / side)
    if counted * rows * columns * side**2 > most:
        factor = math.sqrt(frames * height * width / most)
        rows, columns = (max(1, math.floor(length / factor / side)) for length in (height, width))
    elif counted * rows * columns * side**2 < least:
        factor = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(length * factor / side) for length in (height, width))
    return rows * side, columns * side


def enlarged(height: int, width: int, side: int) -> tuple[int, int]:
    """Return the height and width of the same shape, both at least `side`."""
    if min(height, width) >= side:
        return height, width
    factor = max(side / height, side / width)
    return int(height * factor), int(width * factor)


def cut(values: np.ndarray, size: int, frames: int, merge: int) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames `[frames, 3, height, width]` into patches `[patches, numbers]`; return also time, rows, columns."""
    time, rows, columns = len(values) // frames, values.shape[2] // size, values.shape[3] // size
    split = values.reshape(time, frames, 3, rows // merge, merge, size, columns // merge, merge, size)
    patches = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(time * rows * columns, -1), (time, rows, columns)
