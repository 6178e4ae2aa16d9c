"""Names that a package offers and imports when they are asked for (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str], modules: str = "") -> tuple[Callable[[str], Any], tuple[str, ...]]:
    """`__getattr__` of a package, and the names it knows.

    **Arguments:**

    - `homes`: of each module, by its name below `eqx_decoders`, the names that it holds.
    - `modules`: of the package, to be found as its attributes, too.
    """
    found = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules.split():
            return importlib.import_module(f"{package}.{name}")
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"eqx_decoders.{found[name]}"), name)

    return get, (*found, *modules.split())
