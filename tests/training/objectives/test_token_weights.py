"""Averages over tokens, answers and prompts, for all of an optimizer's batch."""

import numpy as np
import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.training.objectives.token_weights import token_weights
from tests.compare import assert_allclose, assert_array_equal
from tests.errors import refused


LENGTHS = np.array([3, 1, 0, 2])  # the third answer has no tokens, and its prompt none at all
GROUPS = np.array(["a", "b", "c", "a"])
WEIGHTS = {
    "token": ({}, [1 / 6, 1 / 6, 0, 1 / 6]),
    "row": ({}, [1 / 9, 1 / 3, 0, 1 / 6]),
    "constant": (dict(limit=4), [1 / 12, 1 / 12, 0, 1 / 12]),
    "prompt": (dict(groups=GROUPS), [1 / 10, 1 / 2, 0, 1 / 10]),
    "row_sum": ({}, [1 / 3, 1 / 3, 0, 1 / 3]),
}


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_weights_of_lengths_and_of_masks(aggregation):
    options, want = WEIGHTS[aggregation]
    of_lengths = token_weights(LENGTHS, aggregation, **options)
    assert_allclose(of_lengths, want, rtol=1e-6)
    mask = np.array([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0] * 5, [1, 1, 0, 0, 0]], bool)
    of_masks = token_weights(mask, aggregation, **options)
    assert_array_equal(of_masks, mask * of_lengths[:, None])
    assert of_masks.dtype == np.float32


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_nothing_to_weigh(aggregation):
    options, _ = WEIGHTS[aggregation]
    assert_array_equal(token_weights(np.zeros(4), aggregation, **options), np.zeros(4))


@pytest.mark.parametrize(
    ("aggregation", "options", "name"),
    [
        pytest.param("row", dict(groups=GROUPS), "'prompt'", id="row-with-groups"),
        pytest.param("prompt", {}, "'prompt'", id="prompt-without-groups"),
        pytest.param("constant", {}, "'constant'", id="constant-without-limit"),
        pytest.param("constant", dict(limit=0), "limit=0", id="limit"),
    ],
)
def test_options_of_other_aggregations_are_refused(aggregation, options, name):
    with refused(ConfigError, name):
        token_weights(LENGTHS, aggregation, **options)
