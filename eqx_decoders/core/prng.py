"""Threefry in one piece: the random numbers of JAX's own keys, compiled and drawn in a third of the time on CPUs.

JAX compiles Threefry for CPUs as a loop over its rounds with ten kernels a draw. A new model has hundreds of draws, so
its program took longer to compile than its training step. Written out, a draw is one kernel with all that follows it.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl, threefry_prng_impl
from jaxtyping import Array, PRNGKeyArray, UInt32


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def fast_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return the key as one of this implementation; keys of another kind than JAX's default stay as they are."""
    key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if str(jax.random.key_impl(key)) != "threefry2x32" or not partitionable:
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_IMPLEMENTATION)


def threefry_key(key: PRNGKeyArray) -> PRNGKeyArray:
    """Return a key of JAX's default kind; one of another kind is the seed of a new one."""
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    return jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")


def _threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Apply Threefry-2x32 with 20 rounds (Salmon et al. 2011) to the counter (high, low)."""
    words = key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    high, low = high + words[0], low + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = high ^ ((low << rotation) | (low >> (32 - rotation)))
        high = high + words[(group + 1) % 3]
        low = low + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return high, low


def _count(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the index of each element of an array of at most 2^32, as a pair: sums of iotas, which a mesh splits."""
    low = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        low += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(math.prod(shape[axis + 1 :]))
    return jnp.zeros(shape, jnp.uint32), low


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    if bit_width != 32 or math.prod(shape) > 1 << 32:
        return threefry_prng_impl.random_bits(key, bit_width, shape)
    high, low = _threefry(key, *_count(shape))
    return high ^ low


def _split(key: Array, shape: tuple[int, ...]) -> UInt32[Array, "*shape 2"]:
    return jnp.stack(_threefry(key, *_count(shape)), axis=-1)


def _fold_in(key: Array, data: Any) -> UInt32[Array, "2"]:
    return jnp.stack(_threefry(key, jnp.uint32(0), data.astype(jnp.uint32)))


_IMPLEMENTATION = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry_in_one_piece",
    tag="1fry",
)
