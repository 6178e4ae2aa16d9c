"""A batch in parts that pass each layer one behind the other: what one sends travels while another is multiplied."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import Context, Execution
from eqx_decoders.errors import check
from eqx_decoders.pipeline import cut_rows, join_rows
from eqx_decoders.stats import BlockStats


Parts = tuple[Float[Array, "rows length *streams embed"], ...]


def cut_batch(x: Float[Array, "batch length *streams embed"], execution: Execution) -> Parts:
    """`Execution.batch_split` parts of a batch, of each device's rows as many in each. Raises where that can't be."""
    count, layout, rows = execution.batch_split, execution.layout, x.shape[0]
    devices = 1 if layout.mesh is None else layout.activation_parts("batch", (rows,))
    rule = f"must be a multiple of Execution.batch_split={count} times the {devices} devices that split it"
    check(rows % (count * devices) == 0, f"A batch of {rows} rows {rule}. Choose another batch size or leave it out.")
    return tuple(cut_rows(x, count))


def join_batch(parts: Parts) -> Float[Array, "batch length *streams embed"]:
    """The batch that `cut_batch` has cut."""
    return join_rows(jnp.stack(parts))


def run_in_parts(
    block: Any, parts: Parts, ctx: Context, past: None, key: PRNGKeyArray | None
) -> tuple[Parts, dict[str, Any], BlockStats]:
    """A block's call for each part, and what they return together: statistics have the parts on their first axis.

    No part's work needs that of another, and a part's next layer needs its own alone: so each device may send or
    receive for one while it multiplies for another (DeepSeek-AI 2024, section 3.2.1).
    """
    arrays, others = eqx.partition(ctx, eqx.is_array)
    rows = jax.tree.map(lambda leaf: cut_rows(leaf, len(parts)), arrays)
    results = []
    for number, x in enumerate(parts):
        own = eqx.combine(jax.tree.map(lambda leaf, number=number: leaf[number], rows), others)
        results.append(block(x, own, past, key=None if key is None else jax.random.fold_in(key, number)))
    streams, entries, stats = zip(*results, strict=True)
    entries = jax.tree.map(lambda *leaves: join_rows(jnp.stack(leaves)), *entries)
    return streams, entries, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)
