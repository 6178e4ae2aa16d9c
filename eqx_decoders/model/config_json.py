"""Lossless conversion of configurations to JSON and back, and changes of single fields by name."""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import eqx_decoders.blocks.residual
import eqx_decoders.encoders
import eqx_decoders.layers
from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.errors import ConfigError, check, check_integer, check_option, suggest
from eqx_decoders.layers.base import RegisteredConfig


T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Convert a configuration to JSON values: `{"class": "MLPConfig", "mlp_dim": 12, …}` with all of its fields."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__} | fields
    return [to_plain(item) for item in value] if isinstance(value, tuple) else value


def from_plain(value: Any, hint: Any, where: str) -> Any:
    """Convert the result of `to_plain` back to a value of a type that the annotation `hint` allows.

    Raises ConfigError for other values; `where` is the name of the value in the message.
    """
    kinds = _kinds(hint)
    if isinstance(value, dict):
        class_name = str(value.get("class", ""))
        classes = _classes(kinds)
        if class_name not in classes:
            _import_classes()
            classes = _classes(_kinds(hint))
        if class_name not in classes and class_name.isidentifier():
            raise ConfigError(
                f"{where}: class={class_name!r} is not known.{suggest(class_name, classes)} If the class is your own, "
                "define it before the configuration is read: programs take --plugin FILE.py."
            )
        kind = classes[check_option(f"{where}: class", class_name, classes)]
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        fields = {str(name): item for name, item in value.items() if name != "class"}
        for name in fields:
            check_option(f"{where}: field of {kind.__name__}", name, names)
        required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        missing = sorted(set(required) - set(fields))
        check(not missing, f"{where}: {kind.__name__} needs the fields {', '.join(missing)}.")
        return kind(**{name: from_plain(item, hints[name], f"{where}.{name}") for name, item in fields.items()})
    if isinstance(value, list):
        item_hints = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
        check(len(item_hints) == 1, f"{where} must be {_type_names(kinds)}, not a list.")
        return tuple(from_plain(item, item_hints[0], f"{where}[{index}]") for index, item in enumerate(value))
    for kind in kinds:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if value in typing.get_args(kind) if typing.get_origin(kind) is Literal else type(value) is kind:
            return value
    raise ConfigError(f"{where}={value!r} must be {_type_names(kinds)}.")


def decoder_to_json(config: Any) -> str:
    """Write a `DecoderConfig` as JSON; repeated layers are written once: `{"repeat": 4, "blocks": …}`."""
    repeated_blocks = [
        {"repeat": repeats, "blocks": [to_plain(block) for block in unit]}
        for unit, repeats in find_repeats(config.blocks)
    ]
    return json.dumps(to_plain(config) | {"blocks": repeated_blocks}, indent=2) + "\n"


def decoder_from_json(text: str, kind: type[T]) -> T:
    """Parse a text of `decoder_to_json`, and return a configuration of the class `kind`, `DecoderConfig`.

    Raises ConfigError for texts that `decoder_to_json` does not return.
    """
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"The configuration is not valid JSON: {str(error)[:200]}.") from error
    has_blocks = isinstance(plain, dict) and isinstance(plain.get("blocks"), list)
    check(has_blocks, "The configuration must be a JSON object with a list of blocks.")
    blocks = []
    for entry in plain["blocks"]:
        repeated = isinstance(entry, dict) and set(entry) == {"repeat", "blocks"}
        if repeated:
            check_integer("DecoderConfig.blocks: repeat", entry["repeat"])
            check(
                isinstance(entry["blocks"], list),
                'DecoderConfig.blocks: "blocks" must be a list in an entry with "repeat".',
            )
        blocks += entry["blocks"] * entry["repeat"] if repeated else [entry]
    return from_plain(plain | {"blocks": blocks}, kind, "DecoderConfig")


def with_fields(config: T, pairs: Sequence[str]) -> T:
    """Return a `DecoderConfig` with the changes in `pairs`, texts such as `"embed_dim=512"`.

    A name is one of:

    - a field of `DecoderConfig`;
    - `num_layers`: the pattern of layers is truncated, or continued, to this number of layers;
    - a field of the mixers or MLPs, such as `num_heads` or `mlp_dim`: it is changed in all layers that have it;
    - a path of fields that starts with `mixer`, `mlp` or `block`, for fields that are ambiguous or nested:
        `mixer.bias`, `mlp.router.z_loss`, `block.dropout`.

    Values are JSON; other texts are strings. All changes are made together and then checked. Fields that were derived
    from a changed field are not updated.
    """
    changes: dict[str, str] = {}
    for pair in pairs:
        name, equal, text = pair.partition("=")
        check(bool(equal and name), f"set={pair!r} must be a field and its value, such as num_layers=4.")
        changes[name.strip()] = text.strip()
    if not changes:
        return config
    decoder: Any = config
    num_layers = changes.pop("num_layers", None)
    decoder_fields = {field.name for field in dataclasses.fields(decoder)} - {"blocks", "mtp"}
    block_changes = {
        _block_path(name, decoder.blocks, decoder_fields): text
        for name, text in changes.items()
        if name not in decoder_fields
    }
    applied: set[tuple[str, ...]] = set()
    changed_blocks = {block: _changed(block, block_changes, applied) for block in dict.fromkeys(decoder.blocks)}
    for path in block_changes.keys() - applied:
        raise ConfigError(f"set={'.'.join(path)!r}: no layer has this field.")
    new: dict[str, Any] = {"blocks": tuple(changed_blocks[block] for block in decoder.blocks)}
    if num_layers is not None:
        new["blocks"] = _continued(new["blocks"], _parsed_value(num_layers, int, "num_layers"))
    if decoder.mtp is not None:
        new["mtp"] = dataclasses.replace(decoder.mtp, block=_changed(decoder.mtp.block, block_changes, applied))
    hints = typing.get_type_hints(type(decoder))
    new |= {name: _parsed_value(text, hints[name], name) for name, text in changes.items() if name in decoder_fields}
    return dataclasses.replace(decoder, **new)


def _kinds(hint: Any) -> list[Any]:
    """Return the types that an annotation allows. A configuration class also allows its subclasses."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    if isinstance(hint, type) and issubclass(hint, RegisteredConfig):
        return list(hint.registered())
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return [kind, *(derived for subclass in kind.__subclasses__() for derived in _kinds(subclass))]
    return [hint]


def _import_classes() -> None:
    """Import the modules of the library that are imported on first use; their configurations register themselves."""
    for package in (eqx_decoders.layers, eqx_decoders.blocks.residual, eqx_decoders.encoders):
        for name in package.__all__:
            getattr(package, name)


def _classes(kinds: list[Any]) -> dict[str, Any]:
    """Return the configuration classes among the types, by name, without abstract ones."""
    return {
        kind.__name__: kind
        for kind in kinds
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not inspect.isabstract(kind)
    }


def _type_names(kinds: list[Any]) -> str:
    json_names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    names = []
    for kind in kinds:
        if typing.get_origin(kind) is Literal:
            names += map(repr, typing.get_args(kind))
        else:
            names.append(json_names.get(kind, getattr(kind, "__name__", "a list")))
    return " or ".join(names)


def _block_path(name: str, blocks: Sequence[Any], decoder_fields: set[str]) -> tuple[str, ...]:
    """Return the path of a field in a block: `num_heads` is `("mixer", "num_heads")`."""
    first, *rest = name.split(".")
    if rest and first in ("mixer", "mlp", "block"):
        return tuple(rest) if first == "block" else (first, *rest)
    fields = {part: {field for block in blocks for field in _fields(getattr(block, part))} for part in ("mixer", "mlp")}
    owners = [part for part, names in fields.items() if first in names]
    check(len(owners) < 2, f"set={name!r} is a field of mixers and of MLPs: write mixer.{name} or mlp.{name}.")
    if not owners:
        check_option("set", name, ("num_layers", *sorted(decoder_fields), *sorted(fields["mixer"] | fields["mlp"])))
    return (*owners, first, *rest)


def _fields(config: Any) -> list[str]:
    return [] if config is None else [field.name for field in dataclasses.fields(config)]


def _changed(config: Any, changes: dict[tuple[str, ...], str], applied: set[tuple[str, ...]], depth: int = 0) -> Any:
    """Return the configuration with those changes whose path exists in it. Adds their paths to `applied`.

    `config` is at `depth` of the paths.
    """
    new: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for path, text in changes.items():
        name = path[depth]
        if name not in _fields(config):
            continue
        if len(path) == depth + 1:
            new[name] = _parsed_value(text, hints[name], f"{type(config).__name__}.{name}")
            applied.add(path)
        elif dataclasses.is_dataclass(getattr(config, name)):
            nested = {
                other: other_text
                for other, other_text in changes.items()
                if other[: depth + 1] == path[: depth + 1] and len(other) > depth + 1
            }
            new[name] = _changed(getattr(config, name), nested, applied, depth + 1)
    return dataclasses.replace(config, **new) if new else config


def _parsed_value(text: str, hint: Any, where: str) -> Any:
    """Parse a text of the command line as the value of a field with the annotation `hint`."""
    python_constants = {"None": None, "none": None, "True": True, "False": False}
    try:
        value = python_constants[text] if text in python_constants else json.loads(text)
    except ValueError:
        value = text
    return from_plain(value, hint, where)


def _continued(blocks: tuple[T, ...], count: int) -> tuple[T, ...]:
    """Return the first `count` blocks. If there are fewer, continue the shortest cycle at the end of the list."""
    check_integer("num_layers", count)
    kinds = [list(dict.fromkeys(blocks)).index(block) for block in blocks]
    size = len(blocks)
    # find the shortest prefix plus period that describes the list: a dense block and then experts is 1 + 1
    _, _, period = min(
        (prefix + period, prefix, period)
        for period in range(1, size + 1)
        for prefix in range(size - period + 1)
        if all(kinds[i] == kinds[i - period] for i in range(prefix + period, size))
    )
    result = list(blocks)
    while len(result) < count:
        result.append(result[-period])
    return tuple(result[:count])
