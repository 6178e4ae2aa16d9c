"""Images and videos of InternVL 3: tiles, row by row, and the whole image behind them; a tile for each frame."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np

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
from eqx_decoders.media_files.resizing import BICUBIC, SHORT, resize, resize_with_short_weights
from eqx_decoders.media_files.tiles import MOST_TILES, cut_tiles, read_side, tile_grid
from eqx_decoders.media_files.video import Clip, check_taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLWords(CheckedFields):
    """Text of images in a prompt.

    **Arguments:**

    - `tokens`: number of tokens of a tile.
    - `token`, `begin`, `end`: texts of the special tokens.
    """

    tokens: PositiveInt = 256
    token: str = "<IMG_CONTEXT>"
    begin: str = "<img>"
    end: str = "</img>"

    @classmethod
    def read(cls, settings: Settings) -> "InternVLWords":
        """Read the rules from the settings of a directory."""
        return cls(
            tokens=settings.processor.integer("image_seq_length", 256),
            token=settings.token("context_image_token", "<IMG_CONTEXT>"),
            begin=settings.token("start_image_token", "<img>"),
            end=settings.token("end_image_token", "</img>"),
        )

    def image(self, tiles: int = 1) -> str:
        """Return the text of an image of so many tiles."""
        return self.begin + self.token * (self.tokens * tiles) + self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLImages(CheckedFields):
    """Images of InternVL, stretched to the grid of tiles of the nearest shape, and followed by the whole as a tile.

    **Arguments:**

    - `side`: side of a tile, in pixels.
    - `least`, `most`: bounds on the number of tiles, without the whole.
    """

    side: PositiveInt = 448
    least: PositiveInt = 1
    most: Annotated[int, AtLeast(1, maximum=MOST_TILES)] = 12
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD)
    words: InternVLWords = InternVLWords()

    def __post_init__(self):
        super().__post_init__()
        check(self.least <= self.most, f"InternVLImages.least={self.least} must be at most most={self.most}.")

    @classmethod
    def read(cls, settings: Settings) -> "InternVLImages":
        """Read the rules from the settings of a directory; transformers' processor always makes tiles."""
        fields = settings.images
        return cls(
            side=read_side(fields, 384),
            least=fields.integer("min_patches", 1),
            most=fields.integer("max_patches", 12),
            resample=read_resample(fields, BICUBIC),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD),
            words=InternVLWords.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Text of the special token."""
        return self.words.token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`: tiles row by row, and the whole image behind them if there are several."""
        side = self.side
        rows, columns = tile_grid(pixels.shape[0], pixels.shape[1], side, self.least, self.most)
        count = rows * columns + (rows * columns > 1)
        check_tokens(where, self.words.tokens * count)
        values = self.normalization(resize(pixels, (rows * side, columns * side), self.resample, limits, where))
        tiles = cut_tiles(values, side)
        if len(tiles) > 1:
            whole = self.normalization(resize(pixels, (side, side), self.resample, limits, where))
            tiles = np.concatenate([tiles, whole[None]])
        return ProcessedFile({"pixel_values": tiles}, self.words.image(count))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[tiles, 3, side, side]`."""
        return concatenate_arrays(files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVLVideos(CheckedFields):
    """Videos of InternVL: frames at equal distances, each an image of one tile, with its number before it.

    **Arguments:**

    - `choose`: whether frames are sampled; else all are taken.
    - `count`, `fps`: number of frames sampled from the video, or from a second; None for the other one.
    - `shift`: the first frame that is sampled; None for half of the distance between two.
    - `words`: text of each frame.
    - `placeholder`: placeholder of a video in a prompt; it is no token of the model.
    """

    side: PositiveInt = 448
    resample: int = BICUBIC
    normalization: Normalization = Normalization(mean=CLIP_MEAN, std=CLIP_STD, steps="joint")
    choose: bool = False
    count: PositiveInt | None = None
    fps: PositiveFloat | None = None
    shift: NonNegativeFloat | None = None
    words: InternVLWords = InternVLWords()
    placeholder: str = "<video>"

    @property
    def template(self) -> None:
        """None: the directory's template is used."""
        return None

    @classmethod
    def read(cls, settings: Settings) -> "InternVLVideos":
        """Read the rules from the settings of a directory."""
        fields = settings.videos
        fields.allow_only("do_center_crop", False)
        shift = fields.take("initial_shift", True)
        return cls(
            side=read_side(fields, 384),
            resample=read_resample(fields, BICUBIC, SHORT),
            normalization=read_normalization(fields, CLIP_MEAN, CLIP_STD, steps="joint"),
            choose=fields.flag("do_sample_frames", False),
            count=fields.integer("num_frames", None),
            fps=fields.number("fps", None),
            shift=None if shift in (True, None) else float(shift),
            words=InternVLWords.read(settings),
            placeholder=settings.token("video_token", "<video>"),
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values` of the frames."""
        indices = np.arange(clip.count) if clip.chosen else self._frame_indices(clip)
        sides = (self.side, self.side)
        check_tokens(clip.where, self.words.tokens * len(indices))
        check_taken(clip, len(indices), sides, limits)
        values = [
            self.normalization(resize_with_short_weights(pixels, sides, self.resample, limits, clip.where))
            for pixels in clip.frames(indices.tolist())
        ]
        text = "\n".join(f"Frame{number}: {self.words.image()}" for number in range(1, len(values) + 1))
        return ProcessedFile({"pixel_values": np.stack(values)}, text)

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[frames, 3, side, side]`."""
        return concatenate_arrays(files)

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to take; all, where there are fewer than wanted."""
        count = self.count
        if count is None and self.fps is not None:
            count = max(1, int(clip.count / clip.fps * self.fps))
        if not self.choose or count is None or count > clip.count:
            return np.arange(clip.count)
        step = clip.count / count
        return np.arange(step / 2 if self.shift is None else self.shift, clip.count, step).astype(np.int64)
