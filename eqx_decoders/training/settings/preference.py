"""Settings of the methods that learn from preferences: dpo, kto and reward."""

import dataclasses
from typing import Any

from eqx_decoders.errors import CheckedFields, NonNegativeFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.objectives.preference_loss import PairLoss


REFERENCES = ("auto", "base", "start", "ema")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceConfig(PairLoss):
    """Settings of training on pairs of completions (`method="dpo"`) or labeled completions (`method="kto"`)."""

    reference: str = "auto"
    """Reference model. base: this model without its adapters, which needs no memory; start: a copy of the initial
    weights; ema: the EMA weights of `optimizer.ema_decay`; otherwise the directory of a Hugging Face checkpoint.
    auto: base with `lora.rank`, otherwise start."""
    save_reference: bool = False
    """Compute the reference log-probs of all completions before the first step and store them in `<run-dir>/reference`,
    so that no reference model is in memory."""
    examples_per_row: PositiveInt = 16
    """Maximum number of pairs, or of labeled completions, in one sequence."""

    def __post_init__(self):
        super().__post_init__()
        if self.reference not in REFERENCES:
            expand_paths(self, "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(CheckedFields):
    """Settings of training a reward model on pairs of completions (`method="reward"`)."""

    centering: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores around 0. 0.01 is common."""


def check_reference(config: Any) -> None:
    """Raise ConfigError if a run (a `TrainConfig`) lacks what its reference model requires."""
    settings, reference = config.preference, config.preference.reference
    check(
        reference != "base" or config.lora.rank is not None,
        "preference.reference='base' needs lora.rank: it is the model without its adapters.",
    )
    check(
        reference != "ema" or config.optimizer.ema_decay is not None,
        "preference.reference='ema' needs optimizer.ema_decay.",
    )
    if settings.save_reference:
        check(reference != "ema", "preference.save_reference=True needs a fixed reference: preference.reference='ema' "
              "changes in each step. Leave one of them out.")  # fmt: skip
        check(
            config.method == "kto" or settings.needs_reference,
            f"preference.save_reference=True is not read with preference.kind={settings.kind!r}, which has no "
            "reference: leave it out.",
        )


def check_reward(config: Any) -> None:
    """Raise ConfigError for settings of a run (a `TrainConfig`) that a reward model does not support."""
    check(
        config.export_adapter is None,
        f"export_adapter={config.export_adapter!r} cannot hold the score head, which is trained in addition to the "
        "adapters: use export, which writes the merged model.",
    )
