"""Command-line flags of the settings of a training run, by the names that error messages have for settings."""

from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.config_file import flat_settings


def flag(name: str) -> str:
    """Return the flag of a setting by its dotted name: `"optimizer.eps"` is `--optimizer.eps`."""
    named = {"dataset.path": "data", "dataset.held_out_path": "held-out"}
    return "--" + named.get(name, name.removeprefix("dataset.").replace("_", "-"))


def flags() -> dict[str, str]:
    """Return the flag of every setting, by its dotted name, by that of its class, and without `dataset`."""
    names = flat_settings(TrainConfig())
    by_name = {name: flag(name) for name in names}
    by_name |= {name.removeprefix("dataset."): value for name, value in by_name.items()}
    classes = {
        "dataset": "DataConfig",
        "optimizer": "OptimizerConfig",
        "step": "StepConfig",
        "mesh": "Layout",
        "low_precision": "LowPrecision",
        "offload": "Offload",
    }
    for group, kind in classes.items():
        by_name |= {name.replace(f"{group}.", f"{kind}."): flag(name) for name in names if name.startswith(f"{group}.")}
    for group, kind in (("lora", "LoRAConfig"), ("remat", "Remat")):
        by_name |= {name.replace(f"{group}_", f"{kind}."): flag(name) for name in names if name.startswith(f"{group}_")}
    return by_name
