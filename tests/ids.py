"""Ids of parametrized tests, which `conftest.py` makes of all parameters without ids of their own."""

import dataclasses
from typing import Any


LONGEST = 50


def short(value: Any) -> str | None:
    """Return the id of a parameter, such as `fsdp=2 tensor=4` or `Rope(theta=100.0)`; None: pytest's own id."""
    if value is None or isinstance(value, bool | int | float | str):
        return None if len(str(value)) <= LONGEST else str(value)[:LONGEST]
    return _text(value)[:LONGEST] or ("default" if isinstance(value, dict) else "empty")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, set | frozenset):  # whose order differs from process to process
        return ",".join(sorted(map(_text, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        changed = {name: each for name, (each, default) in fields.items() if str(each) != str(default)}
        return f"{type(value).__name__}({_text(changed)})"
    if hasattr(value, "shape"):
        return "x".join(map(str, value.shape))
    text = getattr(value, "__name__", str(value))
    return type(value).__name__ if " at 0x" in text else text
