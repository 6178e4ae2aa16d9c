"""Settings of training a reward model."""

import dataclasses
from typing import Any

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedFields):
    """Settings of training a reward model on pairs of answers."""

    centering: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0. 0.01 is common."""


def check_reward(config: Any) -> None:
    """Raise ConfigError for settings of a run, a `TrainConfig`, that are of models with logits."""
    rule = f"export_adapter={config.export_adapter!r} would lack the head of scores, which is trained beside the pairs"
    check(config.export_adapter is None, f"{rule}: give export, of the merged model.")
