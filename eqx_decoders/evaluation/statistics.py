"""Statistics of evaluations.

Standard errors are computed over prompts, because samples of the same prompt are correlated. NaN stands for a
completion without a grade, and is left out of all means.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from eqx_decoders.errors import check


class MeanScore(NamedTuple):
    """Mean over prompts, its standard error, and the number of prompts. NaN: there are too few prompts."""

    mean: float
    error: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.error:.4f}" if self.error == self.error else "")


class WinCounts(NamedTuple):
    """Numbers of prompts for which the first of two models is better, equal and worse."""

    wins: int
    ties: int
    losses: int

    @property
    def p_value(self) -> float:
        """P-value of the two-sided sign test, without ties."""
        fewer, count = min(self.wins, self.losses), self.wins + self.losses
        tail = sum(math.comb(count, index) for index in range(fewer + 1))
        return min(1.0, 2 * tail / 2**count)


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k, `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021).

    **Arguments:**

    - `count`: number of completions n.
    - `correct`: number of correct completions c.

    Raises ConfigError for fewer than k completions.
    """
    check(0 <= correct <= count, f"pass_at_k: correct={correct} must be from 0 to count={count}.")
    check(
        1 <= k <= count, f"pass@{k} needs at least {k} completions per prompt, but there are {count}: increase samples."
    )
    return 1.0 - math.comb(count - correct, k) / math.comb(count, k)


def prompt_means(scores: Float[np.ndarray, "prompts samples"]) -> Float[np.ndarray, "prompts"]:
    """Return the mean score of each prompt. NaN: no completion of the prompt has a grade."""
    is_graded = ~np.isnan(scores)
    counts = is_graded.sum(axis=1)
    sums = np.where(is_graded, scores, 0.0).sum(axis=1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def mean_of(values: Float[np.ndarray, "prompts"]) -> MeanScore:
    """Return the mean of one value per prompt, and its standard error `s / sqrt(n)` (s with n - 1)."""
    known = values[~np.isnan(values)]
    count = len(known)
    error = float(known.std(ddof=1) / math.sqrt(count)) if count > 1 else math.nan
    return MeanScore(float(known.mean()) if count else math.nan, error, count)


def mean_over_prompts(scores: Float[np.ndarray, "prompts samples"]) -> MeanScore:
    """Return the mean of the prompts' mean scores. All prompts have the same weight."""
    return mean_of(prompt_means(scores))


def mean_pass_at_k(correct: Float[np.ndarray, "prompts samples"], k: int) -> MeanScore:
    """Return the mean of `pass_at_k` over the prompts with at least k grades. `correct`: 1, 0 or NaN."""
    counts = (~np.isnan(correct)).sum(axis=1)
    sums = np.nansum(correct, axis=1)
    values = [pass_at_k(int(n), int(c), k) for n, c in zip(counts, sums, strict=True) if n >= k]
    return mean_of(np.asarray(values, np.float64))


def paired_difference(first: Float[np.ndarray, "prompts"], second: Float[np.ndarray, "prompts"]) -> MeanScore:
    """Return the mean of `first - second` over prompts with both scores, and its standard error."""
    return mean_of(first - second)


def win_counts(first: Float[np.ndarray, "prompts"], second: Float[np.ndarray, "prompts"]) -> WinCounts:
    """Count the prompts for which `first` is better, equal and worse, among prompts with both scores."""
    difference = (first - second)[~np.isnan(first - second)]
    return WinCounts(int((difference > 0).sum()), int((difference == 0).sum()), int((difference < 0).sum()))


def ratio_of_sums(
    numerators: Float[np.ndarray, "documents"], denominators: Float[np.ndarray, "documents"]
) -> MeanScore:
    """Return `r = sum a / sum b` over documents, and its standard error `sqrt(n/(n-1) sum (a - r b)^2) / sum b`."""
    count, total = len(numerators), float(denominators.sum())
    ratio = float(numerators.sum()) / total if total else math.nan
    squares = float(((numerators - ratio * denominators) ** 2).sum())
    error = math.sqrt(squares * count / (count - 1)) / total if count > 1 and total else math.nan
    return MeanScore(ratio, error, count)
