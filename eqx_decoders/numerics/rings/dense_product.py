"""Products of dense weights whose gradients are ring reduce-scatters."""

import logging
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from eqx_decoders.numerics.product_plan import ProductPlan
from eqx_decoders.numerics.rings.levels import ROWS, fits_ring, levels_and_parts
from eqx_decoders.numerics.rings.reduce_scatter import ring_scatter, separate
from eqx_decoders.sharding.axes import AXES, names_of
from eqx_decoders.sharding.chips import LANES
from eqx_decoders.sharding.layout import Layout


_log = logging.getLogger("eqx_decoders")


class GradientRing(NamedTuple):
    """Ring reduce-scatter for the weight gradient of a product: how operands and gradient are split.

    - `axes`: mesh axes of the ring.
    - `levels`: number of devices of a ring of each level; the first level sums products.
    - `dimension`: dimension of the weight that is sharded over the ring.
    - `cut`: dimension of the weight that is cut into `parts`, which alternate between the two directions.
    - `dimension_first`: whether terms are computed with `dimension` as first dimension, because pieces are too narrow
        as last dimension.
    - `other_axes`: further mesh axes that split the tokens.
    - `x`, `out`, `gathered`, `stored`: partitions of the activation, of the result, of the weight in the product, and
        of its gradient.
    """

    axes: tuple[str, ...]
    levels: tuple[int, ...]
    dimension: int
    cut: int
    parts: int
    dimension_first: bool
    other_axes: tuple[str, ...]
    x: PartitionSpec
    out: PartitionSpec
    gathered: PartitionSpec
    stored: PartitionSpec


def multiply_with_ring(plan: ProductPlan, x: Array, weight: Array, dtype: np.dtype, layout: Layout) -> Array | None:
    """Multiply an activation by a weight whose gradient is a ring reduce-scatter; None if a ring is not used."""
    ring = gradient_ring(plan, layout, x, weight)
    return None if ring is None else ring_product(plan, dtype, layout, ring, x, weight)


def gradient_ring(plan: ProductPlan, layout: Layout, x: Array, weight: Array) -> GradientRing | None:
    """Return the ring for the weight gradient of a product; None if XLA reduces the gradient."""
    if not layout.backend.gradient_rings:
        return None
    shardings = layout.gather_shardings(plan.right, weight.shape)
    if shardings is None:
        return None
    gathered, stored = shardings
    ring = find_ring(plan, layout, gathered.spec, stored.spec, x.shape, weight.shape)
    if ring is not None and fits_ring(ring.levels, weight.shape[ring.dimension], ROWS):
        return ring
    _log.info("%r: XLA reduces the gradient of the weight %s, which does not fit a ring.", plan.pattern, weight.shape)
    return None


def find_ring(
    plan: ProductPlan,
    layout: Layout,
    gathered: PartitionSpec,
    stored: PartitionSpec,
    x_shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
) -> GradientRing | None:
    """Return the ring along the dimension that is split in `stored` but not in `gathered`; None if a ring does not fit.

    A ring does not fit if

    - several dimensions are split differently, or the product has axes that x, the weight and the result share;
    - no other dimension of the weight can be cut into two equal parts on each device;
    - the activation or the result is not split like the gathered weight along the axes of the weight;
    - the axes of the ring do not all split the tokens, of x and of the result alike.

    **Arguments:**

    - `gathered`, `stored`: partitions of the weight in the product and of its gradient.
    """
    left, right, out = plan.left, plan.right, plan.out
    if set(left) & set(right) & set(out) or not all(name in AXES for name in (*left, *right, *out)):
        return None
    gathered_axes = [names_of(entry) for entry in gathered]
    stored_axes = [names_of(entry) for entry in stored]
    changed = [index for index in range(len(right)) if gathered_axes[index] != stored_axes[index]]
    if len(changed) != 1 or gathered_axes[changed[0]]:
        return None
    dimension = changed[0]
    axes = stored_axes[dimension]

    def num_shards(mesh_axes: tuple[str, ...]) -> int:
        return math.prod(layout.sizes[name] for name in mesh_axes)

    local_shape = [size // num_shards(mesh_axes) for size, mesh_axes in zip(weight_shape, gathered_axes, strict=True)]
    cuts = [index for index, size in enumerate(local_shape) if index != dimension and size % 2 == 0]
    if not cuts:
        return None
    cut = cuts[0]

    sizes = dict(zip((*right, *left), (*weight_shape, *x_shape), strict=True))

    def mesh_axes_by_name(axis_names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        spec = layout.activation_spec(axis_names, [sizes[name] for name in axis_names])
        return {name: names_of(entry) for name, entry in zip(axis_names, spec, strict=True)}

    of_weight = dict(zip(right, gathered_axes, strict=True))
    of_x = mesh_axes_by_name(left)
    of_out = mesh_axes_by_name(out)
    if any(of_weight[name] != (of_x | of_out)[name] for name in right):
        return None
    of_tokens = {name: of_x[name] for name in left if name not in right and of_x[name] == of_out[name]}
    token_axes = tuple(name for mesh_axes in of_tokens.values() for name in mesh_axes)
    # the mesh axis `data` may span slices that a slow network connects: each step of a ring would wait for this network
    if "data" in axes or not set(axes) <= set(token_axes) <= layout.unmapped_axes:
        return None

    def partition(axis_names: tuple[str, ...]) -> PartitionSpec:
        return PartitionSpec(*(of_weight.get(name, of_tokens.get(name)) or None for name in axis_names))

    columns = weight_shape[dimension]
    across = math.prod(local_shape) // columns
    levels, parts = levels_and_parts(layout, axes, columns, across, local_shape[cut])
    return GradientRing(
        axes=axes,
        levels=levels,
        dimension=dimension,
        cut=cut,
        parts=parts,
        dimension_first=dimension == len(right) - 1 and columns < LANES * num_shards(axes),
        other_axes=tuple(name for name in token_axes if name not in axes),
        x=partition(left),
        out=partition(out),
        gathered=gathered,
        stored=stored,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def ring_product(
    plan: ProductPlan,
    dtype: np.dtype,
    layout: Layout,
    ring: GradientRing,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
) -> Float[Array, "..."]:
    """Multiply an activation by a gathered weight; the gradient of the weight is a ring reduce-scatter."""
    return _forward(plan, dtype, layout, ring, x, weight)[0]


def _forward(plan, dtype, layout, ring, x, weight):
    weight = lax.with_sharding_constraint(weight, NamedSharding(layout.current_mesh, ring.gathered))
    return jnp.einsum(plan.letters, x, weight, preferred_element_type=dtype), (x, weight)


def _backward(plan, dtype, layout, ring, saved, gradient):
    x, weight = saved
    transpose = jax.linear_transpose(lambda x: jnp.einsum(plan.letters, x, weight, preferred_element_type=dtype), x)
    weight_gradient = layout.shard_map(
        partial(_scattered_gradient, plan, ring, weight.dtype), (ring.x, ring.out), ring.stored
    )
    return *transpose(gradient), weight_gradient(x, gradient)


ring_product.defvjp(_forward, _backward)


def _scattered_gradient(plan: ProductPlan, ring: GradientRing, dtype: np.dtype, x: Array, gradient: Array) -> Array:
    """Return this device's shard of the weight gradient, summed over the tokens of all devices."""
    operands, result = plan.letters.split("->")
    left, right = operands.split(",")
    order = list(range(len(right)))
    if ring.dimension_first:
        order.remove(ring.dimension)
        order.insert(0, ring.dimension)
    product = f"{left},{result}->{''.join(right[index] for index in order)}"

    def piece(array: Array, axis_names: tuple[str, ...], dimension: int, count: int, index: Array | int) -> Array:
        """Return piece `index` of `count` along a dimension of the weight, if the array has its axis."""
        axis_name = plan.right[dimension]
        if axis_name not in axis_names:
            return array
        axis = axis_names.index(axis_name)
        width = array.shape[axis] // count
        return lax.dynamic_slice_in_dim(array, index * width, width, axis)

    def term(index: Array, part: int) -> Array:
        operands = []
        for array, axis_names in ((x.astype(gradient.dtype), plan.left), (gradient, plan.out)):
            array = piece(array, axis_names, ring.cut, ring.parts, part)
            operands.append(piece(array, axis_names, ring.dimension, ring.levels[0], index))
        return separate(jnp.einsum(product, *operands, preferred_element_type=jnp.float32))

    sums = ring_scatter(term, ring.axes, ring.levels, dtype, order.index(ring.dimension), ring.parts)
    shard = jnp.moveaxis(jnp.concatenate(sums, order.index(ring.cut)), range(len(order)), order)
    return lax.psum(shard, ring.other_axes) if ring.other_axes else shard
