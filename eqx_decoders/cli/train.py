"""Train a decoder on text.

    python scripts/train.py --run-dir runs/tiny --model tiny

Started again on the same run directory, it goes on where it was, with the settings of the run where none are given.
SIGTERM saves and exits with 143.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax

from eqx_decoders.cli import own_errors, program, require
from eqx_decoders.describe import describe
from eqx_decoders.families import list_models
from eqx_decoders.io.processes import connected
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.describe_data import describe_data
from eqx_decoders.training.memory import keep_memory
from eqx_decoders.training.run import train
from eqx_decoders.training.runs import abstract_run, is_begun
from eqx_decoders.training.settings import TrainConfig, flags, is_new, load_settings


@program(flags)
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Train as the command line says; the exit code."""
    require("tyro", "grain", "tokenizers", "matplotlib")  # now, not after hours of training
    config = parse(args, prog)
    if config.list_models:
        print("\n".join(list_models()))
        return 0
    if config.describe_data:
        print(describe_data(config, colours=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
        return 0
    with connected(config.distributed_timeout) if config.distributed else contextlib.nullcontext():
        return _train(config)


def _train(config: TrainConfig) -> int:
    if jax.default_backend() == "cpu":
        keep_memory()
    if config.describe:
        print(describe(abstract_run(config, config.run_dir, config.execution())))
        return 0
    return train(config)


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> TrainConfig:
    """The settings in the arguments of a command line; exits with 2 for what it doesn't know.

    In a run directory that was begun, those that are not given are the run's.
    """
    import tyro

    # The flags of the data have no prefix. This is said here and not in the classes, which do without tyro.
    TrainConfig.__annotations__["dataset"] = Annotated[DataConfig, tyro.conf.OmitArgPrefixes]
    for field, name in (("path", "data"), ("held_out_path", "held-out")):
        DataConfig.__annotations__[field] = Annotated[tuple[str, ...] | None, tyro.conf.arg(name=name)]
    TrainConfig.__annotations__["set"] = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    with own_errors():
        return tyro.cli(TrainConfig, args=args, prog=prog, description=__doc__, default=_defaults(args))


def _defaults(args: Sequence[str] | None) -> TrainConfig:
    """The settings of the run directory that the arguments name; without an export that was written already."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run-dir", "--run_dir", default=TrainConfig.run_dir)
    run_dir = finder.parse_known_args(args)[0].run_dir
    if not is_begun(run_dir):
        return TrainConfig()
    run = load_settings(Path(run_dir) / "settings.json")
    kept = {name: value for name in ("export", "export_adapter") if (value := getattr(run, name)) and is_new(value)}
    once = {"export": None, "export_adapter": None, "allow_changes": False, "distributed": False}
    return dataclasses.replace(run, **{"run_dir": run_dir} | once | kept)
