"""Descriptions of Python functions for chat templates: JSON schemas of their signatures and docstrings."""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_SECTION = re.compile(r"^(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)[ \t]*(?:\([^)]*\))?:[ \t]*(.*)")  # maybe with its type
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.DOTALL | re.IGNORECASE)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function for the variable `tools` of chat templates, as transformers' `get_json_schema` does.

    Its parameters have type hints and lines in a docstring of Google's style: a section `Args:`, and maybe `Returns:`.
    `(choices: ["a", "b"])` at the end of a line are the only values. Raises TypeError with what is missing.
    """
    name, text = function.__name__, inspect.getdoc(function)
    if not text:
        raise TypeError(f"the tool {name} has no docstring, which tells the model what it does")
    about, arguments, returned = _parsed(text)
    hints = typing.get_type_hints(function)
    result = hints.pop("return", None)
    properties, required = dict[str, Any](), list[str]()
    for key, parameter in inspect.signature(function).parameters.items():
        if key not in hints or key not in arguments:
            missing = "type hint" if key not in hints else "line in the section Args: of its docstring"
            raise TypeError(f"the parameter {key} of the tool {name} has no {missing}")
        properties[key] = _described(_schema(hints[key], f"{name}.{key}"), arguments[key])
        required += [key] if parameter.default is inspect.Parameter.empty else []
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    described = {"name": name, "description": about, "parameters": parameters}
    if result is not None:
        more = {} if returned is None else {"description": returned}
        described["return"] = _schema(result, f"{name}: what it returns") | more
    return {"type": "function", "function": described}


def _parsed(text: str) -> tuple[str, dict[str, str], str | None]:
    """Return what a docstring says of the function, of its arguments by name, and of what it returns."""
    about, *rest = _SECTION.split(text)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    lines = inspect.cleandoc("\n" + sections.get("Args", "")).splitlines()
    arguments, name = dict[str, str](), ""
    for line in lines:
        begun = _ARGUMENT.match(line)
        name = name if begun is None else begun[1]
        arguments[name] = f"{arguments.get(name, '')} {line.strip() if begun is None else begun[2]}".strip()
    returned = " ".join(sections["Returns"].split()) if "Returns" in sections else None
    return about.strip(), arguments, returned


def _described(schema: dict[str, Any], line: str) -> dict[str, Any]:
    choices = _CHOICES.search(line)
    if choices is not None:
        schema = schema | {"enum": [str(each).strip() for each in json.loads(choices[1])]}
        line = line[: choices.start()].strip()
    return schema | {"description": line}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint. Raises TypeError for one that JSON has not."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        kinds = sorted({_PLAIN[type(each)] for each in inner})
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return _union(inner, where)
    kind = hint if origin is None else origin
    if kind in (list, Sequence):
        return {"type": "array"} | ({"items": _schema(inner[0], where)} if inner else {})
    if kind is tuple:
        return {"type": "array"} | ({"prefixItems": [_schema(each, where) for each in inner]} if inner else {})
    if kind in (dict, Mapping):
        return {"type": "object"} | ({"additionalProperties": _schema(inner[1], where)} if inner else {})
    raise TypeError(f"{where} has the type {hint}, which JSON has not: take numbers, texts, lists and dicts of them")


def _union(inner: Sequence[Any], where: str) -> dict[str, Any]:
    parts = [_schema(each, where) for each in inner if each is not types.NoneType]
    if len(parts) == 1:
        schema = parts[0]
    elif all(isinstance(part.get("type"), str) and len(part) == 1 for part in parts):
        schema = {"type": sorted(part["type"] for part in parts)}
    else:
        schema = {"anyOf": parts}
    return schema | ({"nullable": True} if types.NoneType in inner else {})
