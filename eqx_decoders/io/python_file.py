"""Import of users' Python files by path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from eqx_decoders.errors import ConfigError, EqxDecodersError
from eqx_decoders.io.atomic_files import expanded


def run_python_file(path: str, kind: str, flag: str, purpose: str) -> ModuleType:
    """Run a Python file, and return it as the module `eqx_decoders_<kind>_<name>`.

    Raises ConfigError if the file does not exist or raises an exception.

    **Arguments:**

    - `path`: path of the file.
    - `kind`: part of the module's name.
    - `flag`: name of the flag with the path, for error messages.
    - `purpose`: noun phrase for the contents of the file, for error messages.
    """
    file = Path(expanded(path))
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{flag}={path!r} must be a Python file with {purpose}.")
    name = f"eqx_decoders_{kind}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # true for every file that ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up the module here
    try:
        spec.loader.exec_module(module)
    except EqxDecodersError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{flag}={path!r} cannot be run: {type(error).__name__}: {str(error)[:300]}. Correct the file."
        ) from error
    return module
