"""The stack of blocks: `run_stack` runs one `ScannedLayers` after another, each with one `jax.lax.scan`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from eqx_decoders.blocks.batch_overlap import cut_batch, join_batch, run_staggered
from eqx_decoders.blocks.block import Block, BlockConfig
from eqx_decoders.blocks.layer_inputs import LayerInputQueue
from eqx_decoders.blocks.stats import BlockStats, join_parts
from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.cache.base import pasts, slices, stacked
from eqx_decoders.remat import get_remat
from eqx_decoders.sharding.explicit import at_layer
from eqx_decoders.sharding.offload import to_device


class StackOutput(NamedTuple):
    """Result of a stack: the residual stream, and the cache entries and statistics of each `ScannedLayers`."""

    x: Array
    entries: tuple[tuple[dict[str, Any], ...], ...]
    stats: list[tuple[BlockStats, ...]]


def run_stack(
    stack: "tuple[ScannedLayers, ...]",
    x: Float[Array, "batch length *streams embed"],
    ctx: ForwardContext,
    caches: tuple[Any, ...] | None,
    *,
    keys: Key[Array, "layers"] | None,
    by_layer: dict[str, Array],
    run_layers: Callable[..., "ScanOutput"],
) -> StackOutput:
    """Run all layers of a stack.

    **Arguments:**

    - `caches`: the caches of each `ScannedLayers`, or None for a pass without a cache.
    - `keys`: one key per layer, for dropout.
    - `by_layer`: inputs of individual layers; see `Inputs.by_layer`.
    - `run_layers`: `ScannedLayers.__call__`, or a function with the same arguments (`run_in_pipeline`).
    """
    entries, stats = [], []
    start = 0
    input_queue = LayerInputQueue(by_layer)
    for index, layers in enumerate(stack):
        unit = tuple(block.config for block in layers.unit)
        end = start + layers.repeats * len(unit)
        output = run_layers(
            layers,
            x,
            ctx,
            None if caches is None else caches[index],
            keys=None if keys is None else keys[start:end],
            inputs=input_queue.next_inputs(unit, layers.repeats),
        )
        x = output.x
        ctx = dataclasses.replace(ctx, shared=output.shared)
        start = end
        entries.append(output.entries)
        stats.append(output.stats)
    input_queue.check_empty()
    return StackOutput(x, tuple(entries), stats)


class ScannedLayers(eqx.Module):
    """`repeats` copies of the blocks in `unit`. Weights are stacked on a leading `layers` axis, and run by one scan.

    Use `ScannedLayers.build` to create the arrays, and `eqx.tree_at` to edit them: constructors of layers check shapes
    without a `layers` axis.
    """

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    unit: tuple[Block, ...]
    repeats: int = eqx.field(static=True)

    @classmethod
    def build(
        cls, unit: tuple[BlockConfig, ...], embed_dim: int, *, keys: Key[Array, "layers"], first_layer: int = 0
    ) -> "ScannedLayers":
        """Return new layers.

        `keys` has one key per layer, `repeats * len(unit)` keys in total. `first_layer` is the index of the first of
        these layers in the decoder.

        For each distinct block of the unit, an outer loop runs over the repeats, and an inner loop creates the copies
        of the block in one unit. The program therefore contains few random-number operations, which take most of its
        compile time, and needs temporary memory for one unit only. A single loop over all blocks would take much longer
        to compile, because the compile time of a loop grows faster than its number of random-number operations
        (jax 0.12).
        """
        layer_indices = first_layer + jnp.arange(len(keys)).reshape(-1, len(unit))
        keys = keys.reshape(layer_indices.shape)
        blocks: dict[int, Block] = {}
        for config in dict.fromkeys(unit):
            indices = [index for index, other in enumerate(unit) if other == config]
            build = functools.partial(_build_block, config, embed_dim)

            def build_copies(
                keys: Key[Array, "copies"],
                layer_indices: Int[Array, "copies"],
                build: Callable[..., Block] = build,
                count: int = len(indices),
            ) -> tuple[Block, ...]:
                copies = map_layers(build, keys, layer_indices)
                return tuple(at_layer(copies, copy) for copy in range(count))

            columns = jnp.array(indices)
            built = map_layers(build_copies, keys[:, columns], layer_indices[:, columns])
            blocks.update(zip(indices, built, strict=True))
        return cls(unit=tuple(blocks[index] for index in range(len(unit))), repeats=len(layer_indices))

    def unstacked(self) -> tuple[Block, ...]:
        """Return a tuple of the blocks in the order of the layers, with unstacked weights."""
        return tuple(block for index in range(self.repeats) for block in at_layer(self.unit, index))

    def __call__(
        self,
        x: Float[Array, "batch length *streams embed"],
        ctx: ForwardContext,
        caches: tuple[dict[str, Any], ...] | None = None,
        *,
        keys: Key[Array, "layers"] | None = None,
        inputs: tuple[dict[str, Array], ...] | None = None,
    ) -> "ScanOutput":
        """Run all layers.

        **Arguments:**

        - `caches`: for each block of the unit the caches of its layers by name. None: no cached values are read, and no
            new cache entries are returned.
        - `keys`: one key per layer, for dropout.
        - `inputs`: for each block of the unit the inputs of its individual layers, with a leading axis of `repeats`.
        """
        unit_caches = ({},) * len(self.unit) if caches is None else caches
        inputs = ({},) * len(self.unit) if inputs is None else inputs
        keys = None if keys is None else keys.reshape(self.repeats, len(self.unit))
        scanned = ctx.execution.scan and self.repeats > 1
        overlap = caches is None and ctx.execution.batch_split > 1
        run_block = self._block_call(ctx, scanned, overlap, trains=caches is None)
        weights, static = eqx.partition(self.unit, eqx.is_array)
        cache_slices = None if caches is None or ctx.cache_is_empty else slices(unit_caches)
        slice_in_step = scanned and caches is not None

        # only shared values that are replaced here are carried, because a scan saves its carry for the gradient
        replaced = {name for block in self.unit for name in block.config.shared_names if name in ctx.shared}

        no_slices = (None,) * len(self.unit)
        stacked_arrays = tuple(zip(weights, no_slices if cache_slices is None else cache_slices, strict=True))

        def step(carry, repeat):
            x, carried_values = carry
            index_or_arrays, keys, inputs = repeat
            shared = ctx.shared | carried_values
            entries, stats = [], []
            for position, block in enumerate(static):
                block_ctx = dataclasses.replace(ctx, shared=shared, layer_inputs=inputs[position])
                if slice_in_step:
                    arrays, cache_slice = _slice_after(x, stacked_arrays[position], index_or_arrays)
                else:
                    arrays, cache_slice = index_or_arrays[position]
                past = None if cache_slice is None else pasts(unit_caches[position], cache_slice)
                key = None if keys is None else keys[position]
                x, block_entries, block_stats = run_block(eqx.combine(arrays, block), x, block_ctx, past, key)
                shared = {name: value for name, value in shared.items() if name != block.config.shortcut_from}
                shared |= block.config.shared_values(past, block_entries)
                entries.append({name: block_entries[name] for name in unit_caches[position]})
                stats.append(block_stats)
            carried_values = {name: shared.get(name, ctx.shared[name]) for name in replaced}
            added = {name: shared[name] for name in shared if name not in ctx.shared}
            return (x, carried_values), (tuple(entries), tuple(stats), added)

        stream: Any = cut_batch(x, ctx.execution) if overlap else x
        carry = stream, {name: ctx.shared[name] for name in replaced}
        repeats = jnp.arange(self.repeats) if slice_in_step else stacked_arrays, keys, inputs
        (stream, carried), entries, stats, added = _over_repeats(
            step, carry, repeats, unit_caches, self.repeats, scanned
        )
        if overlap:
            stream = join_batch(stream)
            stats = tuple(join_parts(block_stats) for block_stats in stats)
        return ScanOutput(stream, entries, stats, ctx.shared | carried | added)

    def _block_call(self, ctx: ForwardContext, scanned: bool, overlap: bool, trains: bool) -> Callable[..., Any]:
        """Return the function that runs one block under the remat policy; with `overlap` it runs parts of a batch."""
        several_blocks = scanned and len(self.unit) > 1
        call = run_staggered if overlap else Block.__call__
        ordered = several_blocks and trains and not overlap
        return checkpointed(call, ctx, prevent_cse=several_blocks or not scanned, ordered=ordered)


class ScanOutput(NamedTuple):
    """Result of `ScannedLayers`.

    **Arguments:**

    - `x`: the residual stream.
    - `entries`, `stats`: new cache entries and statistics for each block of the unit, stacked over the repeats.
    - `shared`: values of these and earlier layers that later layers can use, by name; see `BlockConfig.shared_values`.
    """

    x: Array
    entries: tuple[dict[str, Any], ...]
    stats: tuple[BlockStats, ...]
    shared: dict[str, Any]


def _over_repeats(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, repeats: Any, caches: Any, count: int, scanned: bool
) -> tuple[Any, Any, Any, Any]:
    """Run `step` for all `count` repeats, with `jax.lax.scan` or with a Python loop.

    `repeats` has the inputs of `step` for each repeat, stacked on a leading axis.

    Returns the last carry, the stacked cache entries and statistics, and the shared values added by the last repeat.
    """
    if scanned:
        carry, (entries, stats, added) = jax.lax.scan(step, carry, repeats, length=count)
        return carry, entries, stats, at_layer(added, -1)
    results = []
    for index in range(count):
        carry, result = step(carry, at_layer(repeats, index))
        results.append(result)
    entries, stats, (*_, added) = zip(*results, strict=True)
    return carry, stacked(caches, entries), jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats), added


def _slice_after(x: Array, stacked: Any, index: Array) -> Any:
    """Return layer `index` of a stacked tree, and make XLA slice it only after `x` is computed.

    If the scan sliced the weights, XLA might copy the weights of all blocks of a unit at the start of an iteration. In
    decoding, these copies would need much more memory than the activations.
    """
    index, _ = jax.lax.optimization_barrier((index, x))
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)


def checkpointed(call: Callable[..., Any], ctx: ForwardContext, *, prevent_cse: bool, ordered: bool = False) -> Any:
    """Return a function `(block, x, ctx, past, key)` that runs a block under the remat policy of `ctx`.

    **Arguments:**

    - `call`: `Block.__call__`, or another function with the same arguments.
    - `prevent_cse`: prevent XLA from undoing remat by common-subexpression elimination between the forward and the
        backward pass. Not needed in a scan, because forward and backward pass are separate loops there.
    - `ordered`: make XLA process the blocks in order. Set it for several blocks in the body of one loop.

        Backward pass: the gradient of `x` is returned only after the reduced gradients of the weights. Otherwise XLA
        may postpone the weight gradients of all blocks to the end of the loop body, and keep the inputs of all of them
        (gemma3-12b, six blocks: 38 GB instead of 22 GB).

        Forward pass on a mesh with remat: weights are used only after `x` is computed. Otherwise XLA may all-gather the
        weights of all blocks first, not overlapped with any product. Without remat this barrier is left out, because it
        would keep a copy of the gathered weights.
    """
    remat = get_remat(ctx.execution.remat)
    layout = ctx.execution.layout
    barrier = _gradient_barrier if remat is None or layout.single else jax.lax.optimization_barrier

    def run(block, x, ctx, past, key):
        # inside the checkpoint, so that the backward pass transfers weights from the host again
        block = to_device(block)
        if ordered:
            weights, others = eqx.partition(block, eqx.is_inexact_array)
            weights, x = barrier((weights, x))
            block = eqx.combine(weights, others)
        return call(block, x, ctx, past, key=key)

    if remat is None:
        return run
    return eqx.filter_checkpoint(run, policy=remat.policy(), prevent_cse=prevent_cse)


@jax.custom_vjp
def _gradient_barrier(tree: Any) -> Any:
    """Return the tree unchanged; its gradients become available only all together."""
    return tree


_gradient_barrier.defvjp(lambda tree: (tree, None), lambda _, gradients: (jax.lax.optimization_barrier(gradients),))


def _build_block(config: BlockConfig, embed_dim: int, key: Key[Array, ""], layer: Int[Array, ""]) -> Block:
    return config.build(embed_dim, key=key, layer=layer)


def map_layers(build: Callable[..., Any], *arguments: Array) -> Any:
    """Call `build` for each index of the leading axis of `arguments`, and stack the resulting arrays.

    Unlike `eqx.filter_vmap`, this creates one layer at a time and needs temporary memory for a single layer only.
    """
    static = None

    def build_arrays(arguments: tuple[Array, ...]) -> Any:
        nonlocal static
        arrays, static = eqx.partition(build(*arguments), eqx.is_array)
        return arrays

    if len(arguments[0]) == 1:
        first = build_arrays(tuple(argument[0] for argument in arguments))
        arrays = jax.tree.map(lambda array: array[None], first)
    else:
        arrays = jax.lax.map(build_arrays, arguments)
    return eqx.combine(arrays, static)
