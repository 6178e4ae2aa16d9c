"""Conversion of arguments that are written as text to the types of the tool's schema."""

import json
import random

import pytest

from eqx_decoders.io.text.output_parsing.tool_arguments import ToolSchema


def convert(schema, text, **root):
    parameters = {"type": "object", "properties": {"x": schema}, **root}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return ToolSchema(tools, "f").convert("x", text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "5a", "5a"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "true", "true"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "boolean"}, {"type": "null"}]}, "True", True),
        ({"allOf": [{"type": "number"}, {"minimum": 1}]}, "2.5", 2.5),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "5", "5"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"$ref": "#/$defs/s"}, "5", "5"),
        ({"$ref": "#/$defs/a~1b%20c"}, "5", "5"),
        ({"$ref": "#/$defs/list"}, "['a']", ["a"]),
        ({"$ref": "#/nowhere"}, "5", 5),
        ({"$ref": "https://example.org/s"}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, "1"]}, "1", 1),
        ({"enum": [True, None]}, "true", True),
        ({"const": "1"}, "1", "1"),
        ({"const": None}, "null", None),
        ({"type": "boolean"}, "False", False),
        ({"type": "integer"}, "140.0", 140),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "number"}, "140.0", 140.0),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "many", "many"),
        ({"type": "array"}, "['a', True, None]", ["a", True, None]),
        ({"type": "array"}, '["a", true]', ["a", True]),
        ({"type": "object"}, "{'a': {'b': 1}}", {"a": {"b": 1}}),
        ({"type": "object"}, '{"a": "b\nc"}', {"a": "b\nc"}),
        ({"type": "str"}, "5", "5"),
        ({"type": "str | None"}, "5", 5),
        (True, "5", 5),
        (False, "5", 5),
        ({}, "[1", "[1"),
        ({}, "True", True),
        ({}, '"a"', "a"),
        ({"type": "string"}, " a\n", " a\n"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_converts_arguments_to_the_types_of_the_schema(schema, text, value):
    definitions = {"s": {"type": "string"}, "a/b c": {"type": "string"}, "list": {"type": "array"}}
    found = convert(schema, text, **{"$defs": definitions})
    assert found == value and type(found) is type(value)


def random_schema(draw, depth=3):
    """Return a JSON value, usually an object with keywords of JSON Schema, whose values may be invalid."""
    if depth == 0 or draw.random() < 0.1:
        return draw.choice([True, False, None, {}, [], "string", 3, {"type": "string"}, {"$ref": "#"}])
    inner = lambda: random_schema(draw, depth - 1)  # noqa: E731
    keywords = {
        "type": draw.choice(["string", "integer", ["null", "array"], [], 5, None, ["x", 1], "any"]),
        "enum": draw.choice([[], [1, "1", None, {}], 3]),
        "const": inner(),
        "$ref": draw.choice(["#", "#/$defs/a", "#/properties/x", "#/$defs/%", "#a", "", 4]),
        "anyOf": [inner(), inner()],
        "oneOf": inner(),
        "allOf": [inner()],
        "items": inner(),
        "properties": draw.choice([{"x": inner()}, {"y": inner()}, None, []]),
        "patternProperties": draw.choice([{"^x": inner()}, {"(": inner()}, None]),
        "additionalProperties": inner(),
        "not": inner(),
        "nullable": draw.choice([True, False, 1]),
    }
    return {name: keywords[name] for name in draw.sample(sorted(keywords), draw.randrange(1, 5))}


def test_accepts_any_json_value_as_a_schema():
    draw = random.Random(0)
    for _ in range(40):
        parameters = random_schema(draw, 4)
        if isinstance(parameters, dict):
            parameters.setdefault("$defs", {"a": random_schema(draw)})
        schema = ToolSchema([{"name": "f", "parameters": parameters}], "f")
        assert schema.known_names is None or isinstance(schema.known_names, frozenset)
        for text in ("5", "1.0", "None", "true", "[1]", "{'a': 1}", "x", "", "[" * 2000, '"'):
            json.dumps(schema.convert("x", text))


def test_accepts_cyclic_references():
    nodes = {f"n{at}": {"allOf": [{"$ref": f"#/$defs/n{other}"} for other in range(8)]} for at in range(8)}
    assert convert({"$ref": "#/$defs/n0"}, "5", **{"$defs": nodes}) == 5
    assert convert({"$ref": "#/properties/x"}, "5") == 5


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        (["string", "integer"], "02134", "02134"),
        (["string", "number"], "+4912345", "+4912345"),
        (["string", "number"], "1.50", "1.50"),
        (["string", "integer"], "140.0", "140.0"),
        (["string", "null"], "none", "none"),
        (["string", "number"], "2.5", 2.5),
        (["string", "integer"], "-7", -7),
        (["integer", "null"], "007", 7),
    ],
)
def test_converts_only_canonical_text_if_the_schema_allows_strings(types, text, value):
    for schema in ({"type": types}, {"anyOf": [{"type": word} for word in types]}):
        found = convert(schema, text)
        assert found == value and type(found) is type(value)


def test_does_not_evaluate_pattern_properties():
    parameters = {"patternProperties": {"(a+)+$": {"type": "string"}}}
    schema = ToolSchema([{"name": "f", "parameters": parameters}], "f")
    assert schema.convert("a" * 40 + "!", "5") == 5
