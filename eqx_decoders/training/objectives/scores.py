"""Models with a score head: scores of completions (reward models) and values of tokens (critics), and their losses."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, PRNGKeyArray

from eqx_decoders.context import Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.objectives.policy_loss import value_is_clipped, value_loss
from eqx_decoders.training.objectives.preference_loss import Sums, pair_metrics, reward_loss
from eqx_decoders.training.objectives.reductions import (
    completion_lengths,
    completion_means,
    completion_sums,
    masked_sum,
)
from eqx_decoders.training.objectives.token_log_probs import in_row_order, needed, target_hidden
from eqx_decoders.training.step.loss import model_inputs
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.zigzag import in_context_order


# --- reward models ----------------------------------------------------------------------------------------------------


def reward_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch completions"]:
    """Compute the scores of the completions 1, 2, ..., `Signals.max_completions` of each row; 0 for absent ones.

    The score is read at the last token of the completion (see `Signals.completion_ids`), which is the end of its turn.
    Outside of `jax.jit` the function is compiled. Raises ConfigError for a model without exactly one score, and for a
    batch without completion ids.
    """
    scores = model.config.scores
    check(
        scores == 1,
        f"reward_scores: DecoderConfig.scores={scores} must be 1: use a model that was trained with method='reward', "
        "or `add_score_head`.",
    )
    check(batch.signals is not None, "Batch.signals=None: reward_scores needs completion ids. Use PreferenceBatches.")
    return _reward_scores(model, batch)


@jit_if_eager
@run_with_auto_axes
def _reward_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch completions"]:
    assert batch.signals is not None
    (completion_ids,) = needed(batch.signals, "completion_ids")
    count = batch.signals.max_completions
    batch, last = in_context_order(model.config, model.execution, batch, _at_last_tokens(completion_ids, count))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    inputs, promises = model_inputs(model, batch), Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, _ = model.run(jnp.asarray(batch.tokens), positions, segments, **inputs, promises=promises)
    return completion_sums(model.logits(hidden)[..., 0], last, count)


def _at_last_tokens(completion_ids: Int[Array, "batch length"], count: int) -> Int[Array, "batch length"]:
    """Return the id of each completion at its last token, and 0 elsewhere.

    Tokens of an environment, or padding, may follow the last token.
    """
    ids = jnp.arange(1, count + 1, dtype=completion_ids.dtype)[None, None]
    positions = jnp.arange(1, completion_ids.shape[1] + 1)[None, :, None]
    ends = jnp.max(jnp.where(completion_ids[:, :, None] == ids, positions, 0), axis=1)  # counted from 1
    ends = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), completion_ids, axis=1)
    return jnp.where(ends == positions[..., 0], completion_ids, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardObjective(CheckedFields):
    """Loss of a reward model, `sum over pairs of weight * reward_loss` (Bradley and Terry 1952).

    It reads `Signals.completion_ids` (2k - 1 is the chosen and 2k the rejected completion of a pair, both in one row),
    `policy` (the weight of the pair, at the tokens of both) and optionally `baseline`, the margin of the pair.
    """

    centering: NonNegativeFloat = 0.0
    """Weight of the squared sum of both scores, which keeps them around 0."""
    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the loss of a microbatch. There is no dropout."""
        scores, signals = reward_scores(model, batch), batch.signals
        assert signals is not None
        completion_ids, weights = needed(signals, "completion_ids", "policy")
        count = scores.shape[1]
        pairs = lambda x: x.reshape(-1, 2)  # noqa: E731
        real = jnp.all(pairs(completion_lengths(completion_ids, count)) > 0, axis=1)
        margins = None
        if signals.baseline is not None:
            (margin,) = needed(signals, "baseline")
            margins = pairs(completion_means(margin, completion_ids, count))[:, 0]
        chosen, rejected = pairs(scores)[:, 0], pairs(scores)[:, 1]
        losses, sums = reward_loss(chosen, rejected, real=real, margins=margins, centering=self.centering)
        loss = jnp.sum(pairs(completion_means(weights, completion_ids, count))[:, 0] * losses)
        tokens = jnp.sum((completion_ids > 0).astype(jnp.float32))
        zero = jnp.zeros_like(loss)  # tokens have no likelihood
        return loss, LossMetrics(loss=loss, nll=zero, correct=zero, tokens=tokens, sums=sums)

    def metrics(self, sums: Sums) -> Sums:
        """Return means over pairs: `reward_accuracy`, `reward_margin`, and the scores of both completions."""
        return pair_metrics(sums)


# --- critics ----------------------------------------------------------------------------------------------------------


def token_values(model: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    """Compute the critic's value after each token: the expected return, given the token and those before it.

    The value before a sampled token is the value after the preceding token. The value after the last token bootstraps
    the return of a truncated completion. Outside of `jax.jit` the function is compiled. Raises ConfigError for a model
    without exactly one score.
    """
    scores = model.config.scores
    check(scores == 1, f"token_values: DecoderConfig.scores={scores} must be 1: use `add_score_head(model)`.")
    return _token_values(model, batch)


@jit_if_eager
@run_with_auto_axes
def _token_values(model: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    hidden = target_hidden(model, dataclasses.replace(batch, signals=None)).hidden
    return in_row_order(model.logits(hidden)[..., 0], model.execution)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueObjective(CheckedFields):
    """Loss of a critic, `sum over tokens of weight * value_loss`.

    It reads `Signals.policy` (the weight of a token), `returns`, and `values`, the values at sampling time.
    """

    clip: PositiveFloat = 0.2
    """Value clip range: a value that has moved by more than this since sampling has no gradient."""
    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the loss of a microbatch, without dropout and routing replay: a critic has its own routers."""
        signals = None if batch.signals is None else dataclasses.replace(batch.signals, experts=None)
        hidden, _, _, signals = target_hidden(model, dataclasses.replace(batch, signals=signals))
        weights, returns, old = needed(signals, "policy", "returns", "values")
        values, real = model.logits(hidden)[..., 0], weights != 0
        loss = value_loss(values, returns, weights=weights, old=old, clip=self.clip)
        clipped = value_is_clipped(values, returns, old=old, clip=self.clip)
        tokens, zero = masked_sum(real, real), jnp.zeros_like(loss)  # tokens have no likelihood
        sums = {"tokens": tokens, "value_clip": masked_sum(clipped, real)}
        return loss, LossMetrics(loss=loss, nll=zero, correct=zero, tokens=tokens, sums=sums)

    def metrics(self, sums: Sums) -> Sums:
        """Return the fraction of tokens without gradient because their value has moved too far."""
        return {"value_clip": sums["value_clip"] / jnp.maximum(sums["tokens"], 1.0)}
