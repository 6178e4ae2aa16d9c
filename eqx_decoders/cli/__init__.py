"""The programs: `eqx-decoders train`, `generate` and `convert`, which `scripts/` starts, too."""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from eqx_decoders.errors import EqxDecodersError, need_extra
from eqx_decoders.io.rundir import Interrupt, Watch, exit_code
from eqx_decoders.io.waiting import showing


PROGRAMS = {
    "train": "train a decoder on text",
    "generate": "let a model write",
    "convert": "between Hugging Face directories and run directories",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names with the others; the exit code."""
    name, *rest = [*(sys.argv[1:] if args is None else args), ""]
    if name in PROGRAMS:
        return importlib.import_module(f"eqx_decoders.cli.{name}").main(rest[:-1], prog=f"eqx-decoders {name}")
    asked = name in ("-h", "--help")
    lines = [f"usage: eqx-decoders {{{','.join(PROGRAMS)}}} [OPTIONS]", ""]
    lines += [f"  {program:10}{text}" for program, text in PROGRAMS.items()]
    lines += ["", "eqx-decoders train --help explains the options of train, and so on."]
    print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def program(main: Callable[..., int]) -> Callable[..., int]:
    """A program that prints the errors of this library as one line and returns their exit code, and those of signals.

    It shows what takes longer than two seconds.
    """

    @functools.wraps(main)
    def run(*args, **options):
        with Interrupt(at_once=True), showing(), Watch():
            try:
                return main(*args, **options)
            except EqxDecodersError as error:
                print(f"error: {error}", file=sys.stderr)
                return exit_code(error)

    return run


def require(*packages: str) -> None:
    """Raise MissingPackage for the first package of the extra "train" that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise need_extra(package, "train")
