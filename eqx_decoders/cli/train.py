"""Train a decoder on text.

    python scripts/train.py --run-dir runs/tiny --model tiny
    python scripts/train.py --method rl --help     # flags of a method
    python scripts/train.py --help-all             # all flags

If the run directory contains a run, it is resumed with its settings, unless flags change them. SIGTERM saves a
checkpoint and ends the program with exit code 143.
"""

import argparse
import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from eqx_decoders.cli import program, require
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.cli.xla_flags import set_options
from eqx_decoders.context import ExecutionConfig
from eqx_decoders.core.malloc import keep_memory
from eqx_decoders.errors import ConfigError
from eqx_decoders.families.registry import list_models
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.io.processes import connected
from eqx_decoders.io.program_cache import keep_programs
from eqx_decoders.io.run_lock import check_run_dir
from eqx_decoders.model.weight_table import describe
from eqx_decoders.rl.methods import train
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.model import abstract_run
from eqx_decoders.training.run.preview import describe_data
from eqx_decoders.training.run.trackers import check_installed
from eqx_decoders.training.settings.files import is_settings_of_run, settings_to_resume, with_file
from eqx_decoders.training.settings.flags import flag, long_flag
from eqx_decoders.training.settings.methods import METHOD_RULES
from eqx_decoders.training.settings.run import (
    DataSettings,
    MethodSettings,
    ProcessSettings,
    RunSettings,
    TrainConfig,
    TrainedModelSettings,
)
from eqx_decoders.training.settings.step import ModelSettings, StepSettings
from eqx_decoders.training.settings.values import flat_settings, with_settings


# Flags that are listed first in the help: a first run needs no others.
BASIC = (
    "run_dir",
    "model",
    "init_from",
    "method",
    "data.path",
    "steps",
    "data.batch_size",
    "data.seq_len",
    "optimizer.learning_rate",
    "lora.rank",
    "mesh.fsdp",
    "config",
    "list_models",
)
# Groups that `--help` shows; the groups that the method of the command line reads are added, `--help-all` shows all.
HELP_GROUPS = ("data", "optimizer")
HELP_TITLES = (RunSettings, TrainedModelSettings, ModelSettings)
PRESET = "rl.preset"
TITLES = {
    RunSettings: "run",
    ModelSettings: "model",
    TrainedModelSettings: "model",
    DataSettings: "evaluation",
    MethodSettings: "method",
    StepSettings: "step",
    ExecutionConfig: "execution",
    ProcessSettings: "process",
}


@program(lambda: flag_names(TrainConfig))
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the training program with the arguments of a command line; return the exit code."""
    require("tyro", "filelock", "tokenizers", "matplotlib")  # some of them are imported only after the last step
    config = parse(args, prog)
    if config.list_models:
        print("\n".join(list_models()))
        return 0
    if config.describe or config.describe_data:
        check_run_dir(config.run_dir)
    if config.describe_data:
        print(describe_data(config, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        return 0
    check_installed(config.trackers)
    set_options(config.xla_flags)  # before JAX initializes its backends
    keep_memory()
    with connected(config.distributed_timeout) if config.distributed else contextlib.nullcontext():
        return _train(config)


def _train(config: TrainConfig) -> int:
    if config.describe:
        print(describe(abstract_run(RunDirectory(config), config.execution())))
        return 0
    keep_programs(config.data.cache_dir)
    return train(config)


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> TrainConfig:
    """Parse the arguments of a command line. Exits with code 2 for unknown arguments.

    Settings without a flag are read from the file `--config`, otherwise from the run directory if it has a run.
    """
    import tyro

    def pairs_of(number: type) -> Any:
        pair = tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATTERN=NUMBER",
            instance_from_str=functools.partial(_parse_pair, number),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [f"{value[0]}={value[1]:g}"],
        )
        return tuple[Annotated[tuple[str, number], pair], ...]

    paths = None | str | tuple[str, ...]  # tyro uses the first type that fits: "None" must become None
    types = {
        "data.path": paths,
        "data.held_out_path": paths,
        "set": Annotated[tuple[str, ...], tyro.conf.UseAppendAction],
        "optimizer.lr_multipliers": pairs_of(float),
        "lora.rank_pattern": pairs_of(int),
        "lora.alpha_pattern": pairs_of(float),
    }
    default = _defaults(args)
    try:
        return parse_flags(
            default,
            titles=TITLES,
            first=BASIC,
            types=types,
            hidden=_hidden_in_help(sys.argv[1:] if args is None else args, default.method),
            args=args,
            prog=prog,
            description=__doc__,
        )
    except ConfigError as error:
        is_of_file = _fails_without_flags(default, error)
        raise ConfigError(f"{default.config}: {error}" if is_of_file else str(error)) from None


def _hidden_in_help(args: Sequence[str], method: str) -> set[str]:
    """Return the settings that `--help` leaves out: all but the basic ones and what the method reads."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--method", default=method)
    method = finder.parse_known_args(args)[0].method
    groups = (*HELP_GROUPS, *(METHOD_RULES[method].groups if method in METHOD_RULES else ()))
    shown = {name for cls in HELP_TITLES for name in inspect.get_annotations(cls)} | set(BASIC)
    given = {word.partition("=")[0] for word in args}
    return {
        name
        for name in flat_settings(TrainConfig())
        if name not in shown and name.partition(".")[0] not in groups and not given & {flag(name), long_flag(name)}
    }


def _parse_pair(number: type, words: list[str]) -> tuple[str, Any]:
    """Parse `PATTERN=NUMBER`."""
    pattern, _, value = words[0].rpartition("=")
    if not pattern:
        raise ValueError("it must be a pattern and a number, such as '*.mlp.*=2'")
    return pattern, number(value)


def _defaults(args: Sequence[str] | None) -> TrainConfig:
    """Return the settings before flags: those of the run directory, replaced by a preset, replaced by the file.

    They are not checked yet, because flags may still change them. The flag of the preset is read here and not with the
    other flags, because the file and the other flags take precedence over the settings of the preset.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run-dir", "--run_dir")
    finder.add_argument("--checkpoint-dir", "--checkpoint_dir")
    finder.add_argument("--config")
    finder.add_argument(flag(PRESET), dest=PRESET)
    arguments = finder.parse_known_args(args)[0]
    preset = {name: value for name, value in vars(arguments).items() if name == PRESET and value is not None}
    preset = {name: None if value == "None" else value for name, value in preset.items()}
    expand_paths(arguments, "run_dir", "checkpoint_dir", "config")

    def with_preset_and_file(settings: TrainConfig) -> TrainConfig:
        with_preset = with_settings(settings, preset, checked=False)
        if arguments.config is None:
            return with_preset
        if is_settings_of_run(arguments.config):
            # The file has all settings of a run. The flag of the preset takes precedence over them.
            return with_settings(with_file(settings, arguments.config), preset, checked=False)
        return with_file(with_preset, arguments.config, without=[*preset])

    new = with_preset_and_file(TrainConfig())
    expand_paths(new, "run_dir", "checkpoint_dir")
    run_dir = arguments.run_dir or new.run_dir
    run = RunDirectory.find(run_dir, arguments.checkpoint_dir or new.checkpoint_dir)
    return new if run is None else with_preset_and_file(settings_to_resume(run.settings, run_dir))


def _fails_without_flags(default: TrainConfig, error: ConfigError) -> bool:
    """Return whether the settings of the file raise the same error without flags."""
    if default.config is None:
        return False
    try:
        with_settings(default, {})
    except ConfigError as without_flags:
        return str(without_flags) == str(error)
    return False
