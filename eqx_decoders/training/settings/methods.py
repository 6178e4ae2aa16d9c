"""Table of the training methods: the settings that each reads, and their checks. Settings not read are refused."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.errors import check
from eqx_decoders.training.settings.distill import check_teacher
from eqx_decoders.training.settings.preference import check_reference, check_reward
from eqx_decoders.training.settings.rl import check_rl


class MethodRules(NamedTuple):
    """A training method.

    **Arguments:**

    - `groups`: fields that the method reads, by group of settings.
    - `files`: records of the data. None: texts and conversations, as with `sft`.
    - `needs_init_from`: whether the method only trains existing models.
    - `check_run`: checks the settings of a run, a `TrainConfig`.
    """

    groups: Mapping[str, tuple[str, ...]]
    files: str | None = None
    needs_init_from: bool = True
    check_run: Callable[[Any], None] | None = None


ALL = ("*",)  # all fields of a group
REFERENCE = ("examples_per_row", "reference", "save_reference")
SAMPLING = ("prompts", "samples", "max_new_tokens", "temperature", "completions_per_row", "slots", "max_staleness")

METHOD_RULES = {
    "sft": MethodRules({}, needs_init_from=False),
    "dpo": MethodRules({"preference": ALL}, "pairs", check_run=check_reference),
    "kto": MethodRules({"preference": REFERENCE, "kto": ALL}, "labeled completions", check_run=check_reference),
    "reward": MethodRules({"preference": ("examples_per_row",), "reward": ALL}, "pairs", check_run=check_reward),
    "rl": MethodRules({"rl": ALL, "sampler": ALL}, "prompts", check_run=check_rl),
    "distill": MethodRules(
        {"distill": ALL, "rl": SAMPLING, "sampler": ALL}, needs_init_from=False, check_run=check_teacher
    ),
}


def check_groups(method: str, groups: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that the method does not read."""
    kind = METHOD_RULES[method]
    for name, settings in groups.items():
        read = kind.groups.get(name, ())
        if read == ALL:
            continue
        default = type(settings)(**{field: getattr(settings, field) for field in read})  # may depend on these fields
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            check(
                field.name in read or value == getattr(default, field.name),
                f"{name}.{field.name}={value!r} is not read with method={method!r}: leave it out.",
            )


def check_method(config: Any) -> None:
    """Raise ConfigError for settings of a run (a `TrainConfig`) that its method does not support."""
    check(
        config.epochs is None or not (config.method == "rl" or config.distill.on_policy),
        f"epochs={config.epochs} is not supported with method={config.method!r}, which samples its data: set steps. "
        "One pass over the prompts takes the number of prompts divided by rl.prompts.",
    )
    check(
        config.epochs is None or not config.preference.save_reference,
        f"epochs={config.epochs} is not supported with preference.save_reference=True, which needs the number of steps "
        "before the data are read: set steps.",
    )
    if config.method == "sft":
        return
    kind, name, step = METHOD_RULES[config.method], f"method={config.method!r}", config.step
    check(
        config.init_from is not None or not kind.needs_init_from,
        f"{name} needs init_from: the model to train.",
    )
    check(config.mtp_depths == 0, f"mtp_depths={config.mtp_depths} is not supported with {name}: leave it out.")
    if kind.files is not None:
        check(config.data.path is not None, f"{name} needs data.path: files of {kind.files}.")
        check(not config.describe_data, f"describe_data is not supported with {name}: leave it out.")
    check(
        step.z_loss == 0.0 and step.fused_loss,
        f"step.z_loss={step.z_loss} and step.fused_loss={step.fused_loss} are not read with {name}: leave them out.",
    )
    if kind.check_run is not None:
        kind.check_run(config)
