"""What each method reads of a run's settings, and the rules for them; a setting that is not read is an error."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.errors import check
from eqx_decoders.training.methods.distill_config import check_teacher
from eqx_decoders.training.methods.preference_config import check_reference
from eqx_decoders.training.methods.reward_config import check_reward
from eqx_decoders.training.methods.rl_config import check_rl


ALL = ("*",)  # fields of a group
SHARED = ("examples_per_row",)  # of `preference`: how any examples are packed
REFERENCE = (*SHARED, "reference", "save_reference")  # and what they are compared with


class MethodKind(NamedTuple):
    """What a method reads of the settings.

    **Arguments:**

    - `groups`: the groups of settings of methods that it reads, each with the fields that it reads of it.
    - `files`: what its data are; None: texts, as those of `sft`.
    - `answers`: whether its model must answer already.
    - `check_run`: its own rules for the settings of a run, a `TrainConfig`.
    """

    groups: Mapping[str, tuple[str, ...]]
    files: str | None = None
    answers: bool = True
    check_run: Callable[[Any], None] | None = None


DRAWS = ("prompts", "samples", "max_new_tokens", "temperature", "answers_per_row", "slots", "max_staleness")


KINDS = {
    "sft": MethodKind({}, answers=False),
    "dpo": MethodKind({"preference": ALL}, "pairs", check_run=check_reference),
    "kto": MethodKind({"preference": REFERENCE, "kto": ALL}, "answers", check_run=check_reference),
    "reward": MethodKind({"preference": SHARED, "reward": ALL}, "pairs", check_run=check_reward),
    "rl": MethodKind({"rl": ALL, "sampler": ALL}, "prompts", check_run=check_rl),
    "distill": MethodKind({"distill": ALL, "rl": DRAWS, "sampler": ALL}, answers=False, check_run=check_teacher),
}


def check_groups(method: str, groups: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of the groups that the method does not read."""
    reads = KINDS[method].groups
    for name, settings in groups.items():
        read = reads.get(name, ())
        given = {} if read == ALL else {field: getattr(settings, field) for field in read}
        plain = type(settings)(**given)  # a setting may follow from those that are read
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            free = read == ALL or field.name in read or value == getattr(plain, field.name)
            check(free, f"{name}.{field.name}={value!r} is not read with method={method!r}: leave it out.")


def check_method(config: Any) -> None:
    """Raise ConfigError for settings of a run, a `TrainConfig`, with which its method does not go."""
    kind, name = KINDS[config.method], f"method={config.method!r}"
    if config.method == "sft":
        return
    begun = config.init_from is not None or not kind.answers
    check(begun, f"{name} needs init_from: a model that answers already.")
    check(config.mtp_depths == 0, f"mtp_depths={config.mtp_depths}: {name} trains no drafts. Leave it out.")
    if kind.files is not None:
        check(config.data.path is not None, f"{name} needs data.path: files of {kind.files}.")
        check(not config.describe_data, f"describe_data shows documents: {name} reads {kind.files}. Leave it out.")
    step = config.step
    rule = f"step.z_loss={step.z_loss} and step.fused_loss={step.fused_loss} are not read with {name}."
    check(step.z_loss == 0.0 and step.fused_loss, rule)
    if kind.check_run is not None:
        kind.check_run(config)
