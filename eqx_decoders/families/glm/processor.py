"""Images and videos of GLM-4.1V and GLM-4.5V: Qwen's patches, and frames that are images with their times."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import PositiveFloat
from eqx_decoders.families.qwen.processor import Qwen3Videos, QwenImages, read_pixels, read_videos
from eqx_decoders.media_files.base import ProcessedFile, Settings
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization
from eqx_decoders.media_files.video import Clip


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmImages(QwenImages):
    """Images of GLM-4.1V; bounds on pixels count each image as often as a patch repeats it."""

    least: int = 112 * 112
    most: int = 28 * 28 * 15_000
    counted: bool = True
    placeholder: str = "<|image|>"

    @classmethod
    def read(cls, settings: Settings) -> "GlmImages":
        """Read the rules from the settings of a directory."""
        return cls(**cls._settings(settings, 112 * 112, 28 * 28 * 15_000, "<|image|>"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmVideos(Qwen3Videos):
    """Videos of GLM-4.1V: each two frames are an image, with the first one's second behind it.

    **Arguments:**

    - `longest`: seconds from which on as many frames are sampled as from a video of this duration.
    - `token`: text of the special token of images, which is repeated.
    """

    size: int = 14
    least: int = 112 * 112
    most: int = 28 * 28 * 2 * 30_000
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, steps="joint")
    longest: PositiveFloat = 300.0
    placeholder: str = "<|video|>"
    token: str = "<|image|>"
    begin: str = "<|begin_of_image|>"
    end: str = "<|end_of_image|>"

    @classmethod
    def read(cls, settings: Settings) -> "GlmVideos":
        """Read the rules from the settings of a directory."""
        fields = settings.videos
        least, most = read_pixels(fields, 112 * 112, 28 * 28 * 2 * 30_000)
        fields.take("num_frames", None)  # transformers samples by fps alone
        options = read_videos(settings, 14, CLIP_MEAN, CLIP_STD, choose=True, placeholder="<|video|>")
        token = settings.token("image_token", "<|image|>")
        longest = fields.number("max_duration", 300.0)
        fps = options.pop("fps") or 2.0
        return cls(**{**options, "count": None}, fps=fps, least=least, most=most, longest=longest, token=token)

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values`, and `image_grid_thw` of each image."""
        made = super().process(clip, limits)
        count, *sides = made.arrays["video_grid_thw"][0].tolist()
        grids = np.array([[1, *sides]] * count)
        return ProcessedFile({"pixel_values": made.arrays["pixel_values_videos"], "image_grid_thw": grids}, made.text)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        if not self.choose or self.fps is None:
            return np.arange(clip.count)
        last, long = clip.count - 1, int(self.longest * self.fps)
        if clip.seconds <= self.longest:
            count = max(math.floor(clip.seconds * self.fps), 1)
            indices = [min(last, math.ceil(number * clip.fps / self.fps)) for number in range(count)]
        elif long >= clip.count:
            indices = list(range(clip.count))
        else:
            seconds = np.linspace(0, clip.seconds, long).tolist()
            indices = [min(last, math.ceil(second * clip.fps)) for second in seconds]
        return _even(indices)

    def _time(self, seconds: float) -> str:
        return str(int(seconds))

    def _text(self, clip: Clip, indices: np.ndarray, grid: tuple[int, int, int]) -> str:
        image = self.begin + self.token * (grid[1] * grid[2] // self.merge**2) + self.end
        times = [self._time(index / clip.fps) for index in indices[:: self.frames].tolist()]
        return "".join(f"{image}{time}" for time in times)


RATES = ((30.0, 3.0), (300.0, 1.0), (2400.0, 0.5))  # longest duration, images per second
MOST_FRAMES = 640


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm46Videos(GlmVideos):
    """Videos of GLM-4.6V: as many images a second as their duration says."""

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        if not self.choose:
            return np.arange(clip.count)
        longest = RATES[-1][0]
        seconds = min(clip.seconds, longest)
        rate = next(rate for most, rate in RATES if seconds <= most)
        count = min(int(seconds * rate * self.frames), MOST_FRAMES)
        indices = [] if clip.count < count else self._at_times(clip, 1 / (self.frames * rate))
        ends = (indices[0], indices[-1]) if indices and len(indices) < count else (0, clip.count - 1)
        if len(indices) != count:
            indices = np.linspace(*ends, count, dtype=np.int64).tolist()
        return _even(indices)

    def _at_times(self, clip: Clip, step: float) -> list[int]:
        """Return the first frame behind each time, up to the last whole second."""
        indices, time = [], 0.0
        for index in range(clip.count):
            if index * (1 / clip.fps) >= time:
                time += step
                indices.append(index)
                if time >= int(clip.seconds):
                    break
        return indices

    def _time(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def _even(indices: Sequence[int]) -> np.ndarray:
    """Return each of ascending indices once, and the last one twice if they were odd."""
    once = list(dict.fromkeys(indices))
    return np.array(once + once[-1:] * (len(once) % 2))
