"""Hashes of n-grams, in 31 bits as MaxText has them, or in 63 bits as Qwen 4 does; sizes of hashed tables.

An n-gram's hash is the exclusive or of its tokens, each times an odd number of its place; its row in a table is the
remainder by a prime. JAX computes in 32 bits unless told otherwise: 63 bits are two words here, which are exact.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt32


HashBits = Literal[31, 63]
_LAYER_STEP = 10_007  # between the seeds of layers
_MASK, _GAMMA = 2**64 - 1, 0x9E37_79B9_7F4A_7C15


def multipliers(bits: HashBits, seed: int, number: int, classes: int, count: int) -> tuple[int, ...]:
    """Return odd numbers for so many places, the last token's first; no product of one and a class is beyond `bits`.

    `number` is the layer's for 31 bits, and its place among the layers with tables for 63.
    """
    half, seed = max(1, (2**bits - 1) // classes // 2), seed + _LAYER_STEP * number
    if bits == 31:
        drawn = np.random.default_rng(seed).integers(0, half, size=count, dtype=np.int32)
        return tuple((drawn * 2 + 1).tolist())
    return tuple(2 * (_split_mix(seed + _GAMMA * (place + 1)) % half) + 1 for place in range(count))


def _split_mix(value: int) -> int:
    """Return a number of 64 bits that looks random (SplitMix64; Steele et al. 2014)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)


def hash_rows(
    bits: HashBits,
    classes: Sequence[Int[Array, "batch length"]],
    factors: Sequence[int],
    sizes: Int32[np.ndarray, "orders heads"],
) -> list[Int32[Array, "batch length heads"]]:
    """Return for pairs, triples and so on the remainder of their hash by the size of each head's table.

    `classes` are those of each token, of the one before it and so on; their `factors` are `multipliers`.
    """
    if bits == 31:
        first, *others = (each * factor for each, factor in zip(classes, factors, strict=True))
        hashes = itertools.accumulate(others, jnp.bitwise_xor, initial=first)
        return [each[..., None] % size.reshape(1, 1, -1) for each, size in zip(list(hashes)[1:], sizes, strict=True)]
    products = [_product(each.astype(jnp.uint32), factor) for each, factor in zip(classes, factors, strict=True)]
    pairs = itertools.accumulate(products, lambda x, y: (x[0] ^ y[0], x[1] ^ y[1]))
    return [_remainder(*each, size) for each, size in zip(list(pairs)[1:], sizes, strict=True)]


Words = tuple[UInt32[Array, "batch length"], UInt32[Array, "batch length"]]


def _product(x: UInt32[Array, "batch length"], factor: int) -> Words:
    """Return the high and the low word of `x factor`, a number below 2^64."""
    high, low = np.uint32(factor >> 32), np.uint32(factor & 0xFFFF_FFFF)
    x1, x0, low1, low0 = x >> 16, x & 0xFFFF, low >> 16, low & 0xFFFF
    cross, other = x1 * low0, x0 * low1
    middle = (x0 * low0 >> 16) + (cross & 0xFFFF) + (other & 0xFFFF)
    return x * high + x1 * low1 + (cross >> 16) + (other >> 16) + (middle >> 16), x * low


def _remainder(high: Array, low: Array, sizes: Int32[np.ndarray, "heads"]) -> Int32[Array, "batch length heads"]:
    """Divide by each size, as by hand: a few binary digits at a time, as many as fit below the last remainder."""
    step = 32 - int(sizes.max()).bit_length()
    divisor, rest = sizes.astype(np.uint32).reshape(1, 1, -1), jnp.zeros((*low.shape, len(sizes)), jnp.uint32)
    for end in range(64, 0, -step):
        begin = max(end - step, 0)
        if begin >= 32:
            part = high >> (begin - 32)
        elif end <= 32:
            part = low >> begin
        else:
            part = (low >> begin) | (high << (32 - begin) if begin else high & 0)
        digits = part & np.uint32(2 ** (end - begin) - 1)
        rest = ((rest << (end - begin)) | digits[..., None]) % divisor
    return rest.astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def table_sizes(layers: tuple[int, ...], bases: tuple[int, ...], heads: int) -> dict[int, tuple[int, ...]]:
    """Return for each layer, order and head the next prime that is above the last one and that no other table has."""
    used: set[int] = set()
    sizes: dict[int, tuple[int, ...]] = {}
    for layer in layers:
        mine: list[int] = []
        for base in bases:
            last = base - 1
            for _ in range(heads):
                last = next(number for number in itertools.count(last + 1) if number not in used and _is_prime(number))
                used.add(last)
                mine.append(last)
        sizes[layer] = tuple(mine)
    return sizes


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def up_to_last(window: Sequence[Int[Array, "batch length"]], end_token: int | None) -> list[Int[Array, "batch length"]]:
    """Return earlier tokens, the nearest first, with -1 for those that an `end_token` after them keeps away."""
    if end_token is None:
        return list(window)
    ended = jax.tree.map(lambda x: x == end_token, list(window))
    apart = itertools.accumulate(ended, jnp.logical_or)
    return [jnp.where(is_apart, -1, each) for each, is_apart in zip(window, apart, strict=True)]
