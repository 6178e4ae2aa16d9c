"""The stack: finds the structure of a list of blocks, stacks the weights of what repeats, and scans over it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from eqx_decoders.block import Block, BlockConfig, BlockStats
from eqx_decoders.context import Context
from eqx_decoders.layers.cache import Entries, KVCache, Past
from eqx_decoders.remat import get_remat


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
        x: Float[Array, "batch length embed"],
        ctx: Context,
        caches: tuple[KVCache | None, ...] | None = None,
        *,
        keys: Key[Array, "layers"] | None = None,
    ) -> tuple[Float[Array, "batch length embed"], tuple[Entries | None, ...], tuple[BlockStats, ...]]:
        """Run all layers.

        **Arguments:**

        - `caches`: for each block of the unit the cache of its layers; None reads no past and proposes no entries.
        - `keys`: one key per layer, for dropout.

        **Returns:**

        The residual stream; for each block of the unit the proposed entries and the statistics, stacked over layers.
        """
        caches = (None,) * len(self.unit) if caches is None else caches
        keys = None if keys is None else keys.reshape(self.repeats, len(self.unit))
        scanned = ctx.execution.scan and self.repeats > 1
        weights, static = eqx.partition(self.unit, eqx.is_array)
        reads = tuple(None if cache is None or ctx.cache_is_empty else (cache.key, cache.value) for cache in caches)

        def step(x, here):
            weights, reads, keys = here
            entries, stats = [], []
            for place, (block, cache) in enumerate(zip(eqx.combine(weights, static), caches, strict=True)):
                past = None if cache is None or ctx.cache_is_empty else Past(*reads[place], positions=cache.positions)
                run = checkpointed(ctx, prevent_cse=not scanned)
                x, entry, stat = run(block, x, ctx, past, None if keys is None else keys[place])
                entries.append(None if cache is None else entry)
                stats.append(stat)
            return x, (tuple(entries), tuple(stats))

        if scanned:
            x, (entries, stats) = jax.lax.scan(step, x, (weights, reads, keys), length=self.repeats)
            return x, entries, stats
        results = []
        for index in range(self.repeats):
            x, result = step(x, at_layer((weights, reads, keys), index))
            results.append(result)
        entries, stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
        return x, entries, stats


def at_layer(tree: Any, index: int) -> Any:
    """Layer `index` of a stacked tree."""
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, tree)


def checkpointed(ctx: Context, *, prevent_cse: bool) -> Any:
    """One block's call under the remat policy: what it does not name is computed again in the backward pass."""

    def run(block, x, ctx, past, key):
        return block(x, ctx, past, key=key)

    remat = get_remat(ctx.execution.remat)
    if remat is None:
        return run
    # inside a scan nothing can be shared between the forward and the backward loop, so XLA need not be kept from it
    return eqx.filter_checkpoint(run, policy=remat.policy(), prevent_cse=prevent_cse)


def join_layer_stats(per_segment: Sequence[tuple[BlockStats, ...]]) -> BlockStats:
    """Join what segments return, for each block of the unit stacked over repeats, into one leading axis of layers.

    Each field is that of the layers that have it, in their order; None if there are none. Where layers differ in their
    number of experts, the shorter ones are filled up with zeros.
    """

    def joined(name: str) -> Any:
        stacked = []
        for unit in per_segment:
            trees = [tree for stats in unit if (tree := getattr(stats, name)) is not None]
            if trees:
                columns = jax.tree.map(lambda *leaves: jnp.stack(_pad_to_widest(leaves), axis=1), *trees)
                stacked.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), columns))
        return jax.tree.map(lambda *leaves: jnp.concatenate(_pad_to_widest(leaves)), *stacked) if stacked else None

    return BlockStats(**{field.name: joined(field.name) for field in dataclasses.fields(BlockStats)})


def _pad_to_widest(leaves: Sequence[Array]) -> list[Array]:
    """Arrays of a leading axis and perhaps one more, which then gets the same size in all of them."""
    size = max(leaf.shape[-1] for leaf in leaves)
    pads = [((0, 0),) * (leaf.ndim - 1) + ((0, size - leaf.shape[-1]),) for leaf in leaves]
    return [jnp.pad(leaf, pad) if leaf.ndim > 1 else leaf for leaf, pad in zip(leaves, pads, strict=True)]
