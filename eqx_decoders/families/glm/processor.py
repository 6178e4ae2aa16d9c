"""Images and videos of GLM-4.1V, GLM-4.5V and GLM-4.6V: the patches of Qwen-VL. A video is a list of timed images."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import PositiveFloat
from eqx_decoders.families.qwen.processor import (
    Qwen3VideoProcessor,
    QwenImageProcessor,
    read_pixel_bounds,
    read_video_fields,
)
from eqx_decoders.media_files.base import ProcessedFile, Settings
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization
from eqx_decoders.media_files.video import Clip


_PATCH_SIZE = 14
_MIN_PIXELS = 112 * 112
_IMAGE_MAX_PIXELS = 28 * 28 * 15_000
_VIDEO_MAX_PIXELS = 28 * 28 * 2 * 30_000
_FPS = 2.0
_MAX_DURATION = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmImageProcessor(QwenImageProcessor):
    """Images of GLM-4.1V. The bounds apply to the pixels of all repeated frames."""

    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _IMAGE_MAX_PIXELS
    count_repeats: bool = True
    placeholder: str = "<|image|>"

    @classmethod
    def read(cls, settings: Settings) -> "GlmImageProcessor":
        """Create the processor from the settings of a model's directory."""
        return cls(**cls._read_fields(settings, _MIN_PIXELS, _IMAGE_MAX_PIXELS, "<|image|>"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmVideoProcessor(Qwen3VideoProcessor):
    """Videos of GLM-4.1V: a pair of frames is an image, followed by the time of its first frame in seconds.

    **Arguments:**

    - `max_duration`: duration in seconds above which the number of sampled frames does not increase.
    - `image_token`: image token, which is repeated once per token.
    """

    patch_size: int = _PATCH_SIZE
    min_pixels: int = _MIN_PIXELS
    max_pixels: int = _VIDEO_MAX_PIXELS
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, rounding="fused")
    max_duration: PositiveFloat = _MAX_DURATION
    placeholder: str = "<|video|>"
    image_token: str = "<|image|>"
    start_token: str = "<|begin_of_image|>"
    end_token: str = "<|end_of_image|>"

    @classmethod
    def read(cls, settings: Settings) -> "GlmVideoProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.videos
        min_pixels, max_pixels = read_pixel_bounds(fields, _MIN_PIXELS, _VIDEO_MAX_PIXELS)
        shared_fields = read_video_fields(
            settings, _PATCH_SIZE, CLIP_MEAN, CLIP_STD, sample_frames=True, placeholder="<|video|>"
        )
        shared_fields["num_frames"] = None  # transformers ignores it and samples by fps
        shared_fields["fps"] = shared_fields["fps"] or _FPS
        return cls(
            **shared_fields,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_duration=fields.number("max_duration", _MAX_DURATION),
            image_token=settings.token("image_token", "<|image|>"),
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values`, `[patches, features]`, and `image_grid_thw`, `[images, 3]`."""
        video = super().process(clip, limits)
        num_images, rows, columns = video.arrays["video_grid_thw"][0].tolist()
        grids = np.array([[1, rows, columns]] * num_images)
        return ProcessedFile({"pixel_values": video.arrays["pixel_values_videos"], "image_grid_thw": grids}, video.text)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        if not self.sample_frames or self.fps is None:
            return np.arange(clip.num_frames)
        last = clip.num_frames - 1
        max_frames = int(self.max_duration * self.fps)
        if clip.duration <= self.max_duration:
            num_frames = max(math.floor(clip.duration * self.fps), 1)
            indices = [min(last, math.ceil(number * clip.fps / self.fps)) for number in range(num_frames)]
        elif max_frames >= clip.num_frames:
            indices = list(range(clip.num_frames))
        else:
            times = np.linspace(0, clip.duration, max_frames).tolist()
            indices = [min(last, math.ceil(time * clip.fps)) for time in times]
        return _to_even_length(indices)

    def _format_time(self, seconds: float) -> str:
        return str(int(seconds))

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        num_tokens = grid[1] * grid[2] // self.merge_size**2
        image = self.start_token + self.image_token * num_tokens + self.end_token
        times = [self._format_time(index / clip.fps) for index in indices[:: self.temporal_patch_size].tolist()]
        return "".join(f"{image}{time}" for time in times)


_GLM46_RATES = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))  # (maximum duration in seconds, images per second)
_GLM46_MAX_FRAMES = 640


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm46VideoProcessor(GlmVideoProcessor):
    """Videos of GLM-4.6V: the number of images per second depends on the duration."""

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        if not self.sample_frames:
            return np.arange(clip.num_frames)
        seconds = min(clip.duration, _GLM46_RATES[-1][0])
        images_per_second = next(rate for max_duration, rate in _GLM46_RATES if seconds <= max_duration)
        frames_per_second = self.temporal_patch_size * images_per_second
        num_frames = min(int(seconds * images_per_second * self.temporal_patch_size), _GLM46_MAX_FRAMES)
        indices = [] if clip.num_frames < num_frames else self._indices_at_times(clip, 1 / frames_per_second)
        if len(indices) != num_frames:
            has_too_few = 0 < len(indices) < num_frames
            first, last = (indices[0], indices[-1]) if has_too_few else (0, clip.num_frames - 1)
            indices = np.linspace(first, last, num_frames, dtype=np.int64).tolist()
        return _to_even_length(indices)

    def _indices_at_times(self, clip: Clip, interval: float) -> list[int]:
        """Return the first frame at or after each multiple of `interval` seconds, before the last full second."""
        indices = []
        time = 0.0
        for index in range(clip.num_frames):
            if index * (1 / clip.fps) >= time:
                time += interval
                indices.append(index)
                if time >= int(clip.duration):
                    break
        return indices

    def _format_time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def _to_even_length(indices: Sequence[int]) -> np.ndarray:
    """Remove repeated indices. Then repeat the last index if their number is odd."""
    unique = list(dict.fromkeys(indices))
    return np.array(unique + unique[-1:] * (len(unique) % 2))
