"""JSON Schemas for constrained answers: what llguidance cannot represent is refused before an answer starts.

llguidance refuses most keywords that it does not implement. `prepare_schema` refuses the others, and rewrites formats
that llguidance checks less strictly than the `jsonschema` package does.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError


MAX_SHOWN = 80  # characters of a value in an error message
MAX_EXACT = 2**53  # llguidance reads numbers as 64-bit floats
MAX_DEPTH = 200  # of nested schemas

# Keywords of any draft that restrict values and that llguidance ignores in some drafts.
UNSUPPORTED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "contentSchema",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "disallow",
        "divisibleBy",
        "else",
        "extends",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
# Values of unsupported keywords that restrict nothing.
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "contentSchema": (True,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# Keywords whose values are schemas, lists of schemas, or objects with schemas as values.
SCHEMA = ("additionalItems", "additionalProperties", "items")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_OBJECTS = ("$defs", "definitions", "patternProperties", "properties")
COMPOSITION = ("$ref", "allOf", "anyOf", "oneOf")
STRING_RULES = ("pattern", "format", "minLength", "maxLength", "enum", "const")
NUMBER_RULES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")

# Dates that exist: llguidance allows February 29 in any year, and the year 0.
_LEAP_YEARS = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEARS = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_DATE = rf"(?:{_YEARS}-(?:{_DAYS})|{_LEAP_YEARS}-02-29)"
PATTERN_OF_FORMAT = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}[Tt][0-9]{{2}}:[0-9]{{2}}:[0-5]",  # without leap seconds
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
}


def prepare_schema(schema: Any) -> Any:
    """Return a JSON Schema as llguidance needs it. Raises ConfigError for rules that llguidance does not represent.

    Objects that declare properties get no others, unless `additionalProperties` allows them explicitly: a model could
    go on with properties of any names otherwise.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ConfigError(f"json cannot be read: a JSON Schema is an object, not {_shown(schema)}.")
    prepared = _prepare(schema, "$", 0)
    names, patterns = set[str](), set[str]()
    composed = False
    for _, inner in subschemas(prepared):
        composed |= any(keyword in inner for keyword in COMPOSITION)
        inner_names = {*_strings(inner.get("properties")), *_strings(inner.get("required"))}
        inner_patterns = _strings(inner.get("patternProperties"))
        _check_overlap(inner_names, inner_patterns)
        names |= inner_names
        patterns |= set(inner_patterns)
    if composed:  # rules of several objects may be combined
        _check_overlap(names, patterns)
    inner_schemas = [inner for _, inner in subschemas(prepared)]
    if not any(_combines_objects(inner) for inner in inner_schemas):
        for inner in inner_schemas:
            _close(inner)
    return prepared


def _combines_objects(schema: Mapping[str, Any]) -> bool:
    """Return whether properties of an object may be declared in several places."""
    if "allOf" in schema:
        return True
    siblings = schema.keys() - {"title", "description", "default", "examples", "$defs", "definitions", "$schema"}
    return any(keyword in schema for keyword in COMPOSITION) and len(siblings) > 1


def _close(schema: dict[str, Any]) -> None:
    """Allow the declared properties of an object only, where nothing else is said."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        return
    if {"additionalProperties", "patternProperties", "minProperties"} & schema.keys():
        return
    if set(_strings(schema.get("required"))) <= properties.keys():
        schema["additionalProperties"] = False


def subschemas(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas in it that are objects, with their paths."""
    pending = [(path, schema)]
    while pending:
        where, item = pending.pop()
        if isinstance(item, dict):
            yield where, item
            pending += _inner(where, item)


def leaf_schemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the inner schemas whose rules may exclude every value, which llguidance notices only when it gets there."""
    definitions = {name: schema[name] for name in ("$defs", "definitions", "$schema") if name in schema}
    seen = set[str]()
    for path, inner in subschemas(schema):
        num_rules = max(sum(rule in inner for rule in rules) for rules in (STRING_RULES, NUMBER_RULES))
        combined = any(keyword in inner for keyword in COMPOSITION) and len(inner) > 1
        if path != "$" and (num_rules > 1 or combined or "multipleOf" in inner):
            text = json.dumps(inner)
            if text not in seen:
                seen.add(text)
                yield path, {**definitions, **inner} if '"$ref"' in text else inner


def _inner(path: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in SCHEMA_OBJECTS and isinstance(value, dict):
            for name, inner in value.items():
                yield f"{path}.{keyword}.{name}", inner
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield f"{path}.{keyword}[{index}]", inner
        elif keyword in SCHEMA:
            yield f"{path}.{keyword}", value


def _prepare(schema: Any, path: str, depth: int) -> Any:
    if not isinstance(schema, dict):
        return schema
    if depth > MAX_DEPTH:
        raise ConfigError(f"json cannot be read: {path[:MAX_SHOWN]} is nested too deeply.")
    prepared = dict[str, Any]()
    for keyword, value in schema.items():
        if keyword in UNSUPPORTED:
            if any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(keyword, ())):
                continue
            if keyword in ("if", "then", "else") and not ("if" in schema and {"then", "else"} & schema.keys()):
                continue  # without the other part, it restricts nothing
            if keyword in ("minContains", "maxContains") and "contains" not in schema:
                continue
            raise ConfigError(
                f"json cannot be kept: {path[:MAX_SHOWN]} has the keyword {keyword}={_shown(value)}, which constrained "
                "answers do not support. Leave it out."
            )
        if keyword in SCHEMA_OBJECTS and isinstance(value, dict):
            prepared[keyword] = {
                name: _prepare(inner, f"{path}.{keyword}.{name}", depth + 1) for name, inner in value.items()
            }
        elif keyword in SCHEMA_LISTS and isinstance(value, list):
            prepared[keyword] = [
                _prepare(inner, f"{path}.{keyword}[{index}]", depth + 1) for index, inner in enumerate(value)
            ]
        elif keyword in SCHEMA:
            prepared[keyword] = _prepare(value, f"{path}.{keyword}", depth + 1)
        elif not (keyword == "x-guidance" and path == "$"):  # options of llguidance, which are not a client's
            prepared[keyword] = value
    _check_numbers(prepared, path)
    _check_min_properties(prepared, path)
    pattern = PATTERN_OF_FORMAT.get(str(prepared.get("format")))
    if pattern is not None:
        if prepared["format"] == "date":
            del prepared["format"]
        if "pattern" in prepared:
            prepared["allOf"] = [*prepared.get("allOf", []), {"type": "string", "pattern": pattern}]
        else:
            prepared["pattern"] = pattern
    return prepared


def _check_numbers(schema: Mapping[str, Any], path: str) -> None:
    """Refuse integers that llguidance would round."""
    values: list[Any] = [schema.get(keyword) for keyword in NUMBER_RULES]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, int) and abs(value) > MAX_EXACT:
            raise ConfigError(
                f"json cannot be kept: {path[:MAX_SHOWN]} has the number {value}. Constrained answers support integers "
                f"up to {MAX_EXACT}: give it as a string."
            )


def _check_min_properties(schema: Mapping[str, Any], path: str) -> None:
    """Refuse a minimum that properties with free names must reach: their names may repeat."""
    minimum = schema.get("minProperties")
    num_required = len(_strings(schema.get("required")))
    if isinstance(minimum, int) and minimum > num_required + 1:
        raise ConfigError(
            f"json cannot be kept: {path[:MAX_SHOWN]} has minProperties={minimum}, and {num_required} properties are "
            "required. Constrained answers support at most one more: list the properties in required."
        )


def _check_overlap(names: set[str], patterns: Sequence[str] | set[str]) -> None:
    for pattern in patterns:
        try:
            matcher = re.compile(pattern)
            name = next((name for name in sorted(names) if matcher.search(name)), None)
        except (re.error, RecursionError, OverflowError):  # a rule of another dialect: it may match any name
            name = min(names, default=None)
        if name is not None:
            raise ConfigError(
                f"json cannot be kept: the property {_shown(name)} may match {_shown(pattern)} in patternProperties. "
                "Constrained answers need patterns that match no name in properties and required: change the pattern."
            )


def _strings(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
