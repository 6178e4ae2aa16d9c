"""Settings of training on preferences."""

import dataclasses
from typing import Any

from eqx_decoders.errors import PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.objectives.preference_loss import PairLoss


REFERENCES = ("auto", "base", "start", "ema")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceConfig(PairLoss):
    """Settings of training on pairs of answers (`method="dpo"`), or on answers with labels (`"kto"`)."""

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


def check_reference(config: Any) -> None:
    """Raise ConfigError unless a run, a `TrainConfig`, has the reference that it names."""
    reference = config.preference.reference
    rule, adapted = f"preference.reference={reference!r} needs", config.lora.rank is not None
    check(reference != "base" or adapted, f"{rule} lora.rank: without pairs there is no base beside the model.")
    means = config.optimizer.ema_decay is not None
    check(reference != "ema" or means, f"{rule} optimizer.ema_decay, of the running means.")
    saved = config.preference.save_reference
    fixed = reference != "ema" and (config.method == "kto" or config.preference.needs_reference)
    rule = f"preference.save_reference=True needs a reference that stays: preference.reference={reference!r} moves,"
    check(fixed or not saved, f"{rule} or kind={config.preference.kind!r} has none. Leave it out.")
