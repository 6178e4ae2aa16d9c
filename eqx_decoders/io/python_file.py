"""Python files of users: run once, and looked into by name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from eqx_decoders.errors import ConfigError, EqxDecodersError, check
from eqx_decoders.io.atomic_files import expanded


def run_python_file(path: str, kind: str, flag: str, purpose: str) -> ModuleType:
    """Run a Python file, and return its module, `eqx_decoders_<kind>_<name>`.

    flag, purpose: what names the file, and what it is for, for errors. Raises ConfigError with the reason.
    """
    file = Path(expanded(path))
    check(file.suffix == ".py" and file.is_file(), f"{flag}={path!r} must be a Python file with {purpose}.")
    name = f"eqx_decoders_{kind}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # as of every file that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
    except EqxDecodersError:
        raise
    except Exception as error:
        raise ConfigError(f"{flag}={path!r} can't be run: {type(error).__name__}: {str(error)[:300]}.") from error
    return module
