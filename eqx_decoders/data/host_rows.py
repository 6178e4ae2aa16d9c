"""Which rows of a batch each process of a run holds, and batches made of them."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batches import Batch
from eqx_decoders.encoders.common_shapes import in_shapes, largest, shapes_of
from eqx_decoders.errors import check
from eqx_decoders.io.coordination import gather
from eqx_decoders.sharding.layout import Layout


def host_rows(layout: Layout, rows: int, process_index: int | None = None) -> Sequence[int]:
    """The rows of a batch of `rows` that the devices of a process hold, in ascending order, each once.

    They need not follow each other: which they are depends on where its devices stand in the mesh. Other processes may
    hold the same ones. None: this process.
    """
    index = jax.process_index() if process_index is None else process_index
    places = layout.activation_sharding("batch", (rows,)).devices_indices_map((rows,))
    held = {range(rows)[place] for device, (place,) in places.items() if device.process_index == index}
    found = sorted(set().union(*held))
    return range(rows) if len(found) == rows else tuple(found)


def place(batch: Batch, layout: Layout, rows: int) -> Batch:
    """The batch of `rows` sequences over all devices, from this process's `host_rows` of it in NumPy.

    In a run of several processes all must call this, in one order, if there are images: their arrays get the shapes
    of the process that has the largest ones.
    """
    length = batch.tokens.shape[1]
    sharding = layout.activation_sharding("batch length", (rows, length))
    media, batch = batch.media, dataclasses.replace(batch, media=None)
    if jax.process_count() == 1:
        along = jax.tree.map(lambda leaf: jax.device_put(leaf, _along_rows(leaf.shape, layout)), media)
        return dataclasses.replace(jax.device_put(batch, sharding), media=along)
    held = host_rows(layout, rows)
    if media is not None:
        rule = f"each of the {len(held)} rows of this process must be a group: Media.create(…, groups={len(held)})"
        check(len(media.order) == len(held), f"Batch.media has {len(media.order)} groups, and {rule}.")
        media = in_shapes(media, largest(gather("images", shapes_of(media))))

    def one(leaf: np.ndarray, sharding: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        each = len(leaf) // len(held)  # of its rows belong to one of the batch

        def part(index: Any) -> np.ndarray:
            wanted = range(each * rows)[index[0]]
            first = bisect.bisect_left(held, wanted.start // each) * each + wanted.start % each
            return leaf[first : first + len(wanted), *index[1:]]

        return jax.make_array_from_callback((each * rows, *leaf.shape[1:]), sharding, part)

    def beside(leaf: np.ndarray) -> jax.Array:
        return one(leaf, _along_rows((len(leaf) // len(held) * rows, *leaf.shape[1:]), layout))

    placed = jax.tree.map(lambda leaf: one(leaf, sharding), batch)
    return dataclasses.replace(placed, media=jax.tree.map(beside, media))


def _along_rows(shape: Sequence[int], layout: Layout) -> Any:
    """Where an array of a batch's images is: split along its rows where the mesh divides them."""
    return layout.activation_sharding("batch", shape[:1])
