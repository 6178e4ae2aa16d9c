"""Gathering of arrays on the host of the first process, piece by piece, so that no device ever holds a whole one."""

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


PIECE = (
    128_000_000  # bytes; while it gathers, a device holds up to four times as many in addition to its part of the array
)
_HOST_PLATFORMS = ("cpu",)  # platforms whose arrays are in the host's memory

Cut = tuple[slice, ...]


def pieces(x: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[Cut, np.ndarray]]:
    """Yield `x[place]` in pieces of about `PIECE` bytes at most, each with its slices in `x[place]`.

    **Arguments:**

    - `x`: of any sharding over the devices of any processes; or a NumPy array.
    - `place`: indices of its first dimensions.

    In a run of several processes all must take all pieces, of the same arrays in one order. Only the first process gets
    any; parts on its own devices are not sent. No copy of `x` is made: neither on a device, nor by JAX on the host,
    where `np.asarray(x)` would live as long as `x`.
    """
    first = jax.process_index() == 0
    if not isinstance(x, jax.Array):
        yield from [((), np.asarray(x)[(*place, ...)])] * first
    elif place and len(place) == x.ndim:  # a single number, from the piece that has it
        for cuts, piece in pieces(x, place[:-1]):
            begin, end, _ = cuts[0].indices(x.shape[-1])
            if begin <= place[-1] < end:
                yield (), piece[place[-1] - begin, ...]
    elif x.is_fully_addressable or _is_held_by_first(x.sharding, x.shape):
        yield from _from_own_devices(x, place) if first else ()
    else:
        yield from _from_all_devices(x, place)


def on_first_host(x: Any) -> np.ndarray | None:
    """Return a whole array in the first process, None in the others; all of them must call it."""
    whole = np.empty(x.shape, x.dtype) if jax.process_index() == 0 else None
    for cut, piece in pieces(x):
        if whole is not None:
            whole[cut] = piece
    return whole


@functools.lru_cache(maxsize=1024)  # called for every tensor, of which models with experts have tens of thousands
def _is_held_by_first(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether the devices of the first process have all parts of an array: others only have copies."""
    held = [(device.process_index, _box(index, shape)) for device, index in sharding.devices_indices_map(shape).items()]
    return {box for process, box in held if process == 0} == {box for _, box in held}


def _box(index: Cut, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return begin and end of a part along each dimension."""
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


def _steps(size: int, row_bytes: int) -> tuple[int, list[int]]:
    """Return the number of rows of a piece, and the begins of the pieces, of which the last ones may overlap."""
    step = max(1, min(size, PIECE // max(1, row_bytes)))
    return step, [min(begin, size - step) for begin in range(0, size, step)]


def _from_own_devices(x: jax.Array, place: tuple[int, ...]) -> Iterator[tuple[Cut, np.ndarray]]:
    """Yield each part once, from one of the devices of this process that hold it."""
    parts = {_box(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    for box, part in parts.items():
        lead, rest = box[: len(place)], box[len(place) :]
        if not all(begin <= index < end for index, (begin, end) in zip(place, lead, strict=True)):
            continue
        local = tuple(index - begin for index, (begin, _) in zip(place, lead, strict=True))
        shape = part.shape[len(place) :]
        axis = int(np.argmax(shape))
        step, begins = _steps(shape[axis], math.prod(shape) // max(1, shape[axis]) * x.dtype.itemsize)
        for begin in begins:
            cuts = [slice(*ends) for ends in rest]
            cuts[axis] = slice(rest[axis][0] + begin, rest[axis][0] + begin + step)
            yield tuple(cuts), _read(part, local, axis, begin, step)


def _read(part: jax.Array, place: tuple[int, ...], axis: int, begin: int, step: int) -> np.ndarray:
    """Read `step` rows along an axis of `part[place]`, a part on one device."""
    if next(iter(part.devices())).platform in _HOST_PLATFORMS:
        return np.asarray(part)[(*place, *[slice(None)] * axis, slice(begin, begin + step))]
    return np.asarray(jax.block_until_ready(_cut(part, np.asarray([*place, begin], np.int32), axis, step)))


@functools.partial(jax.jit, static_argnames=("axis", "step"))
def _cut(block: Array, where: Array, axis: int, step: int) -> Array:
    """Return `block[*place, ..., begin : begin + step, ...]`, cut along the `axis` behind the place.

    where: the place, and behind it `begin`.
    """
    lead = len(where) - 1
    starts = [*where[:lead], *[jnp.zeros_like(where[0])] * (block.ndim - lead)]
    starts[lead + axis] = where[lead]
    sizes = [*[1] * lead, *block.shape[lead:]]
    sizes[lead + axis] = step
    return jax.lax.dynamic_slice(block, starts, sizes).reshape(sizes[lead:])


def _from_all_devices(x: jax.Array, place: tuple[int, ...]) -> Iterator[tuple[Cut, np.ndarray]]:
    """Yield some rows of all parts at a time, which every device gathers."""
    x = untyped(x)
    axis, step, begins = gathering(x, len(place))
    size = x.sharding.shard_shape(x.shape)[len(place) + axis]
    everything = (slice(None),) * axis
    for begin in begins:
        where = np.asarray([*place, begin], np.int32)
        # All wait: otherwise others would go on and allocate memory for many pieces.
        rows = jax.block_until_ready(gathered_rows(x, where, x.sharding, axis, step))
        if jax.process_index() > 0:
            continue
        data = np.asarray(rows.addressable_data(0))
        for number in range(x.shape[len(place) + axis] // size):
            target, source = number * size + begin, number * step
            yield (*everything, slice(target, target + step)), data[(*everything, slice(source, source + step))]


def gathering(x: jax.Array | jax.ShapeDtypeStruct, lead: int) -> tuple[int, int, list[int]]:
    """Plan the gathering of `x[place]`: return the axis, the number of rows of a piece, and the begins of all pieces.

    lead: length of the place.
    """
    shape, local = x.shape[lead:], x.sharding.shard_shape(x.shape)[lead:]
    axis = int(np.argmax(local))
    row_bytes = math.prod(shape) // max(1, local[axis]) * x.dtype.itemsize
    return axis, *_steps(local[axis], row_bytes)


@functools.partial(jax.jit, static_argnames=("sharding", "axis", "step"))
def gathered_rows(x: Array, where: Array, sharding: NamedSharding, axis: int, step: int) -> Array:
    """Gather `step` rows of each part of `x[place]` that `axis` is cut into, from the same row on, on every device.

    **Arguments:**

    - `where`: the place, and behind it the first row within the part: one program serves all of them.
    - `axis`: of `x[place]`.

    Each device cuts its own part. XLA would gather whole dimensions first, to cut them where they are split.
    """
    mesh, lead = sharding.mesh, len(where) - 1
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    names = [() if name is None else name if isinstance(name, tuple) else (name,) for name in spec[:lead]]
    holders = tuple(name for each in names for name in each)

    def own_rows(block: Array, where: Array) -> Array:
        local, is_holder = [], jnp.bool_(True)
        for index, size, each in zip(where[:lead], block.shape[:lead], names, strict=True):
            index = index - size * (jax.lax.axis_index(each) if each else 0)
            is_holder &= (index >= 0) & (index < size)
            local.append(jnp.clip(index, 0, size - 1))
        rows = _cut(block, jnp.stack([*local, where[lead]]), axis, step)
        if not holders:
            return rows
        # One device has the rows, the others add 0 to their bits: a sum of floats would lose the sign of -0.0.
        bits = jax.lax.bitcast_convert_type(rows, f"uint{8 * rows.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(jax.lax.psum(jnp.where(is_holder, bits, 0), holders), rows.dtype)

    cut = jax.shard_map(
        own_rows,
        mesh=mesh,
        in_specs=(PartitionSpec(*spec), PartitionSpec()),
        out_specs=PartitionSpec(*spec[lead:]),
        check_vma=False,
    )
    return jax.lax.with_sharding_constraint(cut(x, where), NamedSharding(mesh, PartitionSpec()))
