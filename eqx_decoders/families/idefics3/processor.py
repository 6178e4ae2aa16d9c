"""Images and videos of SmolVLM and Idefics 3: tiles, row by row, and the whole image behind them."""

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
from eqx_decoders.media_files.resizing import LANCZOS, SHORT, Size, resize, resize_with_short_weights
from eqx_decoders.media_files.video import Clip, check_taken, clock


MOST_LONGEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolWords(CheckedFields):
    """Text of images in a prompt.

    **Arguments:**

    - `tokens`: number of tokens of a tile.
    - `token`, `around`, `whole`: texts of the special tokens; each tile of several also has `<row_1_col_1>` and so on.
    """

    tokens: PositiveInt = 169
    token: str = "<image>"
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    @classmethod
    def read(cls, settings: Settings) -> "SmolWords":
        """Read the rules from the settings of a directory."""
        return cls(
            tokens=settings.processor.integer("image_seq_len", 169),
            token=settings.token("image_token", "<image>"),
            around=settings.token("fake_image_token", "<fake_token_around_image>"),
            whole=settings.token("global_image_token", "<global-img>"),
        )

    def image(self, rows: int = 0, columns: int = 0) -> str:
        """Return the text of an image with these tiles before the whole."""
        tile = self.token * self.tokens
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{self.around}{self.whole}{tile}{self.around}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMImages(CheckedFields):
    """Images of SmolVLM, resized to one longer side, cut into tiles, and followed by the whole as a tile.

    **Arguments:**

    - `longest`: the longer side, in pixels.
    - `tile`: side of a tile; both sides of an image become multiples of it.
    - `split`: whether there are tiles besides the whole image.
    """

    longest: PositiveInt = 4 * 364
    tile: PositiveInt = 364
    split: bool = True
    resample: int = LANCZOS
    normalization: Normalization = Normalization()
    words: SmolWords = SmolWords()

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMImages":
        """Read the rules from the settings of a directory."""
        fields = settings.images
        fields.allow_only("do_pad", True)
        return cls(
            longest=read_longest(fields, "size", 4 * 364),
            tile=read_longest(fields, "max_image_size", 364),
            split=fields.flag("do_image_splitting", True),
            resample=read_resample(fields, LANCZOS),
            normalization=read_normalization(fields, HALVES, HALVES),
            words=SmolWords.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """Text of the special token."""
        return self.words.token

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Return `pixel_values` of the tiles and the whole; `pixel_attention_mask`, 1 everywhere."""
        tile, rows, columns = self.tile, 0, 0
        target = fit_longest(pixels.shape[0], pixels.shape[1], self.longest)
        pixels = resize(pixels, target, self.resample, limits, where)
        parts = []
        if self.split:
            pixels = resize(pixels, self._whole_tiles(*pixels.shape[:2]), self.resample, limits, where)
            rows, columns = pixels.shape[0] // tile, pixels.shape[1] // tile
            if rows * columns > 1:
                cut = pixels.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2)
                parts = list(cut.reshape(-1, tile, tile, 3))
            else:
                rows = columns = 0
        parts.append(resize(pixels, (tile, tile), self.resample, limits, where))
        check_tokens(where, self.words.tokens * len(parts))
        arrays = {
            "pixel_values": np.stack([self.normalization(part) for part in parts]),
            "pixel_attention_mask": np.ones((len(parts), tile, tile), np.int64),
        }
        return ProcessedFile(arrays, self.words.image(rows, columns))

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[1, tiles, 3, height, width]`, `[1, tiles, height, width]`."""
        return as_one_row(files)

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return multiples of tiles, the longer side first."""
        if width >= height:
            ratio = width / height
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            ratio = width / height
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return height, width


# transformers' template for conversations with videos, whatever template the directory has. Texts may be no parts.
VIDEO_TEMPLATE = """<|im_start|>{% for message in messages %}{{ message.role | capitalize -}}
{%- set parts = [{'type': 'text', 'text': message.content}] if message.content is string else message.content -%}
{{ ':' if parts and parts[0].type == 'image' else ': ' }}
{%- for part in parts %}{{ part.text if part.type == 'text' else '<' ~ part.type ~ '>' }}{% endfor -%}
<end_of_utterance>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMVideos(CheckedFields):
    """Videos of SmolVLM: frames at equal distances, each an image of one tile, with its time before it.

    Frames are sampled wherever `count` or `fps` say how many, as transformers does for conversations. A video's text
    counts its own frames; that of transformers also counts the padding of shorter videos.

    **Arguments:**

    - `size`: the longer side of frames after the first resizing, or their height and width.
    - `tile`: height and width of frames after the second resizing.
    - `count`, `fps`: the most frames sampled from a video, and the number from a second; None for no such bound.
    - `skip`: seconds dropped at the beginning and the end of a video that is long for `count` and `fps`.
    - `words`: text of each frame.
    - `placeholder`: placeholder of a video in a prompt; it is no token of the model.
    - `template`: chat template of conversations with videos.
    """

    size: int | Size = 4 * 364
    tile: PositiveInt = 364
    resample: int = LANCZOS
    normalization: Normalization = Normalization(steps="joint")
    count: PositiveInt | None = None
    fps: PositiveFloat | None = None
    skip: NonNegativeFloat = 1.0
    words: SmolWords = SmolWords()
    placeholder: str = "<video>"
    template: str = VIDEO_TEMPLATE

    def __post_init__(self):
        super().__post_init__()
        sides = (self.size,) if isinstance(self.size, int) else self.size
        for side in sides:
            check_integer("SmolVLMVideos.size", side)

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMVideos":
        """Read the rules from the settings of a directory; `size` has priority over `video_sampling`."""
        fields = settings.videos
        fields.allow_only("do_pad", True)
        count, fps = fields.integer("num_frames", None), fields.number("fps", None)
        size = read_size(fields, "size", {"longest_edge": 4 * 364})
        inner = fields.table("video_sampling")
        if inner is not None:
            count, fps = inner.integer("max_frames"), inner.number("fps")
            size = size if "size" in fields.content else read_size(inner, "video_size", size)
        if "longest_edge" not in size and not {"height", "width"} <= size.keys():
            raise fields.error(f"size={size} must have longest_edge, or height and width.")
        return cls(
            size=size["longest_edge"] if "longest_edge" in size else (size["height"], size["width"]),
            tile=read_longest(fields, "max_image_size", 364),
            resample=read_resample(fields, LANCZOS, SHORT),
            normalization=read_normalization(fields, HALVES, HALVES, steps="joint"),
            count=count,
            fps=fps,
            words=SmolWords.read(settings),
            placeholder=settings.token("video_token", "<video>"),
        )

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Return `pixel_values` of the frames; `pixel_attention_mask`, 1 everywhere."""
        indices = np.arange(clip.count) if clip.chosen else self._frame_indices(clip)
        check_tokens(clip.where, self.words.tokens * len(indices))
        sides = (self.tile, self.tile)
        check_taken(clip, len(indices), sides, limits)
        target, values = self._target(clip), []
        for pixels in clip.frames(indices.tolist()):
            for wanted in (target, sides):
                pixels = resize_with_short_weights(pixels, wanted, self.resample, limits, clip.where)
            values.append(self.normalization(pixels))
        mask = np.ones((len(values), *sides), np.int64)
        return ProcessedFile(
            {"pixel_values": np.stack(values), "pixel_attention_mask": mask}, self._text(clip, indices)
        )

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return arrays `[1, frames, 3, height, width]`, `[1, frames, height, width]`."""
        return as_one_row(files)

    def _target(self, clip: Clip) -> Size:
        if isinstance(self.size, int):
            return fit_longest(clip.height, clip.width, min(self.size, MOST_LONGEST))
        return self.size

    def _frame_indices(self, clip: Clip) -> np.ndarray:
        """Return the ascending indices of the frames to take."""
        if self.count is None and self.fps is None:
            return np.arange(clip.count)
        first, last = 0, clip.count - 1
        most = clip.count if self.count is None else self.count
        count = most if self.fps is None else min(round(self.fps * clip.seconds), most)
        if self.count is not None and self.fps is not None and self.skip > 0:
            margin, long = self.skip * clip.fps, clip.seconds - 2 * self.skip > self.count * self.fps
            inner = int(margin), min(int(clip.count - margin), last)
            first, last = inner if long and inner[0] < inner[1] else (first, last)
        # with more indices than frames, each frame is taken once
        count = min(max(count, 1), last - first + 1)
        return np.unique(np.linspace(first, last, count, dtype=np.int64))

    def _text(self, clip: Clip, indices: np.ndarray) -> str:
        times = (indices / clip.fps).tolist()
        seconds = datetime.timedelta(seconds=int(times[-1] if clip.chosen else clip.seconds))
        count = in_words(len(indices))
        begin = f"You are provided the following series of {count} frames from a {seconds} [H:MM:SS] video.\n"
        frames = (f"\nFrame from {clock(time)}:{self.words.image()}" for time in times)
        return f"{begin}{''.join(frames)}\n\n"


def as_one_row(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Return the arrays of images, or of the frames of videos, as those of one row of a batch."""
    return {name: array[None] for name, array in concatenate_arrays(files).items()}


_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))


def in_words(number: int) -> str:
    """Return a number from 0 on in English: 1234 is "one thousand, two hundred and thirty-four"."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_SMALL[number % 10]}" if number % 10 else "")
    size, name = next(one for one in _LARGE if number >= one[0])
    head, rest = f"{in_words(number // size)} {name}", number % size
    return f"{head}{' and ' if rest < 100 else ', '}{in_words(rest)}" if rest else head


def read_longest(fields: Fields, key: str, default: int) -> int:
    """Read the one size in a table."""
    size = read_size(fields, key, {"longest_edge": default})
    if "longest_edge" not in size:
        raise fields.error(f"{key}={size} must have longest_edge.")
    return size["longest_edge"]


def fit_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return height and width of the same shape with this longer side, the other one even; at most 4096."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height = max(height + height % 2, 1)
    else:
        height, width = longest, int(longest * ratio)
        width = max(width + width % 2, 1)
    ratio = width / height
    if width >= height and width > MOST_LONGEST:
        width, height = MOST_LONGEST, int(MOST_LONGEST / ratio)
    elif height > width and height > MOST_LONGEST:
        height, width = MOST_LONGEST, int(MOST_LONGEST * ratio)
    return max(height, 1), max(width, 1)
