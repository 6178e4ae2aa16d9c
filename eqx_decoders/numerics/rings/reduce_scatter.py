"""Ring reduce-scatter inside a `shard_map`, whose terms are computed while sums are sent."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from eqx_decoders.numerics.rings.levels import MAX_ADDITIONS, additions, load_function, ring_levels
from eqx_decoders.numerics.rings.links import ring_pairs
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.links import send


def separate(product: Array) -> Array:
    """Keep XLA from fusing the addition of the received sum into the product, which would then wait for that sum."""
    return lax.optimization_barrier(product)


class _Level(NamedTuple):
    """Two concurrent rings in opposite directions: their terms `term(index, half)`, number and distance of devices."""

    term: Callable[[Int[Array, ""], int], Array]
    size: int
    distance: int


def ring_scatter(
    term: Callable[[Int[Array, ""], int], Array],
    axes: tuple[str, ...],
    levels: tuple[int, ...],
    dtype: np.dtype,
    dimension: int,
    parts: int = 2,
) -> list[Array]:
    """Reduce-scatter inside a `shard_map`: return the parts of this device's shard along a dimension.

    `term(index, part)` computes this device's term for a part of piece `index`; the first level has one piece for each
    of its devices, and further levels cut these pieces. Further levels run while the first level computes the next two
    parts. Sums are sent in `dtype`, and rounded to it after each addition.
    """

    def first_level_term(pair: int, index: Int[Array, ""], half: int) -> Array:
        return term(index, 2 * pair + half)

    sums: dict[int, tuple[Array, Array]] = {}  # by pair of parts
    for step in range(parts // 2 + len(levels) - 1):
        running: dict[int, _Level] = {}
        for level, size in enumerate(levels):
            pair = step - level
            if 0 <= pair < parts // 2:
                level_term = partial(first_level_term, pair) if level == 0 else _cutter(sums[pair], size, dimension)
                running[pair] = _Level(level_term, size, math.prod(levels[level + 1 :]))
        sums |= zip(running, _run_rings(list(running.values()), axes, dtype), strict=True)
    return [half for pair in sums.values() for half in pair]


def _cutter(halves: tuple[Array, Array], parts: int, dimension: int) -> Callable[[Int[Array, ""], int], Array]:
    """Return the function `(index, half)` -> piece `index` of a half."""
    width = halves[0].shape[dimension] // parts
    return lambda index, half: lax.dynamic_slice_in_dim(halves[half], index * width, width, dimension)


def _run_rings(levels: Sequence[_Level], axes: tuple[str, ...], dtype: np.dtype) -> list[tuple[Array, Array]]:
    """Run several levels of `ring_scatter` concurrently."""
    num_devices = lax.axis_size(axes)
    device = lax.axis_index(axes)

    def terms(level: _Level, step: Array | int) -> tuple[Array, Array]:
        position = device // level.distance % level.size
        return level.term((position - 1 - step) % level.size, 0), level.term((position + 1 + step) % level.size, 1)

    def add(level: _Level, step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        rings = [ring_pairs(num_devices, level.size, level.distance, direction) for direction in (1, -1)]
        received = [send(half, axes, pairs) for half, pairs in zip(sums, rings, strict=True)]
        first, second = (
            (half.astype(new.dtype) + new).astype(dtype) for half, new in zip(received, terms(level, step), strict=True)
        )
        return first, second

    def add_to_levels(min_size: int, step: Array, sums: list[tuple[Array, Array]]) -> list[tuple[Array, Array]]:
        """Add a term to the levels that have at least `min_size` devices; smaller levels have finished."""
        return [
            add(level, step, halves) if level.size >= min_size else halves
            for level, halves in zip(levels, sums, strict=True)
        ]

    def first_terms(level: _Level) -> tuple[Array, Array]:
        first, second = (half.astype(dtype) for half in terms(level, 0))
        return first, second

    sums = [first_terms(level) for level in levels]
    start = 1
    for size in sorted({level.size for level in levels} - {1}):
        sums = lax.fori_loop(start, size, partial(add_to_levels, size), sums)
        start = size
    return sums


def ring_sum(layout: Layout, x: Array, axes: tuple[str, ...], dimension: int) -> Array:
    """Sum an array over devices and return this device's shard along a dimension, like `lax.psum_scatter`.

    With more than `MAX_ADDITIONS` additions, sums are float32.
    """
    size = lax.axis_size(axes)
    levels = ring_levels(size, size, load_function(layout, axes), products=False)
    needs_float32 = additions(levels) > MAX_ADDITIONS
    dtype = np.promote_types(x.dtype, np.float32) if needs_float32 else x.dtype
    cut = (dimension + 1) % x.ndim
    first, second = jnp.split(x, [x.shape[cut] // 2], cut)
    term = _cutter((first, second), levels[0], dimension)
    return jnp.concatenate(ring_scatter(term, axes, levels, dtype, dimension), cut).astype(x.dtype)
