"""Lines of a draft beside those of the nearest family, and text from files as Python writes it."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Note:
    """Line of a table: Python, or nothing, after a comment, or none.

    **Arguments:**

    - `code`: a row, without its comma.
    - `question`: what a person must decide.
    - `reason`: why the row is as it is, for rows without a question.
    """

    code: str = ""
    question: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Notes:
    """What a draft says beside the nearest family's table.

    **Arguments:**

    - `keys`: of keys of `config.json`.
    - `harmless`: keys without effect, each with the reason.
    - `tensors`: of tensors, and of rows without one.
    - `model`: of what neither keys nor tensors say.
    """

    keys: list[Note]
    harmless: dict[str, str]
    tensors: list[Note]
    model: list[Note]


def literal(value: Any) -> str:
    """Return a JSON value as Python writes it, on one line."""
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isascii() and letter.isprintable() else f"\\U{ord(letter):08x}"


def printable(text: str) -> str:
    """Return a text with words of a file for a comment: one line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
