"""Losses of a step, and the loss of a language model: the cross-entropy of the next tokens of a document."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray, Shaped

from eqx_decoders.blocks.stats import join_layer_stats
from eqx_decoders.context import Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.core.input_checks import as_int32, as_key, check_inputs
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.signals import Signals
from eqx_decoders.encoders.merge import without_placeholders
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, check
from eqx_decoders.layers.attention.indexer import IndexerStats
from eqx_decoders.layers.embedding.embedding import document_positions
from eqx_decoders.layers.moe.router import RoutingStats
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.model.mtp import same_document, shift_left
from eqx_decoders.numerics.einsum import as_weight
from eqx_decoders.sharding.axes import AnyArray
from eqx_decoders.sharding.chips import chip_of
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.head.cross_entropy import HeadTiles, cross_entropy, linear_argmax, linear_cross_entropy
from eqx_decoders.training.head.vocab_parallel import HeadWeights
from eqx_decoders.training.step.balance import expert_configs, has_routing_loss, routing_loss
from eqx_decoders.training.step.indexer_loss import indexer_configs, indexer_loss
from eqx_decoders.training.step.loss_metrics import LossMetrics, MTPLossSums
from eqx_decoders.training.step.zigzag import in_context_order, row_order


def nonzero_divisor(weight: Array) -> Array:
    """Return a sum of weights for use as a divisor: 1 where it is 0, because then all weighted sums are 0."""
    return jnp.where(weight > 0, weight, 1.0)


def next_tokens(batch: Batch) -> tuple[Int[Array, "batch length"], Float32[Array, "batch length"]]:
    """Return the target of each token, and its weight: 0 at the end of a document or row, for padding, and if masked.

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
    return jnp.where(weights == 0, 0, targets), weights  # a target without a weight can be any number, such as -100


def mtp_targets(
    batch: Batch, depth: int, order: np.ndarray | None = None
) -> tuple[Int[Array, "batch length"], Float32[Array, "batch length"]]:
    """Return the targets of a depth of multi-token prediction, `depth` tokens after the next token, and their weights.

    `order`: order of the tokens in the rows, if it differs from that of the batch.
    """
    targets, weights = (shift_left(x, depth) for x in next_tokens(batch))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    positions, segments = document_positions(positions, segments, targets.shape)
    weights = jnp.where(same_document(positions, segments, depth), weights, 0.0)
    targets = jnp.where(weights == 0, 0, targets)
    return (targets, weights) if order is None else (targets[:, order], weights[:, order])


class Forward(NamedTuple):
    """Results of a forward pass, for losses with additional terms.

    **Arguments:**

    - `hidden`: the residual stream after the last block.
    - `batch`: the tokens, in the order in which the model has read them.
    - `weights`: weight of the target of each token.
    - `signals`: signals of the target of each token, at the position of the token.
    - `streams`: the residual stream after each layer, for a model with `layer_streams`.
    """

    hidden: Float[Array, "batch length embed"]
    batch: Batch
    weights: Float32[Array, "batch length"]
    signals: Signals
    streams: Float[Array, "layers batch length *streams embed"] | None = None


AdditionalLoss = Callable[[Forward], tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]]


@run_with_auto_axes
def token_loss_sum(
    model: Decoder,
    batch: Batch,
    *,
    z_loss: float = 0.0,
    fused: bool = True,
    key: PRNGKeyArray | None = None,
    full_batch: Batch | None = None,
    nll_weight: float = 1.0,
    more: AdditionalLoss | None = None,
) -> tuple[Float32[Array, ""], LossMetrics]:
    """Compute the training loss, summed over the targets, and its metrics.

    The loss is `sum over targets of -log p(target) + z_loss * log(Z)^2 + routing_loss + indexer_loss + mtp_loss`.
    Gradients of sums can be added over microbatches and divided by the sum of `metrics.tokens` at the end.

    **Arguments:**

    - `z_loss`: weight of `log(Z)^2`.
    - `fused`: compute the head and the loss together, in tiles of positions, so that only a part of the logits exists
        at a time.
    - `key`: key for dropout.
    - `full_batch`: the batch of which `batch` is a microbatch. The losses of routing, indexers and multi-token
        prediction are means over it.
    - `nll_weight`: weight of the loss of next tokens, with `more`.
    - `more`: returns additional terms of the loss, and sums for metrics.
    """
    full_batch, mtp, sums = batch if full_batch is None else full_batch, None, None
    in_order, order = batch, row_order(model.execution, batch.tokens.shape[1])
    signals = Signals() if more is None or batch.signals is None else jax.tree.map(shift_to_previous, batch.signals)
    ordered = in_context_order(model.config, model.execution, batch, *next_tokens(batch), signals)
    batch, targets, weights, signals = ordered
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    inputs, promises = model_inputs(model, batch), Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, stats = model.run(jnp.asarray(batch.tokens), positions, segments, key=key, **inputs, promises=promises)
    loss, nll, correct = _head_loss(model, hidden, targets, weights, z_loss=z_loss, fused=fused, key=key)
    if more is not None:
        added, sums = more(Forward(hidden, batch, weights, signals, stats.streams))
        loss = nll_weight * loss + added
    if model.mtp is not None and model.mtp.config.loss_weight > 0:
        inputs |= dict(order=order, documents_are_contiguous=batch.contiguous)
        streams = model.predict_mtp(hidden, batch.tokens, positions, segments, key, **inputs)
        stats = join_layer_stats([(stats,), (streams.stats,)])
        ahead, mtp = _mtp_loss_sum(model, streams.hidden, in_order, full_batch, fused=fused, key=key)
        loss = loss + ahead
    if stats.routing is not None and has_routing_loss(model.config):
        loss = loss + _routing_loss_sum(model, stats.routing, full_batch)
    if stats.indexer is not None:
        loss = loss + _indexer_loss_sum(model, stats.indexer, full_batch)
    stats = dataclasses.replace(stats, streams=None, choices=None)  # values of tokens, not statistics of a step
    stats = stats if jax.tree.leaves(stats) else None
    metrics = LossMetrics(loss=loss, nll=nll, correct=correct, tokens=jnp.sum(weights), stats=stats, mtp=mtp, sums=sums)
    return loss, metrics


def shift_to_previous(x: Shaped[AnyArray, "batch length *rest"]) -> Shaped[Array, "batch length *rest"]:
    """Move values of tokens to the position of the previous token."""
    x = jnp.asarray(x)
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def model_inputs(model: Decoder, batch: Batch) -> dict[str, Any]:
    """Return the inputs of the model other than tokens. Images are encoded once, for the model and for MTP."""
    encoded = None if batch.media is None else model.encode(batch.media)
    return dict(inputs=batch.inputs, media=batch.media, encoded=encoded)


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
    """Return the loss, negative log-likelihood and number of correct predictions, summed over the targets.

    `depth`: depth of multi-token prediction; 0: the head.
    """
    if fused:
        loss, sums = linear_cross_entropy(
            model.head_input(hidden, key=key, depth=depth),
            head_weights(model),
            targets,
            weights,
            soft_cap=model.config.logit_soft_cap,
            z_loss=z_loss,
            **head_options(model),
        )
        return loss, sums.nll, sums.correct
    logits = model.logits(hidden, key=key, depth=depth)
    nll = jnp.sum(weights * cross_entropy(logits, targets))
    loss = jnp.sum(weights * cross_entropy(logits, targets, z_loss=z_loss))
    return loss, nll, jnp.sum(weights * (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32))


def head_weights(model: Decoder) -> HeadWeights:
    """Return the dense weights of the output head. Raises ConfigError for a head of scores."""
    model.config.check_logits("a loss of tokens")
    return HeadWeights(as_weight(model.head_kernel).array(1 if model.head is None else 0), model.logit_bias)


def head_options(model: Decoder) -> dict[str, Any]:
    """Return options of `linear_cross_entropy` that follow from the model's execution."""
    layout, head_bytes = model.execution.layout, model.execution.head_bytes
    if head_bytes is None:
        chip = chip_of(layout.device.device_kind)
        head_bytes = 2 * 10**9 if chip is None else int(chip.memory / chip.devices / 10)
    return dict(
        tied=model.head is None,
        tiles=HeadTiles(head_bytes=head_bytes),
        flatten=layout.backend.flat_products,
        layout=layout,
    )


def _mtp_loss_sum(
    model: Decoder, hidden: tuple[Array, ...], batch: Batch, full_batch: Batch, *, fused: bool, key: PRNGKeyArray | None
) -> tuple[Array, MTPLossSums]:
    """Compute the MTP loss of a microbatch: its part of `loss_weight * mean of -log p over the targets of all depths`,
    multiplied by the number of next-token targets of the full batch.
    """
    assert model.mtp is not None
    order, sums, tokens = row_order(model.execution, batch.tokens.shape[1]), [], []
    for depth, x in enumerate(hidden, 1):
        targets, weights = mtp_targets(batch, depth, order)
        sums.append(_head_loss(model, x, targets, weights, fused=fused, key=key, depth=depth)[:2])
        tokens.append(jnp.sum(weights))
    losses, nll = zip(*sums, strict=True)
    whole = jnp.sum(jnp.stack([mtp_targets(full_batch, depth)[1] for depth in range(1, len(hidden) + 1)]))
    scale = model.mtp.config.loss_weight * jnp.sum(next_tokens(full_batch)[1]) / nonzero_divisor(whole)
    return scale * sum(losses), MTPLossSums(nll=jax.lax.stop_gradient(jnp.stack(nll)), tokens=jnp.stack(tokens))


def _indexer_loss_sum(model: Decoder, stats: IndexerStats, full_batch: Batch) -> Float32[Array, ""]:
    """Compute the loss of indexers for a microbatch: its part of the mean over the full batch, multiplied by the number
    of targets.
    """
    tokens = jnp.sum(_real_tokens(model, full_batch, indexer_configs)[: stats.tokens.shape[0]], axis=(1, 2))
    whole = dataclasses.replace(stats, tokens=tokens)
    return jnp.sum(next_tokens(full_batch)[1]) * indexer_loss(model.config, whole)


def _real_tokens(
    model: Decoder, batch: Batch, configs: Callable[[DecoderConfig], Sequence[Any]]
) -> Float32[Array, "layers batch length"]:
    """Return the tokens that each layer of `configs` reads, as 0 and 1. Layers of multi-token prediction come last."""
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    positions, segments = document_positions(positions, segments, batch.tokens.shape)
    count = len(configs(dataclasses.replace(model.config, mtp=None)))
    ahead = [same_document(positions, segments, depth + 1) for depth in range(len(configs(model.config)) - count)]
    return jnp.stack([positions >= 0] * count + ahead).astype(jnp.float32)


def _routing_loss_sum(model: Decoder, stats: RoutingStats, full_batch: Batch) -> Float32[Array, ""]:
    """Compute the routing loss of a microbatch: its part of the mean over the full batch, multiplied by the number of
    targets.
    """
    reals = _real_tokens(model, full_batch, expert_configs)[: stats.tokens.shape[0]]
    sums = jnp.sum(reals, axis=(1, 2)), jnp.sum(jnp.max(reals, axis=2), axis=1)
    whole = eqx.tree_at(lambda s: (s.tokens, s.sequences), stats, sums)
    return jnp.sum(next_tokens(full_batch)[1]) * routing_loss(model.config, whole)


def next_token_loss(
    model: Decoder, batch: Batch, *, z_loss: float = 0.0, fused: bool = True, key: PRNGKeyArray | int | None = None
) -> tuple[Float32[Array, ""], LossMetrics]:
    """Compute the mean loss over the target tokens of a batch (0 without targets), and the sums of `token_loss_sum`.

    The loss includes the balance losses and z-losses of routers, as means over the layers with experts; the losses of
    indexers, as a mean over their layers; and the loss of multi-token prediction, as a mean over the targets of all
    depths, multiplied by `MTPConfig.loss_weight`.

    Outside of `jax.jit` the function is compiled. Raises ConfigError for arrays with wrong shapes or dtypes and, if the
    values are known, for ids outside of the vocabulary.

    **Arguments:**

    - `model`: a decoder.
    - `batch`: tokens and, optionally, segment ids, positions, spans and a mask of targets.
    - `z_loss`: weight of `log(Z)^2`, which keeps the normalizer near 1 (PaLM, 2022).
    - `fused`: compute head and loss together, in tiles.
    - `key`: key for dropout.
    """
    more: Any = dict(loss_mask=batch.loss_mask, spans=batch.spans)
    tokens = batch.tokens if batch.media is None else without_placeholders(batch.tokens, batch.media)
    check_inputs(model.config, tokens, batch.positions, batch.segment_ids, name="Batch.tokens", **more)
    return _mean_loss(model, batch, z_loss, fused, as_key(key))


@jit_if_eager
@run_with_auto_axes
def _mean_loss(model: Decoder, batch: Batch, z_loss: float, fused: bool, key: PRNGKeyArray | None):
    loss, metrics = token_loss_sum(model, batch, z_loss=z_loss, fused=fused, key=key)
    return loss / nonzero_divisor(metrics.tokens), metrics


@runtime_checkable
class Loss(Protocol):
    """Loss that a step minimizes: a sum over the microbatches of a batch.

    A loss is hashable, and losses that compute the same function are equal: the step is compiled for each value.
    """

    # whether the sum over the batch is divided by `LossMetrics.tokens`
    per_token: ClassVar[bool]

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the loss of `batch`, a microbatch of `full_batch`. `key`: key for dropout."""
        ...

    def metrics(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Compute the metrics of a batch from the sums of `LossMetrics.sums`."""
        ...


@dataclasses.dataclass(frozen=True)
class NextTokenLoss(CheckedFields):
    """Cross-entropy of next tokens, with the losses of routers, indexers and multi-token prediction."""

    z_loss: NonNegativeFloat = 0.0
    """Weight of `log(Z)^2`."""
    fused: bool = True
    """Compute head and loss together, in tiles."""
    per_token: ClassVar[bool] = True

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute `token_loss_sum`."""
        return token_loss_sum(model, batch, z_loss=self.z_loss, fused=self.fused, key=key, full_batch=full_batch)

    def metrics(self, sums: dict[str, Float32[Array, ""]]) -> dict[str, Float32[Array, ""]]:
        """Return no metrics."""
        return {}


class EvaluationSums(eqx.Module):
    """Sums of an evaluation, which can be added over batches.

    **Arguments:**

    - `nll`, `tokens`: negative log-likelihood of the targets in nats, and their number.
    - `accepted`, `proposed`: for each depth of multi-token prediction, the number of draft tokens that equal the head's
        prediction one token later, and of all draft tokens. None without multi-token prediction.
    """

    nll: Float32[Array, ""]
    tokens: Float32[Array, ""]
    accepted: Float32[Array, "depths"] | None = None
    proposed: Float32[Array, "depths"] | None = None


@run_with_auto_axes
def evaluation_sums(model: Decoder, batch: Batch) -> EvaluationSums:
    """Compute the sums of one batch. A target with a weight below 1 counts as a fraction of a token."""
    in_order, order = batch, row_order(model.execution, batch.tokens.shape[1])
    batch, targets, weights = in_context_order(model.config, model.execution, batch, *next_tokens(batch))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    inputs, promises = model_inputs(model, batch), Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, _ = model.run(jnp.asarray(batch.tokens), positions, segments, **inputs, promises=promises)
    _, nll, _ = _head_loss(model, hidden, targets, weights, fused=True, key=None)
    sums = EvaluationSums(nll=nll, tokens=jnp.sum(weights))
    if model.mtp is None:
        return sums
    predicted = _argmax_tokens(model, hidden, 0)
    accepted, proposed = [], []
    inputs |= dict(order=order, documents_are_contiguous=batch.contiguous)
    streams = model.predict_mtp(hidden, batch.tokens, positions, segments, **inputs)
    for depth, x in enumerate(streams.hidden, 1):
        weights = mtp_targets(in_order, depth, order)[1]
        right = _argmax_tokens(model, x, depth) == shift_left(predicted, depth, order)
        accepted.append(jnp.sum(weights * right.astype(jnp.float32)))
        proposed.append(jnp.sum(weights))
    return dataclasses.replace(sums, accepted=jnp.stack(accepted), proposed=jnp.stack(proposed))


def _argmax_tokens(model: Decoder, hidden: Array, depth: int) -> Int[Array, "batch length"]:
    """Return the most likely token at each position. A cap on logits does not change it."""
    return linear_argmax(model.head_input(hidden, depth=depth), head_weights(model), **head_options(model))
