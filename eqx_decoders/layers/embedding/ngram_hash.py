"""Hashes of n-grams with 31 bits (MaxText) or 63 bits (Qwen 4), and sizes of the hash tables.

The hash of an n-gram is the XOR of its tokens, each multiplied by an odd number for its place in the n-gram. The row in
a hash table is the hash modulo the table size, a prime. JAX has 32-bit integers by default, so 63-bit hashes are
computed exactly with two 32-bit words.
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
_LAYER_STEP = 10_007  # difference of the seeds of consecutive layers
_MASK = 2**64 - 1
_GAMMA = 0x9E37_79B9_7F4A_7C15  # increment of SplitMix64


def multipliers(bits: HashBits, seed: int, number: int, classes: int, count: int) -> tuple[int, ...]:
    """Return `count` odd hash multipliers, starting with the multiplier of the last token of an n-gram.

    Products of a multiplier and a token class (below `classes`) fit into `bits` bits. `number` selects the layer: its
    index in the decoder for 31 bits, its index among the layers with an Engram for 63 bits.
    """
    half = max(1, (2**bits - 1) // classes // 2)
    layer_seed = seed + _LAYER_STEP * number
    if bits == 31:
        sampled = np.random.default_rng(layer_seed).integers(0, half, size=count, dtype=np.int32)
        return tuple((sampled * 2 + 1).tolist())
    return tuple(2 * (_split_mix(layer_seed + _GAMMA * (place + 1)) % half) + 1 for place in range(count))


def _split_mix(value: int) -> int:
    """Return a 64-bit pseudo-random number for a seed (SplitMix64; Steele et al. 2014)."""
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
    """Return the table rows of the n-grams that end at each token: for pairs, for triples, and so on.

    **Arguments:**

    - `classes`: the class of each token, then of the token before it, and so on.
    - `factors`: `multipliers` of these tokens.
    - `sizes`: size of the hash table for each order of n-grams and head.
    """
    if bits == 31:
        products = [token_class * factor for token_class, factor in zip(classes, factors, strict=True)]
        hashes = list(itertools.accumulate(products, jnp.bitwise_xor))
        return [
            ngram_hash[..., None] % order_sizes.reshape(1, 1, -1)
            for ngram_hash, order_sizes in zip(hashes[1:], sizes, strict=True)
        ]
    word_products = [
        _product(token_class.astype(jnp.uint32), factor) for token_class, factor in zip(classes, factors, strict=True)
    ]
    word_hashes = list(itertools.accumulate(word_products, lambda x, y: (x[0] ^ y[0], x[1] ^ y[1])))
    return [_remainder(high, low, order_sizes) for (high, low), order_sizes in zip(word_hashes[1:], sizes, strict=True)]


HighLow = tuple[UInt32[Array, "batch length"], UInt32[Array, "batch length"]]


def _product(x: UInt32[Array, "batch length"], factor: int) -> HighLow:
    """Return the high and the low 32-bit word of the product `x factor`, which is below 2^64."""
    high = np.uint32(factor >> 32)
    low = np.uint32(factor & 0xFFFF_FFFF)
    # long multiplication of x and `low` with 16-bit digits
    x1, x0 = x >> 16, x & 0xFFFF
    low1, low0 = low >> 16, low & 0xFFFF
    cross1, cross2 = x1 * low0, x0 * low1
    middle = (x0 * low0 >> 16) + (cross1 & 0xFFFF) + (cross2 & 0xFFFF)
    return x * high + x1 * low1 + (cross1 >> 16) + (cross2 >> 16) + (middle >> 16), x * low


def _remainder(high: Array, low: Array, sizes: Int32[np.ndarray, "heads"]) -> Int32[Array, "batch length heads"]:
    """Return a 64-bit number modulo each size, by long division.

    Each step shifts in as many binary digits as the 32-bit remainder has room for.
    """
    step = 32 - int(sizes.max()).bit_length()
    divisor = sizes.astype(np.uint32).reshape(1, 1, -1)
    remainder = jnp.zeros((*low.shape, len(sizes)), jnp.uint32)
    for end in range(64, 0, -step):
        start = max(end - step, 0)
        if start >= 32:
            shifted = high >> (start - 32)
        elif end <= 32:
            shifted = low >> start
        else:
            shifted = (low >> start) | (high << (32 - start) if start else high & 0)
        digits = shifted & np.uint32(2 ** (end - start) - 1)
        remainder = ((remainder << (end - start)) | digits[..., None]) % divisor
    return remainder.astype(jnp.int32)


@functools.lru_cache(maxsize=64)
def table_sizes(layers: tuple[int, ...], bases: tuple[int, ...], heads: int) -> dict[int, tuple[int, ...]]:
    """Return the hash table sizes of each layer, for each order and head: increasing primes from the order's base on.

    All tables of all layers have different sizes.
    """
    used: set[int] = set()
    sizes: dict[int, tuple[int, ...]] = {}
    for layer in layers:
        layer_sizes: list[int] = []
        for base in bases:
            size = base - 1
            for _ in range(heads):
                size = next(number for number in itertools.count(size + 1) if number not in used and _is_prime(number))
                used.add(size)
                layer_sizes.append(size)
        sizes[layer] = tuple(layer_sizes)
    return sizes


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def up_to_last(window: Sequence[Int[Array, "batch length"]], end_token: int | None) -> list[Int[Array, "batch length"]]:
    """Replace the tokens up to the last `end_token` by -1; `window` has the earlier tokens, nearest first."""
    if end_token is None:
        return list(window)
    is_end = jax.tree.map(lambda x: x == end_token, list(window))
    is_cut = itertools.accumulate(is_end, jnp.logical_or)
    return [jnp.where(cut, -1, tokens) for tokens, cut in zip(window, is_cut, strict=True)]
