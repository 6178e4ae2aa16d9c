"""What the processes of one run agree on: flags, and which rows of a batch each of them holds."""

import itertools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from eqx_decoders.errors import check
from eqx_decoders.layout import Layout
from eqx_decoders.training.data import Batch


def any_process(flag: bool) -> bool:
    """Whether `flag` is true in any process. All of them must call this at the same point of their programs."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def wait_for_all(name: str) -> None:
    """Return when all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def batch_share(layout: Layout, rows: int) -> tuple[int, int]:
    """Which part of a batch of `rows` this process's devices hold, and of how many; `(0, 1)` if they hold all rows.

    Raises ConfigError if other processes hold rows between those of this one.
    """
    sharding = layout.activation_sharding("batch", (rows,))
    held: Any = sharding.addressable_devices_indices_map((rows,)).values()
    pieces = sorted({index[0].indices(rows)[:2] for index in held})
    together = all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
    rule = f"layout: process {jax.process_index()} holds the rows {pieces} of a batch, which are not consecutive"
    check(together, f"{rule}: give the devices in the order of their processes.")
    start, stop = pieces[0][0], pieces[-1][1]
    return start // (stop - start), rows // (stop - start)


def place(batch: Batch, layout: Layout, rows: int) -> Batch:
    """The batch of `rows` sequences over all devices, from this process's share of it (see `batch_share`) in NumPy."""

    def one(leaf):
        shape = (rows, *leaf.shape[1:])
        sharding = layout.activation_sharding("batch length", shape)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, leaf, shape)

    return jax.tree.map(one, batch)
