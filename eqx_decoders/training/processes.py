"""Which rows of a batch each process of a run holds, and batches made of them."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.errors import check
from eqx_decoders.layout import Layout
from eqx_decoders.training.batches import Batch


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
    """The batch of `rows` sequences over all devices, from this process's `host_rows` of it in NumPy."""
    length = batch.tokens.shape[1]
    sharding = layout.activation_sharding("batch length", (rows, length))
    if jax.process_count() == 1:
        media = None if batch.media is None else jax.tree.map(lambda leaf: _along_rows(leaf, layout), batch.media)
        return dataclasses.replace(jax.device_put(dataclasses.replace(batch, media=None), sharding), media=media)
    rule = "pictures and sounds in a run of several processes: each would pack its own into other shapes"
    check(batch.media is None, f"Batch.media is given: {rule}. Train them in one process.")
    held = host_rows(layout, rows)

    def one(leaf):
        def part(index: Any) -> np.ndarray:
            wanted = range(rows)[index[0]]
            first = bisect.bisect_left(held, wanted.start)
            return leaf[first : first + len(wanted), *index[1:]]

        return jax.make_array_from_callback((rows, length), sharding, part)

    return jax.tree.map(one, batch)


def _along_rows(leaf: Any, layout: Layout) -> Any:
    """An array of a batch's pictures, split along its rows where the mesh divides them."""
    return jax.device_put(leaf, layout.activation_sharding("batch", leaf.shape[:1]))
