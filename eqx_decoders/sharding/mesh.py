"""Construction of device meshes: the number of devices along each mesh axis, and the order of the devices."""

import contextlib
import itertools
import math
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.sharding.chips import chip_of, slice_of


def check_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes as Python integers. Raises ConfigError unless they are positive, except for a single -1."""
    free_axes = [name for name, size in sizes.items() if size == -1]
    check(
        len(free_axes) <= 1,
        f"Layout: only one mesh axis can be -1, but {', '.join(free_axes)} are. Set the others to a number.",
    )
    for name, size in sizes.items():
        is_integer = isinstance(size, numbers.Integral) and not isinstance(size, bool)
        check(
            is_integer and (size >= 1 or size == -1),
            f"Layout.{name}={size!r} must be an integer of at least 1, or -1 for all other devices.",
        )
    return {name: int(size) for name, size in sizes.items()}


def resolve_sizes(sizes: dict[str, int], devices: int, platform: str) -> dict[str, int]:
    """Replace a size of -1 by the number of remaining devices.

    Raises ConfigError if the sizes do not multiply to the number of devices.
    """
    free_axes = [name for name, size in sizes.items() if size == -1]
    required = math.prod(size for size in sizes.values() if size != -1)
    product = _product_text(sizes) or "Layout.data=1"
    hint = ""
    if required > devices and platform == "cpu":
        hint = f" Start Python with JAX_NUM_CPU_DEVICES={required} to get {required} CPU devices."
    if free_axes:
        check(
            devices % required == 0,
            f"{product} needs {required} devices, or a multiple of {required} for Layout.{free_axes[0]}=-1, but "
            f"{devices} are given. Choose other sizes.{hint}",
        )
        return sizes | {free_axes[0]: devices // required}
    check(
        required == devices,
        f"{product} needs {required} devices, but {devices} are given. Set one axis to -1 to use all devices, "
        f"or pass devices=jax.devices()[:{required}].{hint}",
    )
    return sizes


def _product_text(sizes: dict[str, int]) -> str:
    return " x ".join(f"Layout.{name}={size}" for name, size in sizes.items() if size > 1)


def device_grid(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    """Arrange devices in an array with these sizes, so that neighbors in the mesh are physical neighbors if possible.

    TPU slices are connected by a slower network. The axis `data`, or else `stage`, crosses it; all other axes stay
    within a slice. Raises ConfigError, with the most similar possible meshes, if the devices cannot form this mesh.
    """
    try:
        return _arrange(sizes, devices)
    except (ValueError, NotImplementedError, AssertionError) as error:
        num_slices = len(_slices(devices))
        reason = str(error).split(". ")[0]
        if num_slices > 1:
            reason = f"only data and stage can cross the {num_slices} slices"
        similar = " or ".join(itertools.islice(_similar_meshes(sizes, devices), 3)) or "none found"
        raise ConfigError(
            f"{_product_text(sizes)} does not fit on {len(devices)} devices ({reason}). Choose other sizes. The most "
            f"similar possible meshes: {similar}."
        ) from error


def _arrange(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    shape = tuple(sizes.values())
    num_slices = len(_slices(devices))
    if num_slices > 1:
        data = math.gcd(sizes["data"], num_slices)
        across_slices = dict.fromkeys(sizes, 1) | {"data": data, "stage": num_slices // data}
        within_slice = tuple(size // across_slices[name] for name, size in sizes.items())
        if any(size % across_slices[name] for name, size in sizes.items()):
            raise ValueError("the number of slices does not divide data x stage")
        grid = mesh_utils.create_hybrid_device_mesh(
            within_slice, tuple(across_slices.values()), devices, allow_split_physical_axes=True
        )
        return _order_for_rings(grid, sizes)
    try:
        if num_slices == 0:  # not a torus: devices with consecutive ids are neighbors
            return mesh_utils.create_device_mesh(shape, devices)
        grid = jax.make_mesh(shape, tuple(sizes), devices=devices).devices
        return _order_for_rings(grid, sizes)
    except NotImplementedError:  # a mesh axis is not a product of full torus axes: some links stay unused
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _order_for_rings(grid: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
    """Reorder the devices of each slice by `_ring_order` if the axis `fsdp` or `fsdp_transpose` spans the slice."""
    order = grid.flatten()
    slices = np.array([slice_of(device) for device in order])
    if np.sum(slices == slices[0]) not in (sizes["fsdp"], sizes["fsdp_transpose"]):
        return grid
    for index in set(slices.tolist()):
        order[slices == index] = _ring_order(list(order[slices == index]))
    return order.reshape(grid.shape)


def _ring_order(devices: list[Any]) -> list[Any]:
    """Order the chips of a slice so that rings of gradients send to physical neighbors and do not share links.

    If a slice lacks wraparound links along some axis and consists of n boxes of chips (`Chip.ring_box`), a ring runs
    around each box, and consists of every n-th device of the returned order. A slice with all wraparound links has such
    rings in its original order.

    On v5e this is essential: in slices of more than 16 chips, libtpu (0.0.52) overlaps sends with products only if they
    go to neighbors.
    """
    chip = chip_of(devices[0].device_kind)
    device_at = {tuple(device.coords): device for device in devices}
    extents = (np.max(list(device_at), 0) + 1).tolist()
    if chip is None or not chip.ring_box or len(device_at) != math.prod(extents) or len(device_at) < len(devices):
        return devices
    is_torus = all(closed or extent == 1 for closed, extent in zip(chip.closed(extents), extents, strict=True))
    box = [min(pair) for pair in zip(chip.ring_box, extents, strict=True)]
    num_boxes = [extent // size for extent, size in zip(extents, box, strict=True)]
    if is_torus or box[0] % 2 or math.prod(num_boxes) * math.prod(box) < len(devices):
        return devices
    corners = np.array(_open_path(num_boxes)) * box
    return [device_at[tuple(coords)] for offset in _closed_path(box) for coords in (corners + offset).tolist()]


def _open_path(extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all coordinates in a box, ordered so that consecutive coordinates are neighbors."""
    if not extents:
        return [()]
    inner = _open_path(extents[1:])
    return [(x, *coords) for x in range(extents[0]) for coords in (inner[::-1] if x % 2 else inner)]


def _closed_path(extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all coordinates in a box like `_open_path`, where the last coordinates are also a neighbor of the first.

    The path visits all columns except the first one row by row, and returns along the first column. The number of rows,
    `extents[0]`, must be even.
    """
    first, *columns = _open_path(extents[1:])
    path = [(0, *first)]
    for x in range(extents[0]):
        path += [(x, *coords) for coords in (columns[::-1] if x % 2 else columns)]
    return path + [(x, *first) for x in range(extents[0] - 1, 0, -1)]


def _slices(devices: list[Any]) -> set[int]:
    """Return the indices of the TPU slices of the devices; an empty set on other platforms."""
    return {slice_of(device) for device in devices if device.platform == "tpu"}


def _similar_meshes(sizes: dict[str, int], devices: list[Any]) -> Iterator[str]:
    """Yield descriptions of possible meshes with other sizes along the same axes and `data`, most similar first."""
    names = [name for name, size in sizes.items() if size > 1 or name == "data"]

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / sizes[name])) for name, size in zip(names, shape, strict=True))

    for shape in sorted(_factorizations(len(devices), len(names)), key=distance)[:100]:
        with contextlib.suppress(ValueError, NotImplementedError, AssertionError):
            _arrange(sizes | dict(zip(names, shape, strict=True)), devices)
            yield " x ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True) if size > 1)


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of `count` positive integers whose product is `number`."""
    if count == 1:
        yield (number,)
        return
    for factor in (factor for factor in range(1, number + 1) if number % factor == 0):
        for factors in _factorizations(number // factor, count - 1):
            yield (factor, *factors)
