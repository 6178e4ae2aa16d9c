"""What a critic expects: the value of each token, and the loss of its training."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, PRNGKeyArray

from eqx_decoders.core.auto_jit import jit_if_eager
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import CheckedFields, PositiveFloat, check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.explicit import run_with_auto_axes
from eqx_decoders.training.objectives.answers import masked_sum
from eqx_decoders.training.objectives.policy_loss import Sums, value_is_clipped, value_loss
from eqx_decoders.training.objectives.token_log_probs import in_row_order, needed, target_hidden
from eqx_decoders.training.step.loss_metrics import LossMetrics


def values_behind(model: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    """Compute what a critic expects of the return behind each token, the token and those before it given.

    The value of a token that a policy drew is that behind the token before it; that behind the last one is what would
    have come after an answer that was cut. Outside of `jax.jit` it is compiled, too. Raises ConfigError for a model
    without a score, or with several.
    """
    scores = model.config.scores
    check(scores == 1, f"values_behind: DecoderConfig.scores={scores} must be 1: take `add_score_head(model)`.")
    return _values_behind(model, batch)


@jit_if_eager
@run_with_auto_axes
def _values_behind(model: Decoder, batch: Batch) -> Float32[Array, "batch length"]:
    hidden = target_hidden(model, dataclasses.replace(batch, signals=None)).hidden
    return in_row_order(model.logits(hidden)[..., 0], model.execution)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueObjective(CheckedFields):
    """Loss of a critic, `sum over tokens of weight * value_loss`.

    It reads `Signals.policy` (the weight of a token), `returns`, and `values`, those at the time of the draws.
    """

    clip: PositiveFloat = 0.2
    """How far a value may move from that at the time of the draws before its loss has no gradient."""
    per_token: ClassVar[bool] = False

    def __call__(
        self, model: Decoder, batch: Batch, *, key: PRNGKeyArray | None, full_batch: Batch
    ) -> tuple[Float32[Array, ""], LossMetrics]:
        """Compute the part of a batch; there is no dropout, and a critic has routers of its own."""
        signals = None if batch.signals is None else dataclasses.replace(batch.signals, experts=None)
        hidden, _, _, signals = target_hidden(model, dataclasses.replace(batch, signals=signals))
        weights, returns, old = needed(signals, "policy", "returns", "values")
        values, real = model.logits(hidden)[..., 0], weights != 0
        loss = value_loss(values, returns, weights=weights, old=old, clip=self.clip)
        clipped = value_is_clipped(values, returns, old=old, clip=self.clip)
        tokens, nothing = masked_sum(real, real), jnp.zeros_like(loss)  # no token has a likelihood
        sums = {"tokens": tokens, "value_clip": masked_sum(clipped, real)}
        return loss, LossMetrics(loss=loss, nll=nothing, correct=nothing, tokens=tokens, sums=sums)

    def figures(self, sums: Sums) -> Sums:
        """Return the share of tokens whose value has no gradient, since it moved too far."""
        return {"value_clip": sums["value_clip"] / jnp.maximum(sums["tokens"], 1.0)}
