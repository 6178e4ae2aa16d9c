"""Losses of a step beyond next tokens: of pairs of answers, of answers good and bad, of policies, and of teachers."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, PRNGKeyArray

from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.objectives.answers import answer_lengths, answer_means, answer_sums, masked_sum
from eqx_decoders.training.objectives.policy_loss import PolicyLoss, kl_penalty, policy_loss
from eqx_decoders.training.objectives.preference_loss import KTOLoss, PairLoss, kto_loss, pair_figures, pair_loss
from eqx_decoders.training.objectives.token_log_probs import TargetLogProbs, needed, target_log_probs
from eqx_decoders.training.step.loss_metrics import LossMetrics


Sums = dict[str, Float32[Array, ""]]


class _Objective(CheckedFields):
    """A loss of the log-probs of targets, whose sum over a batch is final."""

    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the part of a batch; the signals have what it needs of the whole."""
        targets = target_log_probs(model, batch, temperature=self.temperature_of_draws)
        loss, sums = self.loss(targets)
        counted = self.counted(targets)
        nll = masked_sum(-targets.found.log_probs, counted)
        correct, tokens = masked_sum(targets.found.top, counted), masked_sum(counted, counted)
        return loss, LossMetrics(loss=loss, nll=nll, correct=correct, tokens=tokens, sums=sums)

    @property
    def temperature_of_draws(self) -> float:
        return 1.0

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        raise NotImplementedError

    def counted(self, targets: TargetLogProbs) -> Array:
        """Return the targets of which likelihood and accuracy are reported: the tokens of answers."""
        return needed(targets.signals, "answers")[0] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairObjective(_Objective):
    """Loss of pairs of answers, `sum over pairs of weight * pair_loss`.

    It reads `Signals.answers` (2k - 1 is the chosen and 2k the rejected answer of a pair, both in one row), `policy`
    (the weight of the pair, at the tokens of both) and, for a loss with a reference, `reference`.
    """

    pair: PairLoss = PairLoss()
    """The loss of a pair."""

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of the pairs of all rows."""
        signals = targets.signals
        answers, weights = needed(signals, "answers", "policy")
        count = signals.most_answers + signals.most_answers % 2
        of_answers = lambda x: answer_sums(x, answers, count).reshape(-1, 2).T  # noqa: E731
        chosen, rejected = of_answers(targets.found.log_probs)
        lengths = answer_lengths(answers, count).reshape(-1, 2).T
        more = {}
        if self.pair.needs_reference:
            references = of_answers(*needed(signals, "reference"))
            more = {"reference_chosen": references[0], "reference_rejected": references[1]}
        options = dict(chosen_lengths=lengths[0], rejected_lengths=lengths[1], **more)
        losses, sums = pair_loss(self.pair, chosen, rejected, **options)
        weight = answer_means(weights, answers, count).reshape(-1, 2)[:, 0]
        return jnp.sum(weight * losses), sums

    def figures(self, sums: Sums) -> Sums:
        """Return means over pairs: `reward_accuracy`, `reward_margin`, rewards and log-probs of both answers."""
        return pair_figures(sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOObjective(_Objective):
    """Loss of answers that are desirable or not, `sum over answers of weight * kto_loss`.

    It reads `Signals.answers`, `policy` (the weight of the answer at each of its tokens), `advantages` (1 of a
    desirable answer, -1 of another; answers of 0 are read by nobody), `reference`, and `baseline`.
    """

    kto: KTOLoss = KTOLoss()
    """The loss of an answer."""

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of the answers of all rows."""
        signals = targets.signals
        answers, weights, labels = needed(signals, "answers", "policy", "advantages")
        reference, baseline = needed(signals, "reference", "baseline")
        answers = jnp.where(labels == 0, 0, answers)
        count = signals.most_answers
        lengths = answer_lengths(answers, count).reshape(-1)
        of_answers = lambda x: answer_sums(x, answers, count).reshape(-1)  # noqa: E731
        desirable = of_answers(labels) > 0
        z = answer_means(baseline, answers, count).reshape(-1)
        losses, sums = kto_loss(
            self.kto, of_answers(targets.found.log_probs), of_answers(reference), desirable, lengths=lengths, baseline=z
        )
        return jnp.sum(answer_means(weights, answers, count).reshape(-1) * losses), sums

    def figures(self, sums: Sums) -> Sums:
        """Return the mean rewards of desirable and of other answers."""
        good, bad = sums["desirable"], sums["answers"] - sums["desirable"]
        rewards = {"desirable_reward": good, "undesirable_reward": bad}
        means = {name: sums[name] / jnp.maximum(count, 1.0) for name, count in rewards.items()}
        return {"answers": sums["answers"]} | means


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(_Objective):
    """Loss of answers that a policy drew: `policy_loss + sum nll * -log p + sum divergence * KL - entropy bonus`.

    It reads `Signals.policy` and `advantages`, and where there are any `old`, `sampler`, `answers`, `nll` and, with
    `divergence`, `reference`.
    """

    policy: PolicyLoss = PolicyLoss()
    """The loss of a token."""
    temperature: PositiveFloat = 1.0
    """Temperature at which the answers were drawn: log-probs are those of that distribution."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy, which the loss makes larger."""

    @property
    def temperature_of_draws(self) -> float:
        """The temperature of all log-probs."""
        return self.temperature

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of all tokens that have a weight."""
        signals, log_probs = targets.signals, targets.found.log_probs
        weights, advantages = needed(signals, "policy", "advantages")
        options: Any = dict(old=signals.old, sampler=signals.sampler, answers=signals.answers)
        options |= dict(count=signals.most_answers)
        loss, sums = policy_loss(self.policy, log_probs, weights=weights, advantages=advantages, **options)
        real = weights != 0
        sums |= {"entropy": masked_sum(targets.found.entropy, real), "log_prob": masked_sum(log_probs, real)}
        if self.entropy:
            loss = loss - self.entropy * jnp.sum(jnp.where(real, weights * targets.found.entropy, 0.0))
        if signals.nll is not None:
            loss = loss - jnp.sum(jnp.where(signals.nll != 0, signals.nll * log_probs, 0.0))
        if signals.divergence is not None:
            (reference,), there = needed(signals, "reference"), signals.divergence != 0
            penalty = kl_penalty("k2", log_probs, reference, where=there)
            loss = loss + jnp.sum(jnp.where(there, signals.divergence * penalty, 0.0))
        if signals.reference is not None:
            kl = {name: kl_penalty(name, log_probs, signals.reference, where=real) for name in ("k1", "k3")}
            sums |= {name: masked_sum(value, real) for name, value in kl.items()}
        return loss, sums

    def counted(self, targets: TargetLogProbs) -> Array:
        """Return the tokens that have a weight."""
        return needed(targets.signals, "policy")[0] != 0

    def figures(self, sums: Sums) -> Sums:
        """Return means over tokens."""
        tokens = jnp.maximum(sums["tokens"], 1.0)
        return {name: value / tokens for name, value in sums.items() if name != "tokens"}
