"""Settings as dotted names and values, and their types in YAML and JSON files."""

import collections.abc
import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eqx_decoders.errors import ConfigError, check, missing_package, suggest


T = TypeVar("T")


@typing.runtime_checkable
class HasPreset(typing.Protocol):
    """Settings with a field `preset`, which sets other fields."""

    @property
    def preset(self) -> str | None:
        """Name of the preset."""
        ...

    def of_preset(self, preset: str | None) -> Mapping[str, Any]:
        """Return the fields that another preset changes, with their new values."""
        ...


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of a dataclass and of its nested dataclasses, by dotted name."""
    settings = {}
    for field in dataclasses.fields(config):
        name, value = prefix + field.name, getattr(config, field.name)
        settings |= flat_settings(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return settings


def field_types(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Return the types of the settings of a dataclass and of its nested dataclasses, by dotted name."""
    hints, types_by_name = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], prefix + field.name
        types_by_name |= field_types(hint, f"{name}.") if dataclasses.is_dataclass(hint) else {name: hint}
    return types_by_name


def with_settings(config: T, values: Mapping[str, Any], *, checked: bool = True) -> T:
    """Return a copy of a dataclass with other values, by dotted name.

    If a value changes the preset of a `HasPreset`, the fields that the preset sets change first. With `checked=False`
    the copy is not validated (`__post_init__` is not called).
    """
    fields, of_preset = dict[str, Any](), {}
    if isinstance(config, HasPreset) and values.get("preset", config.preset) != config.preset:
        of_preset = config.of_preset(values["preset"])
    for field in dataclasses.fields(typing.cast(Any, config)):
        value, prefix = of_preset.get(field.name, getattr(config, field.name)), f"{field.name}."
        if dataclasses.is_dataclass(value):
            nested = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
            fields[field.name] = with_settings(value, nested, checked=checked)
        else:
            fields[field.name] = values.get(field.name, value)
    if checked:
        return type(config)(**fields)
    copy = object.__new__(type(config))
    for name, value in fields.items():
        object.__setattr__(copy, name, value)
    return copy


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a mapping from a JSON file (if its name ends in `.json`) or a YAML file. Raises ConfigError."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    try:
        values = _read_json(text, path) if path.suffix == ".json" else _read_yaml(text, path)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply: it must map names of settings to values.") from None
    check(isinstance(values, dict), f"{path} must map names of settings to values, not contain {values!r:.80}.")
    return values


def _read_json(text: str, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_unique((name for name, _ in pairs), path)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error


def _read_yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise missing_package("pyyaml", "train") from error

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _check_unique((key.value for key, _ in node.value), path)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error


def _check_unique(names: Iterable[Any], path: Path) -> None:
    names = list(map(str, names))
    repeated = sorted({name for name in names if names.count(name) > 1})
    check(not repeated, f"{path}: {', '.join(repeated)} occurs more than once. Keep one of them.")


def typed_settings(
    values: Mapping[str, Any], like: Any, aliases: Mapping[str, str], path: str | Path
) -> dict[str, Any]:
    """Return the settings of a file by dotted name, converted to the types of their fields. Raises ConfigError.

    **Arguments:**

    - `values`: contents of the file. Names are nested or dotted, and may contain `-` in place of `_`.
    - `like`: a dataclass with these settings.
    - `aliases`: other names of settings, with the dotted names that they stand for.
    - `path`: the file, for error messages.
    """
    hints = field_types(type(like))
    names = {name: name for name in hints} | dict(aliases)
    groups = {name.rpartition(".")[0] for name in names} - {""}
    settings: dict[str, Any] = {}

    def collect(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            name_in_file = prefix + str(key).replace("-", "_")
            if name_in_file in groups and isinstance(value, dict):  # `data` is a group, and the alias of `data.path`
                collect(value, f"{name_in_file}.")
                continue
            if name_in_file not in names:
                raise ConfigError(f"{path}: there is no setting {name_in_file!r}.{suggest(name_in_file, names)}")
            name = names[name_in_file]
            check(
                name not in settings,
                f"{path}: {name_in_file!r} sets {name!r}, which is already set in this file. Keep one of them.",
            )
            settings[name] = _converted(value, hints[name], f"{path}: {name!r}")

    collect(values, "")
    return settings


def _converted(value: Any, hint: Any, where: str) -> Any:
    """Convert a value of a file to the type of its field. Raises ConfigError."""
    try:
        import msgspec
    except ImportError as error:
        raise missing_package("msgspec", "train") from error

    alternatives = typing.get_args(hint) if _is_union(hint) else (hint,)
    if value == "None" and types.NoneType in alternatives:  # as on the command line
        return None
    plain = value
    if any(_is_tuple_of_pairs(kind) for kind in alternatives):  # a=1, [a=1, b=2] or {a: 1, b: 2}
        items = list(value.items()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
        plain = [item.rpartition("=")[::2] if isinstance(item, str) else item for item in items]
    elif isinstance(value, str) and str not in alternatives and any(map(_is_list, alternatives)):
        plain = [value]
    try:
        converted = msgspec.convert(plain, hint, strict=False)
    except msgspec.ValidationError as error:
        message = f"{where}={value!r} must be {' or '.join(map(_describe_type, alternatives))} ({error})."
        takes_text = any(kind is str or typing.get_origin(kind) is typing.Literal for kind in alternatives)
        quotes = " Put the text in quotes." if takes_text and not isinstance(value, str | dict | list) else ""
        raise ConfigError(message + quotes) from None
    return tuple(converted) if isinstance(converted, list) else converted


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _is_list(hint: Any) -> bool:
    """Return whether a type is `tuple[X, ...]` or `Sequence[X]`."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    return origin is collections.abc.Sequence or (origin is tuple and items[-1] is ...)


def _is_tuple_of_pairs(hint: Any) -> bool:
    return _is_list(hint) and typing.get_origin(typing.get_args(hint)[0]) is tuple


def _describe_type(hint: Any) -> str:
    """Describe a type in an error message: `"an integer"`."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    return names.get(hint, "a list" if _is_list(hint) else str(hint))
