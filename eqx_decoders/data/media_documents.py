"""Images, videos and audio of documents: how many placeholder tokens stand for each, and what the model gets."""

import bisect
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.data.sources.documents import FILES, reference, referred
from eqx_decoders.data.sources.remote import is_remote
from eqx_decoders.data.synthetic_images import SIZE, drawn_pixels
from eqx_decoders.encoders.media import HasMedia
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.io.processors.base import ProcessedFile, together
from eqx_decoders.io.processors.images import open_image
from eqx_decoders.io.processors.processor import Processor, settings_content
from eqx_decoders.io.processors.video import open_video


Span = tuple[int, int]
Marked = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are targets


@runtime_checkable
class MediaReader(Protocol):
    """Reads the images, videos and audio that documents refer to (see `records.reference`).

    **Attributes:**

    - `token`: the placeholder of images.
    - `reads_files`: whether references are paths.
    """

    @property
    def token(self) -> int: ...

    @property
    def reads_files(self) -> bool: ...

    def located(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        """The references by which a document's files are found from anywhere: relative paths begin in `folder`.

        Raises DataError, beginning with `where`, for relative paths without a folder.
        """
        ...

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        """The text of a document, and what of it is trained on, with what the family writes for each file."""
        ...

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        """The tokens of that text, with as many placeholders as its files have; none of these is a target."""
        ...

    def kept(self, references: Sequence[str]) -> tuple[str, ...]:
        """What is kept of references beside the tokens: `arrays` then knows files that have changed meanwhile."""
        ...

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        """The files, as keywords of `Media.create`. Raises DataError for those that cannot be read or have changed."""
        ...

    def pixels(self, one: str) -> np.ndarray | None:
        """The image that a reference means, `[height, width, 3]`, 0 to 255; None of what is no image."""
        ...

    def words(self) -> dict[str, Any]:
        """What `loaded_reader` makes the same one of, in JSON."""
        ...

    def digest(self) -> str:
        """Equal for readers that give documents the same placeholders."""
        ...


@dataclasses.dataclass(frozen=True)
class SyntheticReader:
    """Images that this library draws, by their number; see `drawn_images`. Texts have no word for them."""

    token: int
    tokens: int

    @classmethod
    def of(cls, config: HasMedia) -> "SyntheticReader":
        """For a model that sees images of one size; ConfigError for others."""
        media = config.media
        stem = None if media is None or media.vision is None else media.vision.stem
        if media is None or media.image_token is None or not isinstance(stem, PatchStemConfig):
            raise ConfigError("drawn images need a model that sees: give one with an encoder of images.")
        side = stem.size * stem.merge
        fits = stem.frames == 1 and stem.channels == 3 and SIZE % side == 0
        check(fits, f"drawn images have {SIZE} x {SIZE} pixels: patches that become a token must divide them.")
        return cls(token=media.image_token, tokens=(SIZE // side) ** 2)

    reads_files = False

    def located(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        return tuple(references)

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        return text, tuple(spans)

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        """Where one stands for each image; where there is none, behind the document's beginning."""
        ids, targets = tokens
        places = np.flatnonzero(ids == self.token)
        if len(places) == 0:
            own = np.full(len(references) * self.tokens, self.token, ids.dtype)
            inside = np.zeros(len(own), bool)
            return np.concatenate([ids[:1], own, ids[1:]]), np.concatenate([targets[:1], inside, targets[1:]])
        rule = f"has {len(places)} placeholders, but {len(references)} images"
        check(len(places) == len(references), f"{where} {rule}: give one for each.", DataError)
        repeats = np.where(ids == self.token, self.tokens, 1)
        return np.repeat(ids, repeats), np.repeat(targets & (ids != self.token), repeats)

    def kept(self, references: Sequence[str]) -> tuple[str, ...]:
        return tuple(references)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        return {"pixel_values": drawn_pixels(references)}

    def pixels(self, one: str) -> np.ndarray | None:
        shown = 127.5 * (drawn_pixels([one])[0] + 1)
        return np.moveaxis(shown, 0, -1).round().astype(np.uint8)

    def words(self) -> dict[str, Any]:
        return {"kind": "drawn", "token": self.token, "tokens": self.tokens}

    def digest(self) -> str:
        return _digest_of(self.words())


@dataclasses.dataclass(frozen=True)
class ProcessorReader:
    """Files, read as the processor of a model's directory says. Each audio clip is taken for itself.

    **Arguments:**

    - `directory`: of the model.
    - `token`: the placeholder of images; of what there is else where a model sees none.
    """

    directory: str
    token: int

    reads_files = True

    @functools.cached_property
    def _processor(self) -> Processor:
        return Processor.load(self.directory)

    @functools.cached_property
    def _rules(self) -> dict[str, Any]:
        """How the family makes numbers of the kinds that it takes."""
        known = {"image": self._processor.images, "video": self._processor.videos, "audio": self._processor.audio}
        return {kind: rules for kind, rules in known.items() if rules is not None}

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        """The placeholders of all kinds."""
        words = [self._processor.tokenizer.encode(rules.placeholder, special=True) for rules in self._rules.values()]
        return np.unique(np.concatenate([[self.token], *(ids for ids in words if len(ids) == 1)]))

    def located(self, references: Sequence[str], folder: Path | None, where: str) -> tuple[str, ...]:
        return tuple(_located(*referred(one)[:2], folder, where) for one in references)

    def _seen(self, one: str) -> ProcessedFile:
        kind, name, digest = referred(one)
        where, path, limits = f"{kind} {name[-240:]!r}", Path(name), self._processor.limits
        rule = "is not the file that tokens were made of: put that one back, or refer to this one by another name"
        check(digest in ("", _digest(path)), f"{where} {rule}.", DataError)
        rules = self._rules.get(kind)
        if rules is None:
            raise DataError(f"{where}: {self.directory} says nothing of {kind}: its model takes none.")
        if kind == "image":
            return rules.one(open_image(path, limits, where), limits, where)
        if kind == "video":
            with open_video(path, limits, where) as clip:
                return rules.one(clip, limits)
        arrays, texts = rules.all([path], limits, [where])
        return ProcessedFile(arrays, texts[0])

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        texts: dict[str, list[str]] = {kind: [] for kind in FILES.values()}
        names: dict[str, tuple[str, ...]] = {}
        for one in references:
            kind, seen = referred(one)[0], self._seen(one)
            texts[kind].append(seen.text)
            names[kind] = tuple(sorted(seen.arrays))
        left: dict[str, Iterator[str]] = {}
        for kind, rules in self._rules.items():
            placeholder, found = self._processor.placeholder(rules, text), texts[kind]
            rule = f"has {text.count(placeholder)} placeholders {placeholder!r}, but {len(found)} {kind}s"
            check(text.count(placeholder) == len(found), f"{where} {rule}: give one for each.", DataError)
            left[placeholder] = iter(found)
        pieces, begin, ends, growth = [], 0, [], [0]
        places = [*re.finditer("|".join(map(re.escape, left)), text)]
        if names.get("image") == names.get("video") is not None:  # both are images: the model's arrays are one
            given = [self._processor.placeholder(self._rules[referred(one)[0]], text) for one in references]
            rule = "has a video before an image, and this model reads both as images: put its images first"
            same = [match.group() for match in places] == given
            check(same, f"{where} {rule}.", DataError)
        for match in places:
            new = next(left[match.group()])
            pieces += [text[begin : match.start()], new]
            begin = match.end()
            ends.append(begin)
            growth.append(growth[-1] + len(new) - len(match.group()))

        def moved(place: int) -> int:
            """Where a place of the old text is in the new one: behind the growth of the placeholders before it."""
            return place + growth[bisect.bisect_right(ends, place)]

        return "".join([*pieces, text[begin:]]), tuple((moved(start), moved(stop)) for start, stop in spans)

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        ids, targets = tokens
        return ids, targets & ~np.isin(ids, self._tokens)

    def kept(self, references: Sequence[str]) -> tuple[str, ...]:
        named = (referred(one)[:2] for one in references)
        return tuple(reference(kind, name, _digest(Path(name))) for kind, name in named)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        kinds = [referred(one)[0] for one in references]
        read = [(kind, self._seen(one)) for kind, one in zip(kinds, references, strict=True)]
        found: dict[str, Any] = together((self._rules[kind], seen) for kind, seen in read if kind != "audio")
        heard = [seen for kind, seen in read if kind == "audio"]
        return found | padded(heard) if heard else found

    def pixels(self, one: str) -> np.ndarray | None:
        kind, name, _ = referred(one)
        return open_image(Path(name), self._processor.limits) if kind == "image" else None

    def words(self) -> dict[str, Any]:
        return {"kind": "processed", **dataclasses.asdict(self)}

    def digest(self) -> str:
        """Of what the processor's files say, wherever they are."""
        tokenizer = self._processor.tokenizer.content_hash
        return _digest_of({"token": self.token, "tokenizer": tokenizer, "settings": settings_content(self.directory)})


def _located(kind: str, name: str, folder: Path | None, where: str) -> str:
    if Path(name).is_absolute() or is_remote(name) or name.startswith("data:"):  # which files.check_file refuses
        return reference(kind, name)
    rule = f"names the {kind} {name[:120]!r} by a relative path, and is not on this machine itself"
    if folder is None:
        raise DataError(f"{where} {rule}: give absolute paths, or download it to the directory of its files.")
    return reference(kind, str(folder / name))


def _digest(path: Path) -> str:
    """Of a file's content; that of none where it can't be read, which is told where it is decoded."""
    if not path.is_file():  # a pipe would keep its reader waiting
        return "none"
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return "none"


def padded(seen: Sequence[ProcessedFile]) -> dict[str, np.ndarray]:
    """The arrays of all, one behind the other, and zeros behind those that are shorter along other axes."""
    found: dict[str, np.ndarray] = {}
    for name in seen[0].arrays:
        arrays = [one.arrays[name] for one in seen]
        most = np.max([array.shape for array in arrays], axis=0)
        widths = [[(0, 0), *((0, int(width)) for width in (most - array.shape)[1:])] for array in arrays]
        found[name] = np.concatenate([np.pad(array, width) for array, width in zip(arrays, widths, strict=True)])
    return found


def loaded_reader(words: Mapping[str, Any]) -> MediaReader:
    """The reader of its `words`."""
    given = {name: value for name, value in words.items() if name != "kind"}
    return (SyntheticReader if words["kind"] == "drawn" else ProcessorReader)(**given)


def _digest_of(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
