"""Lookups in tables that are split over devices: some features of all rows, or of some rows.

Left alone, XLA gathers the whole table on every device.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Integer

from eqx_decoders.context import ForwardContext
from eqx_decoders.core.input_checks import as_int32
from eqx_decoders.errors import check
from eqx_decoders.sharding.axes import names_of


def look_up(
    table: Float[Array, "rows ..."], rows: Integer[Array, "batch length *heads"], words: str, ctx: ForwardContext
) -> Float[Array, "batch length ..."]:
    """Look up `table[rows]` in the dtype of activations; `words` are the table's axes; rows outside are clipped.

    On a mesh a device learns which rows the others look for, reads its features of them, and gives each device the
    features of its own tokens' rows (all-to-all): nothing more is sent. Where the rows themselves are split, each
    device reads those that it has, and the results are added.
    """
    layout, dtype, rows = ctx.execution.layout, ctx.execution.precision.compute, as_int32("rows", rows)
    spec = layout.weight_spec(words, table.shape, "table")
    parts, *middle, names = (names_of(group) for group in spec)
    rule = f"Layout.weights splits {words.split()[1]!r} of a table that is looked up; only rows and features may be"
    check(not any(middle), f"{rule} split: give it no mesh axis.")
    if layout.single or not (parts or names):
        return jnp.take(table, rows, axis=0, mode="clip").astype(dtype)
    # devices that have other rows look for the same tokens
    groups = (names_of(group) for group in layout.activation_spec("batch length", rows.shape[:2]))
    tokens = PartitionSpec(*(tuple(name for name in group if name not in parts) or None for group in groups))
    # where tokens are not split like features (a batch that the mesh does not divide), all find them, and share
    exchanged = set(names) <= {name for group in tokens for name in names_of(group)}
    tokens, count = tokens if exchanged else PartitionSpec(), table.shape[0]

    def find(table: Array, rows: Array) -> Array:
        flat = jnp.clip(rows, 0, count - 1).reshape(-1, *rows.shape[2:])
        flat = jax.lax.all_gather(flat, names, axis=0, tiled=True) if exchanged and names else flat
        features = _local_rows(table, flat, parts).astype(dtype)
        last = features.ndim - 1
        if names and exchanged:
            features = jax.lax.all_to_all(features, names, split_axis=0, concat_axis=last, tiled=True)
        elif names:
            features = jax.lax.all_gather(features, names, axis=last, tiled=True)
        features = jax.lax.psum(features, parts) if parts else features
        return features.reshape(*rows.shape, *features.shape[flat.ndim :])

    return layout.shard_map(find, (spec, tokens), tokens)(table, rows)


def _local_rows(table: Array, rows: Array, parts: tuple[str, ...]) -> Array:
    """Look up the rows that this device has; zeros for others."""
    if not parts:
        return jnp.take(table, rows, axis=0, mode="clip")
    index = rows - jax.lax.axis_index(parts) * table.shape[0]
    inside = (index >= 0) & (index < table.shape[0])
    taken = jnp.take(table, index, axis=0, mode="clip")
    return jnp.where(inside.reshape(inside.shape + (1,) * (table.ndim - 1)), taken, 0)
