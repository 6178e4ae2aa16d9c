"""Protocols and helpers of the image, video and audio processors of all model families."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.core.config_reader import Fields, abbreviate
from eqx_decoders.errors import ConversionError, DataError
from eqx_decoders.media_files.limits import MediaLimits
from eqx_decoders.media_files.resizing import FILTERS
from eqx_decoders.media_files.video import Clip


MAX_TOKENS = 1 << 20  # maximum tokens of one image, video or audio clip
_MAX_TOKEN_TEXT = 100  # maximum characters of a special token


class ProcessedFile(NamedTuple):
    """Arrays and prompt text of one image, video or audio clip.

    - `arrays`: arguments of `Media.create` for this file, by name.
    - `text`: text that replaces the file's placeholder in the prompt.
    """

    arrays: Mapping[str, np.ndarray]
    text: str


@runtime_checkable
class ImageProcessor(Protocol):
    """Converts images to arrays and to text in the prompt."""

    @property
    def placeholder(self) -> str: ...

    def process(self, pixels: np.ndarray, limits: MediaLimits, where: str) -> ProcessedFile:
        """Process one image, `[height, width, 3]`. `where` is its name in error messages."""
        ...

    def join(self, files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
        """Return the arguments of `Media.create` for all images of a prompt."""
        ...


@runtime_checkable
class VideoProcessor(Protocol):
    """Converts videos to arrays and to text in the prompt.

    **Attributes:**

    - `template`: chat template for conversations with videos; None: the chat template of the model's directory.
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
    """Settings of the processors of a model's directory.

    **Arguments:**

    - `images`, `videos`, `audio`: settings of the image processor, video processor and feature extractor.
    - `processor`: content of `processor_config.json`.
    - `tokens`: special tokens by name, such as `image_token`, from `tokenizer_config.json`.
    """

    images: Fields
    videos: Fields
    audio: Fields
    processor: Fields
    tokens: Mapping[str, str]

    def token(self, name: str, default: str) -> str:
        """Return the text of the special token `name`.

        The settings of the processor take precedence over the settings of the tokenizer, and these over `default`.
        """
        value = self.processor.take(name, self.tokens.get(name, default))
        if not isinstance(value, str) or not 0 < len(value) <= _MAX_TOKEN_TEXT:
            raise ConversionError(
                f"{self.processor.where}: {name}={abbreviate(value)} must be the text of a special token, a string of "
                f"1 to {_MAX_TOKEN_TEXT} characters."
            )
        return value


def check_tokens(where: str, num_tokens: int) -> None:
    """Raise DataError for a file with more than MAX_TOKENS tokens."""
    if num_tokens > MAX_TOKENS:
        raise DataError(
            f"{where} becomes {num_tokens:,} tokens. The maximum is {MAX_TOKENS:,}. Resize or shorten the file."
        )


def concatenate_arrays(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of all files along their first axis."""
    names = files[0].arrays if files else ()
    return {name: np.concatenate([file.arrays[name] for file in files]) for name in names}


def merge_arrays(
    files: Iterable[tuple[ImageProcessor | VideoProcessor, ProcessedFile]],
) -> dict[str, np.ndarray]:
    """Return the arguments of `Media.create` for images and videos, in the order of their placeholders.

    Some families process videos as images. Their images and videos have arrays of the same names, and are joined in the
    order of all placeholders.
    """
    groups: dict[tuple[str, ...], tuple[ImageProcessor | VideoProcessor, list[ProcessedFile]]] = {}
    for processor, file in files:
        names = tuple(sorted(file.arrays))
        groups.setdefault(names, (processor, []))[1].append(file)
    return {name: array for processor, group in groups.values() for name, array in processor.join(group).items()}


def read_resample(fields: Fields, default: int, known: Collection[int] = FILTERS) -> int:
    """Read `resample`, the number of a filter in `PIL.Image.Resampling`. `known`: the supported filters."""
    fields.allow_only("do_resize", True)
    value = fields.integer("resample", default, least=0)
    if value not in known:
        raise ConversionError(f"{fields.where}: resample={value} must be one of {sorted(known)}.")
    return value


def read_size(fields: Fields, key: str, default: Mapping[str, int]) -> dict[str, int]:
    """Read an object of sizes, such as `{"height": 896, "width": 896}`. One number is both height and width."""
    value = fields.take(key, dict(default))
    if isinstance(value, int):
        value = {"height": value, "width": value}
    is_valid = isinstance(value, dict) and all(
        type(size) is int and 0 < size < 2**31 for size in value.values() if size
    )
    if not is_valid:
        raise fields.error(f"{key}={abbreviate(value)} must be an object of integers above 0.")
    return {name: size for name, size in value.items() if size}


def read_height_width(fields: Fields, key: str, default: int) -> tuple[int, int]:
    """Read an object with the keys height and width. `default` is the default of both."""
    size = read_size(fields, key, {"height": default, "width": default})
    if not {"height", "width"} <= size.keys():
        raise fields.error(f"{key}={abbreviate(size)} must have the keys height and width.")
    return size["height"], size["width"]
