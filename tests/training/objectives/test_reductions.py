"""Test sums over the tokens of each completion, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqx_decoders.training.objectives.reductions import completion_lengths, completion_means, completion_sums, to_tokens
from tests.compare import assert_array_equal, assert_close


# Row 1: a prompt and two completions; the first contains one tool token. Row 2: completion 2 with two tokens, padding.
COMPLETION_IDS = np.array([[0, 0, 1, 1, 0, 1, 2, 2], [0, 2, 2, 0, 0, 0, 0, 0]], np.int32)
VALUES = np.array([[np.nan, np.inf, 1, 2, np.nan, 3, 4, 5], [np.nan, 6, 8, *[-np.inf] * 5]], np.float32)


def test_completion_sums_means_lengths_and_broadcast():
    values, completions = jnp.asarray(VALUES), jnp.asarray(COMPLETION_IDS)
    assert_array_equal(completion_sums(values, completions, 3), [[6, 9, 0], [0, 14, 0]])
    assert_array_equal(completion_means(values, completions, 3), [[2, 4.5, 0], [0, 7, 0]])
    assert_array_equal(completion_lengths(completions, 3), [[3, 2, 0], [0, 2, 0]])
    spread = to_tokens(jnp.asarray([[7.0, 9.0], [np.nan, 5.0]]), completions)
    assert_array_equal(spread, [[0, 0, 7, 7, 0, 7, 9, 9], [0, 5, 5, 0, 0, 0, 0, 0]])


@pytest.mark.slow
def test_gradients_of_completion_means():
    def loss(values):
        means = completion_means(values, jnp.asarray(COMPLETION_IDS), 2)
        return jnp.sum(to_tokens(means**2, jnp.asarray(COMPLETION_IDS)))  # 3 * 2^2 + 2 * 4.5^2 + 2 * 7^2

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(VALUES))
    assert_close(value, jnp.float32(150.5), units=8)
    want = np.array([[0, 0, 4, 4, 0, 4, 9, 9], [0, 14, 14, 0, 0, 0, 0, 0]], np.float32)
    assert_close(gradient, want, units=8)


def test_sharded_rows_are_reduced_without_all_gather():
    """Batch and sequence axes are sharded. The program has no all-gather, and the results equal those of one device."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("data", "context"))

    def loss(values, completions):
        return jnp.sum(to_tokens(completion_means(values, completions, 2) ** 2, completions))

    step = jax.jit(jax.value_and_grad(loss), in_shardings=(place, place)).lower(VALUES, COMPLETION_IDS).compile()
    assert "all-gather" not in step.as_text() and "all-reduce" in step.as_text()
    got = step(jax.device_put(VALUES, place), jax.device_put(COMPLETION_IDS, place))
    assert_close(got[0], np.float32(150.5), units=8)
    assert got[1].sharding.is_equivalent_to(place, 2)
