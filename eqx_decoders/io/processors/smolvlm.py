"""Pictures and films of SmolVLM and Idefics 3: tiles, row by row, and the whole picture behind them."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eqx_decoders.errors import check_integer
from eqx_decoders.families.fields import Fields
from eqx_decoders.io.processors.colours import HALVES, Colours, read_colours
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.resizing import LANCZOS, resize
from eqx_decoders.io.processors.rules import Seen, Settings, check_tokens, joined, read_resample, read_size


MOST_LONGEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolWords:
    """What stands in a prompt for pictures.

    **Arguments:**

    - `tokens`: that stand for a tile.
    - `token`, `around`, `whole`: texts of the special tokens; each tile of several also has `<row_1_col_1>` and so on.
    """

    tokens: int = 169
    token: str = "<image>"
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    def __post_init__(self):
        check_integer("SmolWords.tokens", self.tokens)

    @classmethod
    def read(cls, settings: Settings) -> "SmolWords":
        """From the files of a directory."""
        return cls(
            tokens=settings.processor.integer("image_seq_len", 169),
            token=settings.token("image_token", "<image>"),
            around=settings.token("fake_image_token", "<fake_token_around_image>"),
            whole=settings.token("global_image_token", "<global-img>"),
        )

    def picture(self, rows: int = 0, columns: int = 0) -> str:
        """The text of a picture with so many tiles beside the whole."""
        tile = self.token * self.tokens
        lines = [
            "".join(f"{self.around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if lines else "") + f"{self.around}{self.whole}{tile}{self.around}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVLMPictures:
    """A picture's longer side has one length, whatever it had; it is cut into tiles, and stands behind them as a tile.

    **Arguments:**

    - `longest`: the longer side, in pixels.
    - `tile`: side of a tile; both sides are made multiples of it.
    - `split`: whether there are tiles beside the whole picture.
    """

    longest: int = 4 * 364
    tile: int = 364
    split: bool = True
    resample: int = LANCZOS
    colours: Colours = Colours()
    words: SmolWords = SmolWords()

    def __post_init__(self):
        check_integer("SmolVLMPictures.longest", self.longest)
        check_integer("SmolVLMPictures.tile", self.tile)

    @classmethod
    def read(cls, settings: Settings) -> "SmolVLMPictures":
        """From the files of a directory."""
        fields = settings.pictures
        fields.allow_only("do_pad", True)
        return cls(
            longest=read_longest(fields, "size", 4 * 364),
            tile=read_longest(fields, "max_image_size", 364),
            split=fields.flag("do_image_splitting", True),
            resample=read_resample(fields, LANCZOS),
            colours=read_colours(fields, HALVES, HALVES),
            words=SmolWords.read(settings),
        )

    @property
    def placeholder(self) -> str:
        """The text of the special token."""
        return self.words.token

    def one(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> Seen:
        """`pixel_values` of the tiles and the whole; `pixel_attention_mask`, 1 where they have pixels: everywhere."""
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
            "pixel_values": np.stack([self.colours(part) for part in parts]),
            "pixel_attention_mask": np.ones((len(parts), tile, tile), np.int64),
        }
        return Seen(arrays, self.words.picture(rows, columns))

    def join(self, seen: Sequence[Seen]) -> dict[str, np.ndarray]:
        """`[1, tiles, 3, height, width]`, `[1, tiles, height, width]`."""
        return {name: array[None] for name, array in joined(seen).items()}

    def _whole_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Multiples of tiles, the longer side first."""
        if width >= height:
            ratio = width / height
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            ratio = width / height
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return height, width


def read_longest(fields: Fields, key: str, default: int) -> int:
    """The one size in a table."""
    size = read_size(fields, key, {"longest_edge": default})
    if "longest_edge" not in size:
        raise fields.error(f"{key}={size} must have longest_edge.")
    return size["longest_edge"]


def fit_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width of the same shape whose longer side is given, the other one even; at most 4096."""
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
