"""Configurations as plain JSON values and back, exactly; and changes of single fields by name."""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from eqx_decoders.blocks.repeats import find_repeats
from eqx_decoders.errors import ConfigError, check, check_integer, check_word


T = TypeVar("T")

# The names that classes, and fields by their class, have had on disk, and those that they have now.
FORMER_CLASSES: dict[str, str] = {"BranchConfig": "ExtraLayerConfig", "Plain": "NoResidual"}
FORMER_FIELDS: dict[str, dict[str, str]] = {
    "BlockConfig": {
        "wiring": "residual",
        "before": "pre_layers",
        "after": "post_layers",
        "publishes": "shares_kv_as",
    },
    "AttentionConfig": {"borrows": "kv_shared_from"},
    "Rope": {"in_turn": "interleaved_sections"},
}


_FORMER_PART = re.compile(rf"(?<=\.)(\d+|block|\*)\.({'|'.join(FORMER_FIELDS['BlockConfig'])})(?=\.|$)")


def present_name(path: str) -> str:
    """Return the present path of a weight, or of a pattern of weights, in which parts of blocks have former names."""
    path = _FORMER_PART.sub(lambda found: f"{found[1]}.{FORMER_FIELDS['BlockConfig'][found[2]]}", f".{path}")
    return path.removeprefix(".")


def to_plain(value: Any) -> Any:
    """Convert a configuration to JSON values: `{"class": "MLPConfig", "mlp_dim": 12, …}` with all of its fields."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__} | fields
    return [to_plain(each) for each in value] if isinstance(value, tuple) else value


def from_plain(value: Any, hint: Any, where: str) -> Any:
    """Convert the result of `to_plain` back to a type that fits the annotation `hint`, or raise ConfigError."""
    kinds = _kinds(hint)
    if isinstance(value, dict):
        classes: dict[str, Any] = {kind.__name__: kind for kind in kinds if isinstance(kind, type)}
        classes = {name: kind for name, kind in classes.items() if dataclasses.is_dataclass(kind)}
        word = str(value.get("class", ""))
        word = word if word in classes else FORMER_CLASSES.get(word, word)
        kind = classes[check_word(f"{where}: class", word, classes)]
        hints = typing.get_type_hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        former = {old: new for base in kind.__mro__ for old, new in FORMER_FIELDS.get(base.__name__, {}).items()}
        renamed = {old: new for old, new in former.items() if new not in value}
        fields = {renamed.get(str(name), str(name)): each for name, each in value.items() if name != "class"}
        for name in fields:
            check_word(f"{where}: field of {kind.__name__}", name, names)
        needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
        lacking = sorted(set(needed) - set(fields))
        check(not lacking, f"{where}: {kind.__name__} needs {', '.join(lacking)}.")
        return kind(**{name: from_plain(each, hints[name], f"{where}.{name}") for name, each in fields.items()})
    if isinstance(value, list):
        inner = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
        check(len(inner) == 1, f"{where} must be {_named(kinds)}, not a list.")
        return tuple(from_plain(each, inner[0], f"{where}[{index}]") for index, each in enumerate(value))
    for kind in kinds:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if value in typing.get_args(kind) if typing.get_origin(kind) is Literal else type(value) is kind:
            return value
    raise ConfigError(f"{where}={value!r} must be {_named(kinds)}.")


def decoder_to_json(config: Any) -> str:
    """Write a `DecoderConfig` as JSON; repeated layers are written once: `{"repeat": 4, "blocks": …}`."""
    runs = [
        {"repeat": repeats, "blocks": [to_plain(block) for block in unit]}
        for unit, repeats in find_repeats(config.blocks)
    ]
    return json.dumps(to_plain(config) | {"blocks": runs}, indent=2) + "\n"


def decoder_from_json(text: str, kind: type[T]) -> T:
    """Read the result of `decoder_to_json` as a `DecoderConfig`, its class; ConfigError for anything else."""
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a configuration must be JSON: {str(error)[:200]}.") from error
    good = isinstance(plain, dict) and isinstance(plain.get("blocks"), list)
    check(good, "a configuration must be a JSON object with a list of blocks.")
    blocks = []
    for entry in plain["blocks"]:
        repeated = isinstance(entry, dict) and set(entry) == {"repeat", "blocks"}
        if repeated:
            check_integer("DecoderConfig.blocks: repeat", entry["repeat"])
            check(isinstance(entry["blocks"], list), "DecoderConfig.blocks: repeat needs a list of blocks.")
        blocks += entry["blocks"] * entry["repeat"] if repeated else [entry]
    return from_plain(plain | {"blocks": blocks}, kind, "DecoderConfig")


def with_fields(config: T, pairs: Sequence[str]) -> T:
    """Return a `DecoderConfig` with single fields changed, each by a text like `"embed_dim=512"`.

    The names are those of fields of `DecoderConfig`; `num_layers`, to which the pattern of the layers is cut or
    continued; and of fields of the mixers and the MLPs in all layers that have them: `num_heads`, `mlp_dim`, or with
    the part where both or neither would do, `mixer.bias`, `mlp.router.z_loss`, `block.dropout`. Values are JSON or
    plain words. All are changed together and then checked. Values derived from another field stay as they are.
    """
    named = {}
    for pair in pairs:
        name, equal, text = pair.partition("=")
        check(bool(equal and name), f"set={pair!r} must be a field and its value, such as num_layers=4.")
        named[name.strip()] = text.strip()
    if not named:
        return config
    decoder: Any = config
    count = named.pop("num_layers", None)
    decoder_fields = {field.name for field in dataclasses.fields(decoder)} - {"blocks", "mtp"}
    of_blocks = {name: text for name, text in named.items() if name not in decoder_fields}
    inner = {_path(name, decoder.blocks, decoder_fields): text for name, text in of_blocks.items()}
    used: set[tuple[str, ...]] = set()
    blocks = {block: _changed(block, inner, used) for block in dict.fromkeys(decoder.blocks)}
    for path in inner.keys() - used:
        raise ConfigError(f"set={'.'.join(path)!r}: no layer has that field.")
    new: dict[str, Any] = {"blocks": tuple(blocks[block] for block in decoder.blocks)}
    if count is not None:
        new["blocks"] = _continued(new["blocks"], _value(count, int, "num_layers"))
    if decoder.mtp is not None:
        new["mtp"] = dataclasses.replace(decoder.mtp, block=_changed(decoder.mtp.block, inner, used))
    hints = typing.get_type_hints(type(decoder))
    new |= {name: _value(text, hints[name], name) for name, text in named.items() if name in decoder_fields}
    return dataclasses.replace(decoder, **new)


def _kinds(hint: Any) -> list[Any]:
    """Return the types that an annotation allows, with the subclasses of configurations."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    if dataclasses.is_dataclass(hint):
        kind: Any = hint
        return [kind, *(each for derived in kind.__subclasses__() for each in _kinds(derived))]
    return [hint]


def _named(kinds: list[Any]) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a word", types.NoneType: "null"}
    texts = []
    for kind in kinds:
        literal = typing.get_origin(kind) is Literal
        texts += map(repr, typing.get_args(kind)) if literal else [words.get(kind, getattr(kind, "__name__", "a list"))]
    return " or ".join(texts)


def _path(name: str, blocks: Sequence[Any], decoder_fields: set[str]) -> tuple[str, ...]:
    """Return the path of a field in a block: `num_heads` is `("mixer", "num_heads")`."""
    part, *rest = name.split(".")
    if rest and part in ("mixer", "mlp", "block"):
        return tuple(rest) if part == "block" else (part, *rest)
    parts = {which: {each for block in blocks for each in _fields(getattr(block, which))} for which in ("mixer", "mlp")}
    owners = [which for which, names in parts.items() if part in names]
    check(len(owners) < 2, f"set={name!r} is a field of mixers and of MLPs: write mixer.{name} or mlp.{name}.")
    if not owners:
        check_word("set", name, ("num_layers", *sorted(decoder_fields), *sorted(parts["mixer"] | parts["mlp"])))
    return (*owners, part, *rest)


def _fields(config: Any) -> list[str]:
    return [] if config is None else [field.name for field in dataclasses.fields(config)]


def _changed(config: Any, changes: dict[tuple[str, ...], str], used: set[tuple[str, ...]], depth: int = 0) -> Any:
    """Return the configuration with the values of the paths that it has; these paths are added to `used`."""
    new: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for path, text in changes.items():
        name = path[depth]
        if name not in _fields(config):
            continue
        if len(path) == depth + 1:
            new[name] = _value(text, hints[name], f"{type(config).__name__}.{name}")
            used.add(path)
        elif dataclasses.is_dataclass(getattr(config, name)):
            same = {other: each for other, each in changes.items() if other[: depth + 1] == path[: depth + 1]}
            same = {other: each for other, each in same.items() if len(other) > depth + 1}
            new[name] = _changed(getattr(config, name), same, used, depth + 1)
    return dataclasses.replace(config, **new) if new else config


def _value(text: str, hint: Any, where: str) -> Any:
    """Return the value of a text of the command line, in a field with the annotation `hint`."""
    words = {"None": None, "none": None, "True": True, "False": False}
    try:
        value = words[text] if text in words else json.loads(text)
    except ValueError:
        value = text
    return from_plain(value, hint, where)


def _continued(blocks: tuple[T, ...], count: int) -> tuple[T, ...]:
    """Return the first `count` blocks; if there are fewer, the cycle at their end continues, or all of them repeat."""
    check_integer("num_layers", count)
    numbers = [list(dict.fromkeys(blocks)).index(block) for block in blocks]
    size = len(blocks)
    # the shortest beginning plus cycle that explains all of them: one dense block, then experts, is 1 + 1
    _, _, period = min(
        (begin + period, begin, period)
        for period in range(1, size + 1)
        for begin in range(size - period + 1)
        if all(numbers[i] == numbers[i - period] for i in range(begin + period, size))
    )
    longer = list(blocks)
    while len(longer) < count:
        longer.append(longer[-period])
    return tuple(longer[:count])
