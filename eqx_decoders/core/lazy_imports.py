"""Names of a package, and modules, that are imported on their first use (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, exports: Mapping[str, str], modules: str = ""
) -> tuple[Callable[[str], Any], list[str], Callable[[], list[str]]]:
    """Return `__getattr__`, `__all__` and `__dir__` for a package.

    **Arguments:**

    - `package`: name of the package.
    - `exports`: names of each module, by its path below `eqx_decoders`.
    - `modules`: modules of the package, which become its attributes.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules.split():
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"eqx_decoders.{module_of[name]}"), name)

    return get, list(module_of), lambda: sorted({*module_of, *modules.split()})


class LazyModule:
    """Stand-in for a module, which is imported when the first of its attributes is read: `pl = LazyModule("a.b")`."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # `copy` looks for these before there is a name
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
