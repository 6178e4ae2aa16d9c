"""What the rules of all families share."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.errors import ConversionError, DataError, check
from eqx_decoders.families.config_reader import Fields, abbreviate
from eqx_decoders.io.processors.limits import MediaLimits
from eqx_decoders.io.processors.resizing import FILTERS
from eqx_decoders.io.processors.video import Clip


MOST_TOKENS = 1 << 20  # that stand for one image, video or audio


class ProcessedFile(NamedTuple):
    """What becomes of one image, video or audio.

    - `arrays`: arguments of `Media.create`, for this one.
    - `text`: what stands for it in the prompt in place of its placeholder.
    """

    arrays: Mapping[str, np.ndarray]
    text: str


@runtime_checkable
class ImageRules(Protocol):
    """How a family makes numbers of images, and which text stands for them."""

    @property
    def placeholder(self) -> str: ...

    def one(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """One image, `[height, width, 3]`."""
        ...

    def join(self, seen: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """The arguments of `Media.create` for all images of a prompt."""
        ...


@runtime_checkable
class VideoRules(Protocol):
    """The same for videos.

    **Attributes:**

    - `template`: of conversations with videos, in place of the directory's; None for that one.
    """

    @property
    def placeholder(self) -> str: ...

    @property
    def template(self) -> str | None: ...

    def one(self, clip: Clip, limits: MediaLimits) -> ProcessedFile:
        """One video."""
        ...

    def join(self, seen: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """The arguments of `Media.create` for all videos of a prompt."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a directory says about its processor, file by file."""

    images: Fields
    videos: Fields
    audio: Fields
    processor: Fields
    tokens: Mapping[str, str]

    def token(self, name: str, default: str) -> str:
        """The text of a special token that the processor, else the tokenizer names."""
        value = self.processor.take(name, self.tokens.get(name, default))
        good = isinstance(value, str) and 0 < len(value) <= 100
        rule = "must be a token's text"
        check(good, f"{self.processor.where}: {name}={abbreviate(value)} {rule}.", ConversionError)
        return value


def check_tokens(where: str, count: int) -> None:
    """DataError for a file that becomes more tokens than a model could read."""
    rule = f"more than {MOST_TOKENS:,}. Make it smaller"
    check(count <= MOST_TOKENS, f"{where} becomes {count:,} tokens: {rule}.", DataError)


def joined(seen: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """The arrays of all, one behind the other."""
    return {name: np.concatenate([one.arrays[name] for one in seen]) for name in seen[0].arrays} if seen else {}


def together(read: Iterable[tuple[ImageRules | VideoRules, ProcessedFile]]) -> dict[str, np.ndarray]:
    """The arguments of `Media.create` for images and videos in the order of their placeholders.

    Those of both kinds that have the same names, as a family's videos do that are read as images, stand in that order.
    """
    groups: dict[tuple[str, ...], tuple[ImageRules | VideoRules, list[ProcessedFile]]] = {}
    for rules, one in read:
        groups.setdefault(tuple(sorted(one.arrays)), (rules, []))[1].append(one)
    return {name: array for rules, seen in groups.values() for name, array in rules.join(seen).items()}


def read_resample(fields: Fields, default: int, known: Collection[int] = FILTERS) -> int:
    """Pillow's number of the filter."""
    fields.allow_only("do_resize", True)
    value = fields.integer("resample", default, least=0)
    check(value in known, f"{fields.where}: resample={value} must be one of {sorted(known)}.", ConversionError)
    return value


def read_size(fields: Fields, key: str, default: Mapping[str, int]) -> dict[str, int]:
    """A table of sizes: `{"height": 896, "width": 896}`, a number being both."""
    value = fields.take(key, dict(default))
    value = {"height": value, "width": value} if isinstance(value, int) else value
    rule = "must be an object of integers above 0"
    good = isinstance(value, dict) and all(type(one) is int and 0 < one < 2**31 for one in value.values() if one)
    if not good:
        raise fields.error(f"{key}={abbreviate(value)} {rule}.")
    return {name: one for name, one in value.items() if one}


def read_square(fields: Fields, key: str, default: int) -> tuple[int, int]:
    """Height and width."""
    size = read_size(fields, key, {"height": default, "width": default})
    if not {"height", "width"} <= size.keys():
        raise fields.error(f"{key}={abbreviate(size)} must have height and width.")
    return size["height"], size["width"]
