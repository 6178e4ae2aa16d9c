"""Images and videos of SmolVLM and Idefics 3: tiles in row order, and a thumbnail of the full image after them."""

import dataclasses
import datetime
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.core.config_reader import Fields
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, PositiveInt, check_integer
from eqx_decoders.media_files.base import (
    ProcessedFile,
    Settings,
    check_tokens,
    concatenate_arrays,
    read_resample,
    read_size,
)
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.normalize import HALVES, Normalization, read_normalization
from eqx_decoders.media_files.resizing import FIXED_POINT_FILTERS, LANCZOS, Size, resize, resize_fixed_point
from eqx_decoders.media_files.video import Clip, check_video_pixels, format_time


_MAX_LONGEST_EDGE = 4096
_LONGEST_EDGE = 4 * 364
_TILE_SIZE = 364


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMImageText(CheckedFields):
    """Text of images in a prompt. If an image has several tiles, each tile also has a token such as `<row_1_col_1>`.

    **Arguments:**

    - `tokens_per_tile`: number of tokens of a tile.
    - `image_token`: image token, which is repeated once per token.
    - `fake_image_token`: special token before each tile and after the thumbnail.
    - `global_image_token`: special token before the thumbnail.
    """

    tokens_per_tile: PositiveInt = 169
    image_token: str = "<image>"
    fake_image_token: str = "<fake_token_around_image>"
    global_image_token: str = "<global-img>"

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMImageText":
        """Create the texts from the settings of a model's directory."""
        return cls(
            tokens_per_tile=settings.processor.integer("image_seq_len", 169),
            image_token=settings.token("image_token", "<image>"),
            fake_image_token=settings.token("fake_image_token", "<fake_token_around_image>"),
            global_image_token=settings.token("global_image_token", "<global-img>"),
        )

    def render(self, rows: int = 0, columns: int = 0) -> str:
        """Return the text of an image with `rows` x `columns` tiles and a thumbnail. 0: the thumbnail only."""
        fake = self.fake_image_token
        tile = self.image_token * self.tokens_per_tile
        lines = [
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        separator = "\n" if lines else ""
        return f"{''.join(lines)}{separator}{fake}{self.global_image_token}{tile}{fake}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMImageProcessor(CheckedFields):
    """Images of SmolVLM: resized to `longest_edge`, split into tiles, and followed by a thumbnail of the full image.

    **Arguments:**

    - `longest_edge`: longer side of resized images in pixels.
    - `tile_size`: height and width of a tile in pixels. Both sides of an image are resized to multiples of it.
    - `split_image`: whether images are split into tiles; otherwise there is only the thumbnail.
    - `image_text`: text of an image in a prompt.
    """

    longest_edge: PositiveInt = _LONGEST_EDGE
    tile_size: PositiveInt = _TILE_SIZE
    split_image: bool = True
    resample: int = LANCZOS
    normalization: Normalization = Normalization()
    image_text: SmolVLMImageText = SmolVLMImageText()

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMImageProcessor":
        """Create the processor from the settings of a model's directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        return cls(
            longest_edge=read_longest_edge(fields, "size", _LONGEST_EDGE),
            tile_size=read_longest_edge(fields, "max_image_size", _TILE_SIZE),
            split_image=fields.flag("do_image_splitting", True),
            resample=read_resample(fields, LANCZOS),
            normalization=read_normalization(fields, HALVES, HALVES),
            image_text=SmolVLMImageText.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Image token."""
        return self.image_text.image_token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values`, the tiles and the thumbnail, and `pixel_attention_mask`, 1 everywhere."""
        tile_size = self.tile_size
        size = fit_longest_edge(pixels.shape[0], pixels.shape[1], self.longest_edge)
        pixels = resize(pixels, size, self.resample, limits, where)
        tiles = []
        rows = 0
        columns = 0
        if self.split_image:
            pixels = resize(pixels, self._round_up_to_tiles(*pixels.shape[:2]), self.resample, limits, where)
            rows = pixels.shape[0] // tile_size
            columns = pixels.shape[1] // tile_size
            if rows * columns > 1:
                split = pixels.reshape(rows, tile_size, columns, tile_size, 3).swapaxes(1, 2)
                tiles = list(split.reshape(-1, tile_size, tile_size, 3))
            else:
                rows = 0
                columns = 0
        tiles.append(resize(pixels, (tile_size, tile_size), self.resample, limits, where))
        check_tokens(where, self.image_text.tokens_per_tile * len(tiles))
        arrays = {
            "pixel_values": np.stack([self.normalization(tile) for tile in tiles]),
            "pixel_attention_mask": np.ones((len(tiles), tile_size, tile_size), np.int64),
        }
        return ProcessedFile(arrays, self.image_text.render(rows, columns))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[1, tiles, 3, height, width]`, and the mask, `[1, tiles, height, width]`."""
        return join_as_one_row(files)

    def _round_up_to_tiles(self, height: int, width: int) -> Size:
        """Return height and width as multiples of `tile_size`: the longer side is rounded up before the shorter."""
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile_size) * self.tile_size
            height = math.ceil(int(width / ratio) / self.tile_size) * self.tile_size
        else:
            height = math.ceil(height / self.tile_size) * self.tile_size
            width = math.ceil(int(height * ratio) / self.tile_size) * self.tile_size
        return height, width


# transformers uses this template for conversations with videos instead of the directory's chat template. Here, the
# content of a message may also be a string.
VIDEO_TEMPLATE = """<|im_start|>{% for message in messages %}{{ message.role | capitalize -}}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%}
{{ ':' if parts and parts[0].type == 'image' else ': ' }}
{%- for part in parts %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor -%}
<end_of_utterance>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMVideoProcessor(CheckedFields):
    """Videos of SmolVLM: equidistant frames. A frame is an image of one tile, preceded by its time.

    Frames are sampled if `max_frames` or `fps` is set, as transformers does for conversations. The text of a video has
    the number of its frames; in transformers, it also counts the padding of shorter videos.

    **Arguments:**

    - `size`: longer side of frames after the first resizing, or their height and width.
    - `tile_size`: height and width of frames after the second resizing.
    - `max_frames`: maximum number of frames that are sampled; None: no maximum.
    - `fps`: number of frames to sample per second; None: `max_frames` or all frames.
    - `skipped_seconds`: seconds at the start and at the end that are not sampled, if the remaining duration in seconds
        is above `max_frames * fps` (the rule of transformers).
    - `image_text`: text of a frame in a prompt.
    - `placeholder`: placeholder of a video in a prompt. It is not a token of the model.
    - `template`: chat template for conversations with videos.
    """

    size: int | Size = _LONGEST_EDGE
    tile_size: PositiveInt = _TILE_SIZE
    resample: int = LANCZOS
    normalization: Normalization = Normalization(rounding="fused")
    max_frames: PositiveInt | None = None
    fps: PositiveFloat | None = None
    skipped_seconds: NonNegativeFloat = 1.0
    image_text: SmolVLMImageText = SmolVLMImageText()
    placeholder: str = "<video>"
    template: str = VIDEO_TEMPLATE

    def __post_init__(self):
        super().__post_init__()
        sides = (self.size,) if isinstance(self.size, int) else self.size
        for side in sides:
            check_integer("SmolVLMVideoProcessor.size", side)

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMVideoProcessor":
        """Create the processor from the settings of a model's directory.

        The values in `video_sampling` replace `num_frames` and `fps`. Its `video_size` is used if there is no `size`.
        """
        fields = settings.videos
        fields.allow_only("do_pad", True)
        max_frames = fields.integer("num_frames", None)
        fps = fields.number("fps", None)
        size = read_size(fields, "size", {"longest_edge": _LONGEST_EDGE})
        sampling = fields.table("video_sampling")
        if sampling is not None:
            max_frames = sampling.integer("max_frames")
            fps = sampling.number("fps")
            size = size if "size" in fields.content else read_size(sampling, "video_size", size)
        if "longest_edge" not in size and not {"height", "width"} <= size.keys():
            raise fields.error(f"size={size} must have the key longest_edge, or the keys height and width.")
        return cls(
            size=size["longest_edge"] if "longest_edge" in size else (size["height"], size["width"]),
            tile_size=read_longest_edge(fields, "max_image_size", _TILE_SIZE),
            resample=read_resample(fields, LANCZOS, FIXED_POINT_FILTERS),
            normalization=read_normalization(fields, HALVES, HALVES, rounding="fused"),
            max_frames=max_frames,
            fps=fps,
            image_text=SmolVLMImageText.read(settings),
            placeholder=settings.token("video_token", "<video>"),
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values`, the frames, and `pixel_attention_mask`, 1 everywhere."""
        indices = np.arange(clip.num_frames) if clip.use_all_frames else self._frame_indices(clip)
        check_tokens(clip.where, self.image_text.tokens_per_tile * len(indices))
        tile_shape = (self.tile_size, self.tile_size)
        check_video_pixels(clip, len(indices), tile_shape, limits)
        first_size = self._first_size(clip)
        values = []
        for pixels in clip.frames(indices.tolist()):
            resized = resize_fixed_point(pixels, first_size, self.resample, limits, clip.where)
            resized = resize_fixed_point(resized, tile_shape, self.resample, limits, clip.where)
            values.append(self.normalization(resized))
        mask = np.ones((len(values), *tile_shape), np.int64)
        arrays = {"pixel_values": np.stack(values), "pixel_attention_mask": mask}
        return ProcessedFile(arrays, self._text(clip, indices))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return `pixel_values`, `[1, frames, 3, height, width]`, and the mask, `[1, frames, height, width]`."""
        return join_as_one_row(files)

    def _first_size(self, clip: Clip) -> Size:
        """Return the height and width of frames after the first resizing."""
        if isinstance(self.size, int):
            return fit_longest_edge(clip.height, clip.width, min(self.size, _MAX_LONGEST_EDGE))
        return self.size

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the indices of the frames to use, in ascending order and without repeated indices."""
        if self.max_frames is None and self.fps is None:
            return np.arange(clip.num_frames)
        first = 0
        last = clip.num_frames - 1
        max_frames = clip.num_frames if self.max_frames is None else self.max_frames
        num_frames = max_frames if self.fps is None else min(round(self.fps * clip.duration), max_frames)
        if self.max_frames is not None and self.fps is not None and self.skipped_seconds > 0:
            margin = self.skipped_seconds * clip.fps
            first_inner = int(margin)
            last_inner = min(int(clip.num_frames - margin), last)
            is_long = clip.duration - 2 * self.skipped_seconds > self.max_frames * self.fps
            if is_long and first_inner < last_inner:
                first = first_inner
                last = last_inner
        num_frames = min(max(num_frames, 1), last - first + 1)
        return np.unique(np.linspace(first, last, num_frames, dtype=np.int64))

    def _text(self, clip: Clip, indices: np.ndarray) -> str:
        times = (indices / clip.fps).tolist()
        duration = datetime.timedelta(seconds=int(times[-1] if clip.use_all_frames else clip.duration))
        count = in_words(len(indices))
        start = f"You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n"
        frames = (f"\nFrame from {format_time(time)}:{self.image_text.render()}" for time in times)
        return f"{start}{''.join(frames)}\n\n"


def join_as_one_row(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of all files, and add a leading batch axis of size 1."""
    return {name: array[None] for name, array in concatenate_arrays(files).items()}


_BELOW_TWENTY = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))


def in_words(number: int) -> str:
    """Return a non-negative integer in English: 1234 is "one thousand, two hundred and thirty-four"."""
    if number < 20:
        return _BELOW_TWENTY[number]
    if number < 100:
        units = number % 10
        return _TENS[number // 10 - 2] + (f"-{_BELOW_TWENTY[units]}" if units else "")
    unit, unit_name = next((unit, name) for unit, name in _LARGE if number >= unit)
    text = f"{in_words(number // unit)} {unit_name}"
    remainder = number % unit
    if not remainder:
        return text
    return f"{text}{' and ' if remainder < 100 else ', '}{in_words(remainder)}"


def read_longest_edge(fields: Fields, key: str, default: int) -> int:
    """Read an object with the key longest_edge."""
    size = read_size(fields, key, {"longest_edge": default})
    if "longest_edge" not in size:
        raise fields.error(f"{key}={size} must have the key longest_edge.")
    return size["longest_edge"]


def fit_longest_edge(height: int, width: int, longest_edge: int) -> Size:
    """Return the height and width with this longer side and the same aspect ratio. The shorter side is rounded to even.

    Then the longer side is limited to 4096.
    """
    ratio = width / height
    if width >= height:
        width = longest_edge
        height = int(longest_edge / ratio)
        height = max(height + height % 2, 1)
    else:
        height = longest_edge
        width = int(longest_edge * ratio)
        width = max(width + width % 2, 1)
    ratio = width / height
    if width >= height and width > _MAX_LONGEST_EDGE:
        width = _MAX_LONGEST_EDGE
        height = int(_MAX_LONGEST_EDGE / ratio)
    elif height > width and height > _MAX_LONGEST_EDGE:
        height = _MAX_LONGEST_EDGE
        width = int(_MAX_LONGEST_EDGE * ratio)
    return max(height, 1), max(width, 1)
