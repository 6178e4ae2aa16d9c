"""Looking up rows of tables that are too large for one device: each has some features of all rows.

Left alone, XLA gathers the whole table on every device.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from eqx_decoders.context import Context
from eqx_decoders.errors import check


def look_up(
    table: Float[Array, "rows ..."], rows: Int[Array, "batch length *heads"], words: str, ctx: Context
) -> Float[Array, "batch length ..."]:
    """`table[rows]` in the dtype of activations, `words` being those of the table; rows beyond it count as its last.

    On a mesh a device learns which rows the others look for, finds its features of them, and gives each device the
    features of its own tokens' rows (all-to-all): no more is sent than what is found.
    """
    layout, dtype = ctx.execution.layout, ctx.execution.precision.compute
    spec = layout.weight_spec(words, table.shape, "table")
    names = _names(spec[-1])
    rule = f"Layout.weights splits {words.split()[0]!r} of a table that is looked up; only {words.split()[-1]!r} may be"
    check(not any(spec[:-1]), f"{rule} split: give the others no mesh axis.")
    if layout.single or not names:
        return jnp.take(table, rows, axis=0, mode="clip").astype(dtype)
    tokens = layout.activation_spec("batch length", rows.shape[:2])
    # where tokens are not split like features (a batch that the mesh does not divide), all find them, and share
    exchanged = set(names) <= {name for group in tokens for name in _names(group)}
    tokens = tokens if exchanged else PartitionSpec()

    def find(table: Array, rows: Array) -> Array:
        flat = rows.reshape(-1, *rows.shape[2:])
        flat = jax.lax.all_gather(flat, names, axis=0, tiled=True) if exchanged else flat
        found = jnp.take(table, flat, axis=0, mode="clip").astype(dtype)
        last = found.ndim - 1
        if exchanged:
            found = jax.lax.all_to_all(found, names, split_axis=0, concat_axis=last, tiled=True)
        else:
            found = jax.lax.all_gather(found, names, axis=last, tiled=True)
        return found.reshape(*rows.shape, *found.shape[flat.ndim :])

    # unchecked: that all have gathered the same can't be seen from types
    mapped = jax.shard_map(
        find,
        mesh=layout.mesh_here,
        axis_names=layout.axes_here,
        in_specs=(spec, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return mapped(table, rows)


def _names(group: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return (group,) if isinstance(group, str) else group or ()
