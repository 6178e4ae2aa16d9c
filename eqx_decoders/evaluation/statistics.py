"""Statistics of evaluations. Errors are of prompts, not of samples: the samples of one prompt go together.

NaN stands for an answer that could not be judged: it leaves every mean.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from eqx_decoders.errors import check


class MeanScore(NamedTuple):
    """Mean over some `prompts`, with its standard error; NaN where there are too few."""

    mean: float
    error: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.error:.4f}" if self.error == self.error else "")


class WinCounts(NamedTuple):
    """Prompts where the first of two models is better, equal and worse."""

    wins: int
    ties: int
    losses: int

    @property
    def p_value(self) -> float:
        """Probability of a split at least as uneven among equals: the two-sided sign test; ties say nothing."""
        fewer, count = min(self.wins, self.losses), self.wins + self.losses
        tail = sum(math.comb(count, index) for index in range(fewer + 1))
        return min(1.0, 2 * tail / 2**count)


def pass_at_k(count: int, right: int, k: int) -> float:
    """Return the unbiased chance that one of k answers is right, `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021).

    Raises ConfigError for fewer than k answers.
    """
    check(0 <= right <= count, f"right={right} must be at least 0 and at most count={count}.")
    check(
        1 <= k <= count, f"pass@{k} needs at least {k} answers to a prompt, and there are {count}: draw more samples."
    )
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def prompt_means(scores: Float[np.ndarray, "prompts samples"]) -> Float[np.ndarray, "prompts"]:
    """Return the mean of each prompt's judged answers; NaN where there are none."""
    judged = ~np.isnan(scores)
    counts = judged.sum(axis=1)
    sums = np.where(judged, scores, 0.0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean_of(values: Float[np.ndarray, "prompts"]) -> MeanScore:
    """Return the mean of the values of prompts and its standard error, `s / sqrt(n)` with s by n - 1."""
    known = values[~np.isnan(values)]
    count = len(known)
    error = float(known.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return MeanScore(float(known.mean()) if count else math.nan, error, count)


def mean_over_prompts(scores: Float[np.ndarray, "prompts samples"]) -> MeanScore:
    """Return the mean of the prompts' means: each prompt counts the same, however many of its answers were judged."""
    return mean_of(prompt_means(scores))


def mean_pass_at_k(right: Float[np.ndarray, "prompts samples"], k: int) -> MeanScore:
    """Return the mean of `pass_at_k` over the prompts with at least k judged answers; `right` has 1, 0 and NaN."""
    counts = (~np.isnan(right)).sum(axis=1)
    sums = np.nansum(right, axis=1)
    values = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, sums, strict=True) if n >= k]
    return mean_of(np.asarray(values, np.float64))


def paired_difference(first: Float[np.ndarray, "prompts"], second: Float[np.ndarray, "prompts"]) -> MeanScore:
    """Return the mean of `first - second` over the prompts that both have, with the standard error of differences."""
    return mean_of(first - second)


def win_counts(first: Float[np.ndarray, "prompts"], second: Float[np.ndarray, "prompts"]) -> WinCounts:
    """Count the prompts where the first is better, equal and worse, among those that both have."""
    difference = (first - second)[~np.isnan(first - second)]
    return WinCounts(int((difference > 0).sum()), int((difference == 0).sum()), int((difference < 0).sum()))


def ratio_of_sums(
    numerators: Float[np.ndarray, "documents"], denominators: Float[np.ndarray, "documents"]
) -> MeanScore:
    """Return `r = sum a / sum b` over documents, with the error of a ratio, `sqrt(n/(n-1) sum (a - r b)^2) / sum b`."""
    count, total = len(numerators), float(denominators.sum())
    ratio = float(numerators.sum()) / total if total else math.nan
    squares = float(((numerators - ratio * denominators) ** 2).sum())
    error = math.sqrt(squares * count / (count - 1)) / total if count > 1 and total else math.nan
    return MeanScore(ratio, error, count)
