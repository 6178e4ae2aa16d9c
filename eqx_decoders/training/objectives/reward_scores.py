"""Scores of answers by a reward model, and the loss of its training."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, PRNGKeyArray

from eqx_decoders.context import Promises
from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.objectives.answers import answer_lengths, answer_means, answer_sums
from eqx_decoders.training.objectives.preference_loss import Sums, pair_figures, reward_loss
from eqx_decoders.training.objectives.token_log_probs import needed
from eqx_decoders.training.step.loss import model_inputs
from eqx_decoders.training.step.loss_metrics import LossMetrics
from eqx_decoders.training.step.zigzag import in_context_order


def reward_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch answers"]:
    """Compute the score of each answer of a batch, 1, 2, …, `Signals.most_answers`; 0 of numbers that a row lacks.

    It is read at the answer's last token, `Signals.answers`, which is the end of its turn. Outside of `jax.jit` it is
    compiled, too. Raises ConfigError for a model without a score, or with several, and for a batch without answers.
    """
    scores = model.config.scores
    remedy = "take one that `--method reward` has trained, or `add_score_head`"
    check(scores == 1, f"reward_scores: DecoderConfig.scores={scores} must be 1, that of a reward model: {remedy}.")
    check(batch.signals is not None, "Batch.signals=None: reward_scores needs answers. Take PreferenceBatches.")
    return _reward_scores(model, batch)


@jit_if_eager
@run_with_auto_axes
def _reward_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch answers"]:
    assert batch.signals is not None
    (answers,) = needed(batch.signals, "answers")
    count = batch.signals.most_answers
    batch, last = in_context_order(model.config, model.execution, batch, _last_tokens(answers, count))
    positions, segments = (None if x is None else jnp.asarray(x) for x in (batch.positions, batch.segment_ids))
    inputs, promises = model_inputs(model, batch), Promises(documents_are_contiguous=batch.contiguous)
    hidden, _, _ = model.run(jnp.asarray(batch.tokens), positions, segments, **inputs, promises=promises)
    return answer_sums(model.logits(hidden)[..., 0], last, count)


def _last_tokens(answers: Int[Array, "batch length"], count: int) -> Int[Array, "batch length"]:
    """Return the number of each answer at its last token, otherwise 0: behind it may be a tool's tokens, or padding."""
    numbers = jnp.arange(1, count + 1, dtype=answers.dtype)[None, None]
    places = jnp.arange(1, answers.shape[1] + 1)[None, :, None]
    ends = jnp.max(jnp.where(answers[:, :, None] == numbers, places, 0), axis=1)  # of each answer, counted from 1
    ends = jnp.take_along_axis(jnp.pad(ends, ((0, 0), (1, 0))), answers, axis=1)
    return jnp.where(ends == places[..., 0], answers, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardObjective(CheckedFields):
    """Loss of a reward model, `sum over pairs of weight * reward_loss` (Bradley and Terry 1952).

    It reads `Signals.answers` (2k - 1 is the chosen and 2k the rejected answer of a pair, both in one row), `policy`
    (the weight of the pair, at the tokens of both) and, where there are any, `baseline`: the margin of the pair.
    """

    centering: NonNegativeFloat = 0.0
    """Weight of the square of the sum of both scores, which keeps them around 0."""
    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the part of a batch; there is no dropout."""
        scores, signals = reward_scores(model, batch), batch.signals
        assert signals is not None
        answers, weights = needed(signals, "answers", "policy")
        count = scores.shape[1]
        pairs = lambda x: x.reshape(-1, 2)  # noqa: E731
        real = jnp.all(pairs(answer_lengths(answers, count)) > 0, axis=1)
        margins = None
        if signals.baseline is not None:
            (margin,) = needed(signals, "baseline")
            margins = pairs(answer_means(margin, answers, count))[:, 0]
        chosen, rejected = pairs(scores)[:, 0], pairs(scores)[:, 1]
        losses, sums = reward_loss(chosen, rejected, real=real, margins=margins, centering=self.centering)
        loss = jnp.sum(pairs(answer_means(weights, answers, count))[:, 0] * losses)
        tokens = jnp.sum((answers > 0).astype(jnp.float32))
        nothing = jnp.zeros_like(loss)  # no token has a likelihood
        return loss, LossMetrics(loss=loss, nll=nothing, correct=nothing, tokens=tokens, sums=sums)

    def figures(self, sums: Sums) -> Sums:
        """Return means over pairs: `reward_accuracy`, `reward_margin`, and the scores of both answers."""
        return pair_figures(sums)
