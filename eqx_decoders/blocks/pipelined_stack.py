"""Run scanned layers with pipeline parallelism over the mesh axis `stage`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Key, PyTree

from eqx_decoders.blocks.block import Block
from eqx_decoders.blocks.stack import ScannedLayers, ScanOutput
from eqx_decoders.blocks.stats import BlockStats, join_parts
from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import check
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.axes import Axes, axes, path_name
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import run_pipeline, split_microbatches
from eqx_decoders.sharding.pipeline_config import AXIS


def run_in_pipeline(
    layers: ScannedLayers,
    x: Float[Array, "batch length *streams embed"],
    ctx: ForwardContext,
    caches: None = None,
    *,
    keys: Key[Array, "layers"] | None = None,
    inputs: tuple[dict[str, Array], ...] | None = None,
) -> ScanOutput:
    """Run scanned layers in the pipeline `Execution.pipeline`; the arguments are those of `ScannedLayers.__call__`.

    The pipeline runs the largest number of repeats that fills all stages equally; the remaining repeats run after it.
    A pipeline does not support caches.
    """
    count = pipelined_repeats(layers, ctx)
    if count == 0:
        return layers(x, ctx, keys=keys, inputs=inputs)
    keys = None if keys is None else keys.reshape(layers.repeats, -1)
    arrays, static = eqx.partition(layers.unit, eqx.is_array)

    def slice_repeats(start: int, end: int) -> tuple[PyTree, Any, Any]:
        return jax.tree.map(lambda leaf: leaf[start:end], (arrays, keys, inputs))

    x, stats = _run_pipelined(static, layers, *slice_repeats(0, count), x, ctx)
    remaining = layers.repeats - count
    entries = ({},) * len(layers.unit)
    if remaining == 0:
        return ScanOutput(x, entries, stats, ctx.shared)
    weights, keys, inputs = slice_repeats(count, layers.repeats)
    remaining_layers = ScannedLayers(unit=eqx.combine(weights, static), repeats=remaining)
    out = remaining_layers(x, ctx, keys=None if keys is None else keys.reshape(-1), inputs=inputs)
    stats = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), stats, out.stats)
    return ScanOutput(out.x, entries, stats, out.shared)


def pipelined_repeats(layers: ScannedLayers, ctx: ForwardContext) -> int:
    """Return the number of repeats of the unit that run as a pipeline.

    It is 0 if these layers share values with later layers.
    """
    pipeline = ctx.execution.pipeline
    stages = ctx.execution.layout.sizes.get(AXIS, 1)
    if pipeline is None or stages == 1 or any(block.config.shared_names for block in layers.unit):
        return 0
    return layers.repeats - layers.repeats % (stages * pipeline.repeats)


def check_pipeline(stack: tuple[ScannedLayers, ...], ctx: ForwardContext) -> None:
    """Raise ConfigError if a pipeline is requested, but no layers can run in it."""
    pipeline = ctx.execution.pipeline
    stages = ctx.execution.layout.sizes.get(AXIS, 1)
    if pipeline is None or stages == 1:
        return
    check(
        any(pipelined_repeats(layers, ctx) for layers in stack),
        f"Layout.stage={stages} x Pipeline.repeats={pipeline.repeats} needs at least {stages * pipeline.repeats} "
        "consecutive repeats of equal layers (or of a cycle of layers) that do not share values with later layers, but "
        f"the runs of layers of this model have {', '.join(str(layers.repeats) for layers in stack)} repeats. "
        "Choose fewer stages or repeats, or leave the pipeline out.",
    )


def _run_pipelined(
    static: tuple[Block, ...],
    layers: ScannedLayers,
    weights: PyTree,
    keys: Any,
    inputs: Any,
    x: Array,
    ctx: ForwardContext,
) -> tuple[Array, tuple[BlockStats, ...]]:
    """Run the pipeline of the layers with these `weights`. Returns the residual stream after it, and statistics."""
    execution = ctx.execution
    pipeline = execution.pipeline
    layout = execution.layout
    assert pipeline is not None
    stages = layout.sizes[AXIS]
    microbatches = pipeline.microbatches
    pipeline.check_fits(x.shape[0], stages)
    repeats_per_stage = len(jax.tree.leaves(weights)[0]) // (stages * pipeline.repeats)
    # a stage of a single layer needs no checkpoint for the layer, because `run_pipeline` checkpoints the stage
    stage_remat = execution.remat if repeats_per_stage * len(static) > 1 else None
    stage_layout = layout.without_stage()
    stage_execution = dataclasses.replace(execution, remat=stage_remat, layout=stage_layout, pipeline=None)
    stage_ctx = dataclasses.replace(ctx, layer_inputs={}, execution=stage_execution)
    ctx_arrays, ctx_static = eqx.partition(stage_ctx, eqx.is_array)

    def stage(weights, by_layer, ctx_arrays, x, microbatch):
        if pipeline.gather != "iteration":
            split = functools.partial(_split, stage_layout, stage_layout.weight_spec, layers)
            weights = _split_gradients(split, weights)
        keys, inputs = by_layer
        if keys is not None:
            keys = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), microbatch)
        inputs = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, microbatch, 1, keepdims=False), inputs)
        stage_layers = ScannedLayers(unit=eqx.combine(weights, static), repeats=repeats_per_stage)
        out = stage_layers(x, eqx.combine(ctx_arrays, ctx_static), keys=keys, inputs=inputs)
        return out.x, out.stats

    outer_remat = get_remat(execution.remat)
    cut_layers = jax.vmap(lambda leaf: split_microbatches(leaf, microbatches))
    x, stats = run_pipeline(
        stage,
        weights,
        (keys, jax.tree.map(cut_layers, inputs)),
        jax.tree.map(lambda leaf: split_microbatches(leaf, microbatches), ctx_arrays),
        x,
        pipeline=pipeline,
        layout=layout,
        contiguous=_contiguous(layers, repeats_per_stage * stages * pipeline.repeats, layout),
        gathered=functools.partial(_split, stage_layout, stage_layout.gathered_spec, layers),
        policy=None if outer_remat is None else outer_remat.policy(),
    )
    return x, tuple(join_parts(block_stats) for block_stats in stats)


def _contiguous(layers: ScannedLayers, repeats: int, layout: Layout) -> bool:
    """Return whether all repeats are pipelined, and `stage` shards the `layers` axis of their weights."""
    return repeats == layers.repeats and layout.weight_spec("layers", (repeats,))[0] is not None


def _split(layout: Layout, spec_of: Callable[[Axes], PartitionSpec], layers: ScannedLayers, weights: PyTree) -> PyTree:
    """Constrain the sharding of weights of single layers or of several layers to `spec_of(axis names)`.

    Leading axes (layers, repeats) are replicated.
    """
    axis_names = axes(layers)

    def constrain(path, leaf):
        layer_spec = spec_of(axis_names[f"unit.{path_name(path)}"])[1:]
        spec = PartitionSpec(*(None,) * (leaf.ndim - len(layer_spec)), *layer_spec)
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(layout.current_mesh, spec))

    return jax.tree_util.tree_map_with_path(constrain, weights)


def _split_gradients(split: Callable[[PyTree], PyTree], weights: PyTree) -> PyTree:
    """Return gathered weights unchanged, and shard their gradients with `split` before they are summed."""

    @jax.custom_vjp
    def identity(weights):
        return weights

    identity.defvjp(lambda weights: (weights, None), lambda _, gradients: (split(gradients),))
    return identity(weights)
