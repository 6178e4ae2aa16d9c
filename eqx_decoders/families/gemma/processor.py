"""Images and videos of Gemma 3 and 3n (one size) and Gemma 4 (a number of patches)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import CheckedFields, DataError, PositiveFloat, PositiveInt, check
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
    read_square,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, BILINEAR, SHORT, resize, resize_with_short_weights
from eqx_decoders.media_files.video import Clip, check_taken, clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Images(CheckedFields):
    """Images of Gemma 3, all resized to one size, whatever their shape.

    **Arguments:**

    - `size`: height and width.
    - `pan_and_scan`: whether a long image is followed by up to `most_crops` crops of it, if it is at least
        `least_ratio` times as long as wide and each crop has sides of at least `least_crop`.
    - `tokens`: number of tokens of an image.
    - `placeholder`, `token`, `begin`, `end`: texts of the special tokens.
    """

    size: tuple[int, int] = (896, 896)
    resample: int = BILINEAR
    normalization: Normalization = Normalization()
    pan_and_scan: bool = False
    least_crop: PositiveInt = 256
    most_crops: PositiveInt = 4
    least_ratio: PositiveFloat = 1.2
    tokens: PositiveInt = 256
    placeholder: str = "<start_of_image>"
    token: str = "<image_soft_token>"
    begin: str = "<start_of_image>"
    end: str = "<end_of_image>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3Images":
        """Read the rules from the settings of a directory. Pan and scan is no setting there in transformers either."""
        fields = settings.images
        begin = settings.token("boi_token", "<start_of_image>")
        return cls(
            size=read_square(fields, "size", 224),
            resample=read_resample(fields, BILINEAR),
            normalization=read_normalization(fields, HALVES, HALVES),
            tokens=settings.processor.integer("image_seq_length", 256),
            placeholder=begin,
            begin=begin,
            token=settings.token("image_token", "<image_soft_token>"),
            end=settings.token("eoi_token", "<end_of_image>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: the image, and its crops."""
        parts = [pixels, *self._crops(pixels)]
        check_tokens(where, self.tokens * len(parts))
        values = [self.normalization(resize(part, self.size, self.resample, limits, where)) for part in parts]
        image_text = f"\n\n{self.begin}{self.token * self.tokens}{self.end}\n\n"
        text = image_text
        if len(parts) > 1:
            crops = " ".join([image_text] * (len(parts) - 1))
            text = f"Here is the original image {image_text} and here are some crops to help you see better {crops}"
        return ProcessedFile({"pixel_values": np.stack(values)}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, 3, height, width]`."""
        return concatenate_arrays(files)

    def _crops(self, pixels: np.ndarray) -> list[np.ndarray]:
        height, width = pixels.shape[:2]
        long, short = max(height, width), min(height, width)
        if not self.pan_and_scan or long / short < self.least_ratio:
            return []
        count = min(long // self.least_crop, math.floor(long / short + 0.5))
        count = min(max(count, 2), self.most_crops)
        side = math.ceil(long / count)
        if min(side, short) < self.least_crop:
            return []
        cuts = [slice(side * number, side * (number + 1)) for number in range(count)]
        return [pixels[:, cut] if width >= height else pixels[cut] for cut in cuts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nImages(CheckedFields):
    """Images of Gemma 3n, all resized to one size, whatever their shape.

    **Arguments:**

    - `size`: height and width.
    - `tokens`: number of tokens of an image.
    - `placeholder`, `begin`, `end`: texts of the special tokens; the first one is repeated.
    """

    size: tuple[int, int] = (768, 768)
    resample: int = BILINEAR
    normalization: Normalization = Normalization(mean=None, std=None, steps="joint")
    tokens: PositiveInt = 256
    placeholder: str = "<image_soft_token>"
    begin: str = "<start_of_image>"
    end: str = "<end_of_image>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3nImages":
        """Read the rules from the settings of a directory, whose processor of images is that of SigLIP."""
        fields = settings.images
        return cls(
            size=read_square(fields, "size", 224),
            resample=read_resample(fields, BICUBIC, SHORT),
            normalization=read_normalization(fields, HALVES, HALVES, steps="joint"),
            tokens=settings.processor.integer("image_seq_length", 256),
            placeholder=settings.token("image_token", "<image_soft_token>"),
            begin=settings.token("boi_token", "<start_of_image>"),
            end=settings.token("eoi_token", "<end_of_image>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values` of the image, `[1, 3, height, width]`."""
        check_tokens(where, self.tokens)
        resized = resize_with_short_weights(pixels, self.size, self.resample, limits, where)
        text = f"\n\n{self.begin}{self.placeholder * self.tokens}{self.end}\n\n"
        return ProcessedFile({"pixel_values": self.normalization(resized)[None]}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, 3, height, width]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Images(CheckedFields):
    """Images of Gemma 4, which keep their shape, with at most `tokens` squares of `merge x merge` patches.

    **Arguments:**

    - `size`: rows and columns of pixels in a patch.
    - `merge`: rows and columns of patches that become one token.
    - `placeholder`, `token`, `begin`, `end`: texts of the special tokens.
    """

    size: PositiveInt = 16
    merge: PositiveInt = 3
    tokens: PositiveInt = 280
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=None, std=None)
    placeholder: str = "<|image|>"
    token: str = "<|image|>"
    begin: str = "<|image>"
    end: str = "<image|>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4Images":
        """Read the rules from the settings of a directory."""
        fields, token = settings.images, settings.token("image_token", "<|image|>")
        return cls(
            size=fields.integer("patch_size", 16),
            merge=fields.integer("pooling_kernel_size", 3),
            tokens=fields.integer("max_soft_tokens", 280),
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalize=False),
            placeholder=token,
            token=token,
            begin=settings.token("boi_token", "<|image>"),
            end=settings.token("eoi_token", "<image|>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values` and `image_position_ids` of the image, padded with 0 and -1."""
        limits.check_pixels(where, self.tokens * self.merge**2, self.size**2)
        check_tokens(where, self.tokens)
        pixels = self.resized(pixels, limits, where)
        patches, positions, tokens = self.patches(self.normalization(pixels))
        arrays = {"pixel_values": patches[None], "image_position_ids": positions[None]}
        return ProcessedFile(arrays, f"{self.begin}{self.token * tokens}{self.end}")

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[images, patches, numbers]`, `[images, patches, 2]`."""
        return concatenate_arrays(files)

    def resized(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> np.ndarray:
        """Return the largest image of about the same shape that has no more patches."""
        target = self.target(pixels.shape[0], pixels.shape[1], where)
        return pixels if target == pixels.shape[:2] else resize(pixels, target, self.resample, limits, where)

    def target(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the height and width of the resized image: multiples of `merge * size`."""
        side, most = self.merge * self.size, self.tokens * self.merge**2 * self.size**2
        factor = math.sqrt(most / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        check(rows + columns > 0, f"{where}: {width} x {height} pixels leave nothing of an image.", DataError)
        if rows == 0:
            rows, columns = 1, min(width // height, self.tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.tokens), 1
        return rows * side, columns * side

    def patches(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return patches `[most, numbers]`, their positions (column, row), and the number of tokens."""
        rows, columns = (length // self.size for length in values.shape[1:])
        split = values.reshape(3, rows, self.size, columns, self.size).transpose(1, 3, 2, 4, 0)
        index = np.arange(rows * columns)
        more = ((0, self.tokens * self.merge**2 - rows * columns), (0, 0))
        patches = np.pad(split.reshape(rows * columns, -1), more)
        positions = np.stack([index % columns, index // columns], axis=1)
        return patches, np.pad(positions, more, constant_values=-1), rows * columns // self.merge**2


BLACK_TO_WHITE = Normalization(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), steps="joint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Videos(CheckedFields):
    """Videos of Gemma 4: frames at equal distances, each an image with its time before it.

    **Arguments:**

    - `frame`: rules of each frame.
    - `choose`: whether frames are sampled; else all are taken.
    - `count`, `fps`: number of frames sampled from the video, or from a second; None for the other one, or all.
    """

    frame: Gemma4Images = Gemma4Images(
        tokens=70, normalization=BLACK_TO_WHITE, placeholder="<|video|>", token="<|video|>"
    )
    choose: bool = True
    count: PositiveInt | None = 32
    fps: PositiveFloat | None = None

    def __post_init__(self):
        super().__post_init__()
        both = self.fps is None or self.count is None
        check(both, f"Gemma4Videos: fps={self.fps} and count={self.count} exclude each other: give one.")

    @property
    def template(self) -> None:
        """None: the directory's template is used."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4Videos":
        """Read the rules from the settings of a directory."""
        fields, token = settings.videos, settings.token("video_token", "<|video|>")
        fps = fields.number("fps", None)
        return cls(
            frame=Gemma4Images(
                size=fields.integer("patch_size", 16),
                merge=fields.integer("pooling_kernel_size", 3),
                tokens=fields.integer("max_soft_tokens", 70),
                resample=read_resample(fields, BICUBIC, SHORT),
                normalization=read_normalization(fields, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), steps="joint"),
                placeholder=token,
                token=token,
                begin=settings.token("boi_token", "<|image>"),
                end=settings.token("eoi_token", "<image|>"),
            ),
            choose=fields.flag("do_sample_frames", True),
            count=fields.integer("num_frames", 32 if fps is None else None, null=None),
            fps=fps,
        )

    @property
    def placeholder(self) -> str:
        """Text of the special token, which is repeated."""
        return self.frame.token

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values_videos`, `video_position_ids`, both padded, and `num_frames_per_video`."""
        frame, frames = self.frame, []
        indices = np.arange(clip.count) if clip.chosen else self._frame_indices(clip)
        check_tokens(clip.where, frame.tokens * len(indices))
        check_taken(clip, len(indices), (frame.tokens * frame.merge**2 * frame.size, frame.size), limits)
        target = frame.target(clip.height, clip.width, clip.where)
        for pixels in clip.frames(indices.tolist()):
            small = resize_with_short_weights(pixels, target, frame.resample, limits, clip.where)
            frames.append(frame.patches(frame.normalization(small)))
        patches, positions, tokens = zip(*frames, strict=True)
        arrays = {
            "pixel_values_videos": np.stack(patches),
            "video_position_ids": np.stack(positions),
            "num_frames_per_video": np.array([len(frames)]),
        }
        frame_text = f"{frame.begin}{frame.token * tokens[0]}{frame.end}"
        return ProcessedFile(arrays, " ".join(f"{clock(index / clip.fps)} {frame_text}" for index in indices.tolist()))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[frames, patches, numbers]`, `[frames, patches, 2]`, `[videos]`."""
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to take; all, where there are fewer than wanted."""
        count = self.count if self.fps is None else max(1, int(clip.count / clip.fps * self.fps))
        if not self.choose or count is None or count >= clip.count:
            return np.arange(clip.count)
        return np.arange(count) * clip.count // count
