"""The loss of a language model: cross-entropy of each next token of the same document."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, PRNGKeyArray

from eqx_decoders.block import BlockStats
from eqx_decoders.decoder import Decoder
from eqx_decoders.training.cross_entropy import cross_entropy, linear_cross_entropy
from eqx_decoders.training.data import Batch


class LossMetrics(eqx.Module):
    """Sums over the target tokens of a batch, so that batches and microbatches can be added up.

    **Arguments:**

    - `loss`: what is minimised, nats (with the z-loss).
    - `nll`: negative log-likelihood, nats.
    - `correct`: targets that had the highest logit.
    - `tokens`: targets (or the sum of their weights).
    - `stats`: of the layers; None unless asked for.
    """

    loss: Float32[Array, ""]
    nll: Float32[Array, ""]
    correct: Float32[Array, ""]
    tokens: Float32[Array, ""]
    stats: BlockStats | None = None


def next_tokens(batch: Batch) -> tuple[Int[Array, "batch length"], Float32[Array, "batch length"]]:
    """The target of each token and its weight: 0 at the end of a row or document, for padding, and where masked."""
    tokens = jnp.asarray(batch.tokens)
    shape = tokens.shape
    targets = jnp.concatenate([tokens[:, 1:], jnp.zeros((shape[0], 1), tokens.dtype)], axis=1)
    weights = jnp.ones((shape[0], shape[1] - 1), jnp.float32)
    if batch.segment_ids is not None:
        segments = jnp.asarray(batch.segment_ids)
        weights *= ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)).astype(jnp.float32)
    if batch.positions is not None:
        weights *= (jnp.asarray(batch.positions)[:, 1:] >= 0).astype(jnp.float32)
    if batch.loss_mask is not None:
        weights *= jnp.asarray(batch.loss_mask)[:, 1:].astype(jnp.float32)
    weights = jnp.concatenate([weights, jnp.zeros((shape[0], 1), jnp.float32)], axis=1)
    return jnp.where(weights == 0, 0, targets), weights  # what does not count may be anything, even -100


def token_loss_sum(
    model: Decoder, batch: Batch, *, z_loss: float = 0.0, fused: bool = True, key: PRNGKeyArray | None = None
) -> tuple[Float32[Array, ""], LossMetrics]:
    """`sum over targets of -log p(target) + z_loss * log(Z)^2`, and metrics.

    `fused` computes the head and the loss together, some positions at a time, so that all logits never exist at once.
    Gradients of sums can be added over microbatches; divide by `metrics.tokens` at the end.
    """
    targets, weights = next_tokens(batch)
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    hidden, _, stats = model.run(jnp.asarray(batch.tokens), positions, segments, key=key)
    if fused:
        layout = model.execution.layout
        loss, sums = linear_cross_entropy(
            model.normed(hidden, key=key),
            model.head_kernel,
            targets,
            weights,
            tied=model.head is None,
            soft_cap=model.config.logit_soft_cap,
            z_loss=z_loss,
            flatten=layout.single and layout.platform == "cpu",
            layout=layout,
        )
        nll, correct = sums.nll, sums.correct
    else:
        logits = model.logits(hidden, key=key)
        nll = jnp.sum(weights * cross_entropy(logits, targets))
        loss = jnp.sum(weights * cross_entropy(logits, targets, z_loss=z_loss))
        correct = jnp.sum(weights * (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32))
    kept = stats if model.execution.layer_stats else None
    return loss, LossMetrics(loss=loss, nll=nll, correct=correct, tokens=jnp.sum(weights), stats=kept)


def next_token_loss(
    model: Decoder, batch: Batch, *, z_loss: float = 0.0, fused: bool = True, key: PRNGKeyArray | None = None
) -> tuple[Float32[Array, ""], LossMetrics]:
    """The mean of `token_loss_sum` over the batch's target tokens (0 if there are none), and its sums.

    **Arguments:**

    - `model`: a decoder.
    - `batch`: tokens, and where known segment ids, positions and which tokens count as targets.
    - `z_loss`: weight of `log(Z)^2`, which keeps the normaliser near 1 (PaLM, 2022).
    - `fused`: whether head and loss are computed together, tile by tile.
    - `key`: for dropout.
    """
    loss, metrics = token_loss_sum(model, batch, z_loss=z_loss, fused=fused, key=key)
    return loss / jnp.maximum(metrics.tokens, 1.0), metrics


def evaluation_loss(model: Decoder, batch: Batch) -> Float[Array, "2"]:
    """`[nll, tokens]`, both sums: what held-out evaluation adds up over batches."""
    _, metrics = token_loss_sum(model, batch)
    return jnp.stack([metrics.nll, metrics.tokens])
