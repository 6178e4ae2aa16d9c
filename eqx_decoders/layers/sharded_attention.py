"""Attention on a mesh: each device attends with its own queries, by its own heads, to the keys of all.

Queries stay split over batch, length and heads. Of keys and values a device gathers the length, and computes blocks
that its queries may see: positions say which, so rows may stand in any order. Gradients of keys and values are added
and scattered over the devices among which they were gathered.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.layers.kernel import attend
from eqx_decoders.layers.mask import Mask, Spans
from eqx_decoders.layers.scores import Result
from eqx_decoders.layout import Layout


def attend_on_mesh(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    *,
    execution: Execution,
    mask: Mask,
    query_positions: Int[Array, "batch length"],
    key_positions: Int[Array, "batch kv_length"],
    query_segments: Int[Array, "batch length"] | None = None,
    key_segments: Int[Array, "batch kv_length"] | None = None,
    query_spans: Spans | None = None,
    selected: Bool[Array, "batch selected_heads length kv_length"] | None = None,
    soft_cap: float | None = None,
    aligned: bool = False,
    key_axis: Literal["length", "slots"] = "length",
) -> Result:
    """`attend`, by the kernel and on the mesh that `execution` says.

    `key_axis` says how keys are split: like tokens of a call, or like the slots of a cache.
    """
    layout = execution.layout
    options: dict[str, Any] = dict(mask=mask, soft_cap=soft_cap, kernel=execution.attention, platform=layout.platform)
    of_queries = dict(query_positions=query_positions, query_segments=query_segments, query_spans=query_spans)
    of_keys = dict(key_positions=key_positions, key_segments=key_segments)
    if layout.single:
        places = of_queries | of_keys
        return attend(query, key, value, **places, selected=selected, aligned=aligned, local=True, **options)
    rows, length, heads, _ = layout.activation_spec("batch length heads head_dim", query.shape)
    gathered = _names(layout.activation_spec(f"batch {key_axis} kv_heads head_dim", key.shape)[1])
    kv_heads, repeats = _split_kv_heads(layout, _names(heads), key.shape[2])
    gathered = tuple(name for name in gathered if name not in kv_heads)
    parts = math.prod(layout.sizes[name] for name in gathered)
    turned = execution.context_order == "zigzag" and key.shape[1] % (2 * parts) == 0
    groups = query.shape[2] // key.shape[2]

    def run(query, key, value, selected, of_queries, of_keys):
        key, value = (_own_heads(x, query.shape[2], groups, repeats) for x in (key, value))
        if gathered:
            key, value = (lax.all_gather(x, gathered, axis=1, tiled=True) for x in (key, value))
        if gathered and turned:
            key, value, of_keys = jax.tree.map(lambda x: _in_order(x, parts, 1), (key, value, of_keys))
            selected = None if selected is None else _in_order(selected, parts, 3)
        whole = aligned and not gathered
        return attend(
            query, key, value, selected=selected, aligned=whole, local=True, **of_queries, **of_keys, **options
        )

    # named, too, are mesh axes of one device: over what no name splits gradients are summed
    rows = (*_names(rows), *(name for name, size in layout.sizes.items() if size == 1))
    own, keys = PartitionSpec(rows, length, heads), PartitionSpec(rows, gathered or None, kv_heads or None)
    chosen = PartitionSpec(rows, None if selected is None or selected.shape[1] == 1 else heads, length)
    specs = (own, keys, keys, chosen, PartitionSpec(rows, length), PartitionSpec(rows))
    # unchecked: that all have gathered the same can't be seen from types
    mapped = jax.shard_map(run, mesh=layout.mesh, in_specs=specs, out_specs=(own, own), check_vma=False)
    return mapped(query, key, value, selected, of_queries, of_keys)


def _names(group: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return (group,) if isinstance(group, str) else group or ()


def _split_kv_heads(layout: Layout, heads: tuple[str, ...], kv_heads: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the mesh axes that split the heads of queries the first ones, which split those of keys, and the others.

    Over these every device has the same heads of keys, and takes those that its queries use.
    """
    count = len(heads)
    while kv_heads % math.prod(layout.sizes[name] for name in heads[:count]) != 0:
        count -= 1
    return heads[:count], heads[count:]


def _own_heads(x: Array, heads: int, groups: int, repeats: tuple[str, ...]) -> Array:
    """Of heads of keys those that a device's `heads` query heads use, where `groups` of these share one."""
    if not repeats:
        return x
    size = math.gcd(heads, groups)  # so many of them surely share one
    first = lax.axis_index(repeats) * heads
    return jnp.take(x, (first + size * jnp.arange(heads // size)) // groups, axis=2)


# --- the order of tokens ---


def context_parts(layout: Layout) -> int:
    """How many devices have different tokens of a row, in attention."""
    return math.prod(layout.sizes[name] for name in _names(layout.activation_spec("batch length heads")[1]))


def zigzag(length: int, parts: int) -> np.ndarray:
    """Which token stands where in a row of which each of `parts` devices has an equal part, if their work is balanced.

    Device i has chunks i and 2 parts - 1 - i of 2 parts: under a causal mask all have as many keys to look at.
    """
    rule = f"a length of {length} must be a multiple of {2 * parts}, twice the devices that split it"
    check(length % (2 * parts) == 0, f"context_order='zigzag': {rule}.")
    pairs = np.stack([np.arange(parts), 2 * parts - 1 - np.arange(parts)], axis=1)
    return np.arange(length).reshape(2 * parts, -1)[pairs.reshape(-1)].reshape(-1)


def _in_order(x: Array, parts: int, axis: int) -> Array:
    """Keys that stood in zig-zag, each where it belongs: the blocks that a query sees then follow one another."""
    pieces = jnp.split(x, 2 * parts, axis)
    return jnp.concatenate([pieces[index] for index in np.argsort(zigzag(2 * parts, parts))], axis)
