"""Lazy imports: modules, and names of a package, that are imported on first use (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, exports: Mapping[str, str], modules: str = ""
) -> tuple[Callable[[str], Any], list[str], Callable[[], list[str]]]:
    """Return `__getattr__`, `__all__` and `__dir__` of a package whose names are imported on first use.

    **Arguments:**

    - `package`: full name of the package.
    - `exports`: exported names, separated by spaces, by the path of their module below `eqx_decoders`.
    - `modules`: submodules that are attributes of the package, separated by spaces.
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
    """Module that is imported when one of its attributes is first read: `pl = LazyModule("a.b")`."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # `copy` reads such attributes before `self._name` is set
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
