"""Compare advantages and token weights with numbers computed by hand in float64. The tolerance is 1e-6."""

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.objectives.advantages import (
    generalized_advantages,
    group_advantages,
    overlong_penalty,
    token_weights,
    whiten,
)
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


REWARDS = np.array([1, 0, 0.5, 0, 1, 1, 1, 1])
GROUPS = np.array(["a"] * 4 + ["b"] * 4)


def assert_same(got, want) -> None:
    """Compare with a tolerance of 1e-6: the tables have six digits, and float32 has an error of 1e-7 up to 2."""
    assert_allclose(got, want, rtol=0, atol=1e-6)


ESTIMATORS = {
    "GRPO": (dict(scale="group"), [1.305310, -0.783186, 0.261062, -0.783186]),
    "GRPO eps=1e-6": (dict(scale="group", eps=1e-6), [1.305580, -0.783348, 0.261116, -0.783348]),
    "GRPO ddof=0": (dict(scale="group", ddof=0), [1.507193, -0.904316, 0.301439, -0.904316]),
    "Dr. GRPO": ({}, [0.625, -0.375, 0.125, -0.375]),
    "std of the batch": (dict(scale="batch"), [1.364144, -0.818487, 0.272829, -0.818487]),
    "RLOO": (dict(baseline="leave_one_out"), [0.833333, -0.5, 0.166667, -0.5]),
    "MaxRL": (dict(scale="mean"), [1.666667, -1, 0.333333, -1]),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_advantage_estimators(name):
    options, want = ESTIMATORS[name]
    got = group_advantages(REWARDS, GROUPS, **options)
    assert_same(got, [*want, 0, 0, 0, 0])
    assert_array_equal(got[4:], 0)
    order = np.array([4, 0, 5, 1, 6, 2, 7, 3])  # groups need not be contiguous
    assert_array_equal(group_advantages(REWARDS[order], GROUPS[order], **options), got[order])


def test_reinforce_plus_plus_advantages():
    """With the baseline, rewards are centered per group before whitening. Long completions have more weight."""
    ones = np.ones((8, 1))
    plain = group_advantages(REWARDS, GROUPS, baseline="none")
    assert_array_equal(plain, REWARDS)
    assert_same(whiten(plain[:, None], ones)[:, 0], [0.682221, -1.500886, -0.409333, -1.500886, *[0.682221] * 4])
    centered = whiten(group_advantages(REWARDS, GROUPS)[:, None], ones)[:, 0]
    assert_same(centered, [1.994310, -1.196586, 0.398862, -1.196586, *[0] * 4])
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    values = np.array([[1.0, 1, 1], [-1, np.nan, np.inf]])
    assert_same(whiten(values, mask), [[0.5, 0.5, 0.5], [-1.5, 0, 0]])  # over tokens, the mean is 1/2 and the std is 1
    assert_array_equal(whiten(np.full((1, 7), 0.1), np.ones((1, 7))), np.zeros((1, 7)))


def test_missing_rewards_are_excluded_from_their_group():
    rewards = np.array([np.nan, 1, 0, np.nan, 1, np.nan])
    got = group_advantages(rewards, np.array([0, 0, 0, 1, 1, 2]), baseline="leave_one_out")
    assert_array_equal(np.isnan(got), np.isnan(rewards))
    assert_same(got[[1, 2, 4]], [1, -1, 0])
    assert np.isnan(group_advantages(np.full(2, np.nan), np.zeros(2))).all()


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group", "batch", "mean"])
def test_equal_rewards_have_zero_advantage(baseline, scale):
    """In float32 the std of seven rewards of 0.1 is 8e-9 instead of 0. Dividing by it would amplify rounding errors."""
    rewards = np.full(7, 0.1, np.float32)
    assert 0 < rewards.std(ddof=1) < 1e-7
    got = group_advantages(rewards, np.zeros(7), baseline=baseline, scale=scale, eps=1e-8)
    assert_array_equal(got, 0)
    got = group_advantages(np.full(7, 0.1), np.zeros(7), baseline=baseline, scale=scale, eps=0.0)
    assert_array_equal(got, 0)


def test_nearly_equal_rewards_are_scaled_with_eps():
    rewards = np.array([0.7, 0.7, 0.7 + 1e-8, 0.7])
    for eps, want in ((1e-4, 7.5e-5), (1e-8, 0.5)):
        got = group_advantages(rewards, np.zeros(4), scale="group", eps=eps)
        assert_allclose(got[2], want, rtol=1e-4)


def test_invalid_scales_are_refused():
    with refused(ConfigError, "scale='group'"):
        group_advantages(REWARDS, GROUPS, baseline="none", scale="group")
    with refused(ConfigError, "-1.0", "scale='mean'"):
        group_advantages(-REWARDS, GROUPS, scale="mean")


TOKEN_REWARDS, VALUES = np.array([[0.0, 0, 0, 1]] * 3), np.array([[0.5, 0.4, 0.9, 0.3]] * 3)
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 0, 1]])


def test_generalized_advantages():
    """Row 2 contains a tool token, which is skipped. Row 3 is truncated and is bootstrapped with a value of 0.2."""
    values = np.where(MASK, VALUES, np.nan)
    advantages, returns = generalized_advantages(TOKEN_REWARDS, values, MASK, bootstrap=np.array([0, 0, 0.2]))
    assert_same(advantages[0], [0.433662, 0.561750, 0.065, 0.7])
    assert_same(returns[0], [0.933662, 0.961750, 0.965, 1])
    assert_same(advantages[1], [0.436750, 0.565, 0, 0.7])
    assert_same(returns[1], [0.936750, 0.965, 0, 1])
    assert_same(returns[2], returns[1] + 0.2 * np.array([0.95**2, 0.95, 0, 1]))
    assert_array_equal(generalized_advantages(TOKEN_REWARDS, values, MASK)[1][2], returns[1])
    assert_same(whiten(advantages[1:2], MASK[1:2]), [[-0.991344, -0.017092, 0, 1.008436]])
    padded = generalized_advantages(np.array([[0.0, 0, 1, 0]]), VALUES[:1], np.array([[0, 1, 1, 0]]), gamma=0.9)[0]
    assert_same(padded, [[0, 0.9 * 0.9 - 0.4 + 0.9 * 0.95 * 0.1, 0.1, 0]])
    with refused(ConfigError, "rewards", "mask"):
        generalized_advantages(TOKEN_REWARDS, VALUES, 1 - TOKEN_REWARDS)


def test_overlong_penalty():
    assert_same(overlong_penalty(np.array([5, 6, 7, 9, 10, 11]), 10, 4), [0, 0, -0.25, -0.75, -1, -1])
    with refused(ConfigError, "buffer=11"):
        overlong_penalty(np.array([5]), 10, 11)


LENGTHS = np.array([3, 1, 0, 2])  # the third completion is empty, and it is the only completion of its prompt
PROMPTS = np.array(["a", "b", "c", "a"])
WEIGHTS = {
    "token": ({}, [1 / 6, 1 / 6, 0, 1 / 6]),
    "sequence": ({}, [1 / 9, 1 / 3, 0, 1 / 6]),
    "constant": (dict(limit=4), [1 / 12, 1 / 12, 0, 1 / 12]),
    "prompt": (dict(groups=PROMPTS), [1 / 10, 1 / 2, 0, 1 / 10]),
    "sequence_sum": ({}, [1 / 3, 1 / 3, 0, 1 / 3]),
}


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_token_weights_of_lengths_equal_those_of_masks(aggregation):
    options, want = WEIGHTS[aggregation]
    of_lengths = token_weights(LENGTHS, aggregation, **options)
    assert_allclose(of_lengths, want, rtol=1e-6)
    mask = np.array([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0] * 5, [1, 1, 0, 0, 0]], bool)
    of_masks = token_weights(mask, aggregation, **options)
    assert_array_equal(of_masks, mask * of_lengths[:, None])
    assert of_masks.dtype == np.float32


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_token_weights_of_empty_completions_are_zero(aggregation):
    options, _ = WEIGHTS[aggregation]
    assert_array_equal(token_weights(np.zeros(4), aggregation, **options), np.zeros(4))


@pytest.mark.parametrize(
    ("aggregation", "options", "name"),
    [
        pytest.param("sequence", dict(groups=PROMPTS), "'prompt'", id="sequence-with-groups"),
        pytest.param("prompt", {}, "'prompt'", id="prompt-without-groups"),
        pytest.param("constant", {}, "'constant'", id="constant-without-limit"),
        pytest.param("constant", dict(limit=0), "limit=0", id="limit"),
    ],
)
def test_options_of_other_aggregations_are_refused(aggregation, options, name):
    with refused(ConfigError, name):
        token_weights(LENGTHS, aggregation, **options)
