"""JSON Schemas for structured output. Schemas that llguidance cannot express are refused before a completion starts.

llguidance refuses most keywords that it does not implement. `prepare_schema` refuses the remaining keywords, and adds
patterns for formats that llguidance checks less strictly than the `jsonschema` package.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eqx_decoders.errors import ConfigError, missing_package
from eqx_decoders.serving.frontend.api_errors import shown


MAX_PATH = 80  # characters of a path in an error message
MAX_EXACT = 2**53  # llguidance reads numbers as 64-bit floats
MAX_DEPTH = 200  # levels of nested schemas
MAX_COMPARISONS = 20_000  # pairs of a declared name and a pattern in patternProperties
MAX_PATTERNS = 100  # in all patternProperties

# Keywords that restrict values, and that llguidance ignores in at least one draft of JSON Schema.
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
    "contentSchema": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# Keywords whose values are schemas, lists of schemas, or objects with schemas as values.
SCHEMA = ("additionalItems", "additionalProperties", "items")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMA_OBJECTS = ("$defs", "definitions", "patternProperties", "properties")
COMPOSITION = ("$ref", "allOf", "anyOf", "oneOf")
OBJECT_RULES = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
STRING_RULES = ("pattern", "format", "minLength", "maxLength", "enum", "const")
NUMBER_RULES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")

# Regular expression of valid dates: llguidance allows February 29 in any year, and the year 0.
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
# Formats that JSON Schema defines. Other formats, such as `password` and `binary` of OpenAPI, restrict nothing.
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
        *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
        *("uri-template", "uuid"),
    }
)


_literals = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # escaped characters and character classes
_look_around = re.compile(r"\(\?<?[=!]")


def prepare_schema(schema: Any) -> Any:
    """Return a JSON Schema for llguidance. Raises ConfigError for invalid schemas, and for unsupported keywords.

    An object that declares properties allows no undeclared properties, unless `additionalProperties` allows them
    explicitly. Otherwise a model could generate undeclared properties without end.
    """
    prepared = _prepare(schema, "$", 0)
    if isinstance(prepared, bool):
        return {} if prepared else False
    names, patterns = set[str](), set[str]()
    composed = False
    schemas = [schema for _, schema in subschemas(prepared)]
    pairs = list[tuple[set[str], set[str]]]()
    for schema in schemas:
        composed |= any(keyword in schema for keyword in COMPOSITION)
        declared_names = {*_strings(schema.get("properties")), *_strings(schema.get("required"))}
        declared_patterns = set(_strings(schema.get("patternProperties")))
        pairs.append((declared_names, declared_patterns))
        names |= declared_names
        patterns |= declared_patterns
    if len(names) * len(patterns) > MAX_COMPARISONS or len(patterns) > MAX_PATTERNS:
        raise ConfigError(
            f"The JSON Schema is not supported: it has {len(patterns)} patterns in `patternProperties` and "
            f"{len(names)} declared names. At most {MAX_PATTERNS} patterns and {MAX_COMPARISONS} pairs of "
            "a pattern and a name are supported. Use fewer patterns."
        )
    # with a composition, the names of one schema and the patterns of another schema may apply to the same object
    for declared_names, declared_patterns in [(names, patterns)] if composed else pairs:
        _check_overlap(declared_names, declared_patterns)
    if not any(_combines_objects(schema) for schema in schemas):
        for schema in schemas:
            _close(schema)
    return prepared


def _combines_objects(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas may declare properties of the same object."""
    compositions = [keyword for keyword in COMPOSITION if keyword in schema]
    if not compositions:
        return False
    all_of = schema.get("allOf", [])
    return len(compositions) > 1 or len(all_of) > 1 or any(keyword in schema for keyword in OBJECT_RULES)


def _close(schema: dict[str, Any]) -> None:
    """Disallow undeclared properties in the schema of an object, unless a keyword of the schema refers to them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        return
    if {"additionalProperties", "patternProperties", "minProperties"} & schema.keys():
        return
    if set(_strings(schema.get("required"))) <= properties.keys():
        schema["additionalProperties"] = False


def subschemas(schema: Any, path: str = "$") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the content of a schema and of each of its subschemas. Boolean schemas are omitted."""
    pending = [(path, schema)]
    while pending:
        where, item = pending.pop()
        if isinstance(item, dict):
            yield where, item
            pending += _inner(where, item)


def schemas_to_check(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the content of each subschema that may be unsatisfiable: it combines several rules."""
    if not isinstance(schema, dict):
        return
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
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        where = "" if path == "$" else f" at `{path[:MAX_PATH]}`"
        raise ConfigError(f"Invalid JSON Schema: expected an object{where}, got {shown(schema)}.")
    if depth > MAX_DEPTH:
        raise ConfigError(f"Invalid JSON Schema: `{path[:MAX_PATH]}` has more than {MAX_DEPTH} levels.")
    _check_shapes(schema, path)
    if schema.get("not") is True or schema.get("not") == {}:
        return False
    prepared = dict[str, Any]()
    for keyword, value in schema.items():
        if keyword in UNSUPPORTED:
            if any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(keyword, ())):
                continue
            if keyword in ("if", "then", "else") and not ("if" in schema and {"then", "else"} & schema.keys()):
                continue  # `if` without `then` and `else` restricts nothing, nor do these without `if`
            if keyword in ("minContains", "maxContains") and "contains" not in schema:
                continue
            raise ConfigError(
                f"The JSON Schema is not supported: `{path[:MAX_PATH]}` has `{keyword}={shown(value)}`. Remove it."
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
        elif keyword == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        elif not (keyword == "x-guidance" and path == "$"):  # clients must not set llguidance's options
            prepared[keyword] = value
    _check_numbers(prepared, path)
    _check_min_properties(prepared, path)
    _check_pattern(prepared, path)
    pattern = PATTERN_OF_FORMAT.get(str(prepared.get("format")))
    if pattern is not None:
        if prepared["format"] == "date":
            del prepared["format"]
        if "pattern" in prepared:
            prepared["allOf"] = [*prepared.get("allOf", []), {"type": "string", "pattern": pattern}]
        else:
            prepared["pattern"] = pattern
    return prepared


def _check_pattern(schema: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a look-around in `pattern`, such as in zod's pattern for email addresses."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _look_around.search(_literals.sub("", pattern)):
        raise ConfigError(
            f"The JSON Schema is not supported: `{path[:MAX_PATH]}` has `pattern={shown(pattern)}` with look-around. "
            "Remove the pattern, or write it without `(?=`, `(?!`, `(?<=` and `(?<!`."
        )


def _check_shapes(schema: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for keywords whose values have a wrong type."""
    for keyword, value in schema.items():
        if keyword in SCHEMA_OBJECTS:
            good, expected = isinstance(value, dict), "an object"
        elif keyword in SCHEMA_LISTS and keyword != "items":
            good, expected = isinstance(value, list), "a list of schemas"
        elif keyword == "required":
            good = isinstance(value, list) and all(isinstance(name, str) for name in value)
            expected = "a list of strings"
        elif keyword == "type":
            names = value if isinstance(value, list) else [value]
            good = bool(names) and all(isinstance(name, str) and name in TYPES for name in names)
            expected = f"one or more of {', '.join(sorted(TYPES))}"
        elif keyword == "enum":
            good, expected = isinstance(value, list), "a list"
        elif keyword in COUNTS:
            good = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0
            expected = "a non-negative integer"
        else:
            continue
        if not good:
            raise ConfigError(
                f"Invalid JSON Schema: `{path[:MAX_PATH]}` has `{keyword}={shown(value)}`, expected {expected}."
            )


def _check_numbers(schema: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for integers that llguidance would round."""
    values: list[Any] = [schema.get(keyword) for keyword in NUMBER_RULES]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, int) and abs(value) > MAX_EXACT:
            raise ConfigError(
                f"The JSON Schema is not supported: `{path[:MAX_PATH]}` has the number {shown(value)}. The largest "
                f"supported integer is {MAX_EXACT}. Use a string instead."
            )


def _check_min_properties(schema: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a `minProperties` that requires several undeclared properties.

    llguidance does not check that the names of undeclared properties differ.
    """
    minimum = schema.get("minProperties")
    num_required = len(_strings(schema.get("required")))
    if isinstance(minimum, int) and minimum > num_required + 1:
        raise ConfigError(
            f"The JSON Schema is not supported: `{path[:MAX_PATH]}` has `minProperties={shown(minimum)}` and "
            f"{num_required} required properties. `minProperties` may be larger than this number by 1 at most. "
            "List more properties in `required`."
        )


def _check_overlap(names: set[str], patterns: set[str]) -> None:
    """Raise ConfigError for a pattern that matches a declared name, or for which this cannot be determined."""
    for pattern in sorted(patterns) if names else ():
        name = _matching_name(sorted(names), pattern)
        if name is not None:
            raise ConfigError(
                f"The JSON Schema is not supported: the property {shown(name)} may match {shown(pattern)} in "
                "`patternProperties`. Use patterns that match no name in `properties` and `required`."
            )


def _matching_name(names: Sequence[str], pattern: str) -> str | None:
    """Return a name that the pattern may match; None if it matches no name.

    The names are matched by llguidance, which bounds the work for a pattern. Python's `re` may take exponential time.
    """
    if not _may_match(names, pattern):
        return None
    while len(names) > 1:
        half = names[: len(names) // 2]
        names = half if _may_match(half, pattern) else names[len(names) // 2 :]
    return names[0]


def _may_match(names: Sequence[str], pattern: str) -> bool:
    """Return whether the pattern matches at least one name, or is too complex for llguidance."""
    try:
        import llguidance
    except ImportError as error:
        raise missing_package("llguidance", "serve") from error
    source = json.dumps({"grammars": [{"json_schema": {"type": "string", "pattern": pattern, "enum": list(names)}}]})
    matcher = llguidance.LLMatcher(_byte_tokenizer(), source, log_level=0)
    if matcher.is_error():  # also an error if no name matches
        return "Unsatisfiable" not in matcher.get_error()
    matcher.compute_bitmask()
    return matcher.is_error() or not matcher.is_stopped()


@functools.cache
def _byte_tokenizer() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")


def _strings(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, dict | list) else []
