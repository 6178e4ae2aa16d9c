"""Statistics of layers in a forward pass, and functions that join statistics of layers or of parts of a batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from eqx_decoders.layers.attention.indexer import IndexerStats
from eqx_decoders.layers.moe.router import RoutingStats
from eqx_decoders.sharding.pipeline import join_microbatches


class ActivationStats(eqx.Module):
    """Mean, standard deviation and fraction of zeros of a block's output, with a `layers` axis if they are stacked."""

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
    """Statistics of one block's forward pass. A field is None if it is disabled or the block has no such layer.

    **Arguments:**

    - `activations`: statistics of the output, with `Execution.layer_stats`.
    - `routing`: statistics of the router of experts.
    - `indexer`: statistics of the indexer of sparse attention.
    - `max_scores`: maximum attention score of each head of latent attention over all sequences and tokens, with
        `Execution.attention_maxima`.
    - `streams`: the block's output, with `Execution.layer_streams`.
    - `choices`: indices of the experts selected for each token, with `Execution.expert_choices`; padding has the
        index after the last expert.
    """

    activations: ActivationStats | None = None
    routing: RoutingStats | None = None
    indexer: IndexerStats | None = None
    max_scores: Float32[Array, "*layers heads"] | None = None
    streams: Float[Array, "..."] | None = None
    choices: Int32[Array, "*layers batch length slots"] | None = None


def add_stats(first: BlockStats | None, second: BlockStats | None) -> BlockStats | None:
    """Join the statistics of two parts of a batch that are sums or maxima; the other fields become None.

    Use `join_activations` for `activations`. `streams` and `choices` have values for each token.
    """
    if first is None or second is None:
        return None
    maxima = None
    if first.max_scores is not None and second.max_scores is not None:
        maxima = jnp.maximum(first.max_scores, second.max_scores)
    sums = [BlockStats(routing=stats.routing, indexer=stats.indexer) for stats in (first, second)]
    return dataclasses.replace(jax.tree.map(jnp.add, *sums), max_scores=maxima)


def join_activations(parts: ActivationStats, axis: int) -> ActivationStats:
    """Join the statistics of equally large parts of a batch; the parts are on the axis `axis` of each array."""
    means = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=axis), parts)
    # total variance: mean of the parts' variances plus variance of the parts' means
    std = jnp.sqrt(jnp.mean(parts.std**2, axis=axis) + jnp.var(parts.mean, axis=axis))
    return dataclasses.replace(means, std=std)


def join_parts(stats: BlockStats) -> BlockStats:
    """Join the statistics of equally large parts of a batch; the parts are on the second axis of each array."""
    sums = dataclasses.replace(stats, activations=None, streams=None, choices=None)
    joined = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=1), sums)
    per_token = {"streams": stats.streams, "choices": stats.choices}
    per_token = {name: jax.vmap(join_microbatches)(parts) for name, parts in per_token.items() if parts is not None}
    joined = dataclasses.replace(joined, **per_token)
    if stats.max_scores is not None:
        joined = dataclasses.replace(joined, max_scores=jnp.max(stats.max_scores, axis=1))
    if stats.activations is None:
        return joined
    return dataclasses.replace(joined, activations=join_activations(stats.activations, axis=1))


def join_layer_stats(scanned_stats: Sequence[tuple[BlockStats, ...]]) -> BlockStats:
    """Concatenate the statistics of all `ScannedLayers` along a `layers` axis, in the order of the layers.

    An item of `scanned_stats` has the statistics of each block of one unit, stacked over the repeats. In the result, a
    field contains only the layers that have this statistic; it is None if no layer has it. If layers have different
    numbers of experts, statistics per expert are padded with zeros to the largest number.
    """

    def join_field(name: str) -> Any:
        runs = []
        for unit_stats in scanned_stats:
            trees = [tree for stats in unit_stats if (tree := getattr(stats, name)) is not None]
            if trees:
                by_repeat = jax.tree.map(lambda *leaves: jnp.stack(_pad_last_axis(leaves), axis=1), *trees)
                runs.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_repeat))
        return jax.tree.map(lambda *leaves: jnp.concatenate(_pad_last_axis(leaves)), *runs) if runs else None

    return BlockStats(**{field.name: join_field(field.name) for field in dataclasses.fields(BlockStats)})


def _pad_last_axis(leaves: Sequence[Array]) -> list[Array]:
    """Pad the last axis of arrays to the largest size with zeros; arrays with one axis stay unchanged."""
    size = max(leaf.shape[-1] for leaf in leaves)
    pads = [((0, 0),) * (leaf.ndim - 1) + ((0, size - leaf.shape[-1]),) for leaf in leaves]
    return [jnp.pad(leaf, pad) if leaf.ndim > 1 else leaf for leaf, pad in zip(leaves, pads, strict=True)]
