"""Lookups in embedding tables that are sharded over rows, features or both.

Without `shard_map`, XLA all-gathers the complete table on every device.
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
    table: Float[Array, "rows ..."], rows: Integer[Array, "batch length *heads"], axis_names: str, ctx: ForwardContext
) -> Float[Array, "batch length ..."]:
    """Return `table[rows]` in the dtype of activations. Out-of-range rows are clipped.

    On a mesh that splits the features, devices all-gather the row indices, each device reads its features of all these
    rows, and an all-to-all returns to each device the complete features of its own tokens. If the mesh splits the rows
    of the table, each device reads the rows that it stores, and the results are summed.

    **Arguments:**

    - `axis_names`: names of the table's axes. Only the first (rows) and the last (features) may be sharded.
    """
    layout = ctx.execution.layout
    dtype = ctx.execution.precision.compute
    rows = as_int32("rows", rows)
    table_spec = layout.weight_spec(axis_names, table.shape, "table")
    row_axes, *middle_axes, feature_axes = (names_of(group) for group in table_spec)
    check(
        not any(middle_axes),
        f"Layout.weights shards the axis {axis_names.split()[1]!r} of an embedding table, but only rows and features "
        "of such a table can be sharded. Assign no mesh axis to it.",
    )
    if layout.single or not (row_axes or feature_axes):
        return jnp.take(table, rows, axis=0, mode="clip").astype(dtype)
    # devices with different rows of the table look up the same tokens
    token_axes = [names_of(group) for group in layout.activation_spec("batch length", rows.shape[:2])]
    token_axes = [tuple(name for name in group if name not in row_axes) or None for group in token_axes]
    token_spec = PartitionSpec(*token_axes)
    # if tokens are not split along the mesh axes of the features (the batch is not divisible), tokens are replicated,
    # and features are all-gathered
    use_all_to_all = set(feature_axes) <= {name for group in token_spec for name in names_of(group)}
    token_spec = token_spec if use_all_to_all else PartitionSpec()
    count = table.shape[0]

    def look_up_shard(table: Array, rows: Array) -> Array:
        flat = jnp.clip(rows, 0, count - 1).reshape(-1, *rows.shape[2:])
        if use_all_to_all and feature_axes:
            flat = jax.lax.all_gather(flat, feature_axes, axis=0, tiled=True)
        features = _local_rows(table, flat, row_axes).astype(dtype)
        last = features.ndim - 1
        if feature_axes and use_all_to_all:
            features = jax.lax.all_to_all(features, feature_axes, split_axis=0, concat_axis=last, tiled=True)
        elif feature_axes:
            features = jax.lax.all_gather(features, feature_axes, axis=last, tiled=True)
        features = jax.lax.psum(features, row_axes) if row_axes else features
        return features.reshape(*rows.shape, *features.shape[flat.ndim :])

    return layout.shard_map(look_up_shard, (table_spec, token_spec), token_spec)(table, rows)


def _local_rows(table: Array, rows: Array, row_axes: tuple[str, ...]) -> Array:
    """Return the rows that this device stores, and zeros for all other rows."""
    if not row_axes:
        return jnp.take(table, rows, axis=0, mode="clip")
    index = rows - jax.lax.axis_index(row_axes) * table.shape[0]
    is_local = (index >= 0) & (index < table.shape[0])
    local = jnp.take(table, index, axis=0, mode="clip")
    return jnp.where(is_local.reshape(is_local.shape + (1,) * (table.ndim - 1)), local, 0)
