"""Settings from files: YAML as people write it, and JSON.

The setting, not the look of a word, decides what the word means in YAML: `3e-4` is a number for a learning rate, `no`
is false for a switch, and both are texts for a prompt.
"""

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

from eqx_decoders.errors import ConfigError, check, missing_package, suggest


T = TypeVar("T")

_NULLS = ("", "~", "null", "none")
_SWITCHES = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}


@typing.runtime_checkable
class HasPreset(typing.Protocol):
    """Settings some of which a preset sets that is one of them."""

    @property
    def preset(self) -> str | None:
        """Name of the preset."""
        ...

    def of_preset(self, preset: str | None) -> Mapping[str, Any]:
        """Return the settings that another preset changes, by name."""
        ...


class _Plain(str):
    """A word without quotes."""


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a file, JSON if it is called `.json`, otherwise YAML; ConfigError for anything but a mapping."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        values = _json(text, path) if path.suffix == ".json" else _yaml(text, path)
    except RecursionError:
        raise ConfigError(f"{path} holds no settings: what is in it is nested too deeply.") from None
    check(isinstance(values, dict), f"{path} holds no settings: it must be a mapping from names to values.")
    return values


def _json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from error


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise missing_package("pyyaml", "train") from error

    class Loader(yaml.BaseLoader):  # which makes nothing but texts, lists and mappings
        def construct_scalar(self, node: Any) -> str:
            word = super().construct_scalar(node)
            return word if node.style else _Plain(word)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names = [key.value for key, _ in node.value]
            twice = sorted({str(name) for name in names if names.count(name) > 1})
            check(not twice, f"{path}: {', '.join(twice)} is there twice.")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    return values or {}


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every setting of a dataclass, and of those inside it, by its dotted name."""
    settings = {}
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        settings |= flat_settings(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return settings


def typed_settings(
    values: Mapping[str, Any], like: Any, aliases: Mapping[str, str], path: str | Path
) -> dict[str, Any]:
    """Return the settings in a mapping by dotted name, each as a value of its field's type.

    values: nested or with dotted names, with `-` for `_`. like: a dataclass with these fields. aliases: other names.
    """
    hints = field_types(type(like))
    names = {name: name for name in hints} | dict(aliases)
    groups = {name.rpartition(".")[0] for name in names} - {""}
    settings: dict[str, Any] = {}

    def collect(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            name_in_file = prefix + str(key).replace("-", "_")
            if name_in_file in groups and isinstance(value, dict):  # `data` names a group, and its path
                collect(value, f"{name_in_file}.")
                continue
            if name_in_file not in names:  # only then: comparing names takes a start half a second
                raise ConfigError(f"{path}: {name_in_file!r} is no setting.{suggest(name_in_file, names)}")
            name = names[name_in_file]
            check(name not in settings, f"{path}: {name!r} is there twice, also as {name_in_file!r}. Leave one out.")
            settings[name] = _typed(value, hints[name], f"{path}: {name!r}")

    collect(values, "")
    return settings


def with_settings(config: T, values: Mapping[str, Any], *, checked: bool = True) -> T:
    """Replace values of a dataclass by dotted name; another preset than it had changes others (`HasPreset`) before.

    `checked=False` leaves the checks to a later copy.
    """
    fields, preset = dict[str, Any](), {}
    if isinstance(config, HasPreset) and values.get("preset", config.preset) != config.preset:
        preset = config.of_preset(values["preset"])
    for field in dataclasses.fields(typing.cast(Any, config)):
        old, inside = preset.get(field.name, getattr(config, field.name)), f"{field.name}."
        if dataclasses.is_dataclass(old):
            inner = {name.removeprefix(inside): value for name, value in values.items() if name.startswith(inside)}
            fields[field.name] = with_settings(old, inner, checked=checked)
        else:
            fields[field.name] = values.get(field.name, old)
    if checked:
        return type(config)(**fields)
    new = object.__new__(type(config))
    for name, value in fields.items():
        object.__setattr__(new, name, value)
    return new


def field_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Return the annotation of every setting by its dotted name."""
    hints, types_by_name = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], prefix + field.name
        types_by_name |= field_types(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: hint}
    return types_by_name


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Convert a value of a file to the type of the annotation; ConfigError if it has none of the types."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = sorted(typing.get_args(hint) if union else (hint,), key=lambda kind: kind is str)  # a text fits anything
    for kind in kinds:
        try:
            return _as_kind(value, kind, where)
        except ValueError as error:
            if isinstance(error, ConfigError):  # of an item in a list
                raise
    raise ConfigError(f"{where}={value!r} must be {' or '.join(map(_named, kinds))}.")


def _as_kind(value: Any, kind: Any, where: str) -> Any:
    """Convert the value to a single type; ValueError where it is none of that type."""
    if typing.get_origin(kind) in (tuple, collections.abc.Sequence):
        return _as_tuple(value, typing.get_args(kind), where)
    if isinstance(value, dict | list):
        raise ValueError
    word = str(value).lower()
    if _is_null(value):
        if kind is types.NoneType:
            return None
        raise ValueError
    if kind is bool and word in _SWITCHES:
        return _SWITCHES[word]
    if kind in (int, float) and not isinstance(value, bool):
        return _number(value, kind)
    if kind is str and isinstance(value, str):
        return str(value)
    if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
        return str(value)
    raise ValueError


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, _Plain) and value.lower() in _NULLS)


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    """Convert to a number; `1e4` is a whole number, too."""
    number = float(value)
    if kind is float:
        return number
    if not number.is_integer():
        raise ValueError
    return int(Fraction(str(value)))


def _as_tuple(value: Any, parts: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    """Convert a list, or one item alone, to a tuple: of any length for `tuple[str, ...]`, of two for `tuple[int, int]`.

    A pair may be `a=1`, too, and several pairs a mapping.
    """
    fixed = len(parts) > 1 and parts[1] is not ...
    if isinstance(value, dict) and not fixed and typing.get_origin(next(iter(parts))) is tuple:
        value = [list(pair) for pair in value.items()]
    if isinstance(value, dict) or _is_null(value):
        raise ValueError
    if fixed and isinstance(value, str):
        value = list(value.rpartition("=")[::2])
    items = value if isinstance(value, list) else [value]
    if fixed and len(items) != len(parts):
        raise ValueError
    hints = parts if fixed else parts[:1] * len(items)
    return tuple(_typed(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(zip(items, hints, strict=True)))


def _named(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "null"}
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    return words.get(kind, "a list")
