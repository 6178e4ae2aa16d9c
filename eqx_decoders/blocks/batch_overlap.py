"""Batch overlap (two-batch overlap): communication of one part of a batch overlaps with computation of another part."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.block import Block, BlockRun
from eqx_decoders.blocks.stats import BlockStats
from eqx_decoders.context import Execution, ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.layers.base import BranchInputs, StaggeredLayer
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import join_microbatches, split_microbatches


Parts = tuple[Float[Array, "rows length *streams embed"], ...]


def cut_batch(x: Float[Array, "batch length *streams embed"], execution: Execution) -> Parts:
    """Split a batch into `Execution.batch_split` parts of equal size on each device.

    Raises ConfigError if the batch size is not a multiple of the parts times the devices.
    """
    count = execution.batch_split
    layout = execution.layout
    rows = x.shape[0]
    devices = 1 if layout.mesh is None else layout.activation_shards("batch", (rows,))
    check(
        rows % (count * devices) == 0,
        f"A batch of {rows} rows must be a multiple of Execution.batch_split={count} times the {devices} devices that "
        "split the batch. Choose another batch size, or leave batch_split out.",
    )
    return tuple(split_microbatches(x, count))


def join_batch(parts: Parts) -> Float[Array, "batch length *streams embed"]:
    """Join parts from `cut_batch` to a batch."""
    return join_microbatches(jnp.stack(parts))


def run_staggered(
    block: Block, parts: Parts, ctx: ForwardContext, past: None, *, key: PRNGKeyArray | None
) -> tuple[Parts, dict[str, Any], BlockStats]:
    """Run `block` on all parts of a batch, and overlap the communication of its layers with computation.

    Returns the streams of the parts, the entries of the full batch, and statistics with a leading axis of parts.
    `past` is always None, because batch overlap does not support caches.
    """
    ctx_arrays, ctx_static = eqx.partition(ctx, eqx.is_array)
    ctx_parts = jax.tree.map(lambda leaf: split_microbatches(leaf, len(parts)), ctx_arrays)
    contexts = [
        eqx.combine(jax.tree.map(lambda leaf, i=index: leaf[i], ctx_parts), ctx_static) for index in range(len(parts))
    ]
    keys = [None if key is None else jax.random.fold_in(key, index) for index in range(len(parts))]
    part_runs = [_PartRun(block, part_ctx, part_key) for part_ctx, part_key in zip(contexts, keys, strict=True)]
    outputs = _stagger(part_runs, parts, ctx.execution.layout)
    results = [part_run.run.leave(x) for part_run, x in zip(part_runs, outputs, strict=True)]
    streams, entries, stats = zip(*results, strict=True)
    entries = jax.tree.map(lambda *leaves: join_microbatches(jnp.stack(leaves)), *entries)
    return streams, entries, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)


class _AtLayer(NamedTuple):
    """A part of the batch that has stopped at a `StaggeredLayer`.

    `inputs` are the layer's arguments, and `routed` is the result of its `route`.
    """

    inputs: BranchInputs
    routed: Any


class _PartRun:
    """Progress of one part of the batch through the layers of a block."""

    def __init__(self, block: Block, ctx: ForwardContext, key: PRNGKeyArray | None):
        self.run = BlockRun(block.config, ctx, None, key)
        self.residual = block.residual
        self.layers = block.layers()
        self.next = 0  # index of the next layer
        self.state = None
        self.coefficients = None

    def advance(self, value: Array) -> Any:
        """Run layers until the part reaches a `StaggeredLayer` or the end of the block.

        Returns an `_AtLayer` at a `StaggeredLayer`, and the block's output at the end. `value` is the block's input in
        the first call. In later calls it is the output of the `StaggeredLayer` that the previous call has reached.
        """
        if self.state is None:
            self.state = self.residual.begin(self.run.enter(value))
        else:
            self._write(value)
        while self.next < len(self.layers):
            layer = self.layers[self.next]
            y, self.coefficients = self.residual.read(self.state, layer, self.run.ctx)
            if isinstance(layer.layer, StaggeredLayer):
                inputs = self.run.inputs(layer, y)
                return _AtLayer(inputs, layer.layer.route(inputs))
            self._write(self.run(layer, y))
        return self.residual.end(self.state, self.run.dropout, self.run.ctx)

    def _write(self, out: Array) -> None:
        self.state = self.residual.write(self.state, out, self.coefficients)
        self.next += 1


def _stagger(part_runs: Sequence[_PartRun], parts: Sequence[Array], layout: Layout) -> list[Array]:
    """Return the block's output for all parts.

    Without barriers, XLA communicates for all parts at the same time and does not overlap it with products. With
    barriers, each part runs up to a layer that communicates, and the next part starts only then, so that the
    communication of a part overlaps with the computation of the next part. Then the layer finishes all parts
    (DeepSeek-AI 2024, section 3.2.1). There are no barriers if other layers communicate, too, because the mesh splits
    heads or sequences.
    """
    use_barriers = not _splits_more_than_batch(layout)
    values = parts
    while True:
        reached: list[Any] = []
        for part_run, value in zip(part_runs, values, strict=True):
            if use_barriers and reached:
                value, arrays = lax.optimization_barrier((value, _arrays_of(reached[-1])))
                reached[-1] = _with_arrays(reached[-1], arrays)
            reached.append(part_run.advance(value))
        if not isinstance(reached[0], _AtLayer):
            return reached
        layer = part_runs[0].layers[part_runs[0].next]
        results = layer.layer.run_routed([part.inputs for part in reached], [part.routed for part in reached])
        values = [part_run.run.output(layer, result) for part_run, result in zip(part_runs, results, strict=True)]


def _arrays_of(reached: Any) -> Any:
    return reached.routed if isinstance(reached, _AtLayer) else reached


def _with_arrays(reached: Any, arrays: Any) -> Any:
    return reached._replace(routed=arrays) if isinstance(reached, _AtLayer) else arrays


def _splits_more_than_batch(layout: Layout) -> bool:
    """Return whether the mesh splits activations along other axes than the batch, such as heads or sequences."""
    batch_axes = {*dict(layout.activations).get("batch", ()), "stage"}
    return any(size > 1 and name not in batch_axes for name, size in layout.sizes.items())
