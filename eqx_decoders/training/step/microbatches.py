"""Microbatches of a step: a batch cut into parts, and the statistics of the parts put together."""

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
from eqx_decoders.training.step.zigzag import in_rows


def cut_batch(batch: Batch, count: int) -> Batch:
    """Cut a batch into microbatches along a new first axis; images and audio by the rows that they belong to."""
    rows, groups = batch.tokens.shape[0], None if batch.media is None else batch.media.order.shape[0]
    rule = f"microbatches need a group of images for each of the {rows} rows: Media.create(…, groups={rows})"
    check(groups in (None, rows), f"Batch.media has {groups} groups, but {rule}.")

    def cut(path: Any, leaf: Any) -> Array:
        by_row = leaf.reshape(rows, -1, *leaf.shape[1:]) if _is_media(path) else leaf
        return split_microbatches(jnp.asarray(by_row), count)

    return jax.tree_util.tree_map_with_path(cut, batch)


def join_microbatch(batch: Batch, layout: Layout) -> Batch:
    """Reshape one of the microbatches of `cut_batch` to a batch."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.reshape(-1, *leaf.shape[2:]) if _is_media(path) else in_rows(leaf, layout),
        batch,
    )


def _is_media(path: Any) -> bool:
    return path_name(path).startswith("media.")


def without_activations(metrics: LossMetrics) -> tuple[LossMetrics, ActivationStats | None]:
    """Return the metrics without the statistics of activations, which are not sums, and these statistics."""
    if metrics.stats is None:
        return metrics, None
    activations = metrics.stats.activations
    return dataclasses.replace(metrics, stats=dataclasses.replace(metrics.stats, activations=None)), activations


def with_activations(metrics: LossMetrics, parts: ActivationStats | None) -> LossMetrics:
    """Add the statistics of activations of all microbatches, which `parts` has along its first axis."""
    if metrics.stats is None or parts is None:
        return metrics
    return dataclasses.replace(
        metrics, stats=dataclasses.replace(metrics.stats, activations=join_activations(parts, axis=0))
    )


def zeros_to_add(zeros: LossMetrics) -> LossMetrics:
    """Return the start of a sum of metrics over microbatches: zeros, and for maxima a number below all."""
    if zeros.stats is None or zeros.stats.max_scores is None:
        return zeros
    return eqx.tree_at(lambda metrics: metrics.stats.max_scores, zeros, jnp.full_like(zeros.stats.max_scores, EMPTY))
