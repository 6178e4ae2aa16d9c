"""The number of devices along each axis of a mesh, and the position of each device."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from eqx_decoders.errors import ConfigError, check, check_integer
from eqx_decoders.sharding.chips import chip_of


# The chips of a square of 4 x 4, row by row, as a closed path from neighbor to neighbor.
SQUARE_PATH = (0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4)


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
    eight = " XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of a CPU." if more else ""
    if free:
        rule = f"{text} needs {taken} devices or a multiple of it for Layout.{free[0]}=-1, but {devices} are given"
        check(devices % taken == 0, f"{rule}: choose other sizes.{eight}")
        return sizes | {free[0]: devices // taken}
    check(
        taken == devices,
        f"{text} needs {taken} devices, but {devices} are given. Set one axis to -1 to use all, "
        f"or pass devices=jax.devices()[:{taken}].{eight}",
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
        return _in_paths(grid) if max(within) == math.prod(within) else grid
    try:
        if slices == 0:  # no torus: neighbors have adjacent numbers
            return mesh_utils.create_device_mesh(shape, devices)
        grid = jax.make_mesh(shape, tuple(sizes), devices=devices).devices
        return _in_paths(grid) if max(shape) == len(devices) else grid
    except NotImplementedError:  # the axis is no product of whole axes of the torus: some links are not used
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _in_paths(grid: np.ndarray) -> np.ndarray:
    """Order the devices of each slice by `_path`, where one axis has all of them."""
    order = grid.flatten()
    slices = np.array([_slice_of(device) for device in order])
    for index in set(slices.tolist()):
        order[slices == index] = _path(list(order[slices == index]))
    return order.reshape(grid.shape)


def _path(devices: list[Any]) -> list[Any]:
    """Order the chips of a slice so that rings of gradients send to neighbors, where all wait for other sends.

    Rings of `numerics.gradient_ring` have up to 16 devices; in a slice of n squares of 4 x 4 chips they are at distance
    n. A torus that is closed in both directions has such rings as it is.
    """
    chip, place = chip_of(devices[0].device_kind), {tuple(device.coords[:2]): device for device in devices}
    wide, high = extents = (np.max(list(place), 0) + 1).tolist()
    waits = chip is not None and 0 < chip.sends_anywhere < len(devices) and not all(chip.closed(extents))
    if not waits or wide % 4 or high % 4 or len(place) != wide * high:
        return devices
    corners = list(itertools.product(range(0, wide, 4), range(0, high, 4)))
    return [place[x + step % 4, y + step // 4] for step in SQUARE_PATH for x, y in corners]


def _slices(devices: list[Any]) -> set[int]:
    """Return the indices of the devices' TPU slices; other platforms have none that matter."""
    return {_slice_of(device) for device in devices if device.platform == "tpu"}


def _slice_of(device: Any) -> int:
    return getattr(device, "slice_index", 0)


def _nearest(sizes: dict[str, int], devices: list[Any]) -> Iterator[str]:
    """Return meshes with other sizes along the same axes and along `data`, the most similar ones first."""
    names = [name for name, size in sizes.items() if size > 1 or name == "data"]
    divisors = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
    shapes = [each for each in itertools.product(divisors, repeat=len(names)) if math.prod(each) == len(devices)]

    def distance(each: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / sizes[name])) for name, size in zip(names, each, strict=True))

    for each in sorted(shapes, key=distance)[:100]:
        with contextlib.suppress(ValueError, NotImplementedError, AssertionError):
            _arrange(sizes | dict(zip(names, each, strict=True)), devices)
            yield " x ".join(f"{name}={size}" for name, size in zip(names, each, strict=True) if size > 1)
