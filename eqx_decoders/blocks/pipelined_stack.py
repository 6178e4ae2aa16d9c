"""Run a stack of scanned layers, part of which may run as a pipeline over the mesh axis `stage`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key, PyTree

from eqx_decoders.blocks.block import Block
from eqx_decoders.blocks.layer_inputs import LayerInputs
from eqx_decoders.blocks.stack import ScannedLayers, ScanOutput
from eqx_decoders.blocks.stats import BlockStats, join_parts
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.axes import Axes, axes, path_name
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import cut_rows, run_pipeline
from eqx_decoders.sharding.pipeline_config import AXIS


class StackOutput(NamedTuple):
    """Result of a stack: the residual stream, and the cache entries and statistics of each `ScannedLayers`."""

    x: Array
    entries: tuple[tuple[dict[str, Any], ...], ...]
    stats: list[tuple[BlockStats, ...]]


def run_stack(
    stack: tuple[ScannedLayers, ...],
    x: Float[Array, "batch length *streams embed"],
    ctx: ForwardContext,
    caches: tuple[Any, ...] | None,
    *,
    keys: Key[Array, "layers"] | None,
    by_layer: dict[str, Array],
) -> StackOutput:
    """Run all layers of a stack.

    **Arguments:**

    - `caches`: the caches of each `ScannedLayers`, or None.
    - `keys`: one key per layer, for dropout.
    - `by_layer`: see `LayerInputs`.
    """
    entries, stats, begin, layer_inputs = [], [], 0, LayerInputs(by_layer)
    for index, layers in enumerate(stack):
        unit = tuple(block.config for block in layers.unit)
        end = begin + layers.repeats * len(unit)
        these_keys = None if keys is None else keys[begin:end]
        inputs = layer_inputs.cut(unit, layers.repeats)
        these_caches = None if caches is None else caches[index]
        output = run_scanned_layers(layers, x, ctx, these_caches, keys=these_keys, inputs=inputs)
        x, ctx, begin = output.x, dataclasses.replace(ctx, shared=output.shared), end
        entries.append(output.entries)
        stats.append(output.stats)
    layer_inputs.finish()
    return StackOutput(x, tuple(entries), stats)


def run_scanned_layers(
    layers: ScannedLayers,
    x: Float[Array, "batch length *streams embed"],
    ctx: ForwardContext,
    caches: tuple[dict[str, Any], ...] | None = None,
    *,
    keys: Key[Array, "layers"] | None = None,
    inputs: tuple[dict[str, Array], ...] = (),
) -> ScanOutput:
    """Run scanned layers. With a pipeline, as many of them as fill all stages run as a pipeline."""
    count = 0 if caches is not None else piped_repeats(layers, ctx)
    if count == 0:
        return layers(x, ctx, caches, keys=keys, inputs=inputs)
    keys = None if keys is None else keys.reshape(layers.repeats, -1)
    arrays, static = eqx.partition(layers.unit, eqx.is_array)

    def part(begin: int, end: int) -> tuple[PyTree, Any, Any]:
        return jax.tree.map(lambda leaf: leaf[begin:end], (arrays, keys, inputs))

    x, stats = _piped(static, layers, *part(0, count), x, ctx)
    rest = layers.repeats - count
    entries = ({},) * len(layers.unit)
    if rest == 0:
        return ScanOutput(x, entries, stats, ctx.shared)
    weights, keys, inputs = part(count, layers.repeats)
    after = ScannedLayers(unit=eqx.combine(weights, static), repeats=rest)
    out = after(x, ctx, keys=None if keys is None else keys.reshape(-1), inputs=inputs)
    stats = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), stats, out.stats)
    return ScanOutput(out.x, entries, stats, out.shared)


def piped_repeats(layers: ScannedLayers, ctx: ForwardContext) -> int:
    """Return the number of repeats of the unit that run as a pipeline.

    It is 0 if later layers use what these layers share.
    """
    setup, stages = ctx.execution.pipeline, ctx.execution.layout.sizes.get(AXIS, 1)
    if setup is None or stages == 1 or any(block.config.lent_names for block in layers.unit):
        return 0
    return layers.repeats - layers.repeats % (stages * setup.repeats)


def check_pipeline(stack: tuple[ScannedLayers, ...], ctx: ForwardContext) -> None:
    """Raise ConfigError if there is a pipeline, but no layers that could run in it."""
    setup, stages = ctx.execution.pipeline, ctx.execution.layout.sizes.get(AXIS, 1)
    if setup is None or stages == 1:
        return
    text = f"Layout.stage={stages} x Pipeline.repeats={setup.repeats} needs {stages * setup.repeats} equal layers, or"
    counts = ", ".join(str(layers.repeats) for layers in stack)
    rule = f"{text} repeats of some layers, in a row; this model has {counts}"
    check(any(piped_repeats(layers, ctx) for layers in stack), f"{rule}. Choose fewer, or leave the pipeline out.")


def _piped(
    static: tuple[Block, ...],
    layers: ScannedLayers,
    weights: PyTree,
    keys: Any,
    inputs: Any,
    x: Array,
    ctx: ForwardContext,
) -> tuple[Array, tuple[BlockStats, ...]]:
    """Return the stream after the layers with these `weights`, and their statistics."""
    execution = ctx.execution
    setup, layout = execution.pipeline, execution.layout
    assert setup is not None
    stages, count = layout.sizes[AXIS], setup.microbatches
    setup.check_fits(x.shape[0], stages)
    per_stage = len(jax.tree.leaves(weights)[0]) // (stages * setup.repeats)
    # with one layer in a stage, the stage's checkpoint is the layer's
    remat, stage_layout = execution.remat if per_stage * len(static) > 1 else None, layout.without_stage()
    inner = dataclasses.replace(execution, remat=remat, layout=stage_layout, pipeline=None)
    rows, others = eqx.partition(dataclasses.replace(ctx, layer_inputs={}, execution=inner), eqx.is_array)

    def stage(weights, by_layer, rows, x, number):
        if setup.gather != "iteration":
            weights = _scattering(functools.partial(_split, stage_layout, stage_layout.weight_spec, layers), weights)
        keys, inputs = by_layer
        if keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), number)
        inputs = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, 1, keepdims=False), inputs)
        piece = ScannedLayers(unit=eqx.combine(weights, static), repeats=per_stage)
        out = piece(x, eqx.combine(rows, others), keys=keys, inputs=inputs)
        return out.x, out.stats

    cut = jax.vmap(lambda leaf: cut_rows(leaf, count))
    x, stats = run_pipeline(
        stage,
        weights,
        (keys, jax.tree.map(cut, inputs)),
        jax.tree.map(lambda leaf: cut_rows(leaf, count), rows),
        x,
        pipeline=setup,
        layout=layout,
        contiguous=_contiguous(layers, per_stage * stages * setup.repeats, layout),
        gathered=functools.partial(_split, stage_layout, stage_layout.used_spec, layers),
        policy=None if (outer := get_remat(execution.remat)) is None else outer.policy(),
    )
    return x, tuple(join_parts(stat) for stat in stats)


def _contiguous(layers: ScannedLayers, repeats: int, layout: Layout) -> bool:
    """Return whether `stage` splits the weights on their axis of layers, and all repeats run as a pipeline."""
    return repeats == layers.repeats and layout.weight_spec("layers", (repeats,))[0] is not None


def _split(layout: Layout, spec_of: Callable[[Axes], PartitionSpec], layers: ScannedLayers, weights: PyTree) -> PyTree:
    """Shard slices of the weights by `spec_of` their axes; leading axes that a slice adds are replicated."""
    words = axes(layers)

    def one(path, leaf):
        inner = spec_of(words[f"unit.{path_name(path)}"])[1:]
        spec = PartitionSpec(*(None,) * (leaf.ndim - len(inner)), *inner)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(layout.mesh_here, spec))

    return jax.tree_util.tree_map_with_path(one, weights)


def _scattering(split: Callable[[PyTree], PyTree], weights: PyTree) -> PyTree:
    """Return gathered weights unchanged; their gradients are split before they are summed."""

    @jax.custom_vjp
    def same(weights):
        return weights

    same.defvjp(lambda weights: (weights, None), lambda _, gradients: (split(gradients),))
    return same(weights)
