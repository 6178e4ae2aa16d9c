"""Train a decoder on text.

    python scripts/train.py --run-dir runs/tiny --model tiny

Started again on the same run directory, it goes on where it was. SIGTERM saves and exits with 143.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import jax

from eqx_decoders.cli import program, require
from eqx_decoders.describe import describe
from eqx_decoders.families import list_models
from eqx_decoders.training.data import DataConfig
from eqx_decoders.training.describe_data import describe_data
from eqx_decoders.training.memory import keep_memory
from eqx_decoders.training.run import train
from eqx_decoders.training.runs import abstract_run
from eqx_decoders.training.settings import TrainConfig


@program
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
    if config.distributed:
        jax.distributed.initialize()
    if jax.default_backend() == "cpu":
        keep_memory()
    if config.describe:
        print(describe(abstract_run(config, config.run_dir, config.execution())))
        return 0
    return train(config)


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> TrainConfig:
    """The settings in the arguments of a command line; exits with 2 for what it doesn't know."""
    import tyro

    # The flags of the data have no prefix. This is said here and not in the classes, which do without tyro.
    TrainConfig.__annotations__["dataset"] = Annotated[DataConfig, tyro.conf.OmitArgPrefixes]
    for field, flag in (("path", "data"), ("held_out_path", "held-out")):
        DataConfig.__annotations__[field] = Annotated[tuple[str, ...] | None, tyro.conf.arg(name=flag)]
    return tyro.cli(TrainConfig, args=args, prog=prog, description=__doc__)
