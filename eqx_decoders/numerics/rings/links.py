"""Rings of devices: pairs of source and target devices, and the number of messages that share a link of a torus."""

import functools
import math

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from eqx_decoders.sharding.chips import chip_of, slice_of
from eqx_decoders.sharding.links import busiest_link


def ring_pairs(count: int, size: int, distance: int, step: int) -> list[tuple[int, int]]:
    """Return pairs of source and target indices for sending a step around rings of devices.

    The `count` devices form rings of `size` devices, whose indices are `distance` apart. `step` is the direction, 1 or
    -1.
    """
    position = np.arange(count) // distance % size
    target = np.arange(count) + ((position + step) % size - position) * distance
    return list(enumerate(target.tolist()))


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
