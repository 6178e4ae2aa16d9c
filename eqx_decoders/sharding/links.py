"""Rings of devices on the links of a torus: who sends to whom, and how many messages share a link."""

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
    """Return source and target of a step around rings of `size` devices, which stand at a distance, of `count` devices.

    `step` is 1 for a ring in one direction, and -1 in the other.
    """
    place = np.arange(count) // distance % size
    target = np.arange(count) + ((place + step) % size - place) * distance
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
    """Return how many messages take the same link in one direction, if all are sent at once.

    `source` and `target` are coordinates, `[messages, axes of the torus]`. A message goes along one axis after the
    other, the shorter way round where the axis is closed; half way round it goes down.
    """
    messages, at = np.zeros((*extents, len(extents), 2), int), source.copy()
    for axis, (extent, closed) in enumerate(zip(extents, chip.closed(extents), strict=True)):
        way = target[:, axis] - at[:, axis]
        if closed:
            way = (way + extent // 2) % extent - extent // 2
        for step in range(int(np.abs(way).max())):
            moving = np.abs(way) > step
            direction = np.sign(way[moving])
            links = (*at[moving].T, np.full(len(direction), axis), (direction > 0).astype(int))
            np.add.at(messages, links, 1)
            at[moving, axis] = (at[moving, axis] + direction) % extent
    return int(messages.max())


@functools.lru_cache(maxsize=1024)
def ring_load(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int, distance: int) -> int:
    """Return `busiest_link` of rings of devices along some axes of a mesh, in both directions at once.

    1 within a chip, by a switch, and where no links are known.
    """
    if not isinstance(mesh, Mesh):
        return 1
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if chip is None or chip.node:
        return 1
    last = [mesh.axis_names.index(name) for name in axes]
    count = math.prod(mesh.devices.shape[index] for index in last)
    rings = np.moveaxis(mesh.devices, last, range(-len(last), 0)).reshape(-1, count)
    slices = [slice_of(ring[0]) for ring in rings]  # one is like the other
    ours = [ring for ring, each in zip(rings, slices, strict=True) if each == slices[0]]
    coords = np.array([[device.coords for device in ring] for ring in ours])
    pairs = np.array([*ring_pairs(count, size, distance, 1), *ring_pairs(count, size, distance, -1)])
    source, target = (coords[:, pairs[:, index]].reshape(-1, coords.shape[-1]) for index in (0, 1))
    return max(1, busiest_link(chip, (coords.reshape(-1, coords.shape[-1]).max(0) + 1).tolist(), source, target))
