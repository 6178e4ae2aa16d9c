"""Microbatches of a step: division of a batch, and sums of their statistics."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_decoders.blocks.stats import ActivationStats, join_activations
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.kernels.common import EMPTY
from eqx_decoders.sharding.axes import path_name
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.pipeline import split_microbatches
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.zigzag import constrain_rows


def split_batch(batch: Batch, count: int) -> Batch:
    """Divide a batch into microbatches along a new first axis. Raises ConfigError.

    Images and audio are divided according to their rows.
    """
    rows, groups = batch.tokens.shape[0], None if batch.media is None else batch.media.order.shape[0]
    check(
        groups in (None, rows),
        f"Batch.media has {groups} groups, but microbatches need one group of images for each of the {rows} rows: use "
        f"Media.create(…, groups={rows}).",
    )

    def split(path: Any, leaf: Any) -> Array:
        by_row = leaf.reshape(rows, -1, *leaf.shape[1:]) if _is_media(path) else leaf
        return split_microbatches(jnp.asarray(by_row), count)

    return jax.tree_util.tree_map_with_path(split, batch)


def join_microbatch(batch: Batch, layout: Layout) -> Batch:
    """Reshape a microbatch of `split_batch` to a batch."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.reshape(-1, *leaf.shape[2:]) if _is_media(path) else constrain_rows(leaf, layout),
        batch,
    )


def _is_media(path: Any) -> bool:
    return path_name(path).startswith("media.")


def without_activations(metrics: LossMetrics) -> tuple[LossMetrics, ActivationStats | None]:
    """Return the metrics without the statistics of activations, which cannot be added, and these statistics."""
    if metrics.stats is None:
        return metrics, None
    activations = metrics.stats.activations
    return dataclasses.replace(metrics, stats=dataclasses.replace(metrics.stats, activations=None)), activations


def with_activations(metrics: LossMetrics, parts: ActivationStats | None) -> LossMetrics:
    """Return the metrics with the statistics of activations of all microbatches (first axis of `parts`)."""
    if metrics.stats is None or parts is None:
        return metrics
    return dataclasses.replace(
        metrics, stats=dataclasses.replace(metrics.stats, activations=join_activations(parts, axis=0))
    )


def zero_metrics(zeros: LossMetrics) -> LossMetrics:
    """Return the initial value of a sum of metrics over microbatches: zeros, and for maxima the lowest value."""
    if zeros.stats is None or zeros.stats.max_scores is None:
        return zeros
    return eqx.tree_at(lambda metrics: metrics.stats.max_scores, zeros, jnp.full_like(zeros.stats.max_scores, EMPTY))
