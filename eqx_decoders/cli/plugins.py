"""Plugins: Python files with layers, models or families of users, named by `--plugin` in every program."""

from collections.abc import Sequence

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.families.family import Family
from eqx_decoders.families.registry import register_family, register_models
from eqx_decoders.io.python_file import run_python_file
from eqx_decoders.layers.base import RegisteredConfig


FLAG = "--plugin"
HELP = f"{FLAG} FILE.py (every program): Python file with your own layers, models or families, which is executed."


def load_plugin(path: str) -> None:
    """Run a Python file, and register what it defines.

    - Configurations of layers and residual connections register themselves when the file is run.
    - `FAMILY`: a `Family` (or `FAMILIES`, several): the library then reads and writes its checkpoints.
    - `MODELS`: models by name, see `register_models`: `--model NAME` then takes them.

    Raises ConfigError if the file cannot be run, or defines none of these.
    """
    known_classes = _user_classes()
    module = run_python_file(path, "plugin", FLAG, "layers, MODELS or a FAMILY")
    families = getattr(module, "FAMILIES", None) or ([module.FAMILY] if hasattr(module, "FAMILY") else [])
    models = getattr(module, "MODELS", {})
    for family in families:
        if not isinstance(family, Family):
            raise ConfigError(f"{FLAG}={path!r}: FAMILY={family!r} must be a Family: write FAMILY = Family(...).")
    if not isinstance(models, dict):
        raise ConfigError(f"{FLAG}={path!r}: MODELS must be a dictionary of models by name.")
    defines_layers = _user_classes() != known_classes
    check(
        bool(families or models or defines_layers),
        f"{FLAG}={path!r} defines no layer, MODELS or FAMILY. A layer's configuration is derived from MixerConfig, "
        "ChannelConfig, ExtraConfig or Residual.",
    )
    for family in families:
        register_family(family)
    register_models(models)


def _user_classes() -> list[type[RegisteredConfig]]:
    return [kind for kind in RegisteredConfig.registered() if not kind.__module__.startswith("eqx_decoders.")]


def load_plugins(args: Sequence[str]) -> list[str]:
    """Load the plugins in command line arguments, and return the other arguments."""
    others: list[str] = []
    remaining = iter(args)
    for argument in remaining:
        flag, equals, path = argument.partition("=")
        if flag != FLAG:
            others.append(argument)
            continue
        path = path if equals else next(remaining, "")
        check(bool(path), f"{FLAG} needs a file: {FLAG} FILE.py.")
        load_plugin(path)
    return others
