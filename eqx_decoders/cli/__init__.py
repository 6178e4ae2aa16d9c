"""The programs: `eqx-decoders train`, `generate`, `serve`, `convert` and `plan`, which `scripts/` starts, too."""

import contextlib
import functools
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from eqx_decoders.errors import EqxDecodersError, need_extra
from eqx_decoders.io.exit_codes import exit_code
from eqx_decoders.io.interrupt import Interrupt, Watchdog
from eqx_decoders.io.shutdown import leave
from eqx_decoders.io.status import showing


PROGRAMS = {
    "train": "train a decoder on text",
    "generate": "let a model write",
    "serve": "serve a model over HTTP, as OpenAI's API does",
    "convert": "between Hugging Face directories and run directories",
    "plan": "what a training step will need of TPUs that are not here",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the program that the first argument names with the others; return the exit code."""
    name, *rest = [*(sys.argv[1:] if args is None else args), ""]
    if name in PROGRAMS:
        return importlib.import_module(f"eqx_decoders.cli.{name}").main(rest[:-1], prog=f"eqx-decoders {name}")
    help_wanted = name in ("-h", "--help")
    lines = [f"usage: eqx-decoders {{{','.join(PROGRAMS)}}} [OPTIONS]", ""]
    lines += [f"  {program:10}{text}" for program, text in PROGRAMS.items()]
    lines += ["", "eqx-decoders train --help explains the options of train, and so on."]
    print("\n".join(lines), file=sys.stdout if help_wanted else sys.stderr)
    return 0 if help_wanted else 2


def program(flags: Callable[[], Mapping[str, str]]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate a program so that it prints this library's errors as one line and returns their exit codes.

    It returns those of signals, too, and shows a status where work takes longer than two seconds. `flags` gives the
    flag of every setting (see `in_flags`).
    """

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(*args, **options):
            with Interrupt(at_once=True), showing(), Watchdog():
                try:
                    return main(*args, **options)
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


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise this library's errors in the checks of settings, which a parser of tyro would print in a box."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            yield
    except SystemExit as left:
        cause: BaseException | None = left
        while cause is not None and not isinstance(cause, EqxDecodersError):
            cause = cause.__context__
        if cause is not None:
            raise cause from None
        print(output.getvalue(), end="", file=sys.stderr)
        raise


def require(*packages: str) -> None:
    """Raise MissingPackage for the first package of the extra "train" that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise need_extra(package, "train")
