"""A pipeline over the mesh axis `stage`: microbatches pass from stage to stage, each with some of the layers.

The schedule is circular (Narayanan et al. 2021, praxis, MaxText): with `repeats` a stage has several pieces of the
stack, and each microbatch passes all stages so many times. In iteration i stage s works on item `n = i - lag * s`:
microbatch `n mod microbatches` in repeat `n div microbatches`. Iterations without an item (n < 0 or beyond the last)
are bubbles.
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


STAGE_INPUT = "stage_input"

# `stage(weights, by_layer, by_row, x, microbatch)` runs a piece of the stack: the stream after it, and statistics.
Stage = Callable[[PyTree, PyTree, PyTree, Array, Array], tuple[Array, PyTree]]


def cut_rows(x: Shaped[Array, "batch ..."], count: int) -> Shaped[Array, "microbatches rows ..."]:
    """Cut arrays into microbatches: number m has rows m, m + count, …, equally many of every device."""
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)


def join_rows(x: Shaped[Array, "microbatches rows ..."]) -> Shaped[Array, "batch ..."]:
    """Join the microbatches of `cut_rows` to a batch."""
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
    """Run all layers, one piece after the other, over the stages of a mesh.

    Returns the stream, and statistics `[layers, microbatches, ...]`.

    **Arguments:**

    - `stage`: runs a piece of the stack: `stage(weights, by_layer, by_row, x, microbatch)`, the first two with the
        piece's layers in front, the others those of the microbatch with this number.
    - `weights`, `by_layer`: arrays with all layers in front, so many that they fill all pieces.
    - `by_row`: arrays cut by `cut_rows`.
    - `contiguous`: whether the layers of weights are stored split over `stage`.
    - `gathered`: weights as they come, with all that `fsdp` and such split in one place.
    - `policy`: of `jax.checkpoint` around `stage`; None for no checkpoint.
    """
    stages = layout.sizes[AXIS]
    pipeline.check_fits(x.shape[0], stages)
    border = _Border.of(layout, x, pipeline.microbatches)

    def cut(leaf: Array) -> Array:
        pieces = pipeline.repeats * stages
        return leaf.reshape(pipeline.repeats, stages, leaf.shape[0] // pieces, *leaf.shape[1:])

    def on_stage(weights, by_layer, by_row, x):
        along_stage = _own_pieces(weights, pipeline.repeats, stages) if contiguous else _first(weights)
        by_row, queue = jax.tree.map(lambda leaf: leaf[0], (by_row, x))
        schedule = _Schedule(stage, pipeline, stages, gathered, policy)
        y, stats = schedule.run(along_stage, _first(by_layer), by_row, queue)
        return y[None], jax.tree.map(lambda leaf: leaf[:, None], stats)

    along_stage, split = PartitionSpec(AXIS), PartitionSpec(None, AXIS)
    run = jax.shard_map(
        on_stage,
        mesh=layout.mesh_here,
        axis_names={AXIS},
        in_specs=(along_stage if contiguous else split, split, along_stage, along_stage),
        out_specs=(along_stage, split),
        check_vma=False,  # layers add values that differ among stages to zeros that do not
    )
    # a copy for each stage: gradients of shared arrays would be summed inside, where XLA on CPU can't in 16 bits
    by_row = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (stages, *leaf.shape)), by_row)
    weights, by_layer = weights if contiguous else jax.tree.map(cut, weights), jax.tree.map(cut, by_layer)
    y, stats = run(weights, by_layer, by_row, border.enter(x))
    return border.leave(y), jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), stats)


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """Iterations of one stage, inside of `jax.shard_map`."""

    stage: Stage
    pipeline: Pipeline
    stages: int
    gathered: Callable[[PyTree], PyTree]
    policy: Callable[..., bool] | None

    def run(self, weights: PyTree, by_layer: PyTree, by_row: PyTree, queue: Array) -> tuple[Array, PyTree]:
        """Return the last stage's output for all microbatches; `queue` is the first stage's input.

        Weights and `by_layer` are `[repeats, layers, ...]`, statistics `[repeats, layers, microbatches, ...]`.
        """
        setup, me = self.pipeline, lax.axis_index(AXIS)
        last, lag, items, count = self.stages - 1, setup.lag, setup.items, setup.microbatches
        # the last stage's results come back to the first one only if there is something left to do
        steps = [(s, s + 1) for s in range(last)] + [(last, 0)] * (setup.repeats > 1)
        work = self._work if self.policy is None else jax.checkpoint(self._work, policy=self.policy, prevent_cse=False)

        def iterate(pieces, by_layer, by_row, carry, i):
            """Run iterations; `pieces` are weights and the repeat of the first of them."""
            (weights, first), (queue, received, before) = pieces, carry
            item = jnp.maximum(i - lag * me, 0)
            repeat = jnp.minimum(item // count, setup.repeats - 1)
            x = checkpoint_name(jnp.where(me == 0, queue[i % count], received), STAGE_INPUT)
            y, stats = work(weights, jnp.maximum(repeat - first, 0), by_layer, by_row, x, repeat, item % count)
            arrived = lax.ppermute(before if setup.delay else y, AXIS, steps)
            # the last stage stores its own outputs, the first one those that have come back
            done = i - lag * last
            number = jnp.where(me == last, done, done - (lag - 1))
            keeps = (number >= 0) & ((me == last) | ((me == 0) & (setup.repeats > 1)))
            stored = jnp.where(keeps, jnp.where(me == last, y, arrived), queue[number % count])
            queue = lax.dynamic_update_index_in_dim(queue, stored, number % count, 0)
            return (queue, arrived, y if setup.delay else before), stats

        def loop(pieces, by_layer, by_row, carry, begin, length):
            numbers = begin + jnp.arange(length, dtype=jnp.int32)
            return lax.scan(functools.partial(iterate, pieces, by_layer, by_row), carry, numbers)

        # before anything has arrived a stage reads a microbatch, too: with zeros some gradients are not finite
        carry = queue, queue[0], queue[0] if setup.delay else None
        if setup.gather == "repeat":
            carry, stats = self._by_repeat(loop, weights, by_layer, by_row, carry)
        else:
            weights = self.gathered(weights) if setup.gather == "once" else weights
            carry, stats = loop((weights, 0), by_layer, by_row, carry, 0, items + setup.bubbles(self.stages))
        return carry[0], jax.tree.map(lambda leaf: self._of_items(leaf, lag * me), stats)

    def _by_repeat(
        self, loop: Callable[..., Any], weights: PyTree, by_layer: PyTree, by_row: PyTree, carry: Any
    ) -> tuple[Any, PyTree]:
        """Run the iterations of one repeat after the other; two pieces of weights are gathered before each.

        The later stages are in the repeat before for a while. Pieces are gathered again for the gradient.
        """
        setup = self.pipeline

        def part(weights, by_layer, by_row, carry, repeat, length):
            first = jnp.maximum(repeat - 1, 0)
            both = jnp.stack([first, jnp.minimum(first + 1, setup.repeats - 1)])
            pieces = self.gathered(jax.tree.map(lambda leaf: leaf[both], weights))
            return loop((pieces, first), by_layer, by_row, carry, repeat * setup.microbatches, length)

        if self.policy is not None:
            policy, inputs = self.policy, jax.checkpoint_policies.save_only_these_names(STAGE_INPUT)
            part_policy = lambda *args, **params: inputs(*args, **params) or policy(*args, **params)  # noqa: E731
            part = jax.checkpoint(part, policy=part_policy, prevent_cse=False, static_argnums=5)

        def step(carry, repeat):
            return part(weights, by_layer, by_row, carry, repeat, setup.microbatches)

        repeats = jnp.arange(setup.repeats, dtype=jnp.int32)
        carry, stats = lax.scan(step, carry, repeats)
        end = jnp.asarray(setup.repeats, jnp.int32)
        carry, rest = part(weights, by_layer, by_row, carry, end, setup.bubbles(self.stages))
        return carry, jax.tree.map(lambda a, b: jnp.concatenate([a.reshape(-1, *a.shape[2:]), b]), stats, rest)

    def _work(
        self, weights: PyTree, index: Array, by_layer: PyTree, by_row: PyTree, x: Array, repeat: Array, number: Array
    ) -> tuple[Array, PyTree]:
        """Run one item; its inputs are sliced here, so that none of them is saved for the gradient."""
        piece, layers, rows = _at(weights, index), _at(by_layer, repeat), _at(by_row, number)
        return self.stage(piece, layers, rows, x, number)

    def _of_items(self, leaf: Array, begin: Array) -> Array:
        """Reorder `[iterations, layers, ...]` to `[repeats, layers, microbatches, ...]`, without bubbles."""
        valid = lax.dynamic_slice_in_dim(leaf, begin, self.pipeline.items)
        return jnp.moveaxis(valid.reshape(self.pipeline.repeats, -1, *leaf.shape[1:]), 1, 2)


@dataclasses.dataclass(frozen=True)
class _Border:
    """Conversion of a batch to `[stages, microbatches, ...]` on the stages, and back.

    **Arguments:**

    - `count`: microbatches.
    - `outside`, `inside`: how the batch is split there, and a microbatch here.
    - `shared`: whether stages have rows of their own outside, and these pass the border by one collective.
    """

    layout: Layout
    count: int
    outside: PartitionSpec
    inside: PartitionSpec
    shared: bool

    @classmethod
    def of(cls, layout: Layout, x: Array, count: int) -> "_Border":
        words = "batch length embed" if x.ndim == 3 else "batch length streams embed"
        outside = layout.activation_spec(words, x.shape)
        inside = layout.without_stage().activation_spec(words, (x.shape[0] // count, *x.shape[1:]))
        shared = names_of(outside[0]) == (*names_of(inside[0]), AXIS) and inside[1:] == outside[1:]
        return cls(layout, count, outside, inside, shared)

    def enter(self, x: Array) -> Array:
        """Return all microbatches on every stage."""
        if not self.shared:
            x = jnp.broadcast_to(cut_rows(x, self.count)[None], self._shape(x))
            return lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh_here, self._spec))

        def spread(x):
            return cut_rows(lax.all_gather(x, AXIS, tiled=True), self.count)[None]

        return self._mapped(spread, self.outside, self._spec)(x)

    def leave(self, x: Array) -> Array:
        """Return the last stage's microbatches as a batch."""
        if not self.shared:
            x = join_rows(x[-1])
            return lax.with_sharding_constraint(x, NamedSharding(self.layout.mesh_here, self.outside))

        last = len(x) - 1

        def share(x):
            mine = jnp.where(lax.axis_index(AXIS) == last, x[0], 0)
            return lax.psum_scatter(join_rows(mine), AXIS, tiled=True)

        return self._mapped(share, self._spec, self.outside)(x)

    def _mapped(self, run: Callable[[Array], Array], before: PartitionSpec, after: PartitionSpec) -> Callable:
        """Map a function over all mesh axes; with `stage` alone XLA would not split the other dimensions of
        collectives.
        """
        return jax.shard_map(
            run,
            mesh=self.layout.mesh_here,
            axis_names=self.layout.axes_here,
            in_specs=before,
            out_specs=after,
        )

    def _shape(self, x: Array) -> tuple[int, ...]:
        return self.layout.sizes[AXIS], self.count, x.shape[0] // self.count, *x.shape[1:]

    @property
    def _spec(self) -> PartitionSpec:
        return PartitionSpec(AXIS, None, *self.inside)


def _own_pieces(weights: PyTree, repeats: int, stages: int) -> PyTree:
    """Return the pieces that a stage runs, `[repeats, layers, ...]`, from its part of the stored layers.

    Stage s has pieces `s * repeats, …` and runs pieces `s, s + stages, …`. In round t each stage sends one and gets
    one: as `repeats * s` has the same remainder for stages at a distance of `stages / gcd`, these take turns.
    """
    cut = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), weights)
    if repeats == 1:
        return cut
    me, distance = lax.axis_index(AXIS), stages // math.gcd(repeats, stages)
    arrived, order = [], [[0] * repeats for _ in range(stages)]
    for turn in range(repeats):
        sent = [(turn + source // distance) % repeats for source in range(stages)]
        pieces = [source * repeats + number for source, number in enumerate(sent)]
        for piece in pieces:
            order[piece % stages][piece // stages] = turn
        ways = [(source, piece % stages) for source, piece in enumerate(pieces)]
        outgoing = _at(cut, jnp.asarray(sent, jnp.int32)[me])
        arrived.append(jax.tree.map(lambda leaf, ways=ways: lax.ppermute(leaf, AXIS, ways), outgoing))
    turns = jnp.asarray(order, jnp.int32)[me]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves)[turns], *arrived)


def _first(tree: PyTree) -> PyTree:
    """Return a stage's part of arrays `[repeats, stages, ...]`."""
    return jax.tree.map(lambda leaf: leaf[:, 0], tree)


def _at(tree: PyTree, index: Array) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)
