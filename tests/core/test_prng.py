"""Threefry in one piece draws what JAX's own draws, and compiles to less."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_decoders.core import prng
from eqx_decoders.core.prng import fast_key


DRAWS = {
    "bits": lambda key: jax.random.bits(key, (3, 5, 7)),
    "one": lambda key: jax.random.bits(key),
    "none": lambda key: jax.random.bits(key, (2, 0)),
    "bytes": lambda key: jax.random.bits(key, (9,), jnp.uint8),
    "normal": lambda key: jax.random.normal(key, (4, 33)),
    "truncated": lambda key: jax.random.truncated_normal(key, -2.0, 2.0, (65,)),
    "bfloat16": lambda key: jax.random.normal(key, (8,), jnp.bfloat16),
    "split": lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
    "fold_in": lambda key: jax.random.key_data(jax.random.fold_in(key, 1_000_003)),
    "vmap": lambda key: jax.vmap(lambda key: jax.random.normal(key, (6,)))(jax.random.split(key, 4)),
    "nested": lambda key: jax.random.uniform(jax.random.fold_in(jax.random.split(key)[1], 2), (2, 2)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 2**63 + 12345])
def test_draws_are_those_of_jax(name, seed):
    key = jax.random.key(np.uint32(seed % 2**32))
    np.testing.assert_array_equal(DRAWS[name](fast_key(key)), DRAWS[name](key))


def test_keys_of_all_kinds_are_taken():
    old = jax.random.PRNGKey(7)
    np.testing.assert_array_equal(DRAWS["normal"](fast_key(old)), DRAWS["normal"](old))
    other = jax.random.key(7, impl="rbg")
    assert fast_key(other) is other
    again = fast_key(fast_key(old))
    np.testing.assert_array_equal(DRAWS["normal"](again), DRAWS["normal"](old))
    with jax.threefry_partitionable(False):  # JAX's older numbers depend on the whole shape
        np.testing.assert_array_equal(DRAWS["normal"](fast_key(old)), DRAWS["normal"](old))


def test_places_are_counted_beyond_what_a_test_can_draw():
    shape = (65_536, 65_536)
    assert math.prod(shape) == 1 << 32
    last = jax.jit(lambda: prng._count(shape)[1][-1, -1])
    assert int(last()) == (1 << 32) - 1
    more = jax.eval_shape(lambda key: jax.random.bits(fast_key(key), (65_536, 65_537)), jax.random.key(0))
    assert more.shape == (65_536, 65_537)  # by JAX's own, which counts with 64 bits


def test_a_draw_is_one_kernel():
    def kernels(convert):
        draw = lambda key: jax.random.truncated_normal(convert(key), -2.0, 2.0, (96, 40))  # noqa: E731
        return jax.jit(draw).lower(jax.random.key(0)).compile().as_text().count("fusion(")

    assert kernels(fast_key) == 1 < kernels(lambda key: key)
