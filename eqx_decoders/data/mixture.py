"""Mixtures of corpora: parse `path=weight` and `name=path` arguments, and determine the source of each sequence."""

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


MAX_PERIOD = 100_000  # sequences after which the order of sources repeats; so weights are rounded to five digits
WEIGHT = re.compile(r"(.+)=([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)", re.IGNORECASE)
NAME = re.compile(r"([\w.-]+)=(.+)")
QUERY = re.compile(r"[?&][\w-]+$")  # before the `=` of `https://…?v=2`
PARTITION = re.compile(r"[^/]/[\w-]+$")  # before the `=` of `s3://…/year=2024`; files have endings


class WeightedCorpus(NamedTuple):
    """Corpus of a mixture. Its share of the sequences is `weight` divided by the sum of the weights of all corpora."""

    name: str
    path: str
    weight: Fraction


def find_mixture(paths: Paths) -> tuple[WeightedCorpus, ...]:
    """Parse the sources of a mixture, `path=weight` for each source; return () if the paths have no weights.

    The name of a source is derived from its path. The name of an existing file is a path, even if it ends in `=` and a
    number, and so is a URL that ends in a query, `https://…?v=2`.

    Raises ConfigError if only some paths have weights, if a weight is not positive, if a path is repeated, and for a
    URL such as `s3://…/year=2024`, which is either a path or a path with a weight.
    """
    pairs = _split(paths, WEIGHT)
    for path, weight in pairs:
        _check_no_partition(path, weight)
    unweighted = [path for path, weight in pairs if weight is None]
    if len(unweighted) == len(pairs):
        return ()
    check(
        not unweighted,
        f"{DATA} {' '.join(map(repr, unweighted))} has no weight, but other paths have weights. Write path=weight for "
        "all paths, or remove all weights.",
    )
    sources: list[WeightedCorpus] = []
    for path, weight in pairs:
        check(
            all(path != source.path for source in sources),
            f"{DATA} {path!r} is repeated. Write the path once, with the sum of the weights.",
        )
        check(
            Fraction(weight or 0) > 0,
            f"{DATA} '{path}={weight}' must have a weight above 0. Remove paths with weight 0.",
        )
        name = _name(path, {source.name for source in sources})
        sources.append(WeightedCorpus(name, path, Fraction(weight or 0)))
    return tuple(sources)


def find_sets(paths: Paths) -> Mapping[str, tuple[str, ...]]:
    """Parse held-out sets, `name=path` for each path; return the paths of each set, or {} if the paths have no names.

    The name of an existing file is a path. Names consist of letters, digits and `_.-`. Paths with the same name belong
    to the same set. Raises ConfigError if only some paths have names.
    """
    pairs = _split(paths, NAME)
    unnamed = [name for name, path in pairs if path is None]
    if len(unnamed) == len(pairs):
        return {}
    check(
        not unnamed,
        f"{HELD_OUT} {' '.join(map(repr, unnamed))} has no name, but other paths have names. Write name=path for all "
        "paths, or remove all names.",
    )
    sets: dict[str, tuple[str, ...]] = {}
    for name, path in pairs:
        sets[name] = (*sets.get(name, ()), path or "")
    return sets


def shares_of(paths: Paths) -> list[Fraction]:
    """Return the share of each source of a mixture; the shares sum to 1."""
    weights = [source.weight for source in find_mixture(paths)]
    return [weight / sum(weights) for weight in weights]


def _split(paths: Paths, form: re.Pattern[str]) -> list[tuple[str, str | None]]:
    """Split each argument at `=`, with the regular expression `form`.

    An argument that does not match, or that is the name of an existing file, is returned with None.
    """
    pairs = []
    for text in filter(None, as_paths(paths)):
        match = None if Path(text).exists() or glob.glob(text) else form.fullmatch(text)
        is_query = match is not None and is_remote(text) and QUERY.search(match[1]) is not None
        pairs.append((text, None) if match is None or is_query else match.groups())
    return pairs


def _check_no_partition(path: str, weight: str | None) -> None:
    """Raise ConfigError for `s3://…/year=2024`, which is either a directory or a path with a weight."""
    ambiguous = weight is not None and is_remote(path) and weight.isdecimal() and PARTITION.search(path) is not None
    text = f"{path}={weight}"
    check(
        not ambiguous,
        f"{DATA} {text!r} is ambiguous. Write '{text}=1' for the directory with this name, or '{path}/={weight}' for "
        f"the path {path!r} with the weight {weight}.",
    )


def _name(path: str, taken: set[str]) -> str:
    """Return a name for a path that is not in `taken`: the last component without wildcards and file extension.

    For example `web` for `corpora/web/*.jsonl.gz`, and `code` for `code.parquet`.
    """
    parts = [part for part in Path(path).parts if not glob.has_magic(part)]
    stem = parts[-1].split(".")[0] if parts and parts[-1] == Path(path).name and not Path(path).is_dir() else None
    name = re.sub(r"[^\w.-]+", "-", stem or (parts[-1] if parts else "")).strip("-.") or "data"
    number = 2
    while (unique := name if number == 2 and name not in taken else f"{name}-{number}") in taken:
        number += 1
    return unique


class Mixture:
    """Order in which sequences are taken from the sources of a mixture.

    After any number of sequences, the number of sequences of each source differs from its share by less than one. The
    order repeats after a period, so that the source of any sequence can be looked up.

    `per_period`: number of sequences of each source in a period.
    """

    def __init__(self, per_period: Sequence[int]):
        self.per_period = list(per_period)
        self._sources = np.array(_fair_order(self.per_period), np.int32)  # source of each sequence of a period
        self._indices = np.empty_like(self._sources)  # index of each sequence among the sequences of its source
        for source in range(len(self.per_period)):
            is_source = self._sources == source
            self._indices[is_source] = np.arange(is_source.sum())

    @classmethod
    def of_weights(cls, weights: Sequence[Fraction]) -> "Mixture":
        """Return the mixture with these weights. The shares are rounded to five digits."""
        total = sum(weights, Fraction(0))
        shares = [weight / total for weight in weights]
        period = min(MAX_PERIOD, math.lcm(*(share.denominator for share in shares)))
        return cls([max(1, round(share * period)) for share in shares])

    def find(self, row: int) -> tuple[int, int]:
        """Return the source of sequence `row`, and the index of the sequence among the sequences of this source."""
        periods, index = divmod(row, len(self._sources))
        source = int(self._sources[index])
        return source, periods * self.per_period[source] + int(self._indices[index])

    def count(self, rows: int) -> list[int]:
        """Return the number of sequences of each source among the first `rows` sequences."""
        periods, remainder = divmod(rows, len(self._sources))
        counts = np.bincount(self._sources[:remainder], minlength=len(self.per_period)).tolist()
        return [periods * per_period + count for per_period, count in zip(self.per_period, counts, strict=True)]


def _fair_order(per_period: Sequence[int]) -> list[int]:
    """Return a sequence that contains source i `per_period[i]` times, spread as evenly as possible.

    Among the sources that lag behind their share, each step takes the source with the earliest deadline (Tijdeman 1980,
    "The chairman assignment problem": no other order is closer to the shares in the worst case).
    """
    total = sum(per_period)
    scale = 2 * max(len(per_period), 2) - 2  # a source may be taken if it lags by at least 1 / scale sequences
    taken = [0] * len(per_period)
    order = []
    for step in range(1, total + 1):
        lags = [scale * (step * share - total * count) for share, count in zip(per_period, taken, strict=True)]
        deadlines = [
            ((scale - 1) * total - lag) / share if lag >= total else math.inf
            for lag, share in zip(lags, per_period, strict=True)
        ]
        source = min(range(len(per_period)), key=deadlines.__getitem__)
        order.append(source)
        taken[source] += 1
    return order
