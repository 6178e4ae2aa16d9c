"""Images and videos of Qwen2-VL, 2.5-VL, 3-VL, 3-Omni and 3.5: patches, whose number depends on the size."""

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
from eqx_decoders.media_files.resizing import BICUBIC, FIXED_POINT_FILTERS, resize, resize_fixed_point
from eqx_decoders.media_files.video import Clip, check_video_pixels


_MAX_ASPECT_RATIO = 200
_MAX_TEMPORAL_PATCH_SIZE = 64
_PATCH_SIZE = 14
_IMAGE_MIN_PIXELS = 56 * 56
_IMAGE_MAX_PIXELS = 28 * 28 * 1280
_VIDEO_MIN_PIXELS = 128 * 28 * 28
_VIDEO_MAX_PIXELS = 768 * 28 * 28
_QWEN3_MIN_PIXELS = 128 * 32 * 32
_QWEN3_MAX_PIXELS = 768 * 32 * 32
_QWEN3_FPS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenImageProcessor(CheckedFields):
    """Images of Qwen: resized to between `min_pixels` and `max_pixels` pixels without changing the aspect ratio.

    **Arguments:**

    - `patch_size`: height and width of a patch in pixels.
    - `temporal_patch_size`: number of frames in a patch. An image is repeated to fill it.
    - `merge_size`: number of rows and of columns of patches that are merged into one token.
    - `min_pixels`, `max_pixels`: bounds of the resized image.
    - `count_repeats`: whether the bounds apply to the pixels of all repeated frames. Small images are then enlarged to
        at least one token per side before the bounds are applied (GLM-4.1V).
    - `placeholder`: image token, which is repeated once per token.
    """

    patch_size: PositiveInt = _PATCH_SIZE
    temporal_patch_size: Annotated[int, AtLeast(1, maximum=_MAX_TEMPORAL_PATCH_SIZE)] = 2
    merge_size: PositiveInt = 2
    min_pixels: PositiveInt = _IMAGE_MIN_PIXELS
    max_pixels: PositiveInt = _IMAGE_MAX_PIXELS
    count_repeats: bool = False
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    placeholder: str = "<|image_pad|>"

    @classmethod
    def read(cls, settings: Settings) -> "QwenImageProcessor":
        """Create the processor from the settings of a model's directory."""
        return cls(**cls._read_fields(settings, _IMAGE_MIN_PIXELS, _IMAGE_MAX_PIXELS, "<|image_pad|>"))

    @staticmethod
    def _read_fields(settings: Settings, min_pixels: int, max_pixels: int, placeholder: str) -> dict[str, Any]:
        """Return the fields of this class. The arguments are the defaults of fields that differ between families."""
        fields = settings.images
        min_pixels, max_pixels = read_pixel_bounds(fields, min_pixels, max_pixels)
        return dict(
            patch_size=fields.integer("patch_size", _PATCH_SIZE),
            temporal_patch_size=fields.integer("temporal_patch_size", 2),
            merge_size=fields.integer("merge_size", 2),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            placeholder=settings.token("image_token", placeholder),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, patches in the order of `cut_patches`, and `image_grid_thw`."""
        height, width = pixels.shape[:2]
        unit = self.patch_size * self.merge_size
        num_frames = 1
        if self.count_repeats:
            num_frames = self.temporal_patch_size
            height, width = enlarge(height, width, unit)
        size = fit_size(
            height,
            width,
            unit,
            self.min_pixels,
            self.max_pixels,
            where,
            num_frames=num_frames,
            padded_frames=num_frames,
        )
        values = self.normalization(resize(pixels, size, self.resample, limits, where))
        frames = np.broadcast_to(values, (self.temporal_patch_size, *values.shape))
        patches, grid = cut_patches(frames, self.patch_size, self.temporal_patch_size, self.merge_size)
        num_tokens = math.prod(grid) // self.merge_size**2
        check_tokens(where, num_tokens)
        arrays = {"pixel_values": patches, "image_grid_thw": np.array([grid])}
        return ProcessedFile(arrays, self.placeholder * num_tokens)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[patches, features]`, and `image_grid_thw`, `[images, 3]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVideoProcessor(CheckedFields):
    """Videos of Qwen2-VL, 2.5-VL and 3-Omni: each frame has between `min_pixels` and `max_pixels` pixels.

    **Arguments:**

    - `patch_size`: height and width of a patch in pixels.
    - `temporal_patch_size`: number of frames in a patch.
    - `merge_size`: number of rows and of columns of patches that are merged into one token.
    - `min_pixels`, `max_pixels`: bounds of a resized frame.
    - `sample_frames`: whether frames are sampled; otherwise all frames are used.
    - `fps`: number of frames to sample per second; None: `num_frames` or all frames.
    - `num_frames`: number of frames to sample from the video; None: `fps` or all frames.
    - `min_frames`, `max_frames`: bounds of the number of frames that are sampled with `fps`.
    - `max_video_tokens`: maximum tokens of all frames of a video; None: no maximum.
    - `time_array`: name of the array with the seconds between patches, an argument of `Media.create`; None: no array.
    - `assumed_fps`: frame rate from which `time_array` is computed; None: the rate of the sampled frames.
    - `placeholder`: video token, which is repeated once per token.
    """

    patch_size: PositiveInt = _PATCH_SIZE
    temporal_patch_size: Annotated[int, AtLeast(1, maximum=_MAX_TEMPORAL_PATCH_SIZE)] = 2
    merge_size: PositiveInt = 2
    min_pixels: PositiveInt = _VIDEO_MIN_PIXELS
    max_pixels: PositiveInt = _VIDEO_MAX_PIXELS
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, rounding="fused")
    sample_frames: bool = False
    fps: float | None = None
    num_frames: int | None = None
    min_frames: PositiveInt = 4
    max_frames: PositiveInt = 768
    max_video_tokens: int | None = None
    time_array: str | None = "second_per_grid_ts"
    assumed_fps: float | None = None
    placeholder: str = "<|video_pad|>"

    def __post_init__(self):
        super().__post_init__()
        check(
            self.fps is None or self.num_frames is None,
            f"{type(self).__name__}: fps={self.fps} and num_frames={self.num_frames} are exclusive. Set one to None.",
        )

    @property
    def template(self) -> None:
        """None: conversations with videos use the chat template of the model's directory."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "QwenVideoProcessor":
        """Create the processor of Qwen2.5-VL from the settings of a model's directory."""
        min_pixels, max_pixels = read_pixel_bounds(settings.videos, _VIDEO_MIN_PIXELS, _VIDEO_MAX_PIXELS)
        has_max_tokens = settings.videos.flag("cap_pixels_per_frame", False)
        max_video_tokens = settings.videos.integer("max_video_tokens", 128_000)
        shared_fields = read_video_fields(settings, _PATCH_SIZE, CLIP_MEAN, CLIP_STD, sample_frames=False)
        return cls(
            **shared_fields,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_video_tokens=max_video_tokens if has_max_tokens else None,
        )

    @classmethod
    def read_qwen2(cls, settings: Settings) -> "QwenVideoProcessor":
        """Create the processor of Qwen2-VL, which has no times, from the settings of a model's directory."""
        return dataclasses.replace(cls.read(settings), time_array=None)

    @classmethod
    def read_omni(cls, settings: Settings) -> "QwenVideoProcessor":
        """Create the processor of Qwen3-Omni, with fixed bounds and rate, from the settings of a model's directory."""
        return dataclasses.replace(
            cls.read(settings),
            min_pixels=_QWEN3_MIN_PIXELS,
            max_pixels=_QWEN3_MAX_PIXELS,
            time_array="video_second_per_grid",
            assumed_fps=1.0,
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values_videos`, `video_grid_thw` and `time_array`."""
        indices = np.arange(clip.num_frames) if clip.use_all_frames else self._frame_indices(clip)
        size = self._resized_size(clip, len(indices))
        patches, grid = _video_patches(self, clip, indices, size, limits)
        arrays = {"pixel_values_videos": patches, "video_grid_thw": np.array([grid])}
        if self.time_array is not None:
            fps = len(indices) / clip.num_frames * clip.fps if self.assumed_fps is None else self.assumed_fps
            arrays[self.time_array] = np.array([self.temporal_patch_size / fps])
        check_tokens(clip.where, math.prod(grid) // self.merge_size**2)
        return ProcessedFile(arrays, self._text(clip, indices, grid))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values_videos`, `[patches, features]`; `video_grid_thw`, `[videos, 3]`; times, `[videos]`."""
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to use.

        Their number is a multiple of `temporal_patch_size` if the video has enough frames.
        """
        num_frames = self.num_frames
        if not self.sample_frames or (num_frames is None and self.fps is None):
            return np.arange(clip.num_frames)
        unit = self.temporal_patch_size
        if num_frames is not None:
            num_frames = min(round(num_frames / unit) * unit, clip.num_frames)
        else:
            max_frames = min(self.max_frames, clip.num_frames) // unit * unit
            wanted = max(clip.num_frames / clip.fps * (self.fps or 1), self.min_frames)
            num_frames = int(min(wanted, max_frames, clip.num_frames) // unit) * unit
        if num_frames == 0:
            return np.arange(clip.num_frames)
        # the rounding of `torch.arange`, which adds float64 steps to every eighth number in float32
        step = clip.num_frames / num_frames
        numbers = np.arange(math.ceil(clip.num_frames / step))
        base = (step * (numbers // 8 * 8)).astype(np.float32)
        return (base + step * (numbers % 8)).astype(np.float32).astype(np.int64)

    def _resized_size(self, clip: Clip, num_frames: int) -> tuple[int, int]:
        """Return the height and width of resized frames."""
        unit = self.patch_size * self.merge_size
        max_pixels = self.max_pixels
        if self.max_video_tokens is not None:
            # transformers uses 90% of the token budget
            max_total_pixels = int(self.max_video_tokens * unit * unit * 0.9)
            max_frame_pixels = max_total_pixels * self.temporal_patch_size // num_frames
            max_pixels = max(min(max_pixels, max_frame_pixels), int(self.min_pixels * 1.05))
        return fit_size(clip.height, clip.width, unit, self.min_pixels, max_pixels, clip.where)

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        return self.placeholder * (math.prod(grid) // self.merge_size**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VideoProcessor(QwenVideoProcessor):
    """Videos of Qwen3-VL and 3.5: all frames together have between `min_pixels` and `max_pixels` pixels.

    Each patch is preceded by the mean time of its frames. `max_video_tokens` is the maximum of one frame.

    **Arguments:**

    - `start_token`, `end_token`: special tokens before and after each patch.
    """

    patch_size: int = 16
    min_pixels: int = _QWEN3_MIN_PIXELS
    max_pixels: int = _QWEN3_MAX_PIXELS
    normalization: Normalization = Normalization(rounding="fused")
    sample_frames: bool = True
    fps: float | None = _QWEN3_FPS
    time_array: str | None = None
    start_token: str = "<|vision_start|>"
    end_token: str = "<|vision_end|>"

    @classmethod
    def read(cls, settings: Settings) -> "Qwen3VideoProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.videos
        size = read_size(fields, "size", {"shortest_edge": _QWEN3_MIN_PIXELS, "longest_edge": _QWEN3_MAX_PIXELS})
        if not {"shortest_edge", "longest_edge"} <= size.keys():
            raise fields.error(f"size={size} must have the keys shortest_edge and longest_edge, in pixels.")
        shared_fields = read_video_fields(settings, 16, HALVES, HALVES, sample_frames=True)
        if shared_fields["num_frames"] is None and shared_fields["fps"] is None:
            shared_fields["fps"] = _QWEN3_FPS
        has_max_tokens = fields.flag("cap_pixels_per_frame", False)
        max_video_tokens = fields.integer("max_video_tokens", 768)
        return cls(
            **shared_fields,
            min_pixels=size["shortest_edge"],
            max_pixels=size["longest_edge"],
            max_video_tokens=max_video_tokens if has_max_tokens else None,
            start_token=settings.token("vision_start_token", "<|vision_start|>"),
            end_token=settings.token("vision_end_token", "<|vision_end|>"),
        )

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        if not self.sample_frames:
            return np.arange(clip.num_frames)
        if self.num_frames is not None:
            num_frames = self.num_frames
        elif self.fps is not None:
            wanted = int(clip.num_frames / clip.fps * self.fps)
            num_frames = min(max(wanted, self.min_frames), self.max_frames, clip.num_frames)
        else:
            num_frames = min(max(clip.num_frames, self.min_frames), self.max_frames)
        return np.linspace(0, clip.num_frames - 1, num_frames).round().astype(np.int64)

    def _resized_size(self, clip: Clip, num_frames: int) -> tuple[int, int]:
        unit = self.patch_size * self.merge_size
        max_pixels = self.max_pixels
        if self.max_video_tokens is not None:
            max_frame_pixels = min(self.max_video_tokens * unit * unit, max_pixels // num_frames)
            max_pixels = max(max_frame_pixels, int(self.min_pixels * 1.05)) * num_frames
        height, width = enlarge(clip.height, clip.width, unit)
        num_frames = max(num_frames, self.temporal_patch_size)
        padded_frames = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        return fit_size(
            height,
            width,
            unit,
            self.min_pixels,
            max_pixels,
            clip.where,
            num_frames=num_frames,
            padded_frames=padded_frames,
        )

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        times = np.pad(indices, (0, -len(indices) % self.temporal_patch_size), mode="edge") / clip.fps
        times = times.reshape(-1, self.temporal_patch_size)
        num_tokens = grid[1] * grid[2] // self.merge_size**2
        patch = self.start_token + self.placeholder * num_tokens + self.end_token
        return "".join(
            f"<{(patch_times[0] + patch_times[-1]) / 2:.1f} seconds>{patch}" for patch_times in times.tolist()
        )


def read_video_fields(
    settings: Settings,
    patch_size: int,
    mean: Triple,
    std: Triple,
    *,
    sample_frames: bool,
    placeholder: str = "<|video_pad|>",
) -> dict[str, Any]:
    """Return the fields of `QwenVideoProcessor` that all families with Qwen's patches share.

    The arguments after `settings` are the defaults.
    """
    fields = settings.videos
    return dict(
        patch_size=fields.integer("patch_size", patch_size),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        merge_size=fields.integer("merge_size", 2),
        resample=read_resample(fields, BICUBIC, FIXED_POINT_FILTERS),
        normalization=read_normalization(fields, mean, std, rounding="fused"),
        sample_frames=fields.flag("do_sample_frames", sample_frames),
        fps=fields.number("fps", None),
        num_frames=fields.integer("num_frames", None),
        min_frames=fields.integer("min_frames", 4),
        max_frames=fields.integer("max_frames", 768),
        placeholder=settings.token("video_token", placeholder),
    )


def _video_patches(
    processor: QwenVideoProcessor, clip: Clip, indices: np.ndarray, size: tuple[int, int], limits: MediaLimits
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the patches of a video and its grid (time, rows, columns).

    Patches are cut as soon as their frames are decoded, so that few frames are in memory at a time.
    """
    unit = processor.temporal_patch_size
    indices = np.pad(indices, (0, -len(indices) % unit), mode="edge")
    check_video_pixels(clip, len(indices), size, limits)
    pieces = []
    rows = 0
    columns = 0
    frames = []
    for pixels in clip.frames(indices.tolist()):
        resized = resize_fixed_point(pixels, size, processor.resample, limits, clip.where)
        frames.append(processor.normalization(resized))
        if len(frames) == unit:
            patches, (_, rows, columns) = cut_patches(
                np.stack(frames), processor.patch_size, unit, processor.merge_size
            )
            pieces.append(patches)
            frames.clear()
    return np.concatenate(pieces), (len(pieces), rows, columns)


def read_pixel_bounds(fields: Fields, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Read the minimum and maximum pixels from `min_pixels` and `max_pixels`, or else from `size`."""
    size = read_size(fields, "size", {"shortest_edge": min_pixels, "longest_edge": max_pixels})
    default_min = size.get("shortest_edge", size.get("min_pixels", min_pixels))
    default_max = size.get("longest_edge", size.get("max_pixels", max_pixels))
    return fields.integer("min_pixels", default_min), fields.integer("max_pixels", default_max)


def fit_size(
    height: int,
    width: int,
    unit: int,
    min_pixels: int,
    max_pixels: int,
    where: str,
    *,
    num_frames: int = 1,
    padded_frames: int = 1,
) -> tuple[int, int]:
    """Return the size within bounds of its pixels that is closest to `(height, width)`, in multiples of `unit`.

    The bounds apply to all frames of a video: `padded_frames` frames decide whether the video must be resized, and the
    new size is computed for `num_frames` frames, as in transformers. Raises DataError for a too large aspect ratio.
    """
    if max(height, width) / min(height, width) > _MAX_ASPECT_RATIO:
        raise DataError(
            f"{where} has {width} x {height} pixels, an aspect ratio above {_MAX_ASPECT_RATIO}. Crop the image."
        )
    rows = round(height / unit)
    columns = round(width / unit)
    if padded_frames * rows * columns * unit**2 > max_pixels:
        factor = math.sqrt(num_frames * height * width / max_pixels)
        rows = max(1, math.floor(height / factor / unit))
        columns = max(1, math.floor(width / factor / unit))
    elif padded_frames * rows * columns * unit**2 < min_pixels:
        factor = math.sqrt(min_pixels / (num_frames * height * width))
        rows = math.ceil(height * factor / unit)
        columns = math.ceil(width * factor / unit)
    return rows * unit, columns * unit


def enlarge(height: int, width: int, min_side: int) -> tuple[int, int]:
    """Scale a size, without changing the aspect ratio, so that both sides are at least `min_side`."""
    if min(height, width) >= min_side:
        return height, width
    factor = max(min_side / height, min_side / width)
    return int(height * factor), int(width * factor)


def cut_patches(
    frames: np.ndarray, patch_size: int, temporal_patch_size: int, merge_size: int
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut frames, `[frames, 3, height, width]`, into patches.

    Returns patches, `[patches, features]`, and the grid (time, rows, columns). The patches of one token, `merge_size` x
    `merge_size` neighbors, are adjacent.
    """
    time = len(frames) // temporal_patch_size
    rows = frames.shape[2] // patch_size
    columns = frames.shape[3] // patch_size
    split = frames.reshape(
        time,
        temporal_patch_size,
        3,
        rows // merge_size,
        merge_size,
        patch_size,
        columns // merge_size,
        merge_size,
        patch_size,
    )
    patches = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(time * rows * columns, -1), (time, rows, columns)
