"""Families of one's own: Python files with a `FAMILY`, named by `--family` in every program."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from eqx_decoders.errors import ConfigError, EqxDecodersError, check
from eqx_decoders.families import register_family
from eqx_decoders.families.hf_table import Family
from eqx_decoders.io.atomic_files import expanded


FLAG = "--family"
HELP = f"{FLAG} FILE.py, in every program: a family of your own, a file with a FAMILY, which is run."


def register_file(path: str) -> None:
    """Run a Python file, and register its `FAMILY`, and its `MODELS` if it has some. Raises ConfigError."""
    file = Path(expanded(path))
    check(file.suffix == ".py" and file.is_file(), f"{FLAG}={path!r} must be a Python file with a FAMILY.")
    name = f"eqx_decoders_family_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # as of every file that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    except EqxDecodersError:
        raise
    except Exception as error:
        raise ConfigError(f"{FLAG}={path!r} can't be run: {type(error).__name__}: {str(error)[:300]}.") from error
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
