"""What each method reads of a run's settings, and the rules for them; a setting that is not read is an error."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eqx_decoders.errors import check
from eqx_decoders.training.methods.preference_config import check_reference


ALL = ("*",)  # fields of a group


class MethodKind(NamedTuple):
    """What a method reads of the settings.

    **Arguments:**

    - `groups`: the groups of settings of methods that it reads, each with the fields that it reads of it.
    - `files`: what its data are.
    - `check_run`: its own rules for the settings of a run, a `TrainConfig`.
    """

    groups: Mapping[str, tuple[str, ...]]
    files: str = "texts"
    check_run: Callable[[Any], None] | None = None


KINDS = {
    "sft": MethodKind({}),
    "dpo": MethodKind({"preference": ALL}, "pairs", check_reference),
    "kto": MethodKind({"preference": ("reference", "examples_per_row"), "kto": ALL}, "answers", check_reference),
}


def check_groups(method: str, groups: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of the groups that the method does not read."""
    reads = KINDS[method].groups
    for name, settings in groups.items():
        plain, read = type(settings)(), reads.get(name, ())
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            free = read == ALL or field.name in read or value == getattr(plain, field.name)
            check(free, f"{name}.{field.name}={value!r} is not read with method={method!r}: leave it out.")


def check_method(config: Any) -> None:
    """Raise ConfigError for settings of a run, a `TrainConfig`, with which its method does not go."""
    kind, name = KINDS[config.method], f"method={config.method!r}"
    if config.method == "sft":
        return
    check(config.init_from is not None, f"{name} needs init_from: a model that answers already.")
    check(config.mtp_depths == 0, f"mtp_depths={config.mtp_depths}: {name} trains no drafts. Leave it out.")
    check(config.dataset.path is not None, f"{name} needs dataset.path: files of {kind.files}.")
    check(not config.describe_data, f"describe_data shows documents: it needs method='sft', not {config.method!r}.")
    step = config.step
    rule = f"step.z_loss={step.z_loss} and step.fused_loss={step.fused_loss} are not read with {name}."
    check(step.z_loss == 0.0 and step.fused_loss, rule)
    if kind.check_run is not None:
        kind.check_run(config)
