"""Messages between devices: `send`, and the load of the links of a torus."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from eqx_decoders.sharding.chips import Chip


def send(x: Array, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Array:
    """Send an array from source to target devices inside a `shard_map`.

    `pairs`: indices of source and target devices, as `lax.axis_index(axes)` returns them. `lax.ppermute` uses indices
    in the order of the mesh's axes, and newer versions of JAX accept the axes only in that order.
    """
    mesh_order = tuple(name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes)
    indices = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(name) for name in mesh_order])
    indices = indices.transpose([mesh_order.index(name) for name in axes]).flatten()
    return lax.ppermute(x, mesh_order, [(int(indices[source]), int(indices[target])) for source, target in pairs])


def busiest_link(chip: Chip, extents: Sequence[int], source: np.ndarray, target: np.ndarray) -> int:
    """Return the maximum number of messages on a link in one direction if all messages are sent simultaneously.

    A message travels along one torus axis after another. On an axis with wraparound links it takes the shorter
    direction; if both directions are equally long, it travels toward smaller coordinates.

    **Arguments:**

    - `extents`: number of chips along each axis of the torus.
    - `source`, `target`: coordinates of chips, `[messages, torus axes]`.
    """
    messages = np.zeros((*extents, len(extents), 2), int)
    position = source.copy()
    for axis, (extent, closed) in enumerate(zip(extents, chip.closed(extents), strict=True)):
        displacement = target[:, axis] - position[:, axis]
        if closed:
            displacement = (displacement + extent // 2) % extent - extent // 2
        for step in range(int(np.abs(displacement).max())):
            is_moving = np.abs(displacement) > step
            direction = np.sign(displacement[is_moving])
            links = (*position[is_moving].T, np.full(len(direction), axis), (direction > 0).astype(int))
            np.add.at(messages, links, 1)
            position[is_moving, axis] = (position[is_moving, axis] + direction) % extent
    return int(messages.max())
