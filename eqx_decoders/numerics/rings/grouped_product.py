"""Grouped products of expert weights inside a `shard_map`, whose gradients are ring reduce-scatters."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from eqx_decoders.numerics.grouped_matmul import GroupedForm, columns_times_rows, grouped_arrays, in_groups
from eqx_decoders.numerics.rings.levels import ROWS, fits_ring, levels_and_parts
from eqx_decoders.numerics.rings.reduce_scatter import ring_scatter, separate
from eqx_decoders.sharding.chips import LANES
from eqx_decoders.sharding.layout import Layout


class GroupRing(NamedTuple):
    """Ring reduce-scatter for a grouped product `rows inner, groups inner outer -> rows outer` inside a `shard_map`.

    - `axes`, `levels`, `parts`: as in `GradientRing`.
    - `dimension`: dimension of the weight that is sharded over the ring, 1 or 2.
    """

    axes: tuple[str, ...]
    levels: tuple[int, ...]
    dimension: int
    parts: int

    def gather(self, shard: Array) -> Array:
        """All-gather the shards of the weight."""
        return lax.all_gather(shard, self.axes, axis=self.dimension, tiled=True)


def group_ring(layout: Layout, axes: tuple[str, ...], shard: tuple[int, ...], dimension: int) -> GroupRing | None:
    """Return the ring along mesh axes for a weight with shards of shape `shard`; None if a ring is not used."""
    columns = shard[dimension] * math.prod(layout.sizes[name] for name in axes)
    across = shard[3 - dimension]
    if not layout.backend.gradient_rings or "data" in axes or across % 2:
        return None
    levels, parts = levels_and_parts(layout, axes, columns, across, across)
    fits = fits_ring(levels, columns, LANES if dimension == 2 else ROWS)
    return GroupRing(axes, levels, dimension, parts) if fits else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_groups(
    rings: tuple[GroupRing, ...], form: GroupedForm, x: Array, shards: tuple[Array, ...], counts: Int[Array, "groups"]
) -> tuple[Array, ...]:
    """Multiply sorted rows by several sharded weights, as `grouped_products`; `shards` are this device's shards."""
    return _forward(rings, form, x, shards, counts)[0]


def _forward(rings, form, x, shards, counts):
    weights = tuple(ring.gather(shard) for ring, shard in zip(rings, shards, strict=True))
    return grouped_arrays(x, weights, counts, form), (x, weights, counts)


def _backward(rings, form, saved, gradients):
    x, weights, counts = saved
    _, pullback = jax.vjp(lambda x: grouped_arrays(x, weights, counts, form), x)
    inside = in_groups(x, counts)
    x, *masked = (jnp.where(inside, array, jnp.zeros((), array.dtype)) for array in (x, *gradients))
    (x_gradient,) = pullback(gradients)
    shard_gradients = tuple(
        _scattered_gradient(ring, form, weight.dtype, x, gradient, counts)
        for ring, weight, gradient in zip(rings, weights, masked, strict=True)
    )
    return x_gradient, shard_gradients, None


ring_groups.defvjp(_forward, _backward)


def _scattered_gradient(
    ring: GroupRing, form: GroupedForm, dtype: np.dtype, x: Array, gradient: Array, counts: Array
) -> Array:
    """Return this device's shard of the gradient of a weight, summed over the rows of all devices."""
    splits_outer = ring.dimension == 2  # the columns of the result are sharded, not those of x
    split, other = (gradient, x) if splits_outer else (x, gradient)
    width = split.shape[1] // ring.levels[0]
    other_parts = jnp.split(other, ring.parts, 1)

    def term(index: Array, part: int) -> Array:
        piece = lax.dynamic_slice_in_dim(split, index * width, width, 1)
        columns, rows = (other_parts[part], piece) if splits_outer else (piece, other_parts[part])
        return separate(columns_times_rows(form, columns, rows, counts, x.dtype))

    sums = ring_scatter(term, ring.axes, ring.levels, dtype, ring.dimension, ring.parts)
    return jnp.concatenate(sums, 3 - ring.dimension)
