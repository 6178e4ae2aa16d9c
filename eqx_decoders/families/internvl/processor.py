"""Images and videos of InternVL 3: tiles in row order and a thumbnail after them; a frame of a video is one tile."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from eqx_decoders.core.config_reader import abbreviate
from eqx_decoders.errors import AtLeast, CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, check
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import CLIP_MEAN, CLIP_STD, Normalization, read_normalization
from eqx_decoders.media_files.resizing import BICUBIC, FIXED_POINT_FILTERS, resize, resize_fixed_point
from eqx_decoders.media_files.tiles import MAX_TILES, cut_tiles, read_tile_size, tile_grid
from eqx_decoders.media_files.video import Clip, check_video_pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLImageText(CheckedFields):
    """Text of images in a prompt.

    **Arguments:**

    - `tokens_per_tile`: number of tokens of a tile.
    - `image_token`: image token, which is repeated once per token.
    - `start_token`, `end_token`: special tokens before and after an image.
    """

    tokens_per_tile: PositiveInt = 256
    image_token: str = "<IMG_CONTEXT>"
    start_token: str = "<img>"
    end_token: str = "</img>"

    @classmethod
    def read(cls, settings: Settings) -> "InternVLImageText":
        """Create the texts from the settings of a model's directory."""
        return cls(
            tokens_per_tile=settings.processor.integer("image_seq_length", 256),
            image_token=settings.token("context_image_token", "<IMG_CONTEXT>"),
            start_token=settings.token("start_image_token", "<img>"),
            end_token=settings.token("end_image_token", "</img>"),
        )

    def render(self, num_tiles: int = 1) -> str:
        """Return the text of an image."""
        return self.start_token + self.image_token * (self.tokens_per_tile * num_tiles) + self.end_token


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLImageProcessor(CheckedFields):
    """Images of InternVL: resized to the grid of tiles with the closest aspect ratio, and followed by a thumbnail.

    **Arguments:**

    - `tile_size`: height and width of a tile in pixels.
    - `min_tiles`, `max_tiles`: bounds of the number of tiles, without the thumbnail.
    - `image_text`: text of an image in a prompt.
    """

    tile_size: PositiveInt = 448
    min_tiles: PositiveInt = 1
    max_tiles: Annotated[int, AtLeast(1, maximum=MAX_TILES)] = 12
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    image_text: InternVLImageText = InternVLImageText()

    def __post_init__(self):
        super().__post_init__()
        check(
            self.min_tiles <= self.max_tiles,
            f"InternVLImageProcessor.min_tiles={self.min_tiles} must be at most max_tiles={self.max_tiles}.",
        )

    @classmethod
    def read(cls, settings: Settings) -> "InternVLImageProcessor":
        """Create the processor from the settings of a model's directory.

        Images are always split into tiles, as in transformers, whose processor sets `crop_to_patches`.
        """
        fields = settings.images
        return cls(
            tile_size=read_tile_size(fields, 384),
            min_tiles=fields.integer("min_patches", 1),
            max_tiles=fields.integer("max_patches", 12),
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            image_text=InternVLImageText.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Image token."""
        return self.image_text.image_token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: tiles in row order, and a thumbnail after them if there are several tiles."""
        tile_size = self.tile_size
        rows, columns = tile_grid(pixels.shape[0], pixels.shape[1], tile_size, self.min_tiles, self.max_tiles)
        has_thumbnail = rows * columns > 1
        num_tiles = rows * columns + has_thumbnail
        check_tokens(where, self.image_text.tokens_per_tile * num_tiles)
        resized = resize(pixels, (rows * tile_size, columns * tile_size), self.resample, limits, where)
        tiles = cut_tiles(self.normalization(resized), tile_size)
        if has_thumbnail:
            thumbnail = resize(pixels, (tile_size, tile_size), self.resample, limits, where)
            tiles = np.concatenate([tiles, self.normalization(thumbnail)[None]])
        return ProcessedFile({"pixel_values": tiles}, self.image_text.render(num_tiles))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[tiles, 3, tile_size, tile_size]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLVideoProcessor(CheckedFields):
    """Videos of InternVL: equidistant frames. A frame is an image of one tile, preceded by its number.

    **Arguments:**

    - `tile_size`: height and width of resized frames in pixels.
    - `sample_frames`: whether frames are sampled; otherwise all frames are used.
    - `num_frames`: number of frames to sample from the video; None: `fps` or all frames.
    - `fps`: number of frames to sample per second if `num_frames` is None; None: all frames.
    - `first_frame`: index of the first sampled frame; None: half the distance between sampled frames.
    - `image_text`: text of a frame in a prompt.
    - `placeholder`: placeholder of a video in a prompt. It is not a token of the model.
    """

    tile_size: PositiveInt = 448
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, rounding="fused")
    sample_frames: bool = False
    num_frames: PositiveInt | None = None
    fps: PositiveFloat | None = None
    first_frame: NonNegativeFloat | None = None
    image_text: InternVLImageText = InternVLImageText()
    placeholder: str = "<video>"

    @property
    def template(self) -> None:
        """None: conversations with videos use the chat template of the model's directory."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "InternVLVideoProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.videos
        fields.allow_only("do_center_crop", False)
        first_frame = fields.take("initial_shift", True)
        if not isinstance(first_frame, bool | int | float) or not 0 <= first_frame < float("inf"):
            raise fields.error(
                f"initial_shift={abbreviate(first_frame)} must be the index of the first frame, at least 0, or true: "
                "half of the distance between frames."
            )
        return cls(
            tile_size=read_tile_size(fields, 384),
            resample=read_resample(fields, BICUBIC, FIXED_POINT_FILTERS),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD, rounding="fused"),
            sample_frames=fields.flag("do_sample_frames", False),
            num_frames=fields.integer("num_frames", None),
            fps=fields.number("fps", None),
            first_frame=None if first_frame is True else float(first_frame),
            image_text=InternVLImageText.read(settings),
            placeholder=settings.token("video_token", "<video>"),
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values`, `[frames, 3, tile_size, tile_size]`."""
        indices = np.arange(clip.num_frames) if clip.use_all_frames else self._frame_indices(clip)
        size = (self.tile_size, self.tile_size)
        check_tokens(clip.where, self.image_text.tokens_per_tile * len(indices))
        check_video_pixels(clip, len(indices), size, limits)
        values = [
            self.normalization(resize_fixed_point(pixels, size, self.resample, limits, clip.where))
            for pixels in clip.frames(indices.tolist())
        ]
        text = "\n".join(f"Frame{number}: {self.image_text.render()}" for number in range(1, len(values) + 1))
        return ProcessedFile({"pixel_values": np.stack(values)}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[frames, 3, tile_size, tile_size]`."""
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to use: all frames if the video has fewer than requested."""
        num_frames = self.num_frames
        if num_frames is None and self.fps is not None:
            num_frames = max(1, int(clip.num_frames / clip.fps * self.fps))
        if not self.sample_frames or num_frames is None or num_frames > clip.num_frames:
            return np.arange(clip.num_frames)
        step = clip.num_frames / num_frames
        first = step / 2 if self.first_frame is None else self.first_frame
        return np.arange(first, clip.num_frames, step).astype(np.int64)
