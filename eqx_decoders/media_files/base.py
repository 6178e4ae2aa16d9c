"""Rules that all families of processors share."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.resizing import FILTERS
from eqx_decoders.media_files.video import Clip


MOST_TOKENS = 1 << 20  # of one image, video or audio clip


class ProcessedFile(NamedTuple):
    """Arrays and text of one image, video or audio clip.

    - `arrays`: arguments of `Media.create` for this file.
    - `text`: replacement of its placeholder in the prompt.
    """

    arrays: Mapping[str, np.ndarray]
    text: str


@runtime_checkable
class ImageRules(Protocol):
    """Rules by which a family converts images to arrays, and to text in the prompt."""

    @property
    def placeholder(self) -> str: ...

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Process one image, `[height, width, 3]`."""
        ...

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return the arguments of `Media.create` for all images of a prompt."""
        ...


@runtime_checkable
class VideoRules(Protocol):
    """Rules by which a family converts videos.

    **Attributes:**

    - `template`: chat template of conversations with videos; None for the directory's.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def template(self) -> str | None: ...

    def process(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """Process one video."""
        ...

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return the arguments of `Media.create` for all videos of a prompt."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a directory's processor, file by file."""

    images: Fields
    videos: Fields
    audio: Fields
    processor: Fields
    tokens: Mapping[str, str]

    def token(self, name: str, default: str) -> str:
        """Return the text of a special token, from the processor's settings or else the tokenizer's."""
        value = self.processor.take(name, self.tokens.get(name, default))
        good = isinstance(value, str) and 0 < len(value) <= 100
        rule = "must be a token's text"
        check(good, f"{self.processor.where}: {name}={abbreviate(value)} {rule}.", ConversionError)
        return value


def check_tokens(where: str, count: int) -> None:
    """Raise DataError for a file that becomes more tokens than a model could read."""
    rule = f"more than {MOST_TOKENS:,}. Make it smaller"
    check(count <= MOST_TOKENS, f"{where} becomes {count:,} tokens: {rule}.", DataError)


def concatenate_arrays(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Return the arrays of all files, one behind the other."""
    return {name: np.concatenate([one.arrays[name] for one in files]) for name in files[0].arrays} if files else {}


def merge_arrays(read: Iterable[tuple[ImageRules | VideoRules, ProcessedFile]]) -> dict[str, np.ndarray]:
    """Return the arguments of `Media.create` for images and videos in the order of their placeholders.

    Where a family reads videos as images, both kinds have arrays of the same names, and share that order.
    """
    groups: dict[tuple[str, ...], tuple[ImageRules | VideoRules, list[ProcessedFile]]] = {}
    for rules, one in read:
        groups.setdefault(tuple(sorted(one.arrays)), (rules, []))[1].append(one)
    return {name: array for rules, files in groups.values() for name, array in rules.join(files).items()}


def read_resample(fields: Fields, default: int, known: Collection[int] = FILTERS) -> int:
    """Read Pillow's number of the filter."""
    fields.allow_only("do_resize", True)
    value = fields.integer("resample", default, least=0)
    check(value in known, f"{fields.where}: resample={value} must be one of {sorted(known)}.", ConversionError)
    return value


def read_size(fields: Fields, key: str, default: Mapping[str, int]) -> dict[str, int]:
    """Read a table of sizes: `{"height": 896, "width": 896}`, or one number for both."""
    value = fields.take(key, dict(default))
    value = {"height": value, "width": value} if isinstance(value, int) else value
    rule = "must be an object of integers above 0"
    good = isinstance(value, dict) and all(type(one) is int and 0 < one < 2**31 for one in value.values() if one)
    if not good:
        raise fields.error(f"{key}={abbreviate(value)} {rule}.")
    return {name: one for name, one in value.items() if one}


def read_square(fields: Fields, key: str, default: int) -> tuple[int, int]:
    """Read height and width."""
    size = read_size(fields, key, {"height": default, "width": default})
    if not {"height", "width"} <= size.keys():
        raise fields.error(f"{key}={abbreviate(size)} must have height and width.")
    return size["height"], size["width"]
