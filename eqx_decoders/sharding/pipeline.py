"""Pipeline parallelism over the mesh axis `stage`: microbatches pass through stages, which have different layers.

The schedule is circular (Narayanan et al. 2021, praxis, MaxText): a stage has `repeats` pieces of the layer stack, and
each microbatch passes all stages `repeats` times. In iteration i, stage s works on item `n = i - lag * s`: microbatch
`n mod microbatches` in repeat `n div microbatches`. Iterations in which a stage has no item (n < 0, or n >= number of
items) are bubbles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree, Shaped

from eqx_decoders.sharding.axes import names_of
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline_config import AXIS, Pipeline


STAGE_INPUT = "stage_input"  # name of the saved value in `jax.checkpoint`

# `stage(weights, by_layer, by_row, x, microbatch)` runs a piece of the stack. It returns the residual stream and
# statistics.
Stage = Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[Array, PyTree]]


def split_microbatches(x: Shaped[Array, "batch ..."], count: int) -> Shaped[Array, "microbatches rows ..."]:
    """Split a batch into `count` microbatches. Microbatch m has the sequences m, m + count, ….

    With this order, each microbatch has the same number of sequences from every device.
    """
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)


def join_microbatches(x: Shaped[Array, "microbatches rows ..."]) -> Shaped[Array, "batch ..."]:
    """Join the microbatches of `split_microbatches` to a batch (the inverse of `split_microbatches`)."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def run_pipeline(
    stage: Stage,
    weights: PyTree,
    by_layer: PyTree,
    by_row: PyTree,
    x: Float[Array, "batch length *streams embed"],
    *,
    pipeline: Pipeline,
    layout: Layout,
    contiguous: bool = False,
    gathered: Callable[[PyTree], PyTree] = lambda weights: weights,
    policy: Callable[..., bool] | None = None,
) -> tuple[Float[Array, "batch length *streams embed"], PyTree]:
    """Run layers as a pipeline over the mesh axis `stage`.

    Returns the residual stream, and statistics `[layers, microbatches, ...]`.

    **Arguments:**

    - `stage`: function that runs a piece of the stack, `stage(weights, by_layer, by_row, x, microbatch)`. It receives
        the layers of the piece in `weights` and `by_layer`, and the inputs of the microbatch in `by_row` and `x`.
    - `weights`, `by_layer`: arrays `[layers, ...]`. The number of layers is a multiple of `stages * repeats`.
    - `by_row`: arrays `[microbatches, sequences, ...]`, split by `split_microbatches`.
    - `x`: residual stream.
    - `contiguous`: whether `stage` splits the stored weights along their axis of layers.
    - `gathered`: function that constrains weights to be gathered along `fsdp` and similar mesh axes.
    - `policy`: policy of the `jax.checkpoint` around `stage`. None: no `jax.checkpoint`.
    """
    stages = layout.sizes[AXIS]
    pipeline.check_fits(x.shape[0], stages)
    transfer = _BatchTransfer.create(layout, x, pipeline.microbatches)

    def split_layers(leaf: Array) -> Array:
        pieces = pipeline.repeats * stages
        return leaf.reshape(pipeline.repeats, stages, leaf.shape[0] // pieces, *leaf.shape[1:])

    def run_stage(weights, by_layer, by_row, x):
        pieces = _exchange_pieces(weights, pipeline.repeats, stages) if contiguous else _drop_stage_axis(weights)
        by_row, queue = jax.tree.map(lambda leaf: leaf[0], (by_row, x))
        schedule = _Schedule(stage, pipeline, stages, gathered, policy)
        y, stats = schedule.run(pieces, _drop_stage_axis(by_layer), by_row, queue)
        return y[None], jax.tree.map(lambda leaf: leaf[:, None], stats)

    first_axis = PartitionSpec(AXIS)
    second_axis = PartitionSpec(None, AXIS)
    run = jax.shard_map(
        run_stage,
        mesh=layout.current_mesh,
        axis_names={AXIS},
        in_specs=(first_axis if contiguous else second_axis, second_axis, first_axis, first_axis),
        out_specs=(first_axis, second_axis),
        check_vma=False,  # layers add values that vary over `stage` to zeros that do not
    )
    # Each stage gets a copy. The gradient of a shared array would be summed over the stages inside the `shard_map`,
    # and XLA on CPU cannot do this for 16-bit values.
    by_row = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (stages, *leaf.shape)), by_row)
    weights = weights if contiguous else jax.tree.map(split_layers, weights)
    by_layer = jax.tree.map(split_layers, by_layer)
    y, stats = run(weights, by_layer, by_row, transfer.to_stages(x))
    return transfer.from_stages(y), jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), stats)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Iterations of a stage, inside `jax.shard_map`. For the fields, see `run_pipeline`."""

    stage: Stage
    pipeline: Pipeline
    stages: int
    gathered: Callable[[PyTree], PyTree]
    policy: Callable[..., bool] | None

    def run(self, weights: PyTree, by_layer: PyTree, by_row: PyTree, queue: Array) -> tuple[Array, PyTree]:
        """Return the output of the last stage for all microbatches; `queue` is the input of the first stage.

        `weights` and `by_layer` are `[repeats, layers, ...]`, statistics are `[repeats, layers, microbatches, ...]`.
        """
        pipeline = self.pipeline
        stage_index = lax.axis_index(AXIS)
        last = self.stages - 1
        lag, items, microbatches = pipeline.lag, pipeline.items, pipeline.microbatches
        # Results of the last stage return to the first one only if there are further repeats.
        steps = [(stage, stage + 1) for stage in range(last)] + [(last, 0)] * (pipeline.repeats > 1)
        work = self._work if self.policy is None else jax.checkpoint(self._work, policy=self.policy, prevent_cse=False)

        def iterate(pieces, by_layer, by_row, carry, i):
            """Run iteration i. `pieces`: weights, and the repeat of the first piece in them."""
            (weights, first_repeat), (queue, received, previous_y) = pieces, carry
            item = jnp.maximum(i - lag * stage_index, 0)
            repeat = jnp.minimum(item // microbatches, pipeline.repeats - 1)
            x = checkpoint_name(jnp.where(stage_index == 0, queue[i % microbatches], received), STAGE_INPUT)
            piece = jnp.maximum(repeat - first_repeat, 0)
            y, stats = work(weights, piece, by_layer, by_row, x, repeat, item % microbatches)
            arrived = lax.ppermute(previous_y if pipeline.delay else y, AXIS, steps)
            # The last stage stores its output. The first stage stores the output that the last stage has sent back.
            done = i - lag * last
            item_to_store = jnp.where(stage_index == last, done, done - (lag - 1))
            is_storing_stage = (stage_index == last) | ((stage_index == 0) & (pipeline.repeats > 1))
            is_stored = (item_to_store >= 0) & is_storing_stage
            new = jnp.where(stage_index == last, y, arrived)
            index = item_to_store % microbatches
            queue = lax.dynamic_update_index_in_dim(queue, jnp.where(is_stored, new, queue[index]), index, 0)
            return (queue, arrived, y if pipeline.delay else previous_y), stats

        def loop(pieces, by_layer, by_row, carry, start, length):
            iterations = start + jnp.arange(length, dtype=jnp.int32)
            return lax.scan(functools.partial(iterate, pieces, by_layer, by_row), carry, iterations)

        # Until its first input has arrived, a stage computes with a microbatch: some gradients at zero are not finite.
        carry = queue, queue[0], queue[0] if pipeline.delay else None
        if pipeline.gather == "repeat":
            carry, stats = self._run_by_repeat(loop, weights, by_layer, by_row, carry)
        else:
            weights = self.gathered(weights) if pipeline.gather == "once" else weights
            carry, stats = loop((weights, 0), by_layer, by_row, carry, 0, items + pipeline.bubbles(self.stages))
        return carry[0], jax.tree.map(lambda leaf: self._without_bubbles(leaf, lag * stage_index), stats)

    def _run_by_repeat(
        self, loop: Callable[..., Any], weights: PyTree, by_layer: PyTree, by_row: PyTree, carry: Any
    ) -> tuple[Any, PyTree]:
        """Run the iterations repeat by repeat, and gather two pieces of weights before each repeat.

        Two pieces are necessary because later stages are still in the previous repeat for some iterations. In the
        backward pass, the pieces are gathered again.
        """
        pipeline = self.pipeline

        def run_repeat(weights, by_layer, by_row, carry, repeat, length):
            first = jnp.maximum(repeat - 1, 0)
            indices = jnp.stack([first, jnp.minimum(first + 1, pipeline.repeats - 1)])
            pieces = self.gathered(jax.tree.map(lambda leaf: leaf[indices], weights))
            return loop((pieces, first), by_layer, by_row, carry, repeat * pipeline.microbatches, length)

        if self.policy is not None:
            policy = self.policy
            saves_input = jax.checkpoint_policies.save_only_these_names(STAGE_INPUT)

            def repeat_policy(*args, **params) -> bool:
                return saves_input(*args, **params) or policy(*args, **params)

            run_repeat = jax.checkpoint(run_repeat, policy=repeat_policy, prevent_cse=False, static_argnums=5)

        def step(carry, repeat):
            return run_repeat(weights, by_layer, by_row, carry, repeat, pipeline.microbatches)

        repeats = jnp.arange(pipeline.repeats, dtype=jnp.int32)
        carry, stats = lax.scan(step, carry, repeats)
        end = jnp.asarray(pipeline.repeats, jnp.int32)
        carry, last_stats = run_repeat(weights, by_layer, by_row, carry, end, pipeline.bubbles(self.stages))
        return carry, jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1, *a.shape[2:]), b]), stats, last_stats)

    def _work(
        self,
        weights: PyTree,
        piece: Array,
        by_layer: PyTree,
        by_row: PyTree,
        x: Array,
        repeat: Array,
        microbatch: Array,
    ) -> tuple[Array, PyTree]:
        """Run an item. Inputs are sliced inside this function, so that `jax.checkpoint` does not save the slices."""
        return self.stage(_at(weights, piece), _at(by_layer, repeat), _at(by_row, microbatch), x, microbatch)

    def _without_bubbles(self, leaf: Array, start: Array) -> Array:
        """Reorder `[iterations, layers, ...]` to `[repeats, layers, microbatches, ...]`, without bubbles."""
        valid = lax.dynamic_slice_in_dim(leaf, start, self.pipeline.items)
        return jnp.moveaxis(valid.reshape(self.pipeline.repeats, -1, *leaf.shape[1:]), 1, 2)


@dataclasses.dataclass(frozen=True)
class _BatchTransfer:
    """Transfer of a batch to the stages, as `[stages, microbatches, ...]`, and back.

    **Arguments:**

    - `microbatches`: number of microbatches.
    - `batch_spec`: `PartitionSpec` of the batch outside of the pipeline.
    - `microbatch_spec`: `PartitionSpec` of a microbatch on a stage.
    - `uses_collectives`: whether `stage` splits the batch outside of the pipeline and all other axes are split in the
        same way on both sides, so that a single collective can transfer the batch.
    """

    layout: Layout
    microbatches: int
    batch_spec: PartitionSpec
    microbatch_spec: PartitionSpec
    uses_collectives: bool

    @classmethod
    def create(cls, layout: Layout, x: Array, microbatches: int) -> "_BatchTransfer":
        axis_names = "batch length embed" if x.ndim == 3 else "batch length streams embed"
        batch_spec = layout.activation_spec(axis_names, x.shape)
        microbatch_shape = (x.shape[0] // microbatches, *x.shape[1:])
        microbatch_spec = layout.without_stage().activation_spec(axis_names, microbatch_shape)
        uses_collectives = (
            names_of(batch_spec[0]) == (*names_of(microbatch_spec[0]), AXIS) and microbatch_spec[1:] == batch_spec[1:]
        )
        return cls(layout, microbatches, batch_spec, microbatch_spec, uses_collectives)

    def to_stages(self, x: Array) -> Array:
        """Return all microbatches on every stage."""
        if not self.uses_collectives:
            x = jnp.broadcast_to(split_microbatches(x, self.microbatches)[None], self._stages_shape(x))
            return lax.with_sharding_constraint(x, NamedSharding(self.layout.current_mesh, self._stages_spec))

        def gather(x):
            return split_microbatches(lax.all_gather(x, AXIS, tiled=True), self.microbatches)[None]

        return self._shard_map(gather, self.batch_spec, self._stages_spec)(x)

    def from_stages(self, x: Array) -> Array:
        """Return the microbatches of the last stage as a batch."""
        if not self.uses_collectives:
            x = join_microbatches(x[-1])
            return lax.with_sharding_constraint(x, NamedSharding(self.layout.current_mesh, self.batch_spec))

        last = len(x) - 1

        def scatter(x):
            masked = jnp.where(lax.axis_index(AXIS) == last, x[0], 0)
            return lax.psum_scatter(join_microbatches(masked), AXIS, tiled=True)

        return self._shard_map(scatter, self._stages_spec, self.batch_spec)(x)

    def _shard_map(
        self, function: Callable[[Array], Array], in_specs: PartitionSpec, out_specs: PartitionSpec
    ) -> Callable:
        """Map a function over all mesh axes. Over `stage` only, XLA would not split the other axes in collectives."""
        return jax.shard_map(
            function,
            mesh=self.layout.current_mesh,
            axis_names=self.layout.unmapped_axes,
            in_specs=in_specs,
            out_specs=out_specs,
        )

    def _stages_shape(self, x: Array) -> tuple[int, ...]:
        return self.layout.sizes[AXIS], self.microbatches, x.shape[0] // self.microbatches, *x.shape[1:]

    @property
    def _stages_spec(self) -> PartitionSpec:
        return PartitionSpec(AXIS, None, *self.microbatch_spec)


def _exchange_pieces(weights: PyTree, repeats: int, stages: int) -> PyTree:
    """Return the pieces that a stage runs, `[repeats, layers, ...]`, from the layers that it stores.

    Stage s stores the pieces `repeats * s, repeats * s + 1, …` and runs the pieces `s, s + stages, …`. In each of
    `repeats` rounds, every stage sends a piece and receives a piece. `repeats * s mod stages` is equal for stages at a
    distance of `stages / gcd(repeats, stages)`, so these stages send their pieces in a different order.
    """
    stored = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), weights)
    if repeats == 1:
        return stored
    stage_index = lax.axis_index(AXIS)
    distance = stages // math.gcd(repeats, stages)
    received = []
    arrival_rounds = [[0] * repeats for _ in range(stages)]  # of each stage's pieces, in order
    for round_index in range(repeats):
        sent = [(round_index + source // distance) % repeats for source in range(stages)]
        pieces = [source * repeats + number for source, number in enumerate(sent)]
        for piece in pieces:
            arrival_rounds[piece % stages][piece // stages] = round_index
        pairs = [(source, piece % stages) for source, piece in enumerate(pieces)]
        outgoing = _at(stored, jnp.asarray(sent, jnp.int32)[stage_index])
        received.append(jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, AXIS, pairs), outgoing))
    order = jnp.asarray(arrival_rounds, jnp.int32)[stage_index]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves)[order], *received)


def _drop_stage_axis(tree: PyTree) -> PyTree:
    """Return a stage's shard of arrays `[repeats, stages, ...]` without the axis `stages`, whose size is 1."""
    return jax.tree.map(lambda leaf: leaf[:, 0], tree)


def _at(tree: PyTree, index: Array) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)
