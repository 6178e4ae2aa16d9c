"""Batch overlap: a batch runs in parts, and what one part sends to other devices travels while another is computed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.block_run import AnyBlock, BlockRun
from eqx_decoders.blocks.residual.base import ReadWriteResidual
from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.layers.base import BranchInputs, StaggeredLayer
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import cut_rows, join_rows


Parts = tuple[Float[Array, "rows length *streams embed"], ...]


def cut_batch(x: Float[Array, "batch length *streams embed"], execution: Execution) -> Parts:
    """Cut a batch into `Execution.batch_split` parts with equally many rows of each device, or raise ConfigError."""
    count, layout, rows = execution.batch_split, execution.layout, x.shape[0]
    devices = 1 if layout.mesh is None else layout.activation_parts("batch", (rows,))
    rule = f"must be a multiple of Execution.batch_split={count} times the {devices} devices that split it"
    check(rows % (count * devices) == 0, f"A batch of {rows} rows {rule}. Choose another batch size or leave it out.")
    return tuple(cut_rows(x, count))


def join_batch(parts: Parts) -> Float[Array, "batch length *streams embed"]:
    """Join the parts that `cut_batch` returned."""
    return join_rows(jnp.stack(parts))


def run_staggered(
    block: AnyBlock, parts: Parts, ctx: ForwardContext, past: None, *, key: PRNGKeyArray | None
) -> tuple[Parts, dict[str, Any], BlockStats]:
    """Return the results of `block` for all parts together; statistics have the parts on their first axis.

    With a residual connection that calls the layers itself, parts run one after another.
    """
    arrays, others = eqx.partition(ctx, eqx.is_array)
    rows = jax.tree.map(lambda leaf: cut_rows(leaf, len(parts)), arrays)
    numbers = range(len(parts))
    contexts = [eqx.combine(jax.tree.map(lambda leaf, n=number: leaf[n], rows), others) for number in numbers]
    keys = [None if key is None else jax.random.fold_in(key, number) for number in numbers]
    if isinstance(block.residual, ReadWriteResidual):
        part_runs = [_PartRun(block, block.residual, *each) for each in zip(contexts, keys, strict=True)]
        outputs = _stagger(part_runs, parts, ctx.execution.layout)
        results = [part_run.run.leave(x) for part_run, x in zip(part_runs, outputs, strict=True)]
    else:
        results = [block(x, part, key=part_key) for x, part, part_key in zip(parts, contexts, keys, strict=True)]
    streams, entries, stats = zip(*results, strict=True)
    entries = jax.tree.map(lambda *leaves: join_rows(jnp.stack(leaves)), *entries)
    return streams, entries, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


class _Stop(NamedTuple):
    """A part of the batch at a layer that communicates: the layer's arguments, and the result of its `begin`."""

    inputs: BranchInputs
    begun: Any


class _PartRun:
    """Progress of one part of the batch through the layers of a block."""

    def __init__(self, block: AnyBlock, residual: ReadWriteResidual, ctx: ForwardContext, key: PRNGKeyArray | None):
        self.run = BlockRun(block, ctx, None, key)
        self.residual, self.layers, self.next = residual, block.layers(), 0
        self.state, self.coefficients = None, None

    def advance(self, value: Array) -> Any:
        """Run layers up to the next one that communicates, or to the end of the block: a `_Stop`, or the output.

        `value` is the block's input at first, then the output of the layer at which the part stopped.
        """
        if self.state is None:
            self.state = self.residual.begin(self.run.enter(value))
        else:
            self._write(value)
        while self.next < len(self.layers):
            layer, ctx = self.layers[self.next], self.run.ctx
            y, self.coefficients = self.residual.read(self.state, layer, ctx)
            if isinstance(layer.layer, StaggeredLayer):
                inputs = self.run.inputs(layer, y)
                return _Stop(inputs, layer.layer.begin(inputs))
            self._write(self.run(layer, y))
        return self.residual.end(self.state, self.run.dropout, self.run.ctx)

    def _write(self, out: Array) -> None:
        self.state = self.residual.write(self.state, out, self.coefficients)
        self.next += 1


def _stagger(part_runs: Sequence[_PartRun], parts: Sequence[Array], layout: Layout) -> list[Array]:
    """Return the block's output for all parts.

    Left alone, XLA sends what all parts have to send when all are ready to, and multiplies nothing meanwhile. Here each
    part goes as far as to a layer that communicates, and the next one waits for it: what the first sends travels while
    the next one comes. Then the layer goes on with all (DeepSeek-AI 2024, section 3.2.1). If other layers communicate,
    as they do if heads or rows are split, none waits.
    """
    waits, values = not _communicates_elsewhere(layout), parts
    while True:
        reached: list[Any] = []
        for part_run, value in zip(part_runs, values, strict=True):
            if waits and reached:
                value, arrays = lax.optimization_barrier((value, _arrays_of(reached[-1])))
                reached[-1] = _with_arrays(reached[-1], arrays)
            reached.append(part_run.advance(value))
        if not isinstance(reached[0], _Stop):
            return reached
        layer = part_runs[0].layers[part_runs[0].next]
        results = layer.layer.finish([stop.inputs for stop in reached], [stop.begun for stop in reached])
        values = [part_run.run.output(layer, result) for part_run, result in zip(part_runs, results, strict=True)]


def _arrays_of(reached: Any) -> Any:
    return reached.begun if isinstance(reached, _Stop) else reached


def _with_arrays(reached: Any, arrays: Any) -> Any:
    return reached._replace(begun=arrays) if isinstance(reached, _Stop) else arrays


def _communicates_elsewhere(layout: Layout) -> bool:
    """Return whether something but the batch and the weights is split."""
    rows = {*dict(layout.activations).get("batch", ()), "stage"}
    return any(size > 1 and name not in rows for name, size in layout.sizes.items())
