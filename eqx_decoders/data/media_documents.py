"""Readers of the images, videos and audio of documents: synthetic images, and files."""

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
    """Reader of synthetic images (see `synthetic_images`). Texts need no placeholders for them."""

    token: int
    tokens: int

    @classmethod
    def of(cls, config: HasMedia) -> "SyntheticReader":
        """Return the reader for a model with images of one size. Raises ConfigError for other models."""
        media = config.media
        stem = None if media is None else media.patch_stem
        if media is None or media.image_token is None or stem is None or media.tiles is not None:
            raise ConfigError("synthetic images need a vision-language model: choose a model with an image encoder.")
        if isinstance(stem, WholeImageStem):
            side, rows, frames = stem.multiple, stem.side, 1
        else:
            side, frames = stem.size * stem.merge, stem.frames
            rows = SIZE // side
        fits = frames == 1 and stem.channels == 3 and SIZE % side == 0
        check(fits, f"synthetic images have {SIZE} x {SIZE} pixels, which must be divisible by the size of a patch.")
        return cls(token=media.image_token, tokens=rows**2)

    reads_files = False

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        return tuple(references)

    def expand_text(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        return text, tuple(spans)

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        """Repeat the placeholder of each image. Without placeholders, insert them after the first token."""
        ids, targets = tokens
        count = int(np.sum(ids == self.token))
        if count == 0:
            inserted = np.full(len(references) * self.tokens, self.token, ids.dtype)
            no_targets = np.zeros(len(inserted), bool)
            return np.concatenate([ids[:1], inserted, ids[1:]]), np.concatenate([targets[:1], no_targets, targets[1:]])
        check(
            count == len(references),
            f"{where} has {count} placeholders, but {len(references)} images: give one placeholder for each image.",
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
    """Reader of files that uses the processor in a model's directory. Each audio clip is processed separately.

    **Arguments:**

    - `directory`: directory of the model.
    - `token`: placeholder token of images, or of another kind of media if the model takes no images.
    """

    directory: str
    token: int

    reads_files = True

    @functools.cached_property
    def _processor(self) -> Processor:
        return Processor.load(self.directory)

    @functools.cached_property
    def _rules(self) -> dict[str, Any]:
        """Processing rules of the family for each kind of file."""
        all_rules = {"image": self._processor.images, "video": self._processor.videos, "audio": self._processor.audio}
        return {kind: rules for kind, rules in all_rules.items() if rules is not None}

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        """Token ids of the placeholders of all kinds of files."""
        words = [self._processor.tokenizer.encode(rules.placeholder, special=True) for rules in self._rules.values()]
        return np.unique(np.concatenate([[self.token], *(ids for ids in words if len(ids) == 1)]))

    def locate(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        return tuple(_located(*parse_reference(each)[:2], folder, where) for each in references)

    def _process(self, name: str) -> ProcessedFile:
        """Read the file of a reference."""
        kind, name, digest = parse_reference(name)
        where, path, limits = f"{kind} {name[-240:]!r}", Path(name), self._processor.limits
        check(
            digest in ("", _digest(path)),
            f"{where} has changed since the document was tokenized: restore it, or give the new file another name.",
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
        for each in references:
            kind, processed = parse_reference(each)[0], self._process(each)
            texts[kind].append(processed.text)
            names[kind] = tuple(sorted(processed.arrays))
        remaining: dict[str, Iterator[str]] = {}
        for kind, rules in self._rules.items():
            placeholder, expansions = self._processor.placeholder(rules, text), texts[kind]
            count = text.count(placeholder)
            if count != len(expansions):
                raise DataError(
                    f"{where} has {count} placeholders {placeholder!r}, but {len(expansions)} {kind}s: give one for "
                    f"each. Replace names such as '<{kind}>' in messages by parts {{'type': {kind!r}}}, or by the "
                    "placeholder."
                )
            remaining[placeholder] = iter(expansions)
        pieces, begin, ends, growth = [], 0, [], [0]
        matches = [*re.finditer("|".join(map(re.escape, remaining)), text)]
        if names.get("image") == names.get("video") is not None:  # both are images: the model's arrays are one
            kinds = [parse_reference(each)[0] for each in references]
            placeholders = [self._processor.placeholder(self._rules[kind], text) for kind in kinds]
            check(
                [match.group() for match in matches] == placeholders,
                f"{where} has a video before an image, but this model reads videos as images: put the images first.",
                DataError,
            )
        for match in matches:
            new = next(remaining[match.group()])
            pieces += [text[begin : match.start()], new]
            begin = match.end()
            ends.append(begin)
            growth.append(growth[-1] + len(new) - len(match.group()))

        def moved(index: int) -> int:
            """Return the index in the new text of a character of the old text."""
            return index + growth[bisect.bisect_right(ends, index)]

        return "".join([*pieces, text[begin:]]), tuple((moved(start), moved(stop)) for start, stop in spans)

    def expand_tokens(self, tokens: MaskedTokens, references: Sequence[str], where: str) -> MaskedTokens:
        ids, targets = tokens
        return ids, targets & ~np.isin(ids, self._tokens)

    def with_digests(self, references: Sequence[str]) -> tuple[str, ...]:
        named = (parse_reference(each)[:2] for each in references)
        return tuple(reference(kind, name, _digest(Path(name))) for kind, name in named)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        processed = [(parse_reference(each)[0], self._process(each)) for each in references]
        arrays: dict[str, Any] = merge_arrays((self._rules[kind], file) for kind, file in processed if kind != "audio")
        clips = [file for kind, file in processed if kind == "audio"]
        return arrays | padded(clips) if clips else arrays

    def pixels(self, name: str) -> np.ndarray | None:
        kind, path, _ = parse_reference(name)
        return open_image(Path(path), self._processor.limits) if kind == "image" else None

    def to_json(self) -> dict[str, Any]:
        return {"kind": "processed", **dataclasses.asdict(self)}

    def digest(self) -> str:
        """Return the hash of the contents of the processor's files, wherever they are."""
        tokenizer = self._processor.tokenizer.content_hash
        return _digest_of({"token": self.token, "tokenizer": tokenizer, "settings": settings_content(self.directory)})


def _located(kind: str, name: str, folder: Path | None, where: str) -> str:
    if Path(name).is_absolute() or is_remote(name) or name.startswith("data:"):  # which files.check_file refuses
        return reference(kind, name)
    if folder is None:
        raise DataError(
            f"{where} has the relative path {name[:120]!r} of its {kind}, but the record is not in a local file: give "
            "absolute paths, or download the data to the directory of the files."
        )
    return reference(kind, str(folder / name))


def _digest(path: Path) -> str:
    """Return the hash of a file's content, or "none" for an unreadable file, which fails when it is decoded."""
    if not path.is_file():  # a pipe would keep its reader waiting
        return "none"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return "none"


def padded(files: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """Concatenate the arrays of several files, padded with zeros along the other axes."""
    result: dict[str, np.ndarray] = {}
    for name in files[0].arrays:
        arrays = [file.arrays[name] for file in files]
        shape = np.max([array.shape for array in arrays], axis=0)
        widths = [[(0, 0), *((0, int(width)) for width in (shape - array.shape)[1:])] for array in arrays]
        result[name] = np.concatenate([np.pad(array, width) for array, width in zip(arrays, widths, strict=True)])
    return result


def reader_from_json(content: Mapping[str, Any]) -> MediaReader:
    """Return the reader that `to_json` has described."""
    arguments = {name: value for name, value in content.items() if name != "kind"}
    return (SyntheticReader if content["kind"] == "drawn" else ProcessorReader)(**arguments)


def _digest_of(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
