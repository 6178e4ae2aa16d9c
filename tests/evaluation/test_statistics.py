"""Compare statistics of evaluations with known values and with simulations."""

import itertools
import math

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.evaluation.statistics import (
    WinCounts,
    mean_of,
    mean_over_prompts,
    mean_pass_at_k,
    paired_difference,
    pass_at_k,
    ratio_of_sums,
    win_counts,
)
from tests.errors import refused


NAN = math.nan


@pytest.mark.parametrize("k, known", [(1, 0.25), (2, 0.464286), (4, 0.785714), (7, 1.0), (8, 1.0)])
def test_pass_at_k_of_two_correct_answers_among_eight(k, known):
    assert pass_at_k(8, 2, k) == pytest.approx(known, abs=5e-7)


@pytest.mark.parametrize("count, right, k", [(5, 0, 2), (5, 5, 2), (6, 1, 3), (7, 3, 2)])
def test_pass_at_k_equals_the_share_of_subsets_with_a_correct_answer(count, right, k):
    subsets = list(itertools.combinations([True] * right + [False] * (count - right), k))
    assert pass_at_k(count, right, k) == pytest.approx(np.mean([any(subset) for subset in subsets]))


def test_pass_at_k_requires_k_answers():
    with refused(ConfigError, "pass@4", "3"):
        pass_at_k(3, 1, 4)
    with refused(ConfigError, "correct=4", "count=3"):
        pass_at_k(3, 4, 1)


def test_standard_errors_are_clustered_by_prompt():
    """Repeating equal answers of a prompt does not change the standard error."""
    once = np.asarray([[1.0], [0.0], [1.0], [1.0]])
    score = mean_over_prompts(np.repeat(once, 16, axis=1))
    assert score == mean_over_prompts(once)
    assert score.mean == 0.75 and score.error == pytest.approx(0.25) and score.prompts == 4
    assert str(score) == "0.7500 ± 0.2500"


def test_standard_error_equals_the_spread_of_repeated_evaluations():
    """In each simulation, new prompts of different difficulty have 4 answers each."""
    generator = np.random.default_rng(0)
    chances = generator.beta(0.5, 0.5, size=(4000, 50))
    answers = (generator.random((4000, 50, 4)) < chances[..., None]).astype(np.float64)
    means, errors = zip(*((score.mean, score.error) for score in map(mean_over_prompts, answers[:400])), strict=True)
    assert np.mean(errors) == pytest.approx(answers.mean(axis=(1, 2)).std(), rel=0.05)
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.15)


def test_answers_without_a_grade_are_excluded_from_means():
    scores = np.asarray([[1.0, NAN, 0.0, 0.0], [NAN, NAN, NAN, NAN], [1.0, 1.0, NAN, NAN]])
    assert mean_over_prompts(scores)[::2] == pytest.approx(((1 / 3 + 1) / 2, 2))
    assert mean_pass_at_k(scores, 2)[::2] == pytest.approx(((pass_at_k(3, 1, 2) + 1) / 2, 2))
    assert mean_pass_at_k(scores, 3)[::2] == pytest.approx((pass_at_k(3, 1, 3), 1))
    nothing = mean_over_prompts(scores[1:2])
    assert math.isnan(nothing.mean) and math.isnan(nothing.error) and nothing.prompts == 0
    assert str(mean_of(np.asarray([0.5]))) == "0.5000"  # one prompt has no standard error


def test_paired_differences_have_a_smaller_error():
    """If two models fail at the same prompts, their difference has a smaller error than their scores."""
    first = np.asarray([1.0, 0.9, 0.1, 0.0, NAN, 0.5])
    second = np.asarray([0.9, 0.9, 0.0, 0.1, 0.3, NAN])
    difference = paired_difference(first, second)
    assert difference.mean == pytest.approx(0.025) and difference.prompts == 4
    assert difference.error == pytest.approx(np.std([0.1, 0, 0.1, -0.1], ddof=1) / 2)
    assert difference.error < mean_of(first).error / 3
    assert win_counts(first, second) == WinCounts(2, 1, 1)


@pytest.mark.parametrize(
    "wins, losses, known", [(0, 0, 1.0), (5, 5, 1.0), (5, 0, 0.0625), (0, 10, 2 / 1024), (8, 2, 112 / 1024)]
)
def test_sign_test(wins, losses, known):
    assert WinCounts(wins, 7, losses).p_value == pytest.approx(known)


def test_ratio_of_sums_weights_texts_by_their_length():
    bits, size = np.asarray([10.0, 300.0, 95.0]), np.asarray([10.0, 200.0, 90.0])
    ratio = ratio_of_sums(bits, size)
    assert ratio.mean == pytest.approx(1.35) and ratio.prompts == 3
    again = ratio_of_sums(np.repeat(bits, 50), np.repeat(size, 50))
    assert again.error == pytest.approx(ratio.error * math.sqrt(2 / 149), rel=1e-6)
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 3, (3000, 60))
    drawn = bits[rows].sum(axis=1) / size[rows].sum(axis=1)  # bootstrap of 60 texts
    assert ratio_of_sums(np.repeat(bits, 20), np.repeat(size, 20)).error == pytest.approx(drawn.std(), rel=0.1)
    assert math.isnan(ratio_of_sums(bits[:1], size[:1]).error)
