"""Statistics of layers in a forward pass, and how those of several layers or parts are joined."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from eqx_decoders.layers.attention.indexer import IndexerStats
from eqx_decoders.layers.moe.router import RoutingStats
from eqx_decoders.sharding.pipeline import join_rows


class ActivationStats(eqx.Module):
    """Mean, standard deviation and fraction of zeros of a block's output; a leading `layers` axis once stacked."""

    mean: Float32[Array, "*layers"]
    std: Float32[Array, "*layers"]
    zero_fraction: Float32[Array, "*layers"]

    @classmethod
    def of(cls, x: Array) -> "ActivationStats":
        """Compute the statistics of the stream `x`."""
        y = x.astype(jnp.float32)
        zeros = jnp.mean((y == 0).astype(jnp.float32))
        return cls(mean=jnp.mean(y), std=jnp.std(y), zero_fraction=zeros)


class BlockStats(eqx.Module):
    """Statistics of one block's forward pass; None if they are off, or if there is no such layer.

    `max_scores` are the largest scores of the heads of latent attention, over rows and tokens. `streams` are outputs.
    `choices` are the experts of each token, with `Execution.expert_choices`; padding has the number after the last one.
    """

    activations: ActivationStats | None = None
    routing: RoutingStats | None = None
    indexer: IndexerStats | None = None
    max_scores: Float32[Array, "*layers heads"] | None = None
    streams: Float[Array, "..."] | None = None
    choices: Int32[Array, "*layers batch length slots"] | None = None


def add_stats(one: BlockStats | None, other: BlockStats | None) -> BlockStats | None:
    """Add the statistics of two parts of a batch; of largest scores take the larger one."""
    if one is None or other is None:
        return None
    maxima = None
    if one.max_scores is not None and other.max_scores is not None:
        maxima = jnp.maximum(one.max_scores, other.max_scores)
    return dataclasses.replace(jax.tree.map(jnp.add, one, other), max_scores=maxima)


def join_parts(stats: BlockStats) -> BlockStats:
    """Join the statistics of equal parts of a batch, on the second axis of each array."""
    sums = dataclasses.replace(stats, activations=None, streams=None, choices=None)
    joined = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=1), sums)
    of_tokens = {"streams": stats.streams, "choices": stats.choices}
    of_tokens = {name: jax.vmap(join_rows)(parts) for name, parts in of_tokens.items() if parts is not None}
    joined = dataclasses.replace(joined, **of_tokens)
    if stats.max_scores is not None:
        joined = dataclasses.replace(joined, max_scores=jnp.max(stats.max_scores, axis=1))
    if stats.activations is None:
        return joined
    parts, means = stats.activations, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=1), stats.activations)
    # the variance of the whole is the mean of the parts' variances and the variance of their means
    std = jnp.sqrt(jnp.mean(parts.std**2, axis=1) + jnp.var(parts.mean, axis=1))
    return dataclasses.replace(joined, activations=dataclasses.replace(means, std=std))


def join_layer_stats(scanned_stats: Sequence[tuple[BlockStats, ...]]) -> BlockStats:
    """Join the statistics of all `ScannedLayers` along one axis of layers.

    Each item has the statistics of the blocks of one unit, stacked over repeats.

    Each field has the layers that have it, in their order; None if there are none. If layers differ in their number of
    experts, the shorter ones are padded with zeros.
    """

    def joined(name: str) -> Any:
        stacked = []
        for unit in scanned_stats:
            trees = [tree for stats in unit if (tree := getattr(stats, name)) is not None]
            if trees:
                columns = jax.tree.map(lambda *leaves: jnp.stack(_pad_to_widest(leaves), axis=1), *trees)
                stacked.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), columns))
        return jax.tree.map(lambda *leaves: jnp.concatenate(_pad_to_widest(leaves)), *stacked) if stacked else None

    return BlockStats(**{field.name: joined(field.name) for field in dataclasses.fields(BlockStats)})


def _pad_to_widest(leaves: Sequence[Array]) -> list[Array]:
    """Pad the last axis of arrays of two axes to the same size."""
    size = max(leaf.shape[-1] for leaf in leaves)
    pads = [((0, 0),) * (leaf.ndim - 1) + ((0, size - leaf.shape[-1]),) for leaf in leaves]
    return [jnp.pad(leaf, pad) if leaf.ndim > 1 else leaf for leaf, pad in zip(leaves, pads, strict=True)]
