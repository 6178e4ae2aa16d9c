"""Communication in rings of devices: source and target devices, and the load of the links of a torus."""

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from eqx_decoders.sharding.chips import Chip, chip_of, slice_of


def ring_pairs(count: int, size: int, distance: int, step: int) -> list[tuple[int, int]]:
    """Return pairs of source and target indices for sending a step around rings of devices.

    The `count` devices form rings of `size` devices, whose indices are `distance` apart. `step` is the direction, 1 or
    -1.
    """
    position = np.arange(count) // distance % size
    target = np.arange(count) + ((position + step) % size - position) * distance
    return list(enumerate(target.tolist()))


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


@functools.lru_cache(maxsize=1024)
def ring_load(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int, distance: int) -> int:
    """Return `busiest_link` for rings of devices (see `ring_pairs`) that send in both directions simultaneously.

    Returns 1 within a chip, for devices behind a switch, and for unknown devices.

    **Arguments:**

    - `axes`: mesh axes whose devices form the rings, in this order.
    """
    if not isinstance(mesh, Mesh):
        return 1
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None or chip.node:
        return 1
    dimensions = [mesh.axis_names.index(name) for name in axes]
    count = math.prod(mesh.devices.shape[dimension] for dimension in dimensions)
    rings = np.moveaxis(mesh.devices, dimensions, range(-len(dimensions), 0)).reshape(-1, count)
    slices = [slice_of(ring[0]) for ring in rings]
    # All slices have the same load, so it is sufficient to count the first one.
    first_slice_rings = [ring for ring, index in zip(rings, slices, strict=True) if index == slices[0]]
    coords = np.array([[device.coords for device in ring] for ring in first_slice_rings])
    pairs = np.array([*ring_pairs(count, size, distance, 1), *ring_pairs(count, size, distance, -1)])
    source = coords[:, pairs[:, 0]].reshape(-1, coords.shape[-1])
    target = coords[:, pairs[:, 1]].reshape(-1, coords.shape[-1])
    extents = (coords.reshape(-1, coords.shape[-1]).max(0) + 1).tolist()
    return max(1, busiest_link(chip, extents, source, target))
