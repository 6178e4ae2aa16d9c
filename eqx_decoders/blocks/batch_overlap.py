"""A batch in parts that pass each layer one behind the other: what one sends travels while another is multiplied."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.residual.base import Steps
from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import Context, Execution
from eqx_decoders.errors import check
from eqx_decoders.layers.base import BranchInputs, StaggeredLayer
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import cut_rows, join_rows


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
    """A block's call for each part, and what they return together: statistics have the parts on their first axis."""
    arrays, others = eqx.partition(ctx, eqx.is_array)
    rows = jax.tree.map(lambda leaf: cut_rows(leaf, len(parts)), arrays)
    numbers = range(len(parts))
    contexts = [eqx.combine(jax.tree.map(lambda leaf, n=number: leaf[n], rows), others) for number in numbers]
    keys = [None if key is None else jax.random.fold_in(key, number) for number in numbers]
    streams, entries, stats = zip(*block.in_parts(parts, contexts, keys), strict=True)
    entries = jax.tree.map(lambda *leaves: join_rows(jnp.stack(leaves)), *entries)
    return streams, entries, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


class _Meeting(NamedTuple):
    """Where a part has come to a layer that sends: the layer's run, what it is called with, what it has begun."""

    run: Any
    inputs: BranchInputs
    begun: Any


def run_in_turn(begins: Sequence[Callable[[Array], Steps]], parts: Sequence[Array], layout: Layout) -> list[Array]:
    """The streams of all parts after a block; `begins` are its wiring's steps for each part.

    Left alone, XLA sends what all parts have to send when all are ready to, and multiplies nothing meanwhile. Here each
    part goes as far as to a layer that sends, and the next one waits for it: what the first sends travels while the
    next one comes. Then the layer goes on with all (DeepSeek-AI 2024, section 3.2.1). Where other layers send inside of
    themselves, as they do if heads or rows are split, none waits.
    """
    waits, walks = not _sends_inside(layout), []

    def advance(number: int, value: Array) -> Any:
        """Part `number` from `value` on to its next meeting, or its stream at its end."""
        sent: Any = value
        if number == len(walks):
            walks.append(begins[number](value))
            sent = None
        while True:
            try:
                branch, y = walks[number].send(sent)
            except StopIteration as end:
                return end.value
            inputs = branch.run.before(y)
            if isinstance(branch.run.layer, StaggeredLayer):
                return _Meeting(branch.run, inputs, branch.run.layer.begin(inputs))
            sent = branch.run.after(branch.run.layer.branch(*inputs))

    values: Sequence[Array] = parts
    while True:
        reached: list[Any] = []
        for number, value in enumerate(values):
            if waits and reached:
                value, kept = lax.optimization_barrier((value, _arrays_of(reached[-1])))
                reached[-1] = _with_arrays(reached[-1], kept)
            reached.append(advance(number, value))
        if not isinstance(reached[0], _Meeting):
            return reached
        results = reached[0].run.layer.finish([each.inputs for each in reached], [each.begun for each in reached])
        values = [each.run.after(result) for each, result in zip(reached, results, strict=True)]


def _arrays_of(reached: Any) -> Any:
    return reached.begun if isinstance(reached, _Meeting) else reached


def _with_arrays(reached: Any, arrays: Any) -> Any:
    return reached._replace(begun=arrays) if isinstance(reached, _Meeting) else arrays


def _sends_inside(layout: Layout) -> bool:
    """Whether something but the batch and the weights is split."""
    rows = {*dict(layout.activations).get("batch", ()), "stage"}
    return any(size > 1 and name not in rows for name, size in layout.sizes.items())
