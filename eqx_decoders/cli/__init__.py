"""The programs `eqx-decoders train`, `generate`, `serve`, `evaluate`, `convert`, `plan`; `scripts/` start them, too."""

import functools
import gc
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

from eqx_decoders.cli.plugins import load_plugins
from eqx_decoders.errors import EqxDecodersError, missing_package
from eqx_decoders.io.exit_codes import exit_code
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.processes import leave
from eqx_decoders.io.status import showing


PROGRAMS = {
    "train": "train a decoder on text",
    "generate": "let a model write",
    "serve": "serve a model over HTTP, as OpenAI's API does",
    "evaluate": "measure models on tasks and texts, or two of them side by side",
    "convert": "between Hugging Face directories and run directories",
    "plan": "what a step will need of TPUs and GPUs that are not here",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names with the others; return the exit code."""

    def start(name: str) -> Callable[[list[str], str], int]:
        return lambda args, prog: import_program(name)(args, prog=prog)

    return run_command({name: (text, start(name)) for name, text in PROGRAMS.items()}, args, "eqx-decoders")


def import_program(name: str) -> Callable[..., int]:
    """Import a program for a process that runs nothing else; return its `main`.

    Python's collector would look through what the imports make again and again, a fifth of their time, and later
    through all of it whenever it looks for cycles. What is imported stays, so it is told to leave it alone.
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
    """Run the command that the first argument names; print the commands, each with its text, if it names none.

    about: text for the help, before the commands.
    """
    name, *rest = [*(sys.argv[1:] if args is None else args), ""]
    if name in commands:
        return commands[name][1](rest[:-1], f"{prog} {name}")
    help_wanted = name in ("-h", "--help")
    lines = [] if help_wanted or not name else [f"{name!r} is no command.", ""]
    lines += [f"usage: {prog} {{{','.join(commands)}}} [OPTIONS]", ""]
    lines += [about, ""] if help_wanted and about else []
    lines += [f"  {command:10}{text}" for command, (text, _) in commands.items()]
    lines += ["", f"{prog} {next(iter(commands))} --help explains the options of {next(iter(commands))}, and so on."]
    print("\n".join(lines), file=sys.stdout if help_wanted else sys.stderr)
    return 0 if help_wanted else 2


def program(flags: Callable[[], Mapping[str, str]]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a program so that it prints this library's errors as one line and returns their exit codes.

    It returns those of signals, too, and shows a status where work takes longer than two seconds. Families of
    `--plugin` are registered first. `flags` gives the flag of every setting (see `in_flags`).
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

        return run

    return decorate


def in_flags(text: str, flags: Mapping[str, str]) -> str:
    """Replace settings in a sentence by their flags: `DataConfig.seq_len=1` is `--seq-len=1`.

    `flags` has them by name: `seq_len`, and those with a dot by `mesh.fsdp` or by their class. A name that could be a
    word of the sentence counts where a value follows.
    """

    def pattern(name: str) -> str:
        return re.escape(name) + ("" if re.search(r"[._]", name) else "(?==)")

    names = "|".join(map(pattern, sorted(flags, key=len, reverse=True)))
    free = rf"(?<![\w./'\"-])(?:{names})(?![\w/'\"-]|\.\w)"  # not a part of a path, of a quotation or of another name
    named = re.sub(free, lambda found: flags[found[0]], text)
    return re.sub(r"(--[\w.-]+) \(\1\)", r"\1", named)  # where a sentence for all has both, flag and field


def require(*packages: str) -> None:
    """Raise MissingPackage for the first package of the extra "train" that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise missing_package(package, "train")
