"""Conversion of tool arguments that models write as text to the types in the tool's JSON Schema.

Schemas come from clients, so any JSON value is accepted as a schema. Invalid parts of a schema, unresolvable references
and cyclic references do not restrict an argument.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eqx_decoders.io.text.output_parsing.formats import iter_functions


MAX_SCHEMA_DEPTH = 32  # max. nesting of references and combined schemas
MAX_SCHEMAS = 2000  # max. subschemas that are read for one argument; references can expand a small schema exponentially
MAX_DIGITS = 4000  # max. digits of an integer: Python refuses to convert longer strings
MAX_LEVELS = 200  # max. levels of lists and objects in arguments
_TYPES = {
    "string": "string", "str": "string", "text": "string", "integer": "integer", "int": "integer", "number": "number",
    "float": "number", "double": "number", "boolean": "boolean", "bool": "boolean", "null": "null", "none": "null",
    "array": "array", "list": "array", "tuple": "array", "object": "object", "dict": "object", "map": "object",
}  # fmt: skip
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_MAX_INTEGER = 10**MAX_DIGITS
_SURROGATE = re.compile("[\ud800-\udfff]")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


Elements = str | list[tuple[str, Any]]
"""Content of an XML element: a text, or a pair (name, `Elements`) for each child element."""


class ToolSchema:
    """JSON Schema of a tool's parameters.

    **Arguments:**

    - `tools`: descriptions of the offered tools, in the format of OpenAI's API.
    - `name`: name of the tool. The arguments of a tool that is not offered are not restricted.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str):
        function = next((function for function in iter_functions(tools) if function["name"] == name), {})
        self._root: Any = function.get("parameters")
        self._schemas_by_name = dict[str, list[Any]]()  # schemas of the declared parameters
        self._allows_undeclared = False
        self._num_read = 0
        self._collect(self._root, MAX_SCHEMA_DEPTH)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the declared parameters, in the order of the schema."""
        return tuple(self._schemas_by_name)

    @property
    def known_names(self) -> frozenset[str] | None:
        """Allowed names of parameters; None: any name."""
        return None if self._allows_undeclared or not self._schemas_by_name else frozenset(self._schemas_by_name)

    def convert(self, key: str, text: str) -> Any:
        """Convert the text of an argument to the first type that its schema allows.

        The order of the types is null, integer, number, boolean, object or list (in JSON or Python), string. If the
        schema also allows the text as a string, null and numbers must be written as canonical JSON. For example,
        "02134" and "none" remain strings.
        """
        return self._convert_text(self._schema_of(key), text)

    def convert_elements(self, key: str, elements: "Elements") -> Any:
        """Convert an argument that is written as nested XML elements. Texts are converted as in `convert`."""
        return self._convert_elements(self._schema_of(key), elements)

    def _convert_elements(self, schema: Any, elements: "Elements") -> Any:
        self._num_read = 0
        if isinstance(elements, str):
            is_empty = not elements and not self._accepts(schema, "", MAX_SCHEMA_DEPTH)
            empty = next((value for value in ([], {}) if self._accepts(schema, value, MAX_SCHEMA_DEPTH)), "")
            return empty if is_empty else self._convert_text(schema, elements)
        parts = [*self._subschemas(schema, MAX_SCHEMA_DEPTH)]
        if all(name == "item" for name, _ in elements) and self._accepts(schema, [], MAX_SCHEMA_DEPTH):
            items = _any_of([part["items"] for part in parts if "items" in part])
            return [self._convert_elements(items, value) for _, value in elements]
        members = dict[str, Any]()
        for name, value in elements:
            properties = [part.get("properties") for part in parts]
            inner = [known[name] for known in properties if isinstance(known, Mapping) and name in known]
            inner = _any_of(inner or self._undeclared_schemas(schema))
            members[name] = self._convert_elements(inner, value)
        return members

    def _convert_text(self, schema: Any, text: str) -> Any:
        if self._accepts_all(schema):
            return parse_untyped_value(text)
        possible_values = [*_possible_values(text)]
        accepts_text = self._accepts(schema, text, MAX_SCHEMA_DEPTH)
        for value in possible_values:
            if accepts_text and not _is_canonical(value, text):
                continue
            if self._accepts(schema, value, MAX_SCHEMA_DEPTH):
                return int(value) if isinstance(value, _IntegralFloat) else value
        if self._accepts_any(schema, ("", "x")) or len(possible_values) == 1:
            return text
        return int(possible_values[0]) if isinstance(possible_values[0], _IntegralFloat) else possible_values[0]

    def convert_string(self, key: str, value: Any) -> Any:
        """Convert an argument if it is a string that its schema does not allow. Return other arguments unchanged."""
        if not isinstance(value, str):
            return value
        schema = self._schema_of(key)
        if self._accepts_all(schema) or self._accepts(schema, value, MAX_SCHEMA_DEPTH):
            return value
        return self.convert(key, value)

    def _schema_of(self, key: str) -> Any:
        self._num_read = 0
        return _any_of(self._schemas_by_name.get(key) or self._undeclared_schemas(self._root))

    def _collect(self, schema: Any, depth: int) -> None:
        """Collect the properties that the schema of an object declares, including references and combined schemas."""
        for part in self._subschemas(schema, depth):
            properties = part.get("properties")
            if isinstance(properties, Mapping):
                for key, value in properties.items():
                    self._schemas_by_name.setdefault(key, []).append(value)
            if part.get("additionalProperties", False) is not False or part.get("patternProperties"):
                self._allows_undeclared = True

    def _undeclared_schemas(self, schema: Any) -> list[Any]:
        """Return the schemas of undeclared properties.

        `patternProperties` are not evaluated, because a client's regular expression may take exponential time.
        """
        parts = [*self._subschemas(schema, MAX_SCHEMA_DEPTH)]
        if any(part.get("patternProperties") for part in parts):
            return []
        additional = [part.get("additionalProperties") for part in parts]
        return [value for value in additional if isinstance(value, Mapping)]

    def _subschemas(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield a schema, the schemas that it references, and the schemas that `allOf`, `anyOf` and `oneOf` combine."""
        self._num_read += 1
        if not isinstance(schema, Mapping) or depth == 0 or self._num_read > MAX_SCHEMAS:
            return
        yield schema
        pending = [resolve_reference(schema["$ref"], self._root)] if isinstance(schema.get("$ref"), str) else []
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                pending += schema[keyword]
        for part in pending:
            yield from self._subschemas(part, depth - 1)

    def _accepts_all(self, schema: Any) -> bool:
        return all(self._accepts(schema, value, MAX_SCHEMA_DEPTH) for value in ("", "x", 1, 0.5, True, None, [], {}))

    def _accepts_any(self, schema: Any, values: Sequence[Any]) -> bool:
        return any(self._accepts(schema, value, MAX_SCHEMA_DEPTH) for value in values)

    def _accepts(self, schema: Any, value: Any, depth: int) -> bool:
        """Return whether a schema allows the type of a value and, for `enum` and `const`, the value."""
        if schema is False:
            return False
        self._num_read += 1
        if not isinstance(schema, Mapping) or depth == 0 or self._num_read > MAX_SCHEMAS:
            return True
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        if isinstance(types, list) and types:
            names = [_TYPES.get(name.strip().lower(), "any") for name in types if isinstance(name, str)]
            names += ["null"] if schema.get("nullable") is True else []
            if names and "any" not in names and not any(_has_type(value, name) for name in names):
                return False
        if isinstance(schema.get("enum"), list) and not any(_json_equal(value, member) for member in schema["enum"]):
            return False
        if "const" in schema and not _json_equal(value, schema["const"]):
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and not self._accepts(resolve_reference(reference, self._root), value, depth - 1):
            return False
        for keyword, combine in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            members = schema.get(keyword)
            if not isinstance(members, list) or not members:
                continue
            if not combine(self._accepts(member, value, depth - 1) for member in members):
                return False
        return True


def _any_of(schemas: Sequence[Any]) -> Any:
    """Return a schema that accepts values of any of the given schemas; True (any value) if there are no schemas."""
    return True if not schemas else schemas[0] if len(schemas) == 1 else {"anyOf": [*schemas]}


def resolve_reference(reference: str, root: Any) -> Any:
    """Return the schema to which a `$ref` refers within `root` (a JSON pointer), or True if there is no such schema."""
    if reference in ("#", "#/"):
        return root
    if not reference.startswith("#/"):
        return True
    value = root
    for segment in reference[2:].split("/"):
        segment = re.sub("%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), segment)
        segment = segment.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and segment in value:
            value = value[segment]
        elif isinstance(value, list) and segment.isdecimal() and int(segment) < len(value):
            value = value[int(segment)]
        else:
            return True
    return value


def _possible_values(text: str) -> Iterator[Any]:
    """Yield the values that a text may represent, in the order of `ToolSchema.convert`. The last value is the text."""
    word = text.strip()
    if word.lower() in ("null", "none"):
        yield None
    if len(word) <= MAX_DIGITS:
        if _INTEGER.fullmatch(word):
            yield int(word)
        elif _NUMBER.fullmatch(word):
            number = float(word)
            if number.is_integer() and abs(number) < 1 << 53:
                yield _IntegralFloat(number)
            if math.isfinite(number):
                yield number
    if word.lower() in ("true", "false"):
        yield word.lower() == "true"
    if word[:1] in ("{", "[", "("):
        value = parse_json_or_python(word)
        if isinstance(value, dict | list):
            yield value
    yield text


def _is_canonical(value: Any, text: str) -> bool:
    """Return whether a text is the canonical JSON of null or a number. Other values are always canonical."""
    if isinstance(value, bool | str | list | dict):
        return True
    return not isinstance(value, _IntegralFloat) and json.dumps(value) == text.strip()


class _IntegralFloat(int):
    """Integer that is written with a decimal point, such as 140.0.

    It does not match the type "number", because `_possible_values` also yields the float.
    """

    def __new__(cls, number: float):
        return super().__new__(cls, int(number))


def parse_untyped_value(text: str) -> Any:
    """Convert the text of an argument without a schema.

    The text may be JSON, or a list, a dict or a constant in Python syntax. Any other text is a string.
    """
    word = text.strip()
    if word in ("True", "False", "None"):
        return _CONSTANTS[word.lower()]
    if len(word) > MAX_DIGITS and word[:1] not in ("{", "[", '"'):
        return text
    if word[:1] in ("{", "["):
        value = parse_json_or_python(word)
        return value if isinstance(value, dict | list) else text
    try:
        return parse_json(word)
    except (ValueError, RecursionError):
        return text


def normalize_json_value(value: Any, max_levels: int = MAX_LEVELS) -> Any:
    """Return a parsed JSON or Python value that can be written as JSON in UTF-8.

    Unpaired surrogates in strings are replaced with U+FFFD. Raises ValueError for numbers that are not finite, for
    integers with more than `MAX_DIGITS` digits, and for more than `max_levels` levels of lists and objects.
    """
    if isinstance(value, str):
        if not _SURROGATE.search(value):
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    if isinstance(value, int) and abs(value) >= _MAX_INTEGER:
        raise ValueError(f"an integer has more than the maximum of {MAX_DIGITS} digits")
    if isinstance(value, list | dict):
        if max_levels == 0:
            raise ValueError(f"more than {MAX_LEVELS} levels of lists and objects")
        if isinstance(value, list):
            return [normalize_json_value(member, max_levels - 1) for member in value]
        return {
            normalize_json_value(key): normalize_json_value(member, max_levels - 1) for key, member in value.items()
        }
    return value


def parse_json(text: str) -> Any:
    """Parse JSON and normalize the value with `normalize_json_value`. Strings may contain line breaks.

    Raises ValueError or RecursionError.
    """
    return normalize_json_value(json.loads(text, strict=False))


def parse_json_or_python(text: str) -> Any:
    """Parse JSON or a Python literal. Any other text is returned unchanged. JSON strings may contain line breaks."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        pass
    try:
        return normalize_json_value(evaluate_literal(parse_expression(text.strip())))
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError):
        return text


def parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of a Python expression. Suppresses warnings about string escapes. Raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        return ast.parse(text, mode="eval").body


def evaluate_literal(node: ast.expr) -> Any:
    """Return the JSON value of a Python literal, which may also contain `true`, `false` and `null`.

    Raises ValueError for any other expression.
    """
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        return normalize_json_value(
            node.value
        )  # a Python string "\ud83d\ude00" has two surrogates, which become one character
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [evaluate_literal(member) for member in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else evaluate_literal(key) for key in node.keys]
        if not all(isinstance(key, str | int | float) for key in keys):
            raise ValueError("keys of objects must be strings or numbers")
        names = [key if isinstance(key, str) else json.dumps(key) for key in keys]
        return dict(zip(names, map(evaluate_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = evaluate_literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = evaluate_literal(node.left), evaluate_literal(node.right)
        if isinstance(left, str) and isinstance(right, str):
            return left + right
    raise ValueError(f"{ast.unparse(node)[:60]} is not a literal")


def _has_type(value: Any, type_name: str) -> bool:
    if type_name == "null":
        return value is None
    if type_name == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool) or value is None:
        return False
    if type_name == "integer":
        return isinstance(value, int)
    if type_name == "number":
        return isinstance(value, int | float) and not isinstance(value, _IntegralFloat)
    return isinstance(value, {"string": str, "array": list | tuple, "object": Mapping}[type_name])


def _json_equal(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, 1 and true differ."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right
