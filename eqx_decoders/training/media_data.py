"""Pictures of training documents: how many placeholder tokens stand for each, and what the model gets of them."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from eqx_decoders.encoders.media import HasMedia
from eqx_decoders.encoders.stem import PatchStemConfig
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.io.processors.pictures import open_picture
from eqx_decoders.io.processors.processor import Processor
from eqx_decoders.io.processors.rules import PictureRules, Seen, joined
from eqx_decoders.training.drawn_pictures import SIZE, drawn_pixels


Span = tuple[int, int]
Marked = tuple[np.ndarray, np.ndarray]  # tokens, and which of them are targets


@runtime_checkable
class MediaReader(Protocol):
    """Reads the pictures that documents refer to.

    **Attributes:**

    - `token`: the placeholder.
    """

    @property
    def token(self) -> int: ...

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        """The text of a document, and what of it is trained on, with what the family writes for each picture."""
        ...

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        """The tokens of that text, with as many placeholders as its pictures have; none of these is a target."""
        ...

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        """The pictures, as keywords of `Media.create`. Raises DataError for those that cannot be read."""
        ...

    def words(self) -> dict[str, Any]:
        """What `loaded_reader` makes the same one of, in JSON."""
        ...


@dataclasses.dataclass(frozen=True)
class DrawnReader:
    """Pictures that this library draws, by their number; see `drawn_pictures`. Texts have no word for them."""

    token: int
    tokens: int

    @classmethod
    def of(cls, config: HasMedia) -> "DrawnReader":
        """For a model that sees pictures of one size; ConfigError for others."""
        media = config.media
        stem = None if media is None or media.vision is None else media.vision.stem
        if media is None or media.image_token is None or not isinstance(stem, PatchStemConfig):
            raise ConfigError("drawn pictures need a model that sees: give one with an encoder of pictures.")
        side = stem.size * stem.merge
        fits = stem.frames == 1 and stem.channels == 3 and SIZE % side == 0
        check(fits, f"drawn pictures have {SIZE} x {SIZE} pixels: patches that become a token must divide them.")
        return cls(token=media.image_token, tokens=(SIZE // side) ** 2)

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        return text, tuple(spans)

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        """Where one stands for each picture; where there is none, behind the document's beginning."""
        ids, targets = tokens
        places = np.flatnonzero(ids == self.token)
        if len(places) == 0:
            own = np.full(len(references) * self.tokens, self.token, ids.dtype)
            inside = np.zeros(len(own), bool)
            return np.concatenate([ids[:1], own, ids[1:]]), np.concatenate([targets[:1], inside, targets[1:]])
        rule = f"has {len(places)} placeholders, but {len(references)} pictures"
        check(len(places) == len(references), f"{where} {rule}: give one for each.", DataError)
        repeats = np.where(ids == self.token, self.tokens, 1)
        return np.repeat(ids, repeats), np.repeat(targets & (ids != self.token), repeats)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        return {"pixel_values": drawn_pixels(references)}

    def words(self) -> dict[str, Any]:
        return {"kind": "drawn", "token": self.token, "tokens": self.tokens}


@dataclasses.dataclass(frozen=True)
class ProcessedReader:
    """Pictures in files, read as the processor of a model's directory says.

    **Arguments:**

    - `directory`: of the model.
    - `root`: where relative paths begin.
    - `token`: the placeholder.
    """

    directory: str
    root: str
    token: int

    @functools.cached_property
    def rules(self) -> PictureRules:
        """How the family makes numbers of pictures."""
        found = Processor.load(self.directory)
        if found.pictures is None:
            raise DataError(f"{self.directory} says nothing of pictures: its model reads none.")
        return found.pictures

    @functools.cached_property
    def _limits(self) -> Any:
        return Processor.load(self.directory).limits

    def _seen(self, reference: str) -> Seen:
        where = f"picture {reference[:120]!r}"
        return self.rules.one(open_picture(Path(self.root) / reference, self._limits, where), self._limits, where)

    def written(
        self, text: str, spans: Sequence[Span], references: Sequence[str], where: str
    ) -> tuple[str, tuple[Span, ...]]:
        placeholder = self.rules.placeholder
        pieces = text.split(placeholder)
        rule = f"has {len(pieces) - 1} placeholders {placeholder!r}, but {len(references)} pictures"
        check(len(pieces) - 1 == len(references), f"{where} {rule}: give one for each.", DataError)
        texts = [self._seen(reference).text for reference in references]
        # what each place of the old text is in the new one: it moves by the growth of the placeholders before it
        ends = np.cumsum([len(piece) + len(placeholder) for piece in pieces[:-1]])
        growth = np.cumsum([len(new) - len(placeholder) for new in texts])

        def moved(place: int) -> int:
            before = int(np.searchsorted(ends, place, side="right"))
            return place + (int(growth[before - 1]) if before else 0)

        whole = "".join(itertools.chain.from_iterable(itertools.zip_longest(pieces, texts, fillvalue="")))
        return whole, tuple((moved(start), moved(stop)) for start, stop in spans)

    def placed(self, tokens: Marked, references: Sequence[str], where: str) -> Marked:
        ids, targets = tokens
        return ids, targets & (ids != self.token)

    def arrays(self, references: Sequence[str]) -> dict[str, Any]:
        rules: Any = self.rules
        join = getattr(rules, "join", joined)
        return dict(join([self._seen(reference) for reference in references])) if references else {}

    def words(self) -> dict[str, Any]:
        return {"kind": "processed", **dataclasses.asdict(self)}


def loaded_reader(words: Mapping[str, Any]) -> MediaReader:
    """The reader of its `words`."""
    given = {name: value for name, value in words.items() if name != "kind"}
    return (DrawnReader if words["kind"] == "drawn" else ProcessedReader)(**given)


def reader_digest(reader: MediaReader) -> str:
    """Equal for readers that give documents the same placeholders."""
    return hashlib.blake2b(json.dumps(reader.words(), sort_keys=True).encode(), digest_size=8).hexdigest()
