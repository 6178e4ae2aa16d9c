"""The programs `eqx-decoders train`, `generate`, `serve`, `evaluate`, `convert`, `plan`; `scripts/` start them, too."""

import functools
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from eqx_decoders.cli.plugins import load_plugins
from eqx_decoders.errors import EqxDecodersError, missing_package
from eqx_decoders.io.exit_codes import EXIT_SIGPIPE, exit_code
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.processes import leave
from eqx_decoders.io.status import showing


PROGRAMS = {
    "train": "train a decoder",
    "generate": "generate text",
    "serve": "serve a model with an OpenAI-compatible HTTP API",
    "evaluate": "evaluate a model on tasks and texts, or compare two models",
    "convert": "convert between Hugging Face, GGUF and run directories",
    "plan": "plan memory, communication and time of a step on TPUs or GPUs",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the program named by the first argument with the remaining arguments; return the exit code."""

    def start(name: str) -> Callable[[list[str], str], int]:
        return lambda args, prog: import_program(name)(args, prog=prog)

    return run_command({name: (text, start(name)) for name, text in PROGRAMS.items()}, args, "eqx-decoders")


def import_program(name: str) -> Callable[..., int]:
    """Import a program for a process that runs only this program, and return its `main`.

    Python's garbage collector is disabled during the imports, where it would take a fifth of the time, and then ignores
    the imported objects (`gc.freeze`), which are never deleted.
    """
    gc.disable()
    try:
        return importlib.import_module(f"eqx_decoders.cli.{name}").main
    finally:
        gc.freeze()
        gc.enable()


def run_command(
    commands: Mapping[str, tuple[str, Callable[[list[str], str], int]]],
    args: Sequence[str] | None,
    prog: str,
    about: str = "",
) -> int:
    """Run the command named by the first argument. Without a known command, print the list of commands.

    `commands`: description and function of each command. `about`: help text before the list.
    """
    name, *rest = [*(sys.argv[1:] if args is None else args), ""]
    if name in commands:
        return commands[name][1](rest[:-1], f"{prog} {name}")
    help_wanted = name in ("-h", "--help")
    lines = [] if help_wanted or not name else [f"unknown command: {name!r}", ""]
    lines += [f"usage: {prog} {{{','.join(commands)}}} [OPTIONS]", ""]
    lines += [about, ""] if help_wanted and about else []
    lines += [f"  {command:10}{text}" for command, (text, _) in commands.items()]
    lines += ["", f"Options of a command: {prog} COMMAND --help"]
    print("\n".join(lines), file=sys.stdout if help_wanted else sys.stderr)
    return 0 if help_wanted else 2


def program(flags: Callable[[], Mapping[str, str]]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return a decorator for the `main` function of a program.

    The decorated function prints errors of this library as one line and returns their exit codes, handles signals,
    shows a status line for work that takes longer than two seconds, and loads plugins (`--plugin`). `flags` returns
    the flag of each setting (see `in_flags`).
    """

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(args: Sequence[str] | None = None, **options):
            with Interrupt(at_once=True), showing(), Watchdog():
                try:
                    return main(load_plugins(sys.argv[1:] if args is None else args), **options)
                except EqxDecodersError as error:
                    text = in_flags(str(error), flags())
                    print(f"error: {text}", file=sys.stderr)
                    leave(text, exit_code(error))
                    return exit_code(error)
                except BrokenPipeError:  # the reader of a pipe has enough: `train.py --help-all | head`
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at its end
                    return EXIT_SIGPIPE

        return run

    return decorate


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Replace the names of settings in an error message by their flags: `DataConfig.seq_len=1` becomes `--seq-len=1`.

    `flags`: flags by the name of the setting, such as `seq_len`, `mesh.fsdp` or `DataConfig.seq_len`. A name without a
    dot or underscore, which could be an ordinary word, is replaced only if `=` follows.
    """

    def pattern(name: str) -> str:
        return re.escape(name) + ("" if re.search(r"[._]", name) else "(?==)")

    names = "|".join(map(pattern, sorted(flags, key=len, reverse=True)))
    # not part of a path, a quotation or another name
    standalone = rf"(?<![\w./'\"-])(?:{names})(?![\w/'\"-]|\.\w)"
    replaced = re.sub(standalone, lambda match: flags[match[0]], text)
    return re.sub(r"(--[\w.-]+) \(\1\)", r"\1", replaced)  # messages that name both flag and field


def require(*packages: str) -> None:
    """Raise MissingPackage if a package of the extra "train" is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(package, "train")
