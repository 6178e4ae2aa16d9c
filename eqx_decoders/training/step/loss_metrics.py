"""Sums of losses and metrics over the targets of a batch."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from eqx_decoders.blocks.stats import BlockStats, add_stats


class MTPLossSums(eqx.Module):
    """Sums over the targets of each depth of multi-token prediction.

    **Arguments:**

    - `nll`: negative log-likelihood, in nats.
    - `tokens`: number of targets, or the sum of their weights.
    """

    nll: Float32[Array, "depths"]
    tokens: Float32[Array, "depths"]


class LossMetrics(eqx.Module):
    """Sums over the target tokens of a batch, which can be added over batches and microbatches.

    **Arguments:**

    - `loss`: the loss in nats, including the z-loss and the losses of routing and MTP.
    - `nll`: negative log-likelihood, in nats.
    - `correct`: number of targets that are the result of `argmax` (the lowest id with the highest logit).
    - `tokens`: number of targets, or the sum of their weights.
    - `stats`: statistics of the layers, or None: of activations and largest scores if requested, of routing with
        experts, of indexers that are trained. Layers of multi-token prediction come last.
    - `mtp`: sums of multi-token prediction, or None.
    - `sums`: sums of an objective, by name; None for the loss of next tokens.
    """

    loss: Float32[Array, ""]
    nll: Float32[Array, ""]
    correct: Float32[Array, ""]
    tokens: Float32[Array, ""]
    stats: BlockStats | None = None
    mtp: MTPLossSums | None = None
    sums: dict[str, Float32[Array, ""]] | None = None

    def add(self, other: "LossMetrics") -> "LossMetrics":
        """Add the sums of two batches."""
        summed = jax.tree.map(jnp.add, *(dataclasses.replace(each, stats=None) for each in (self, other)))
        return dataclasses.replace(summed, stats=add_stats(self.stats, other.stats))
