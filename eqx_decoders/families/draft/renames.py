"""Modules of a checkpoint that have other names than those of a family: the same shape, the same place."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping

from eqx_decoders.families.draft.tensor_groups import EXPERT, TensorGroup, inner_name
from eqx_decoders.families.weight_rows import Weight


Paths = Callable[[str, int | None], list[str]]  # of weights, by a tensor's name and its number of dimensions


@dataclasses.dataclass(frozen=True)
class Rename:
    """Tensor of a checkpoint that a row of a family means under another name.

    **Arguments:**

    - `old`, `new`: what is replaced in the row's name, and by what.
    - `group`: the tensor.
    - `row`: the pattern of the row.
    - `sure`: whether another family has this name for it, or nothing else has its shape.
    """

    old: str
    new: str
    group: TensorGroup
    row: str
    sure: bool


def find_renames(
    unknown: Mapping[str, TensorGroup],
    missing: Mapping[str, TensorGroup],
    table: Mapping[str, list[Weight]],
    paths: Paths,
) -> list[Rename]:
    """Pair tensors that no row names with rows that no tensor has; `missing` has the shapes that rows expect.

    paths: what families here call a tensor of this name.
    """
    scores: list[tuple[float, str, str]] = []
    for pattern, group in unknown.items():
        for row, wanted in missing.items():
            if _may_be_same(group, wanted):
                scores.append((_score(group, row, table[row], paths), pattern, row))
    renames, used = [], set[str]()
    for score, pattern, row in sorted(scores, reverse=True):
        if pattern in used or row in used or score < _LEAST:
            continue
        alone = [place for _, *place in scores if pattern in place or row in place] == [[pattern, row]]
        old, new = difference(row, pattern)
        renames.append(Rename(old, new, unknown[pattern], row, sure=alone or score >= _KNOWN))
        used |= {pattern, row}
    return renames


_KNOWN, _LEAST = 2.0, 0.6


def _may_be_same(group: TensorGroup, wanted: TensorGroup) -> bool:
    shapes = not group.shapes or not wanted.shapes or group.shapes == wanted.shapes
    same_end = group.pattern.rpartition(".")[2] == wanted.pattern.rpartition(".")[2]
    same_numbers = group.pattern.count(EXPERT) == wanted.pattern.count(EXPERT)
    return shapes and same_end and same_numbers and group.layers == wanted.layers


def _score(group: TensorGroup, row: str, rows: list[Weight], paths: Paths) -> float:
    """Return how likely a tensor is the one that a row means: 2 and more where the name is known."""
    rank = None if group.shape is None else len(group.shape)
    usual = set(paths(group.pattern, rank))
    named, known = usual & {weight.path for weight in rows}, usual - {weight.path for weight in rows}
    near = difflib.SequenceMatcher(None, inner_name(group.pattern), inner_name(row)).ratio()
    return (_KNOWN if named else -1.0 if known else 0.0) + near


def difference(row: str, pattern: str) -> tuple[str, str]:
    """Return the words by which two patterns differ, with dots where these are needed: `.old.` and `.new.`."""
    old, new = row.split("."), pattern.split(".")
    begin = 0
    while begin < min(len(old), len(new)) - 1 and old[begin] == new[begin]:
        begin += 1
    end = 0
    while end < min(len(old), len(new)) - begin and old[-1 - end] == new[-1 - end]:
        end += 1
    old, new = old[begin : len(old) - end], new[begin : len(new) - end]
    left, right = "." if begin else "", "." if end else ""
    return f"{left}{'.'.join(old)}{right}", f"{left}{'.'.join(new)}{right}"
