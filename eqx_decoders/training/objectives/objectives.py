"""Objectives of `Trainer` beyond next-token prediction: preference pairs, labeled completions, and policies."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, PRNGKeyArray

from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveFloat
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.objectives.policy_loss import PolicyLoss, kl_penalty, policy_loss
from eqx_decoders.training.objectives.preference_loss import KTOLoss, PairLoss, kto_loss, pair_loss, pair_metrics
from eqx_decoders.training.objectives.reductions import (
    completion_lengths,
    completion_means,
    completion_sums,
    masked_sum,
)
from eqx_decoders.training.objectives.token_log_probs import TargetLogProbs, needed, target_log_probs
from eqx_decoders.training.step.loss_metrics import LossMetrics


Sums = dict[str, Float32[Array, ""]]


class _Objective(CheckedFields):
    """Loss of the log-probs of targets. The losses of microbatches add up to the loss of the batch."""

    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the loss of a microbatch. Its signals contain what depends on the batch."""
        targets = target_log_probs(model, batch, temperature=self.sampling_temperature)
        loss, sums = self.loss(targets)
        counted = self.counted(targets)
        nll = masked_sum(-targets.found.log_probs, counted)
        correct, tokens = masked_sum(targets.found.top, counted), masked_sum(counted, counted)
        return loss, LossMetrics(loss=loss, nll=nll, correct=correct, tokens=tokens, sums=sums)

    @property
    def sampling_temperature(self) -> float:
        return 1.0

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        raise NotImplementedError

    def counted(self, targets: TargetLogProbs) -> Array:
        """Return the targets whose likelihood and accuracy are reported: the tokens of completions."""
        return needed(targets.signals, "completion_ids")[0] > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairObjective(_Objective):
    """Loss of preference pairs, `sum over pairs of weight * pair_loss`.

    It reads `Signals.completion_ids` (2k - 1 is the chosen and 2k the rejected completion of a pair, both in one row),
    `policy` (the weight of the pair, at the tokens of both) and, for a loss with a reference, `reference`.
    """

    pair: PairLoss = PairLoss()
    """Loss of a pair."""

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of the pairs of all rows."""
        signals = targets.signals
        completion_ids, weights = needed(signals, "completion_ids", "policy")
        count = signals.max_completions + signals.max_completions % 2
        sums_of = lambda x: completion_sums(x, completion_ids, count).reshape(-1, 2).T  # noqa: E731
        chosen, rejected = sums_of(targets.found.log_probs)
        chosen_lengths, rejected_lengths = completion_lengths(completion_ids, count).reshape(-1, 2).T
        reference_chosen = reference_rejected = None
        if self.pair.needs_reference:
            reference_chosen, reference_rejected = sums_of(*needed(signals, "reference"))
        losses, sums = pair_loss(
            self.pair,
            chosen,
            rejected,
            chosen_lengths=chosen_lengths,
            rejected_lengths=rejected_lengths,
            reference_chosen=reference_chosen,
            reference_rejected=reference_rejected,
        )
        weight = completion_means(weights, completion_ids, count).reshape(-1, 2)[:, 0]
        return jnp.sum(weight * losses), sums

    def metrics(self, sums: Sums) -> Sums:
        """Return means over pairs: `reward_accuracy`, `reward_margin`, rewards and log-probs of both completions."""
        return pair_metrics(sums)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOObjective(_Objective):
    """Loss of labeled completions (KTO), `sum over completions of weight * kto_loss`.

    It reads `Signals.completion_ids`, `policy` (the weight of the completion, at each of its tokens), `advantages` (1
    for desirable and -1 for undesirable completions; completions with 0 are ignored), `reference` and `baseline`.
    """

    kto: KTOLoss = KTOLoss()
    """Loss of a completion."""

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of the completions of all rows."""
        signals = targets.signals
        completion_ids, weights, labels = needed(signals, "completion_ids", "policy", "advantages")
        reference, baseline = needed(signals, "reference", "baseline")
        completion_ids = jnp.where(labels == 0, 0, completion_ids)
        count = signals.max_completions
        sums_of = lambda x: completion_sums(x, completion_ids, count).reshape(-1)  # noqa: E731
        means_of = lambda x: completion_means(x, completion_ids, count).reshape(-1)  # noqa: E731
        losses, sums = kto_loss(
            self.kto,
            sums_of(targets.found.log_probs),
            sums_of(reference),
            sums_of(labels) > 0,
            lengths=completion_lengths(completion_ids, count).reshape(-1),
            baseline=means_of(baseline),
        )
        return jnp.sum(means_of(weights) * losses), sums

    def metrics(self, sums: Sums) -> Sums:
        """Return the mean rewards of desirable and of undesirable completions."""
        desirable, undesirable = sums["desirable"], sums["completions"] - sums["desirable"]
        return {
            "completions": sums["completions"],
            "desirable_reward": sums["desirable_reward"] / jnp.maximum(desirable, 1.0),
            "undesirable_reward": sums["undesirable_reward"] / jnp.maximum(undesirable, 1.0),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyObjective(_Objective):
    """Loss of sampled completions: `policy_loss + sum nll * -log p + sum divergence * KL - entropy bonus`.

    It reads `Signals.policy` and `advantages`, and optionally `old`, `sampler`, `completion_ids`, `nll` and, with
    `divergence`, `reference`.
    """

    policy: PolicyLoss = PolicyLoss()
    """Loss of a token."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, which the log-probs also use."""
    entropy: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""

    @property
    def sampling_temperature(self) -> float:
        """Temperature of all log-probs."""
        return self.temperature

    def loss(self, targets: TargetLogProbs) -> tuple[Float32[Array, ""], Sums]:
        """Compute the loss of all tokens with a weight."""
        signals, log_probs = targets.signals, targets.found.log_probs
        weights, advantages = needed(signals, "policy", "advantages")
        optional: Any = dict(old=signals.old, sampler=signals.sampler, completion_ids=signals.completion_ids)
        loss, sums = policy_loss(
            self.policy,
            log_probs,
            weights=weights,
            advantages=advantages,
            count=signals.max_completions,
            **optional,
        )
        real = weights != 0
        sums |= {"entropy": masked_sum(targets.found.entropy, real), "log_prob": masked_sum(log_probs, real)}
        if self.entropy:
            loss = loss - self.entropy * jnp.sum(jnp.where(real, weights * targets.found.entropy, 0.0))
        if signals.nll is not None:
            loss = loss - jnp.sum(jnp.where(signals.nll != 0, signals.nll * log_probs, 0.0))
        if signals.divergence is not None:
            (reference,), has_kl = needed(signals, "reference"), signals.divergence != 0
            penalty = kl_penalty("k2", log_probs, reference, where=has_kl)
            loss = loss + jnp.sum(jnp.where(has_kl, signals.divergence * penalty, 0.0))
        if signals.reference is not None:
            kl = {name: kl_penalty(name, log_probs, signals.reference, where=real) for name in ("k1", "k3")}
            sums |= {name: masked_sum(value, real) for name, value in kl.items()}
        return loss, sums

    def counted(self, targets: TargetLogProbs) -> Array:
        """Return the tokens with a weight."""
        return needed(targets.signals, "policy")[0] != 0

    def metrics(self, sums: Sums) -> Sums:
        """Return means over tokens."""
        tokens = jnp.maximum(sums["tokens"], 1.0)
        return {name: value / tokens for name, value in sums.items() if name != "tokens"}
