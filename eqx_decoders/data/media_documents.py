"""Media readers for documents: synthetic images, and files of images, videos and audio (see `media_reader`)."""

import bisect
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eqx_decoders.data.media_reader import MaskedTokens, MediaReader, Span
from eqx_decoders.data.sources.data_files import is_remote
from eqx_decoders.data.sources.documents import parse_reference, reference
from eqx_decoders.data.sources.records import MEDIA_FIELDS
from eqx_decoders.data.synthetic_images import SIZE, drawn_pixels
from eqx_decoders.encoders.protocols import HasMedia
from eqx_decoders.encoders.stem import WholeImageStem
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.io.processors.processor import Processor, settings_content
from eqx_decoders.media_files.base import ProcessedFile, merge_arrays
from eqx_decoders.media_files.images import open_image
from eqx_decoders.media_files.video import open_video


@dataclasses.dataclass(frozen=True)
class SyntheticReader:
    """Reader of synthetic images (see `synthetic_images`). Placeholders in texts are optional.

    **Arguments:**

    - `token`: id of the placeholder token.
    - `tokens`: number of placeholder tokens per image.
    """

    token: int
    tokens: int

    @classmethod
    def of(cls, config: HasMedia) -> "SyntheticReader":
        """Return the reader for a model. Raises ConfigError if the model cannot read synthetic images."""
        media = config.media
        stem = None if media is None else media.patch_stem
        if media is None or media.image_token is None or stem is None or media.tiles is not None:
            raise ConfigError("synthetic images require a vision-language model. Use a model with an image encoder.")
        if isinstance(stem, WholeImageStem):
            side, rows, frames = stem.multiple, stem.side, 1
        else:
            side, frames = stem.size * stem.merge, stem.frames
            rows = SIZE // side
        check(
            frames == 1 and stem.channels == 3 and SIZE % side == 0,
            f"synthetic images have {SIZE} x {SIZE} pixels and 3 channels, so the size of a patch must be a divisor of "
            f"{SIZE}, but the patches of this model have size {side}, {stem.channels} channels and {frames} frames.",
        )
        return cls(token=media.image_token, tokens=rows**2)

    reads_files = False

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        return tuple(references)

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        return text, tuple(spans)

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        """Repeat the placeholder of each image. If there are no placeholders, insert them after the first token."""
        ids, targets = tokens
        count = int(np.sum(ids == self.token))
        if count == 0:
            inserted = np.full(len(references) * self.tokens, self.token, ids.dtype)
            no_targets = np.zeros(len(inserted), bool)
            return np.concatenate([ids[:1], inserted, ids[1:]]), np.concatenate([targets[:1], no_targets, targets[1:]])
        check(
            count == len(references),
            f"{where} has {count} placeholders, but {len(references)} images. Use one placeholder for each image.",
            DataError,
        )
        repeats = np.where(ids == self.token, self.tokens, 1)
        return np.repeat(ids, repeats), np.repeat(targets & (ids != self.token), repeats)

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        return tuple(references)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        return {"pixel_values": drawn_pixels(references)}

    def pixels(self, name: str) -> np.ndarray | None:
        values = 127.5 * (drawn_pixels([name])[0] + 1)
        return np.moveaxis(values, 0, -1).round().astype(np.uint8)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "drawn", "token": self.token, "tokens": self.tokens}

    def digest(self) -> str:
        return _digest_of(self.to_json())


@dataclasses.dataclass(frozen=True)
class ProcessorReader:
    """Reader of media files that uses the processor of a model. Each audio clip is processed separately.

    **Arguments:**

    - `directory`: directory of the model, with the configuration of the processor.
    - `token`: id of the placeholder token of images, or of another kind of media if the model has no image encoder.
    """

    directory: str
    token: int

    reads_files = True

    @functools.cached_property
    def _processor(self) -> Processor:
        return Processor.load(self.directory)

    @functools.cached_property
    def _rules(self) -> dict[str, Any]:
        """Processing rules of the model family for each kind of file, such as "image"."""
        all_rules = {"image": self._processor.images, "video": self._processor.videos, "audio": self._processor.audio}
        return {kind: rules for kind, rules in all_rules.items() if rules is not None}

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        """Token ids of the placeholders of all kinds of files."""
        encoded = [self._processor.tokenizer.encode(rules.placeholder, special=True) for rules in self._rules.values()]
        return np.unique(np.concatenate([[self.token], *(ids for ids in encoded if len(ids) == 1)]))

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        located = []
        for text in references:
            kind, name, _ = parse_reference(text)
            located.append(_locate(kind, name, folder, where))
        return tuple(located)

    def _process(self, text: str) -> ProcessedFile:
        """Read and process the file of a reference. Raises DataError if it has changed since tokenization."""
        kind, name, digest = parse_reference(text)
        where = f"{kind} {name[-240:]!r}"
        path = Path(name)
        limits = self._processor.limits
        check(
            digest in ("", _digest(path)),
            f"{where} has changed since the document was tokenized. Restore the file, or rename the new file.",
            DataError,
        )
        rules = self._rules.get(kind)
        if rules is None:
            raise DataError(f"{where}: the model in {self.directory} has no encoder for files of the kind {kind!r}.")
        if kind == "image":
            return rules.process(open_image(path, limits, where), limits, where)
        if kind == "video":
            with open_video(path, limits, where) as clip:
                return rules.process(clip, limits)
        arrays, texts = rules.process_all([path], limits, [where])
        return ProcessedFile(arrays, texts[0])

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        texts: dict[str, list[str]] = {kind: [] for kind in MEDIA_FIELDS.values()}
        names: dict[str, tuple[str, ...]] = {}
        kinds = [parse_reference(text_reference)[0] for text_reference in references]
        for kind, text_reference in zip(kinds, references, strict=True):
            processed = self._process(text_reference)
            texts[kind].append(processed.text)
            names[kind] = tuple(sorted(processed.arrays))
        remaining: dict[str, Iterator[str]] = {}
        for kind, rules in self._rules.items():
            placeholder, expansions = self._processor.placeholder(rules, text), texts[kind]
            count = text.count(placeholder)
            if count != len(expansions):
                raise DataError(
                    f"{where} has {count} placeholders {placeholder!r}, but {len(expansions)} {kind}s. Use one "
                    f"placeholder for each {kind}. In messages, replace names such as '<{kind}>' by parts "
                    f"{{'type': {kind!r}}}, or by the placeholder."
                )
            remaining[placeholder] = iter(expansions)
        matches = [*re.finditer("|".join(map(re.escape, remaining)), text)]
        if names.get("image") == names.get("video") is not None:  # the model has the same arrays for images and videos
            placeholders = [self._processor.placeholder(self._rules[kind], text) for kind in kinds]
            check(
                [match.group() for match in matches] == placeholders,
                f"{where} has a video before an image, but this model reads videos as images. Put the images first.",
                DataError,
            )
        pieces = []
        position = 0  # in the old text
        ends = []  # end of each placeholder in the old text
        offsets = [0]  # difference between new and old text, in characters, after each placeholder
        for match in matches:
            expansion = next(remaining[match.group()])
            pieces += [text[position : match.start()], expansion]
            position = match.end()
            ends.append(position)
            offsets.append(offsets[-1] + len(expansion) - len(match.group()))

        def new_index(index: int) -> int:
            """Return the index in the new text of a character of the old text."""
            return index + offsets[bisect.bisect_right(ends, index)]

        return "".join([*pieces, text[position:]]), tuple((new_index(start), new_index(stop)) for start, stop in spans)

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        ids, targets = tokens
        return ids, targets & ~np.isin(ids, self._tokens)

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        parsed = [parse_reference(text) for text in references]
        return tuple(reference(kind, name, _digest(Path(name))) for kind, name, _ in parsed)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        processed = [(parse_reference(text)[0], self._process(text)) for text in references]
        arrays: dict[str, Any] = merge_arrays((self._rules[kind], file) for kind, file in processed if kind != "audio")
        clips = [file for kind, file in processed if kind == "audio"]
        return arrays | concatenate_padded(clips) if clips else arrays

    def pixels(self, name: str) -> np.ndarray | None:
        kind, path, _ = parse_reference(name)
        return open_image(Path(path), self._processor.limits) if kind == "image" else None

    def to_json(self) -> dict[str, Any]:
        return {"kind": "processed", **dataclasses.asdict(self)}

    def digest(self) -> str:
        """Return a hash of the contents of the processor's files, independent of their directory."""
        tokenizer = self._processor.tokenizer.content_hash
        return _digest_of({"token": self.token, "tokenizer": tokenizer, "settings": settings_content(self.directory)})


def _locate(kind: str, name: str, folder: Path | None, where: str) -> str:
    if Path(name).is_absolute() or is_remote(name) or name.startswith("data:"):  # rejected by files.check_file
        return reference(kind, name)
    if folder is None:
        raise DataError(
            f"{where}: the {kind} has the relative path {name[:120]!r}, but the record is not in a local file. Use "
            "absolute paths, or download the data to the directory of the media files."
        )
    return reference(kind, str(folder / name))


def _digest(path: Path) -> str:
    """Return the hash of the content of a file; "none" if it cannot be read. (Decoding such a file raises an error.)"""
    if not path.is_file():  # reading a pipe would block
        return "none"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return "none"


def concatenate_padded(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of several files along the first axis, padded with zeros along the other axes."""
    result: dict[str, np.ndarray] = {}
    for name in files[0].arrays:
        arrays = [file.arrays[name] for file in files]
        shape = np.max([array.shape for array in arrays], axis=0)
        widths = [[(0, 0), *((0, int(width)) for width in (shape - array.shape)[1:])] for array in arrays]
        result[name] = np.concatenate([np.pad(array, width) for array, width in zip(arrays, widths, strict=True)])
    return result


def reader_from_json(content: Mapping[str, Any]) -> MediaReader:
    """Return the reader for an object that `to_json` returned."""
    arguments = {name: value for name, value in content.items() if name != "kind"}
    return (SyntheticReader if content["kind"] == "drawn" else ProcessorReader)(**arguments)


def _digest_of(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
