"""The loss of a language model: cross-entropy of each next token of the same document."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, PRNGKeyArray

from eqx_decoders.blocks.stats import BlockStats, add_stats, join_layer_stats
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs
from eqx_decoders.data.batches import Batch
from eqx_decoders.encoders.merge import without_placeholders
from eqx_decoders.errors import check
from eqx_decoders.layers.attention.indexer import IndexerStats
from eqx_decoders.layers.embedding.embedding import placed_in_documents
from eqx_decoders.layers.moe.router import RoutingStats
from eqx_decoders.model.decoder import Decoder, DecoderConfig
from eqx_decoders.model.mtp import same_document, shift_left
from eqx_decoders.numerics.quantized_weight import widened
from eqx_decoders.sharding.explicit import typed
from eqx_decoders.training.step.balance import expert_configs, has_routing_loss, routing_loss
from eqx_decoders.training.step.cross_entropy import cross_entropy, linear_argmax, linear_cross_entropy
from eqx_decoders.training.step.indexer_loss import indexer_configs, indexer_loss
from eqx_decoders.training.step.zigzag import in_context_order, row_order


class MTPLossSums(eqx.Module):
    """Sums over the targets of each depth of multi-token prediction.

    **Arguments:**

    - `nll`: negative log-likelihood, nats.
    - `tokens`: targets (or the sum of their weights).
    """

    nll: Float32[Array, "depths"]
    tokens: Float32[Array, "depths"]


class LossMetrics(eqx.Module):
    """Sums over the target tokens of a batch, so that batches and microbatches can be added up.

    **Arguments:**

    - `loss`: what is minimised, nats (with the z-loss, and what routing and further depths add, times the targets).
    - `nll`: negative log-likelihood, nats.
    - `correct`: targets that had the highest logit.
    - `tokens`: targets (or the sum of their weights).
    - `stats`: of the layers: of their activations and largest scores if asked for, of routing where there are experts,
        of indexers that learn; None for none of these. The layers of multi-token prediction come last.
    - `mtp`: of multi-token prediction; None where there is none.
    """

    loss: Float32[Array, ""]
    nll: Float32[Array, ""]
    correct: Float32[Array, ""]
    tokens: Float32[Array, ""]
    stats: BlockStats | None = None
    mtp: MTPLossSums | None = None

    def add(self, other: "LossMetrics") -> "LossMetrics":
        """Those of both together."""
        summed = jax.tree.map(jnp.add, *(dataclasses.replace(each, stats=None) for each in (self, other)))
        return dataclasses.replace(summed, stats=add_stats(self.stats, other.stats))


def or_one(weight: Array) -> Array:
    """A sum of weights as what the sum over them is divided by: 1 where there are none, and all sums are 0."""
    return jnp.where(weight > 0, weight, 1.0)


def next_tokens(batch: Batch) -> tuple[Int[Array, "batch length"], Float32[Array, "batch length"]]:
    """The target of each token and its weight: 0 at the end of a row or document, for padding, and where masked.

    Raises ConfigError for rows without tokens.
    """
    tokens = jnp.asarray(as_int32("Batch.tokens", batch.tokens))
    shape = tokens.shape
    check(tokens.size > 0, f"Batch.tokens of shape {shape} must have at least one row, and one token in each.")
    targets = jnp.concatenate([tokens[:, 1:], jnp.zeros((shape[0], 1), tokens.dtype)], axis=1)
    weights = jnp.ones((shape[0], shape[1] - 1), jnp.float32)
    if batch.segment_ids is not None:
        segments = jnp.asarray(batch.segment_ids)
        weights *= ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)).astype(jnp.float32)
    if batch.positions is not None:
        real = jnp.asarray(as_int32("Batch.positions", batch.positions)) >= 0
        weights *= (real[:, 1:] & real[:, :-1]).astype(jnp.float32)
    if batch.loss_mask is not None:
        weights *= jnp.asarray(batch.loss_mask)[:, 1:].astype(jnp.float32)
    weights = jnp.concatenate([weights, jnp.zeros((shape[0], 1), jnp.float32)], axis=1)
    return jnp.where(weights == 0, 0, targets), weights  # what does not count may be anything, even -100


def mtp_targets(
    batch: Batch, depth: int, order: np.ndarray | None = None
) -> tuple[Int[Array, "batch length"], Float32[Array, "batch length"]]:
    """The targets of a depth of multi-token prediction: those of the token `depth` places on, if of one document.

    `order`: in which they are wanted; None: that of the batch.
    """
    targets, weights = (shift_left(x, depth) for x in next_tokens(batch))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    positions, segments = placed_in_documents(positions, segments, targets.shape)
    weights = jnp.where(same_document(positions, segments, depth), weights, 0.0)
    targets = jnp.where(weights == 0, 0, targets)
    return (targets, weights) if order is None else (targets[:, order], weights[:, order])


@typed
def token_loss_sum(
    model: Decoder,
    batch: Batch,
    *,
    z_loss: float = 0.0,
    fused: bool = True,
    key: PRNGKeyArray | None = None,
    full_batch: Batch | None = None,
) -> tuple[Float32[Array, ""], LossMetrics]:
    """`sum over targets of -log p(target) + z_loss * log(Z)^2 + routing_loss + indexer_loss + mtp_loss`,
    and metrics.

    `fused` computes the head and the loss together, some positions at a time, so that all logits never exist at once.
    Gradients of sums can be added over microbatches; divide by `metrics.tokens` at the end. `full_batch` is the batch
    of which this one is a part: what routing, indexers and multi-token prediction add are means over all of it.
    """
    full_batch, mtp = batch if full_batch is None else full_batch, None
    plain, order = batch, row_order(model.execution, batch.tokens.shape[1])
    batch, targets, weights = in_context_order(model, batch, *next_tokens(batch))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    beside = _beside(model, batch)
    hidden, _, stats = model.run(jnp.asarray(batch.tokens), positions, segments, key=key, **beside)
    loss, nll, correct = _head_loss(model, hidden, targets, weights, z_loss=z_loss, fused=fused, key=key)
    if model.mtp is not None and model.mtp.config.loss_weight > 0:
        places = positions, segments
        streams = model.predict_mtp(hidden, batch.tokens, *places, key, **beside, order=order)
        stats = join_layer_stats([(stats,), (streams.stats,)])
        more, mtp = _mtp_loss_sum(model, streams.hidden, plain, full_batch, fused=fused, key=key)
        loss = loss + more
    if stats.routing is not None and has_routing_loss(model.config):
        loss = loss + _routing_loss_sum(model, stats.routing, full_batch)
    if stats.indexer is not None:
        loss = loss + _indexer_loss_sum(model, stats.indexer, full_batch)
    kept = stats if jax.tree.leaves(stats) else None
    return loss, LossMetrics(loss=loss, nll=nll, correct=correct, tokens=jnp.sum(weights), stats=kept, mtp=mtp)


def _beside(model: Decoder, batch: Batch) -> dict[str, Any]:
    """What a model gets beside tokens; images are encoded once, for it and for multi-token prediction."""
    encoded = None if batch.media is None else model.encode(batch.media)
    return dict(inputs=batch.inputs, media=batch.media, encoded=encoded, contiguous=batch.contiguous)


def _head_loss(
    model: Decoder,
    hidden: Array,
    targets: Array,
    weights: Array,
    *,
    z_loss: float = 0.0,
    fused: bool,
    key: PRNGKeyArray | None,
    depth: int = 0,
) -> tuple[Array, Array, Array]:
    """Loss, negative log-likelihood and right predictions, summed over the targets; of the head, or of a depth's."""
    if fused:
        loss, sums = linear_cross_entropy(
            model.head_input(hidden, key=key, depth=depth),
            widened(model.head_kernel),
            targets,
            weights,
            soft_cap=model.config.logit_soft_cap,
            z_loss=z_loss,
            **_head_options(model),
        )
        return loss, sums.nll, sums.correct
    logits = model.logits(hidden, key=key, depth=depth)
    nll = jnp.sum(weights * cross_entropy(logits, targets))
    loss = jnp.sum(weights * cross_entropy(logits, targets, z_loss=z_loss))
    return loss, nll, jnp.sum(weights * (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32))


def _head_options(model: Decoder) -> dict[str, Any]:
    layout, head_bytes = model.execution.layout, model.execution.head_bytes
    flatten = layout.single and layout.platform == "cpu"
    return dict(tied=model.head is None, flatten=flatten, head_bytes=head_bytes, layout=layout)


def _mtp_loss_sum(
    model: Decoder, hidden: tuple[Array, ...], batch: Batch, full_batch: Batch, *, fused: bool, key: PRNGKeyArray | None
) -> tuple[Array, MTPLossSums]:
    """This part's share of `loss_weight * mean over all depths' targets of -log p`, times the targets there."""
    assert model.mtp is not None
    order, sums, tokens = row_order(model.execution, batch.tokens.shape[1]), [], []
    for depth, x in enumerate(hidden, 1):
        targets, weights = mtp_targets(batch, depth, order)
        sums.append(_head_loss(model, x, targets, weights, fused=fused, key=key, depth=depth)[:2])
        tokens.append(jnp.sum(weights))
    losses, nll = zip(*sums, strict=True)
    everything = jnp.sum(jnp.stack([mtp_targets(full_batch, depth)[1] for depth in range(1, len(hidden) + 1)]))
    scale = model.mtp.config.loss_weight * jnp.sum(next_tokens(full_batch)[1]) / or_one(everything)
    return scale * sum(losses), MTPLossSums(nll=jax.lax.stop_gradient(jnp.stack(nll)), tokens=jnp.stack(tokens))


def _indexer_loss_sum(model: Decoder, stats: IndexerStats, full_batch: Batch) -> Float32[Array, ""]:
    """This part's share of the indexers' loss of the whole batch, times the targets there."""
    tokens = jnp.sum(_real_tokens(model, full_batch, indexer_configs)[: stats.tokens.shape[0]], axis=(1, 2))
    everything = dataclasses.replace(stats, tokens=tokens)
    return jnp.sum(next_tokens(full_batch)[1]) * indexer_loss(model.config, everything)


def _real_tokens(
    model: Decoder, batch: Batch, configs: Callable[[DecoderConfig], Sequence[Any]]
) -> Float32[Array, "layers batch length"]:
    """Which tokens each of the layers reads that `configs` finds: those of multi-token prediction come last."""
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    positions, segments = placed_in_documents(positions, segments, batch.tokens.shape)
    count = len(configs(dataclasses.replace(model.config, mtp=None)))
    ahead = [same_document(positions, segments, depth + 1) for depth in range(len(configs(model.config)) - count)]
    return jnp.stack([positions >= 0] * count + ahead).astype(jnp.float32)


def _routing_loss_sum(model: Decoder, stats: RoutingStats, full_batch: Batch) -> Float32[Array, ""]:
    """This part's share of the routing loss of the whole batch, times the targets there."""
    reals = _real_tokens(model, full_batch, expert_configs)[: stats.tokens.shape[0]]
    sums = jnp.sum(reals, axis=(1, 2)), jnp.sum(jnp.max(reals, axis=2), axis=1)
    everything = eqx.tree_at(lambda s: (s.tokens, s.sequences), stats, sums)
    return jnp.sum(next_tokens(full_batch)[1]) * routing_loss(model.config, everything)


def next_token_loss(
    model: Decoder, batch: Batch, *, z_loss: float = 0.0, fused: bool = True, key: PRNGKeyArray | None = None
) -> tuple[Float32[Array, ""], LossMetrics]:
    """The mean of `token_loss_sum` over the batch's target tokens (0 if there are none), and its sums.

    Where routers say so it includes their balance loss and z-loss, each the mean over layers with experts, and where
    indexers say so theirs, the mean over layers that have one; with
    multi-token prediction the mean over the targets of all its depths, by `MTPConfig.loss_weight`.

    Outside of `jax.jit` it is compiled, too. Raises ConfigError for a batch of arrays with wrong shapes or dtypes or,
    where they are known, ids that are not in the vocabulary.

    **Arguments:**

    - `model`: a decoder.
    - `batch`: tokens, and where known segment ids, positions, spans and which tokens count as targets.
    - `z_loss`: weight of `log(Z)^2`, which keeps the normaliser near 1 (PaLM, 2022).
    - `fused`: whether head and loss are computed together, tile by tile.
    - `key`: for dropout.
    """
    more: Any = dict(loss_mask=batch.loss_mask, spans=batch.spans)
    tokens = batch.tokens if batch.media is None else without_placeholders(batch.tokens, batch.media)
    check_inputs(model.config, tokens, batch.positions, batch.segment_ids, name="Batch.tokens", **more)
    return _mean_loss(model, batch, z_loss, fused, as_key(key))


@jit_if_eager
@typed
def _mean_loss(model: Decoder, batch: Batch, z_loss: float, fused: bool, key: PRNGKeyArray | None):
    loss, metrics = token_loss_sum(model, batch, z_loss=z_loss, fused=fused, key=key)
    return loss / or_one(metrics.tokens), metrics


class EvaluationSums(eqx.Module):
    """What held-out evaluation adds up over batches.

    **Arguments:**

    - `nll`, `tokens`: over the targets: nats, and how many.
    - `accepted`, `proposed`: of each depth of multi-token prediction: how often it predicted what the head says one
        token later, and how often it was asked. None where there is none.
    """

    nll: Float32[Array, ""]
    tokens: Float32[Array, ""]
    accepted: Float32[Array, "depths"] | None = None
    proposed: Float32[Array, "depths"] | None = None


@typed
def evaluation_sums(model: Decoder, batch: Batch) -> EvaluationSums:
    """The sums of one batch; a fraction of targets counts as so much of a token."""
    plain, order = batch, row_order(model.execution, batch.tokens.shape[1])
    batch, targets, weights = in_context_order(model, batch, *next_tokens(batch))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    beside = _beside(model, batch)
    hidden, _, _ = model.run(jnp.asarray(batch.tokens), positions, segments, **beside)
    _, nll, _ = _head_loss(model, hidden, targets, weights, fused=True, key=None)
    sums = EvaluationSums(nll=nll, tokens=jnp.sum(weights))
    if model.mtp is None:
        return sums
    said = _argmax_tokens(model, hidden, 0)
    accepted, proposed = [], []
    places = positions, segments
    further = model.predict_mtp(hidden, batch.tokens, *places, **beside, order=order).hidden
    for depth, x in enumerate(further, 1):
        weights = mtp_targets(plain, depth, order)[1]
        right = _argmax_tokens(model, x, depth) == shift_left(said, depth, order)
        accepted.append(jnp.sum(weights * right.astype(jnp.float32)))
        proposed.append(jnp.sum(weights))
    return dataclasses.replace(sums, accepted=jnp.stack(accepted), proposed=jnp.stack(proposed))


def _argmax_tokens(model: Decoder, hidden: Array, depth: int) -> Int[Array, "batch length"]:
    """The likeliest token everywhere; a cap on logits does not change which it is."""
    return linear_argmax(model.head_input(hidden, depth=depth), widened(model.head_kernel), **_head_options(model))
