"""Assign the rows of a global batch to processes, and place batches on the devices of all processes."""

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
    """Return the indices of the rows of a global batch that are stored on the devices of a process, ascending.

    The indices depend on the positions of the devices in the mesh and need not be contiguous. Several processes may
    have the same rows.

    **Arguments:**

    - `rows`: number of rows of the global batch.
    - `process_index`: index of the process; None: this process.
    """
    index = jax.process_index() if process_index is None else process_index
    slices = layout.activation_sharding("batch", (rows,)).devices_indices_map((rows,))
    local_rows = {range(rows)[part] for device, (part,) in slices.items() if device.process_index == index}
    numbers = sorted(set().union(*local_rows))
    return range(rows) if len(numbers) == rows else tuple(numbers)


def place_read_only(batch: Batch, layout: Layout, rows: int) -> Batch:
    """Place a batch on all devices, as `place`, or return it unchanged if there is only one CPU device.

    The caller must not modify the arrays of `batch` later, because the result may share them.
    """
    is_one_cpu_device = jax.process_count() == 1 and layout.single and layout.backend.devices_share_cores
    return batch if is_one_cpu_device and batch.media is None else place(batch, layout, rows)


def place(batch: Batch, layout: Layout, rows: int) -> Batch:
    """Place a global batch on the devices of all processes.

    With images, videos or audio, all processes must make the same calls in the same order, because the media arrays of
    all processes are padded to common shapes.

    **Arguments:**

    - `batch`: the rows of this process (`host_rows`), as NumPy arrays `[local_rows, length]`.
    - `rows`: number of rows of the global batch.
    """
    length = batch.tokens.shape[1]
    sharding = layout.activation_sharding("batch length", (rows, length))
    media, batch = batch.media, dataclasses.replace(batch, media=None)
    if jax.process_count() == 1:
        media = jax.tree.map(lambda leaf: jax.device_put(leaf, _row_sharding(leaf.shape, layout)), media)
        return dataclasses.replace(jax.device_put(batch, sharding), media=media)
    local_rows = host_rows(layout, rows)
    if media is not None:
        check(
            len(media.order) == len(local_rows),
            f"Batch.media has {len(media.order)} groups, but must have a group for each of the {len(local_rows)} rows "
            f"of this process. Use Media.create(…, groups={len(local_rows)}).",
        )
        media = pad_to_shapes(media, merge_shapes(all_gather_json("images", array_shapes(media))))

    def place_array(local: np.ndarray, sharding: Any) -> jax.Array:
        """Return the global array of which `local` contains this process's rows."""
        local = np.asarray(local)
        factor = len(local) // len(local_rows)  # rows of the array per row of the batch

        def shard(index: Any) -> np.ndarray:
            """Return the shard for an index of the global array."""
            global_rows = range(factor * rows)[index[0]]
            first = bisect.bisect_left(local_rows, global_rows.start // factor) * factor + global_rows.start % factor
            return local[first : first + len(global_rows), *index[1:]]

        return jax.make_array_from_callback((factor * rows, *local.shape[1:]), sharding, shard)

    def place_media(local: np.ndarray) -> jax.Array:
        global_shape = (len(local) // len(local_rows) * rows, *local.shape[1:])
        return place_array(local, _row_sharding(global_shape, layout))

    placed = jax.tree.map(lambda local: place_array(local, sharding), batch)
    return dataclasses.replace(placed, media=jax.tree.map(place_media, media))


def _row_sharding(shape: Sequence[int], layout: Layout) -> Any:
    """Return the sharding of a media array: sharded along the rows, if the mesh divides the number of rows."""
    return layout.activation_sharding("batch", shape[:1])
