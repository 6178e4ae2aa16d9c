"""Families ranked by how much of a checkpoint their tables explain."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from eqx_decoders.families.config_keys import GENERATION_KEYS, IGNORED_KEYS
from eqx_decoders.families.draft.comparison import Comparison, compare, habits_of
from eqx_decoders.families.draft.lenient_settings import OUTSIDE, Reading, read_leniently
from eqx_decoders.families.draft.tensor_groups import Shape, inner_name, pattern_of
from eqx_decoders.families.draft.vocabulary import Vocabulary
from eqx_decoders.families.hf_table import Family


_COMPARED = 10
_SLACK = 0.1  # of the keys that a suspect may know less


@dataclasses.dataclass(frozen=True, kw_only=True)
class Likeness:
    """Shares of a checkpoint's tensors and keys that a family has by the same names.

    **Arguments:**

    - `tensors`, `keys`: the shares.
    - `idle`: keys that few families read, that this one reads and the file lacks.
    """

    family: Family
    tensors: float
    keys: float
    idle: int

    @property
    def shares(self) -> tuple[str, float, float]:
        """The family's name with the shares."""
        return self.family.model_type, self.tensors, self.keys

    def score(self, reading: Reading) -> float:
        """Return how promising a closer look at the family is."""
        doubts = 2 * len(reading.refused) + len(habits_of(reading.config)) + 100 * (reading.config is None)
        return 3 * self.tensors + self.keys - 0.05 * doubts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """Families ranked for a checkpoint.

    **Arguments:**

    - `likeness`: the families, the nearest first.
    - `nearest`: the comparison with the nearest one.
    - `words`: what all families call the same.
    - `suspects`: what neither keys nor tensors show, of families that have as many of these by their names; each with
        the families, those first whose keys the file has.
    """

    likeness: tuple[Likeness, ...]
    nearest: Comparison
    words: Vocabulary
    suspects: Mapping[str, tuple[str, ...]]


def rank(families: Iterable[Family], content: Mapping[str, Any], tensors: Mapping[str, Shape]) -> Ranking:
    """Return the families by how much has to differ, and the comparison with the nearest one."""
    families = list(families)
    words = Vocabulary.of(families)
    readings = {
        family.model_type: read_leniently(family, content, words.renamed_keys(family, content)) for family in families
    }
    readers = Counter(key for reading in readings.values() for key in reading.read)
    rare = {key for key, count in readers.items() if 2 * count < len(families)}
    likeness = [_likeness(family, readings[family.model_type], content, tensors, rare) for family in families]
    likeness.sort(key=lambda each: (-each.score(readings[each.family.model_type]), each.idle))
    compared = [
        (each, compare(each.family, content, tensors, readings[each.family.model_type], words))
        for each in likeness[:_COMPARED]
    ]
    compared.sort(key=lambda pair: pair[1].distance + pair[0].idle + 60 * (1 - pair[0].tensors))
    first, nearest = compared[0]
    suspects: dict[str, tuple[str, ...]] = {}
    for each in sorted(likeness, key=lambda each: each.idle):
        reading = readings[each.family.model_type]
        fits = each.tensors >= first.tensors and each.keys >= first.keys - _SLACK and not reading.refused
        for habit in habits_of(reading.config) if fits else ():
            suspects[habit] = (*suspects.get(habit, ()), each.family.model_type)
    return Ranking(
        likeness=(*(each for each, _ in compared), *likeness[_COMPARED:]),
        nearest=nearest,
        words=words,
        suspects={habit: names for habit, names in suspects.items() if habit not in nearest.habits},
    )


def speaking_keys(content: Mapping[str, Any]) -> list[str]:
    """Return the keys that may say something of the model."""
    silent = {*IGNORED_KEYS, *GENERATION_KEYS, *OUTSIDE}
    return [key for key, value in content.items() if key not in silent and value is not None]


def _likeness(
    family: Family, reading: Reading, content: Mapping[str, Any], tensors: Mapping[str, Shape], rare: set[str]
) -> Likeness:
    rows = {inner_name(pattern_of(row.name)) for row in (*family.weights, *family.fused, *family.transposed)}
    names = {inner_name(pattern_of(family.stored_name(name))) for name in tensors}
    keys = speaking_keys(content)
    known = [key for key in keys if key in reading.read | family.ignored_keys.keys() | reading.renamed.keys()]
    idle = {key for key in reading.read & rare if key not in content and key not in reading.renamed.values()}
    return Likeness(
        family=family,
        tensors=len(names & rows) / max(1, len(names)),
        keys=len(known) / max(1, len(keys)),
        idle=len(idle),
    )
