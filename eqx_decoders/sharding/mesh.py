"""The number of devices along each axis of a mesh, and the position of each device."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from eqx_decoders.errors import ConfigError, check, check_integer
from eqx_decoders.sharding.chips import chip_of, slice_of


def resolve_sizes(sizes: dict[str, int], devices: int, platform: str) -> dict[str, int]:
    """Replace the one -1 and check that the sizes multiply to the number of devices."""
    free = [name for name, size in sizes.items() if size == -1]
    check(len(free) <= 1, f"Layout: only one mesh axis can be -1, not {', '.join(free)}.")
    for name, size in sizes.items():
        if name not in free:
            check_integer(f"Layout.{name}", size)
    taken = math.prod(size for size in sizes.values() if size != -1)
    text = " x ".join(f"Layout.{name}={size}" for name, size in sizes.items() if size > 1) or "Layout.data=1"
    more = taken > devices and platform == "cpu"
    remedy = f" Start Python with JAX_NUM_CPU_DEVICES={taken} to get {taken} CPU devices." if more else ""
    if free:
        rule = f"{text} needs {taken} devices or a multiple of it for Layout.{free[0]}=-1, but {devices} are given"
        check(devices % taken == 0, f"{rule}: choose other sizes.{remedy}")
        return sizes | {free[0]: devices // taken}
    check(
        taken == devices,
        f"{text} needs {taken} devices, but {devices} are given. Set one axis to -1 to use all, "
        f"or pass devices=jax.devices()[:{taken}].{remedy}",
    )
    return sizes


def device_grid(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    """Arrange devices as a mesh of these sizes, so that neighbors in it are neighbors in the machine where possible.

    Slices of TPUs are joined by a slower network: `data` crosses it, or else `stage`, and every other axis stays within
    one slice. Raises ConfigError, with the nearest possible meshes, if these devices cannot form this one.
    """
    try:
        return _arrange(sizes, devices)
    except (ValueError, NotImplementedError, AssertionError) as error:
        text = " x ".join(f"Layout.{name}={size}" for name, size in sizes.items() if size > 1)
        slices = len(_slices(devices))
        reason = f"{slices} slices, which data or stage must cross" if slices > 1 else str(error).split(". ")[0]
        near = " or ".join(itertools.islice(_nearest(sizes, devices), 3))
        remedy = f"The nearest that can: {near}" if near else "Give other sizes"
        raise ConfigError(f"{text} does not fit on {len(devices)} devices ({reason}). {remedy}.") from error


def _arrange(sizes: dict[str, int], devices: list[Any]) -> np.ndarray:
    shape, slices = tuple(sizes.values()), len(_slices(devices))
    if slices > 1:
        data = math.gcd(sizes["data"], slices)
        across = dict.fromkeys(sizes, 1) | {"data": data, "stage": slices // data}
        within = tuple(size // across[name] for name, size in sizes.items())
        if any(size % across[name] for name, size in sizes.items()):
            raise ValueError("slices do not divide data x stage")
        grid = mesh_utils.create_hybrid_device_mesh(
            within, tuple(across.values()), devices, allow_split_physical_axes=True
        )
        return _in_paths(grid, sizes)
    try:
        if slices == 0:  # no torus: neighbors have adjacent numbers
            return mesh_utils.create_device_mesh(shape, devices)
        grid = jax.make_mesh(shape, tuple(sizes), devices=devices).devices
        return _in_paths(grid, sizes)
    except NotImplementedError:  # the axis is no product of whole axes of the torus: some links are not used
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _in_paths(grid: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
    """Order the devices of each slice by `_path`, where one axis with rings of gradients has all of them."""
    order = grid.flatten()
    slices = np.array([slice_of(device) for device in order])
    if np.sum(slices == slices[0]) not in (sizes["fsdp"], sizes["fsdp_transpose"]):
        return grid
    for index in set(slices.tolist()):
        order[slices == index] = _path(list(order[slices == index]))
    return order.reshape(grid.shape)


def _path(devices: list[Any]) -> list[Any]:
    """Order the chips of a slice so that rings of gradients send to neighbors, and do not share links.

    In a slice of n blocks of chips these rings are at distance n, each around one block, if the slice is open in some
    direction. Along the axes of a closed torus there are such rings as it is.

    On v5e more depends on it: in slices of more than 16 chips libtpu (0.0.52) sends beside products to neighbors alone.
    """
    chip, place = chip_of(devices[0].device_kind), {tuple(device.coords): device for device in devices}
    extents = (np.max(list(place), 0) + 1).tolist()
    if chip is None or not chip.block or len(place) != math.prod(extents) or len(place) < len(devices):
        return devices
    closed = all(closed or extent == 1 for closed, extent in zip(chip.closed(extents), extents, strict=True))
    block = [min(pair) for pair in zip(chip.block, extents, strict=True)]
    counts = [extent // size for extent, size in zip(extents, block, strict=True)]
    if closed or block[0] % 2 or math.prod(counts) * math.prod(block) < len(devices):
        return devices
    corners = np.array(_path_through(counts)) * block
    return [place[tuple(corner)] for chip_there in _path_around(block) for corner in (corners + chip_there).tolist()]


def _path_through(extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the places of a box, each a neighbor of the next one."""
    if not extents:
        return [()]
    inner = _path_through(extents[1:])
    return [(x, *place) for x in range(extents[0]) for place in (inner[::-1] if x % 2 else inner)]


def _path_around(extents: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the places of a box as `_path_through` does, and the last one is a neighbor of the first one.

    Row by row there, but for the first column, and back along that; the number of rows is even.
    """
    first, *columns = _path_through(extents[1:])
    path = [(0, *first)]
    for x in range(extents[0]):
        path += [(x, *place) for place in (columns[::-1] if x % 2 else columns)]
    return path + [(x, *first) for x in range(extents[0] - 1, 0, -1)]


def _slices(devices: list[Any]) -> set[int]:
    """Return the indices of the devices' TPU slices; other platforms have none that matter."""
    return {slice_of(device) for device in devices if device.platform == "tpu"}


def _nearest(sizes: dict[str, int], devices: list[Any]) -> Iterator[str]:
    """Yield meshes with other sizes along the same axes and along `data`, the most similar ones first."""
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
        for remaining in _factorizations(number // factor, count - 1):
            yield (factor, *remaining)
