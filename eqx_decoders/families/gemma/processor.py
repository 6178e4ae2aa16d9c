"""Images and videos of Gemma 3 and 3n (resized to one size) and Gemma 4 (resized to a maximum number of patches)."""

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
    read_height_width,
    read_resample,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, BILINEAR, FIXED_POINT_FILTERS, resize, resize_fixed_point
from eqx_decoders.media_files.video import Clip, check_video_pixels, format_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3ImageProcessor(CheckedFields):
    """Images of Gemma 3, all resized to `size` without preserving the aspect ratio.

    **Arguments:**

    - `size`: height and width of resized images.
    - `pan_and_scan`: whether an elongated image is followed by crops along its longer side.
    - `min_crop_size`: minimum height and width of a crop in pixels.
    - `max_crops`: maximum number of crops.
    - `min_ratio`: minimum ratio of the longer to the shorter side at which an image is cropped.
    - `tokens_per_image`: number of tokens of an image or crop.
    - `placeholder`, `image_token`, `start_token`, `end_token`: texts of special tokens.
    """

    size: tuple[int, int] = (896, 896)
    resample: int = BILINEAR
    normalization: Normalization = Normalization()
    pan_and_scan: bool = False
    min_crop_size: PositiveInt = 256
    max_crops: PositiveInt = 4
    min_ratio: PositiveFloat = 1.2
    tokens_per_image: PositiveInt = 256
    placeholder: str = "<start_of_image>"
    image_token: str = "<image_soft_token>"
    start_token: str = "<start_of_image>"
    end_token: str = "<end_of_image>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3ImageProcessor":
        """Create the processor from the settings of a model's directory.

        As in transformers, pan-and-scan settings in the directory are ignored.
        """
        fields = settings.images
        start_token = settings.token("boi_token", "<start_of_image>")
        return cls(
            size=read_height_width(fields, "size", 224),
            resample=read_resample(fields, BILINEAR),
            normalization=read_normalization(fields, HALVES, HALVES),
            tokens_per_image=settings.processor.integer("image_seq_length", 256),
            placeholder=start_token,
            start_token=start_token,
            image_token=settings.token("image_token", "<image_soft_token>"),
            end_token=settings.token("eoi_token", "<end_of_image>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `[1 + crops, 3, height, width]`: the image and its crops."""
        images = [pixels, *self._crops(pixels)]
        check_tokens(where, self.tokens_per_image * len(images))
        values = [self.normalization(resize(image, self.size, self.resample, limits, where)) for image in images]
        image_text = f"\n\n{self.start_token}{self.image_token * self.tokens_per_image}{self.end_token}\n\n"
        text = image_text
        if len(images) > 1:
            crops = " ".join([image_text] * (len(images) - 1))
            text = f"Here is the original image {image_text} and here are some crops to help you see better {crops}"
        return ProcessedFile({"pixel_values": np.stack(values)}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, 3, height, width]`."""
        return concatenate_arrays(files)

    def _crops(self, pixels: np.ndarray) -> list[np.ndarray]:
        height, width = pixels.shape[:2]
        long_side = max(height, width)
        short_side = min(height, width)
        if not self.pan_and_scan or long_side / short_side < self.min_ratio:
            return []
        count = min(long_side // self.min_crop_size, math.floor(long_side / short_side + 0.5))
        count = min(max(count, 2), self.max_crops)
        crop_size = math.ceil(long_side / count)
        if min(crop_size, short_side) < self.min_crop_size:
            return []
        spans = [slice(crop_size * index, crop_size * (index + 1)) for index in range(count)]
        return [pixels[:, span] if width >= height else pixels[span] for span in spans]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3nImageProcessor(CheckedFields):
    """Images of Gemma 3n, all resized to `size` without preserving the aspect ratio.

    **Arguments:**

    - `size`: height and width of resized images.
    - `tokens_per_image`: number of tokens of an image.
    - `placeholder`: image token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after an image.
    """

    size: tuple[int, int] = (768, 768)
    resample: int = BILINEAR
    normalization: Normalization = Normalization(mean=None, std=None, rounding="fused")
    tokens_per_image: PositiveInt = 256
    placeholder: str = "<image_soft_token>"
    start_token: str = "<start_of_image>"
    end_token: str = "<end_of_image>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma3nImageProcessor":
        """Create the processor from the settings of a model's directory, which are those of SigLIP's processor."""
        fields = settings.images
        return cls(
            size=read_height_width(fields, "size", 224),
            resample=read_resample(fields, BICUBIC, FIXED_POINT_FILTERS),
            normalization=read_normalization(fields, HALVES, HALVES, rounding="fused"),
            tokens_per_image=settings.processor.integer("image_seq_length", 256),
            placeholder=settings.token("image_token", "<image_soft_token>"),
            start_token=settings.token("boi_token", "<start_of_image>"),
            end_token=settings.token("eoi_token", "<end_of_image>"),
        )

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, `[1, 3, height, width]`."""
        check_tokens(where, self.tokens_per_image)
        resized = resize_fixed_point(pixels, self.size, self.resample, limits, where)
        text = f"\n\n{self.start_token}{self.placeholder * self.tokens_per_image}{self.end_token}\n\n"
        return ProcessedFile({"pixel_values": self.normalization(resized)[None]}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, 3, height, width]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4ImageProcessor(CheckedFields):
    """Images of Gemma 4: resized to at most `max_tokens` tokens without changing the aspect ratio.

    **Arguments:**

    - `patch_size`: height and width of a patch in pixels.
    - `pooling_size`: number of rows and of columns of patches that are pooled into one token.
    - `max_tokens`: maximum number of tokens of an image.
    - `placeholder`: placeholder of an image in a prompt.
    - `image_token`: image token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after an image.
    """

    patch_size: PositiveInt = 16
    pooling_size: PositiveInt = 3
    max_tokens: PositiveInt = 280
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=None, std=None)
    placeholder: str = "<|image|>"
    image_token: str = "<|image|>"
    start_token: str = "<|image>"
    end_token: str = "<image|>"

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4ImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        image_token = settings.token("image_token", "<|image|>")
        return cls(
            patch_size=fields.integer("patch_size", 16),
            pooling_size=fields.integer("pooling_kernel_size", 3),
            max_tokens=fields.integer("max_soft_tokens", 280),
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), normalize=False),
            placeholder=image_token,
            image_token=image_token,
            start_token=settings.token("boi_token", "<|image>"),
            end_token=settings.token("eoi_token", "<image|>"),
        )

    @property
    def max_patches(self) -> int:
        """Maximum number of patches of an image, to which images are padded."""
        return self.max_tokens * self.pooling_size**2

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, padded with 0, and `image_position_ids`, padded with -1."""
        limits.check_pixels(where, self.max_patches, self.patch_size**2)
        check_tokens(where, self.max_tokens)
        size = self.resized_size(pixels.shape[0], pixels.shape[1], where)
        if size != pixels.shape[:2]:
            pixels = resize(pixels, size, self.resample, limits, where)
        patches, positions, num_tokens = self.cut_patches(self.normalization(pixels))
        arrays = {"pixel_values": patches[None], "image_position_ids": positions[None]}
        return ProcessedFile(arrays, f"{self.start_token}{self.image_token * num_tokens}{self.end_token}")

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[images, patches, features]`, and `image_position_ids`, `[images, patches, 2]`."""
        return concatenate_arrays(files)

    def resized_size(self, height: int, width: int, where: str) -> tuple[int, int]:
        """Return the height and width of the resized image: multiples of `pooling_size * patch_size`.

        Raises DataError, with the image's name `where`, if the resized image would have no pixels.
        """
        unit = self.pooling_size * self.patch_size
        factor = math.sqrt(self.max_patches * self.patch_size**2 / (height * width))
        rows = math.floor(factor * height / unit)
        columns = math.floor(factor * width / unit)
        if rows + columns == 0:
            raise DataError(f"{where}: an image of {width} x {height} pixels has less than one token. Enlarge it.")
        if rows == 0:
            rows = 1
            columns = min(width // height, self.max_tokens)
        elif columns == 0:
            rows = min(height // width, self.max_tokens)
            columns = 1
        return rows * unit, columns * unit

    def cut_patches(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Cut an image, `[3, height, width]`, into patches.

        Returns patches, `[max_patches, features]`, padded with 0; their positions (column, row), padded with -1; and
        the number of tokens.
        """
        rows, columns = (length // self.patch_size for length in values.shape[1:])
        num_patches = rows * columns
        split = values.reshape(3, rows, self.patch_size, columns, self.patch_size).transpose(1, 3, 2, 4, 0)
        padding = ((0, self.max_patches - num_patches), (0, 0))
        patches = np.pad(split.reshape(num_patches, -1), padding)
        index = np.arange(num_patches)
        positions = np.stack([index % columns, index // columns], axis=1)
        return patches, np.pad(positions, padding, constant_values=-1), num_patches // self.pooling_size**2


_FUSED_RESCALING = Normalization(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), rounding="fused")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4VideoProcessor(CheckedFields):
    """Videos of Gemma 4: equidistant frames. A frame is an image, preceded by its time.

    **Arguments:**

    - `frame`: image processor of the frames.
    - `sample_frames`: whether frames are sampled; otherwise all frames are used.
    - `num_frames`: number of frames to sample from the video; None: `fps` or all frames.
    - `fps`: number of frames to sample per second; None: `num_frames` or all frames.
    """

    frame: Gemma4ImageProcessor = Gemma4ImageProcessor(
        max_tokens=70, normalization=_FUSED_RESCALING, placeholder="<|video|>", image_token="<|video|>"
    )
    sample_frames: bool = True
    num_frames: PositiveInt | None = 32
    fps: PositiveFloat | None = None

    def __post_init__(self):
        super().__post_init__()
        check(
            self.fps is None or self.num_frames is None,
            f"Gemma4VideoProcessor: fps={self.fps} and num_frames={self.num_frames} are exclusive. Set one to None.",
        )

    @property
    def template(self) -> None:
        """None: conversations with videos use the chat template of the model's directory."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "Gemma4VideoProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.videos
        video_token = settings.token("video_token", "<|video|>")
        fps = fields.number("fps", None)
        return cls(
            frame=Gemma4ImageProcessor(
                patch_size=fields.integer("patch_size", 16),
                pooling_size=fields.integer("pooling_kernel_size", 3),
                max_tokens=fields.integer("max_soft_tokens", 70),
                resample=read_resample(fields, BICUBIC, FIXED_POINT_FILTERS),
                normalization=read_normalization(fields, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), rounding="fused"),
                placeholder=video_token,
                image_token=video_token,
                start_token=settings.token("boi_token", "<|image>"),
                end_token=settings.token("eoi_token", "<image|>"),
            ),
            sample_frames=fields.flag("do_sample_frames", True),
            num_frames=fields.integer("num_frames", 32 if fps is None else None, null=None),
            fps=fps,
        )

    @property
    def placeholder(self) -> str:
        """Video token, which is also repeated once per token."""
        return self.frame.image_token

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values_videos` and `video_position_ids`, both padded, and `num_frames_per_video`."""
        frame = self.frame
        indices = np.arange(clip.num_frames) if clip.use_all_frames else self._frame_indices(clip)
        check_tokens(clip.where, frame.max_tokens * len(indices))
        check_video_pixels(clip, len(indices), (frame.max_patches * frame.patch_size, frame.patch_size), limits)
        size = frame.resized_size(clip.height, clip.width, clip.where)
        frames = []
        for pixels in clip.frames(indices.tolist()):
            resized = resize_fixed_point(pixels, size, frame.resample, limits, clip.where)
            frames.append(frame.cut_patches(frame.normalization(resized)))
        patches, positions, num_tokens = zip(*frames, strict=True)
        arrays = {
            "pixel_values_videos": np.stack(patches),
            "video_position_ids": np.stack(positions),
            "num_frames_per_video": np.array([len(frames)]),
        }
        frame_text = f"{frame.start_token}{frame.image_token * num_tokens[0]}{frame.end_token}"
        times = [format_time(index / clip.fps) for index in indices.tolist()]
        return ProcessedFile(arrays, " ".join(f"{time} {frame_text}" for time in times))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return the arrays of all videos of a prompt.

        - `pixel_values_videos`: `[frames, patches, features]`.
        - `video_position_ids`: `[frames, patches, 2]`.
        - `num_frames_per_video`: `[videos]`.
        """
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to use: all frames if the video has fewer than requested."""
        num_frames = self.num_frames
        if self.fps is not None:
            num_frames = max(1, int(clip.num_frames / clip.fps * self.fps))
        if not self.sample_frames or num_frames is None or num_frames >= clip.num_frames:
            return np.arange(clip.num_frames)
        return np.arange(num_frames) * clip.num_frames // num_frames
