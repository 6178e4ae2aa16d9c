"""Families of one's own: Python files with a `FAMILY`, named by `--family` in every program."""

from collections.abc import Sequence

from eqx_decoders.errors import ConfigError, check
from eqx_decoders.families.hf_table import Family
from eqx_decoders.families.registry import register_family
from eqx_decoders.io.python_file import run_python_file


FLAG = "--family"
HELP = f"{FLAG} FILE.py, in every program: a family of your own, a file with a FAMILY, which is run."


def register_file(path: str) -> None:
    """Run a Python file, and register its `FAMILY`, and its `MODELS` if it has some. Raises ConfigError."""
    module = run_python_file(path, "family", FLAG, "a FAMILY")
    family, models = getattr(module, "FAMILY", None), getattr(module, "MODELS", {})
    if not isinstance(family, Family):
        raise ConfigError(f"{FLAG}={path!r} has no FAMILY: `FAMILY = Family(…)` must stand in it.")
    check(isinstance(models, dict), f"{FLAG}={path!r}: MODELS must be a dictionary of functions by name.")
    register_family(family, models)


def take_families(args: Sequence[str]) -> list[str]:
    """Register the families that a command line names; return the other arguments."""
    rest: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, path = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        path = path if equals else next(words, "")
        check(bool(path), f"{FLAG} needs a file: {FLAG} FILE.py.")
        register_file(path)
    return rest
