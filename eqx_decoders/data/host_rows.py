"""Rows of a batch that each process of a run holds, and their arrays on the devices of all processes."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eqx_decoders.data.batch import Batch
from eqx_decoders.encoders.common_shapes import array_shapes, merge_shapes, pad_to_shapes
from eqx_decoders.errors import check
from eqx_decoders.io.processes import all_gather_json
from eqx_decoders.sharding.layout import Layout


def host_rows(layout: Layout, rows: int, process_index: int | None = None) -> Sequence[int]:
    """Return the rows of a batch of `rows` that the devices of a process hold, in ascending order, each once.

    They need not be contiguous: they depend on the places of its devices in the mesh. Other processes may hold the same
    rows. process_index: None for this process.
    """
    index = jax.process_index() if process_index is None else process_index
    slices = layout.activation_sharding("batch", (rows,)).devices_indices_map((rows,))
    held = {range(rows)[part] for device, (part,) in slices.items() if device.process_index == index}
    numbers = sorted(set().union(*held))
    return range(rows) if len(numbers) == rows else tuple(numbers)


def hand_over(batch: Batch, layout: Layout, rows: int) -> Batch:
    """Place a batch that nobody will write to: on one CPU it is read where it is, which takes no time."""
    whole = jax.process_count() == 1 and batch.media is None and layout.single and layout.backend.devices_share_cores
    return batch if whole else place(batch, layout, rows)


def place(batch: Batch, layout: Layout, rows: int) -> Batch:
    """Place a batch of `rows` sequences on all devices, given this process's `host_rows` of it in NumPy.

    In a run of several processes all must call this, in one order, if there are images, videos or audio: their arrays
    get the shapes of the process that has the largest ones.
    """
    length = batch.tokens.shape[1]
    sharding = layout.activation_sharding("batch length", (rows, length))
    media, batch = batch.media, dataclasses.replace(batch, media=None)
    if jax.process_count() == 1:
        media = jax.tree.map(lambda leaf: jax.device_put(leaf, _row_sharding(leaf.shape, layout)), media)
        return dataclasses.replace(jax.device_put(batch, sharding), media=media)
    held = host_rows(layout, rows)
    if media is not None:
        rule = f"each of the {len(held)} rows of this process must be a group: Media.create(…, groups={len(held)})"
        check(len(media.order) == len(held), f"Batch.media has {len(media.order)} groups, and {rule}.")
        media = pad_to_shapes(media, merge_shapes(all_gather_json("images", array_shapes(media))))

    def placed(leaf: np.ndarray, sharding: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        each = len(leaf) // len(held)  # of its rows belong to one row of the batch

        def part(index: Any) -> np.ndarray:
            wanted = range(each * rows)[index[0]]
            first = bisect.bisect_left(held, wanted.start // each) * each + wanted.start % each
            return leaf[first : first + len(wanted), *index[1:]]

        return jax.make_array_from_callback((each * rows, *leaf.shape[1:]), sharding, part)

    def placed_media(leaf: np.ndarray) -> jax.Array:
        return placed(leaf, _row_sharding((len(leaf) // len(held) * rows, *leaf.shape[1:]), layout))

    whole = jax.tree.map(lambda leaf: placed(leaf, sharding), batch)
    return dataclasses.replace(whole, media=jax.tree.map(placed_media, media))


def _row_sharding(shape: Sequence[int], layout: Layout) -> Any:
    """Return the sharding of an array of a batch's media: split along its rows where the mesh divides them."""
    return layout.activation_sharding("batch", shape[:1])
