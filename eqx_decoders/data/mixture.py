"""Mixtures of corpora: weights and names in `--data`, and the source of each sequence."""

import glob
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eqx_decoders.data.sources.data_files import is_remote
from eqx_decoders.data.sources.sources import DATA, HELD_OUT, Paths, as_paths
from eqx_decoders.errors import check


MAX_PERIOD = 100_000  # sequences after which the order of sources repeats; weights are rounded to five digits
WEIGHT = re.compile(r"(.+)=([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
NAME = re.compile(r"([\w.-]+)=(.+)")
QUERY = re.compile(r"[?&][\w-]+$")  # before the `=` of `https://…?v=2`
PARTITION = re.compile(r"[^/]/[\w-]+$")  # before the `=` of `s3://…/year=2024`; files have endings


class WeightedCorpus(NamedTuple):
    """Corpus of a mixture. Its share of the sequences is its weight divided by the sum of all weights."""

    name: str
    path: str
    weight: Fraction


def find_mixture(paths: Paths) -> tuple[WeightedCorpus, ...]:
    """Return the sources of `path=weight`, …, each with a name from its path; nothing if the paths have no weights.

    The name of an existing file is a path, even if it ends in `=` and a number. So is a URL that ends in a query,
    `https://…?v=2`. Raises ConfigError if only some paths have weights, if a weight is not above 0, if a path occurs
    twice, or for a URL such as `s3://…/year=2024`, which may be a path or a path with a weight.
    """
    pairs = _split(paths, WEIGHT)
    for path, weight in pairs:
        _check_no_partition(path, weight)
    plain = [path for path, weight in pairs if weight is None]
    if len(plain) == len(pairs):
        return ()
    check(
        not plain,
        f"{DATA} {' '.join(map(repr, plain))} has no weight, but other paths have one: give every path a weight, "
        "path=weight, or none of them.",
    )
    sources: list[WeightedCorpus] = []
    for path, weight in pairs:
        check(
            all(path != source.path for source in sources),
            f"{DATA} {path!r} is given twice: give it once, with the sum of the weights.",
        )
        check(
            Fraction(weight or 0) > 0,
            f"{DATA} '{path}={weight}' must have a weight above 0: remove paths without weight.",
        )
        name = _name(path, {source.name for source in sources})
        sources.append(WeightedCorpus(name, path, Fraction(weight or 0)))
    return tuple(sources)


def find_sets(paths: Paths) -> Mapping[str, tuple[str, ...]]:
    """Return the paths of each held-out set of `name=path`, …; nothing if the paths have no names.

    The name of an existing file is a path. Names consist of letters, digits and `_.-`. Paths with the same name are one
    set. Raises ConfigError if only some paths have names.
    """
    pairs = _split(paths, NAME)
    plain = [name for name, path in pairs if path is None]
    if len(plain) == len(pairs):
        return {}
    check(
        not plain,
        f"{HELD_OUT} {' '.join(map(repr, plain))} has no name, but other paths have one: give every path a name, "
        "name=path, or none of them.",
    )
    sets: dict[str, tuple[str, ...]] = {}
    for name, path in pairs:
        sets[name] = (*sets.get(name, ()), path or "")
    return sets


def shares_of(paths: Paths) -> list[Fraction]:
    """Return the share of each source of a mixture."""
    weights = [source.weight for source in find_mixture(paths)]
    return [weight / sum(weights) for weight in weights]


def _split(paths: Paths, form: re.Pattern[str]) -> list[tuple[str, str | None]]:
    """Split each text at its `=`. A text without `=`, or that is the name of a file, is returned with None."""
    pairs = []
    for text in filter(None, as_paths(paths)):
        match = None if Path(text).exists() or glob.glob(text) else form.fullmatch(text)
        is_query = match is not None and is_remote(text) and QUERY.search(match[1]) is not None
        pairs.append((text, None) if match is None or is_query else match.groups())
    return pairs


def _check_no_partition(path: str, weight: str | None) -> None:
    """Raise ConfigError for `s3://…/year=2024`, which may be a path with a weight or a directory."""
    ambiguous = weight is not None and is_remote(path) and weight.isdecimal() and PARTITION.search(path) is not None
    text = f"{path}={weight}"
    check(
        not ambiguous,
        f"{DATA} {text!r} is ambiguous: write '{text}=1' for the directory with this name, or '{path}/={weight}' for "
        f"the path {path!r} with the weight {weight}.",
    )


def _name(path: str, taken: set[str]) -> str:
    """Return `web` for `corpora/web/*.jsonl.gz` and `code` for `code.parquet`: the last part without wildcards."""
    parts = [part for part in Path(path).parts if not glob.has_magic(part)]
    stem = parts[-1].split(".")[0] if parts and parts[-1] == Path(path).name and not Path(path).is_dir() else None
    name = re.sub(r"[^\w.-]+", "-", stem or (parts[-1] if parts else "")).strip("-.") or "data"
    number = 2
    while (unique := name if number == 2 and name not in taken else f"{name}-{number}") in taken:
        number += 1
    return unique


class Mixture:
    """Order of the sources of a mixture: after any number of sequences, each source has its share to within one.

    Each step takes the source whose next sequence is due first among the sources that lag behind (Tijdeman 1980, "The
    chairman assignment problem": no other order is closer to the shares in the worst case). The shares are fractions
    with a common denominator, after which the order repeats, so that every position can be looked up.

    parts: number of sequences of each source in one period.
    """

    def __init__(self, parts: Sequence[int]):
        self.parts = list(parts)
        self._order = np.array(_fair_order(self.parts), np.int32)
        self._numbers = np.empty_like(self._order)  # index among the sequences of the same source
        for source in range(len(self.parts)):
            chosen = self._order == source
            self._numbers[chosen] = np.arange(chosen.sum())

    @classmethod
    def of_weights(cls, weights: Sequence[Fraction]) -> "Mixture":
        """Return the mixture with these weights. The shares are rounded to five digits."""
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        length = min(MAX_PERIOD, math.lcm(*(share.denominator for share in shares)))
        return cls([max(1, round(share * length)) for share in shares])

    def find(self, row: int) -> tuple[int, int]:
        """Return the source of sequence `row`, and the index of the sequence in that source."""
        rounds, index = divmod(row, len(self._order))
        source = int(self._order[index])
        return source, rounds * self.parts[source] + int(self._numbers[index])

    def taken(self, rows: int) -> list[int]:
        """Return the number of sequences of each source among the first `rows`."""
        rounds, index = divmod(rows, len(self._order))
        rest = np.bincount(self._order[:index], minlength=len(self.parts)).tolist()
        return [rounds * part + more for part, more in zip(self.parts, rest, strict=True)]


def _fair_order(parts: Sequence[int]) -> list[int]:
    """Return a sequence that contains number i `parts[i]` times, spread as evenly as possible."""
    total, double = sum(parts), 2 * max(len(parts), 2) - 2
    taken, order = [0] * len(parts), []
    for number in range(1, total + 1):
        behind = [double * (number * part - total * had) for part, had in zip(parts, taken, strict=True)]
        due = (((double - 1) * total - lag) / part for lag, part in zip(behind, parts, strict=True))
        times = [time if lag >= total else math.inf for time, lag in zip(due, behind, strict=True)]
        order.append(min(range(len(parts)), key=times.__getitem__))
        taken[order[-1]] += 1
    return order
