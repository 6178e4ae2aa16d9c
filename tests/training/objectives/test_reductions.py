"""Sums over the completions of rows, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from eqx_decoders.training.objectives.reductions import completion_lengths, completion_means, completion_sums, to_tokens
from tests.compare import assert_array_equal, assert_close


# a prompt, two completions with a tool's token in one of them, padding; a row with one completion of two tokens
COMPLETION_IDS = np.array([[0, 0, 1, 1, 0, 1, 2, 2], [0, 2, 2, 0, 0, 0, 0, 0]], np.int32)
VALUES = np.array([[np.nan, np.inf, 1, 2, np.nan, 3, 4, 5], [np.nan, 6, 8, *[-np.inf] * 5]], np.float32)


def test_sums_means_and_back():
    values, completions = jnp.asarray(VALUES), jnp.asarray(COMPLETION_IDS)
    assert_array_equal(completion_sums(values, completions, 3), [[6, 9, 0], [0, 14, 0]])
    assert_array_equal(completion_means(values, completions, 3), [[2, 4.5, 0], [0, 7, 0]])
    assert_array_equal(completion_lengths(completions, 3), [[3, 2, 0], [0, 2, 0]])
    spread = to_tokens(jnp.asarray([[7.0, 9.0], [np.nan, 5.0]]), completions)
    assert_array_equal(spread, [[0, 0, 7, 7, 0, 7, 9, 9], [0, 5, 5, 0, 0, 0, 0, 0]])


@pytest.mark.slow
def test_gradients_of_each_completion():
    def loss(values):
        means = completion_means(values, jnp.asarray(COMPLETION_IDS), 2)
        return jnp.sum(to_tokens(means**2, jnp.asarray(COMPLETION_IDS)))  # 3 * 2^2 + 2 * 4.5^2 + 2 * 7^2

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(VALUES))
    assert_close(value, jnp.float32(150.5), units=8)
    want = np.array([[0, 0, 4, 4, 0, 4, 9, 9], [0, 14, 14, 0, 0, 0, 0, 0]], np.float32)
    assert_close(gradient, want, units=8)


def test_rows_split_over_a_mesh_exchange_only_sums():
    """Batch and length are split: no device gathers a row, and the numbers are those of one device."""
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("data", "context"))

    def loss(values, completions):
        return jnp.sum(to_tokens(completion_means(values, completions, 2) ** 2, completions))

    step = jax.jit(jax.value_and_grad(loss), in_shardings=(place, place)).lower(VALUES, COMPLETION_IDS).compile()
    assert "all-gather" not in step.as_text() and "all-reduce" in step.as_text()
    got = step(jax.device_put(VALUES, place), jax.device_put(COMPLETION_IDS, place))
    assert_close(got[0], np.float32(150.5), units=8)
    assert got[1].sharding.is_equivalent_to(place, 2)
