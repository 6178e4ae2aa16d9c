"""The stack: finds the structure of a list of blocks, stacks the weights of what repeats, and scans over it."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from eqx_decoders.blocks.batch_overlap import cut_batch, join_batch
from eqx_decoders.blocks.block import Block, BlockConfig, checkpointed
from eqx_decoders.blocks.stats import BlockStats, join_parts
from eqx_decoders.context import Context
from eqx_decoders.layers.cache.engine_owned import ExternalWrite, stacked_or_listed
from eqx_decoders.layers.cache.kv_cache import pasts, slices
from eqx_decoders.sharding.explicit import in_auto_mode, mesh_of, spec_of


@functools.lru_cache(maxsize=256)
def segments(blocks: tuple[BlockConfig, ...]) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
    """Cut a list of blocks into `(unit, repeats)` runs so that as few blocks as possible have to be traced.

    `(local,) * 5 + (full,)` ten times and two locals more are `((local x5, full), 10), ((local,), 2)`. Of two cuts
    with as many blocks the one with fewer runs is taken, and what is left over comes last. A dynamic programme over the
    ends of runs, O(n^2 log n).
    """
    index: dict[BlockConfig, int] = {}
    kinds = [index.setdefault(block, len(index)) for block in blocks]
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]  # blocks traced, runs, -(begin of the last run), its unit
    for end in range(1, len(kinds) + 1):
        options = []
        for unit in range(1, end + 1):
            begin = end - unit
            while begin >= 0 and kinds[begin : begin + unit] == kinds[end - unit : end]:
                options.append((best[begin][0] + unit, best[begin][1] + 1, -begin, unit))
                begin -= unit
        best.append(min(options))
    cuts, end = [], len(kinds)
    while end > 0:
        begin, unit = -best[end][2], best[end][3]
        cuts.append((blocks[begin : begin + unit], (end - begin) // unit))
        end = begin
    return tuple(reversed(cuts))


class Segment(eqx.Module):
    """`repeats` copies of `unit`: weights stacked on a leading `layers` axis, run by one scan.

    Its arrays can't be built by calling the constructors of layers (their types name no `layers` axis): use
    `Segment.build`, and `eqx.tree_at` to edit.
    """

    stack_axes: ClassVar[tuple[str, ...]] = ("layers",)
    unit: tuple[Block, ...]
    repeats: int = eqx.field(static=True)

    @classmethod
    def build(cls, unit: tuple[BlockConfig, ...], embed_dim: int, *, keys: Key[Array, "layers"]) -> "Segment":
        """Initialise with one key per layer, in the order of the layers: `keys` has `repeats * len(unit)` of them."""

        def one(keys):
            return tuple(config.build(embed_dim, key=key) for config, key in zip(unit, keys, strict=True))

        keys = keys.reshape(-1, len(unit))
        return cls(unit=eqx.filter_vmap(one)(keys), repeats=keys.shape[0])

    def unstacked(self) -> tuple[Block, ...]:
        """The blocks one by one, in the order of the layers."""
        return tuple(block for index in range(self.repeats) for block in at_layer(self.unit, index))

    def __call__(
        self,
        x: Float[Array, "batch length *streams embed"],
        ctx: Context,
        memories: tuple[dict[str, Any], ...] | None = None,
        *,
        keys: Key[Array, "layers"] | None = None,
        inputs: tuple[dict[str, Array], ...] | None = None,
    ) -> "SegmentOutput":
        """Run all layers.

        **Arguments:**

        - `memories`: for each block of the unit what its layers remember; None reads no past and proposes nothing.
        - `keys`: one key per layer, for dropout.
        - `inputs`: for each block of the unit what its layers get each for themselves, `repeats` first.
        """
        kept = ({},) * len(self.unit) if memories is None else memories
        inputs = ({},) * len(self.unit) if inputs is None else inputs
        keys = None if keys is None else keys.reshape(self.repeats, len(self.unit))
        scanned = ctx.execution.scan and self.repeats > 1
        split = memories is None and ctx.execution.batch_split > 1
        several = scanned and len(self.unit) > 1
        in_turn = several and not split and memories is None
        run = checkpointed(ctx, prevent_cse=several or not scanned, split=split, in_turn=in_turn)
        weights, static = eqx.partition(self.unit, eqx.is_array)
        reads = None if memories is None or ctx.cache_is_empty else slices(kept)
        late = scanned and memories is not None

        # what others have published is carried only if it is published again: a scan keeps its carry for the gradient
        again = {name for name in ctx.shared if any(block.config.shares_kv_as == name for block in self.unit)}

        def step(carry, here):
            (x, shared), (layer, keys, inputs) = carry, here
            shared = ctx.shared | shared
            entries, stats = [], []
            for place, block in enumerate(static):
                own = dataclasses.replace(ctx, shared=shared, layer_inputs=inputs[place])
                part = stacked[place] if late else layer[place]
                arrays, cut = _late(part, layer, x) if late else part
                past = None if cut is None else pasts(kept[place], cut)
                x, entry, stat = run(eqx.combine(arrays, block), x, own, past, None if keys is None else keys[place])
                if block.config.shares_kv_as is not None:
                    shared = shared | {block.config.shares_kv_as: (past, entry)}
                entries.append({name: entry[name] for name in kept[place]})
                stats.append(stat)
            known = {name: shared[name] for name in again}
            published = {name: shared[name] for name in shared if name not in ctx.shared}
            return (x, known), (tuple(entries), tuple(stats), published)

        stacked = tuple(zip(weights, (None,) * len(self.unit) if reads is None else reads, strict=True))
        stream: Any = cut_batch(x, ctx.execution) if split else x
        carry = stream, {name: ctx.shared[name] for name in again}
        xs = jnp.arange(self.repeats) if late else stacked, keys, inputs
        carry, results = _over_layers(step, carry, xs, self.repeats, scanned)
        (stream, known), (entries, stats, published) = carry, results
        if split:
            stream, stats = join_batch(stream), tuple(join_parts(stat) for stat in stats)
        return SegmentOutput(stream, entries, stats, ctx.shared | known | at_layer(published, -1))


def _over_layers(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, repeats: int, scanned: bool) -> Any:
    """`jax.lax.scan`, or the same layer by layer: the last carry, and what each step returned, stacked."""
    if scanned:
        return jax.lax.scan(step, carry, xs, length=repeats)
    results = []
    for index in range(repeats):
        carry, result = step(carry, at_layer(xs, index))
        results.append(result)
    return carry, jax.tree.map(stacked_or_listed, *results, is_leaf=lambda node: isinstance(node, ExternalWrite))


class SegmentOutput(NamedTuple):
    """What a segment returns.

    **Arguments:**

    - `x`: the residual stream.
    - `entries`, `stats`: for each block of the unit, stacked over layers.
    - `shared`: what layers have published up to here: their past and what they propose.
    """

    x: Array
    entries: tuple[dict[str, Any], ...]
    stats: tuple[BlockStats, ...]
    shared: dict[str, Any]


def _late(stacked: Any, index: Array, x: Array) -> Any:
    """Layer `index` of a stacked tree, cut out after `x` is known.

    Cut by the scan, the weights of a unit's blocks may all be copied at its begin: for one token that is much memory.
    """
    index, _ = jax.lax.optimization_barrier((index, x))
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), stacked)


def at_layer(tree: Any, index: int) -> Any:
    """Layer `index` of a stacked tree."""

    def cut(leaf: Any) -> Any:
        take = in_auto_mode(mesh_of(leaf), operator.getitem, lambda _: PartitionSpec(*spec_of(leaf)[1:]))
        return take(leaf, index)

    def at(leaf: Any) -> Any:
        return leaf[index] if isinstance(leaf, np.ndarray) else cut(leaf) if eqx.is_array(leaf) else leaf

    return jax.tree.map(at, tree)
