"""Gathering of sharded arrays on the host of the first process, in pieces: no device stores a complete array."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from eqx_decoders.sharding.explicit import untyped


# Bytes of a piece. While an array is gathered, a device needs up to four times as many bytes in addition to its shard.
PIECE_BYTES = 128_000_000
_HOST_PLATFORMS = ("cpu",)  # platforms whose arrays are in the host's memory

Index = tuple[slice, ...]


def pieces(x: Any, layer: tuple[int, ...] = ()) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield `x[layer]` in pieces of about `PIECE_BYTES`, each with its index in `x[layer]`.

    **Arguments:**

    - `x`: an array with any sharding over the devices of any processes, or a NumPy array.
    - `layer`: indices into the leading dimensions of `x`, such as the layer, or the layer and the expert.

    In a run of several processes, all processes must iterate over all pieces of the same arrays in the same order. Only
    the first process gets pieces. Shards on its own devices are not sent between devices. `x` is not copied: neither on
    a device, nor on the host, where JAX would keep the result of `np.asarray(x)` as long as `x`.
    """
    is_first = jax.process_index() == 0
    if not isinstance(x, jax.Array):
        if is_first:
            yield (), np.asarray(x)[(*layer, ...)]
    elif layer and len(layer) == x.ndim:  # a single element, from the piece that contains it
        for index, piece in pieces(x, layer[:-1]):
            start, stop, _ = index[0].indices(x.shape[-1])
            if start <= layer[-1] < stop:
                yield (), piece[layer[-1] - start, ...]
    elif x.is_fully_addressable or _is_held_by_first(x.sharding, x.shape):
        if is_first:
            yield from _from_own_devices(x, layer)
    else:
        yield from _from_all_devices(x, layer)


def on_first_host(x: Any) -> np.ndarray | None:
    """Return a complete array in the first process, None in other processes. All processes must call it."""
    result = np.empty(x.shape, x.dtype) if jax.process_index() == 0 else None
    for index, piece in pieces(x):
        if result is not None:
            result[index] = piece
    return result


@functools.lru_cache(maxsize=1024)  # called for every tensor; models with experts have tens of thousands
def _is_held_by_first(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether the devices of the first process have all shards, so that other devices only have copies."""
    shards = [
        (device.process_index, _bounds(index, shape)) for device, index in sharding.devices_indices_map(shape).items()
    ]
    return {bounds for process, bounds in shards if process == 0} == {bounds for _, bounds in shards}


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of a shard along each dimension."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _piece_starts(size: int, row_bytes: int) -> tuple[int, list[int]]:
    """Return the number of rows of a piece, and the first rows of all pieces. The last two pieces may overlap."""
    num_rows = max(1, min(size, PIECE_BYTES // max(1, row_bytes)))
    return num_rows, [min(start, size - num_rows) for start in range(0, size, num_rows)]


def _from_own_devices(x: jax.Array, layer: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield the pieces of each shard once, from one of the devices of this process that store it."""
    shards = {_bounds(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    for bounds, shard in shards.items():
        layer_bounds = bounds[: len(layer)]
        inner_bounds = bounds[len(layer) :]
        if not all(start <= index < stop for index, (start, stop) in zip(layer, layer_bounds, strict=True)):
            continue
        shard_layer = tuple(index - start for index, (start, _) in zip(layer, layer_bounds, strict=True))
        shape = shard.shape[len(layer) :]
        axis = int(np.argmax(shape))
        num_rows, starts = _piece_starts(shape[axis], math.prod(shape) // max(1, shape[axis]) * x.dtype.itemsize)
        for start in starts:
            index = [slice(*part) for part in inner_bounds]
            first_row = inner_bounds[axis][0] + start
            index[axis] = slice(first_row, first_row + num_rows)
            yield tuple(index), _read(shard, shard_layer, axis, start, num_rows)


def _read(shard: jax.Array, layer: tuple[int, ...], axis: int, start: int, num_rows: int) -> np.ndarray:
    """Read `num_rows` rows along an axis of `shard[layer]`, an array on one device."""
    if next(iter(shard.devices())).platform in _HOST_PLATFORMS:
        return np.asarray(shard)[(*layer, *[slice(None)] * axis, slice(start, start + num_rows))]
    return np.asarray(jax.block_until_ready(_slice_rows(shard, np.asarray([*layer, start], np.int32), axis, num_rows)))


@functools.partial(jax.jit, static_argnames=("axis", "num_rows"))
def _slice_rows(shard: Array, where: Array, axis: int, num_rows: int) -> Array:
    """Return `shard[*layer, ..., start : start + num_rows, ...]`, sliced along `axis` of `shard[layer]`.

    `where`: `[*layer, start]`, an array so that one compiled program serves all layers and starts.
    """
    lead = len(where) - 1
    starts = [*where[:lead], *[jnp.zeros_like(where[0])] * (shard.ndim - lead)]
    starts[lead + axis] = where[lead]
    sizes = [*[1] * lead, *shard.shape[lead:]]
    sizes[lead + axis] = num_rows
    return jax.lax.dynamic_slice(shard, starts, sizes).reshape(sizes[lead:])


def _from_all_devices(x: jax.Array, layer: tuple[int, ...]) -> Iterator[tuple[Index, np.ndarray]]:
    """Yield pieces that consist of some rows of each shard. All devices gather them."""
    x = untyped(x)
    axis, num_rows, starts = gathering_plan(x, len(layer))
    shard_rows = x.sharding.shard_shape(x.shape)[len(layer) + axis]
    before = (slice(None),) * axis
    for start in starts:
        where = np.asarray([*layer, start], np.int32)
        # All processes wait: otherwise the other processes would continue and allocate memory for many pieces.
        rows = jax.block_until_ready(gathered_rows(x, where, x.sharding, axis, num_rows))
        if jax.process_index() > 0:
            continue
        data = np.asarray(rows.addressable_data(0))
        for shard in range(x.shape[len(layer) + axis] // shard_rows):
            target = shard * shard_rows + start
            source = shard * num_rows
            yield (*before, slice(target, target + num_rows)), data[(*before, slice(source, source + num_rows))]


def gathering_plan(x: jax.Array | jax.ShapeDtypeStruct, lead: int) -> tuple[int, int, list[int]]:
    """Return how to gather `x[layer]`: the axis, the number of rows per shard and piece, and the starts of all pieces.

    `lead`: length of `layer`.
    """
    shape = x.shape[lead:]
    shard_shape = x.sharding.shard_shape(x.shape)[lead:]
    axis = int(np.argmax(shard_shape))
    row_bytes = math.prod(shape) // max(1, shard_shape[axis]) * x.dtype.itemsize
    return axis, *_piece_starts(shard_shape[axis], row_bytes)


@functools.partial(jax.jit, static_argnames=("sharding", "axis", "num_rows"))
def gathered_rows(x: Array, where: Array, sharding: NamedSharding, axis: int, num_rows: int) -> Array:
    """Return `num_rows` rows of each shard of `x[layer]` along `axis`, gathered on every device.

    **Arguments:**

    - `where`: `[*layer, start]`: `start` is the first row within each shard.
    - `sharding`: sharding of `x`.
    - `axis`: an axis of `x[layer]`.

    Each device slices its own shard. Without shard_map, XLA would gather complete dimensions before slicing.
    """
    mesh = sharding.mesh
    lead = len(where) - 1
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    layer_axes = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec[:lead]]
    summed_axes = tuple(mesh_axis for axes in layer_axes for mesh_axis in axes)

    def own_rows(shard: Array, where: Array) -> Array:
        shard_layer = []
        is_holder = jnp.bool_(True)
        for index, size, axes in zip(where[:lead], shard.shape[:lead], layer_axes, strict=True):
            index = index - size * (jax.lax.axis_index(axes) if axes else 0)
            is_holder &= (index >= 0) & (index < size)
            shard_layer.append(jnp.clip(index, 0, size - 1))
        rows = _slice_rows(shard, jnp.stack([*shard_layer, where[lead]]), axis, num_rows)
        if not summed_axes:
            return rows
        # Only one device has the layer; the others contribute 0. Bits are added, because a sum of floats would lose the
        # sign of -0.0.
        bits = jax.lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(jax.lax.psum(jnp.where(is_holder, bits, 0), summed_axes), rows.dtype)

    slice_shards = jax.shard_map(
        own_rows,
        mesh=mesh,
        in_specs=(PartitionSpec(*spec), PartitionSpec()),
        out_specs=PartitionSpec(*spec[lead:]),
        check_vma=False,
    )
    return jax.lax.with_sharding_constraint(slice_shards(x, where), NamedSharding(mesh, PartitionSpec()))
