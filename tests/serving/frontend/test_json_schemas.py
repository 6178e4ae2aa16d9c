"""JSON Schemas of constrained answers: a schema is refused, or all sampled values match it."""

import asyncio
import json
import random
import time

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.tokenizer import ByteTokenizer
from eqx_decoders.serving.frontend.json_schemas import UNSUPPORTED, prepare_schema
from eqx_decoders.serving.frontend.structured_output import Grammar, GrammarCompiler
from tests.errors import refused
from tests.serving.fake_engine import allowed_tokens


jsonschema = pytest.importorskip("jsonschema")

STOP = 257
CLOSE_AFTER = 100  # tokens after which a sample is ended as soon as possible
COMPILER = GrammarCompiler(ByteTokenizer(), 320, [STOP])


def constraint_of(schema):
    (constraint,) = asyncio.run(COMPILER.prepare(Grammar("json", json.dumps(schema)), 1))
    return constraint


def sample(schema, seed: int, max_tokens: int = 300) -> str | None:
    """Sample JSON from the allowed tokens. Returns None if the text is not complete after `max_tokens`."""
    constraint, pick, ids = constraint_of(schema), random.Random(seed), []
    for _ in range(max_tokens):
        tokens = allowed_tokens(constraint)
        assert tokens, "no token is allowed"
        closing = [token for token in tokens if chr(token) in '"]}'] if len(ids) > CLOSE_AFTER else []
        token = pick.choice(closing or tokens)
        if token == STOP:
            assert not constraint.error, (bytes(ids), constraint.error)
            return bytes(ids).decode()
        constraint.accept(token)
        ids.append(token)
    return None


def validator(schema):
    drafts = {"draft-04": jsonschema.Draft4Validator, "draft-07": jsonschema.Draft7Validator}
    declared = schema.get("$schema", "") if isinstance(schema, dict) else ""
    draft = next((draft for name, draft in drafts.items() if name in declared), jsonschema.Draft202012Validator)
    return draft(schema, format_checker=jsonschema.FormatChecker())


def record(properties, **more):
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        **more,
    }


NUMBER = {"type": "integer", "minimum": 1, "maximum": 3}
WORD = {"type": "string", "maxLength": 3}
SCHEMAS = {
    "patternProperties": {"type": "object", "patternProperties": {"^x[0-9]$": NUMBER}, "additionalProperties": False},
    "patternProperties next to properties": record({"a": NUMBER}, patternProperties={"^x[0-9]$": NUMBER}),
    "maxProperties": {"type": "object", "additionalProperties": NUMBER, "maxProperties": 2},
    "minProperties": {"type": "object", "additionalProperties": NUMBER, "minProperties": 1, "maxProperties": 1},
    "multipleOf": record({"a": {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 30}}),
    "fractions": record({"a": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2}}),
    "negative": record({"a": {"type": "number", "exclusiveMinimum": -2.5, "maximum": -0.5}}),
    "pattern": record({"a": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]$"}}),
    "pattern unanchored": record({"a": {"type": "string", "pattern": "[0-9]", "maxLength": 4}}),
    "pattern with the characters of a look-ahead": record({"a": {"type": "string", "pattern": r"^[(?=]\(?=$"}}),
    "format": record({"a": {"type": "string", "format": "ipv4"}, "b": {"type": "string", "format": "uuid"}}),
    "format of OpenAPI": record({"a": {"type": "string", "format": "password", "maxLength": 3}}),
    "date": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 5, "maxItems": 5},
    "date with a pattern": {"type": "string", "format": "date", "pattern": "-02-"},
    "date-time": {"type": "string", "format": "date-time"},
    "oneOf": {"oneOf": [record({"k": {"const": "a"}, "v": NUMBER}), record({"k": {"const": "b"}, "w": NUMBER})]},
    "anyOf": {"anyOf": [NUMBER, record({"a": WORD}), {"type": "null"}]},
    "allOf": {"allOf": [{"type": "object", "properties": {"a": NUMBER}, "required": ["a"]},
                        {"properties": {"b": NUMBER}, "required": ["b"]}],
              "additionalProperties": NUMBER, "maxProperties": 2},
    "prefixItems": {"type": "array", "prefixItems": [NUMBER, {"enum": ["a"]}], "items": False, "minItems": 1},
    "items of draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
                         "items": [NUMBER, {"enum": ["a"]}], "additionalItems": False, "minItems": 2},
    "draft 4": {"$schema": "http://json-schema.org/draft-04/schema#",
                **record({"a": {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}})},
    "recursion": {"$defs": {"n": record({"v": NUMBER, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}})},
                  "$ref": "#/$defs/n"},
    "reference with siblings": {"$defs": {"n": {"type": "integer", "minimum": 1}},
                                **record({"a": {"$ref": "#/$defs/n", "maximum": 3}})},
    "types": record({"a": {"type": ["integer", "null"], "minimum": 1, "maximum": 3}}),
    "enum": {"enum": ["é", 'a"b', "😀", 1, None, [1, {"a": 2}]]}, "const": {"const": {"a": [1, None, "x"]}},
    "lengths": record({"a": {"type": "string", "minLength": 2, "maxLength": 3}}),
    "optional": {"type": "object", "properties": {"a": NUMBER, "b": WORD, "c": {"type": "boolean"}},
                 "additionalProperties": False},
    "open": {"type": "object", "properties": {"a": NUMBER}, "additionalProperties": NUMBER},
    "names like keywords": record({"not": NUMBER, "if": NUMBER, "uniqueItems": {"type": "boolean"}}),
    "annotations": record({"a": {**NUMBER, "title": "t", "default": 1, "x-order": 1, "examples": [9]}}),
    "neutral": record({"a": {**NUMBER, "not": False}}, uniqueItems=False, propertyNames={}, unevaluatedProperties=True),
    "names that are strings": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER},
    "if without then": record({"a": NUMBER}, **{"if": {"required": ["a"]}}),
    "options of llguidance": {"x-guidance": {"lenient": True, "whitespace_pattern": "x"}, **record({"a": NUMBER})},
    "no value for an optional property": {
        "type": "object", "properties": {"a": {"multipleOf": 7, "type": "integer", "minimum": 1, "maximum": 6}},
        "additionalProperties": False},
    "false for an optional property": {"type": "object", "properties": {"a": False, "b": NUMBER},
                                       "additionalProperties": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_sampled_values_match_the_schema(name):
    schema, ended = SCHEMAS[name], 0
    for seed in range(8):
        text = sample(schema, seed)
        if text is not None:
            ended += 1
            value = json.loads(text)
            errors = [error.message for error in validator(schema).iter_errors(value)]
            assert not errors, (text, errors)
    assert ended > 2


def test_objects_with_declared_properties_are_closed():
    closed = prepare_schema({"properties": {"a": {"properties": {"b": NUMBER}}}, "required": ["a"]})
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    for schema in (
        {"properties": {"a": NUMBER}, "additionalProperties": True},
        {"properties": {"a": NUMBER}, "required": ["b"]},
        {"properties": {"a": NUMBER}, "minProperties": 1},
        {"properties": {"a": NUMBER}, "patternProperties": {"^b": NUMBER}},
        {"allOf": [{"properties": {"a": NUMBER}}, {"properties": {"b": NUMBER}}]},
        {"properties": {"a": NUMBER}, "anyOf": [{"required": ["a"]}, {"properties": {"b": NUMBER}}]},
        {"properties": {}}, {"type": "object"},
    ):  # fmt: skip
        assert prepare_schema(schema) == schema


@pytest.mark.parametrize(
    "siblings",
    [{"discriminator": {"propertyName": "a"}}, {"deprecated": True}, {"$id": "x"}, {"type": "object"}],
)
def test_keywords_next_to_a_composition_do_not_open_objects(siblings):
    inner = {"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}
    for schema in ({"oneOf": [inner, NUMBER]}, {"anyOf": [inner]}, {"allOf": [inner]}):
        (keyword,) = schema
        assert prepare_schema({**schema, **siblings})[keyword][0]["additionalProperties"] is False


def test_pattern_properties_take_bounded_time():
    start = time.process_time()
    for name, pattern in (("a" * 60 + "!", "^(a+)+$"), ("a" * 60, "(a|a)*b"), ("x" * 60, "(x+x+)+y")):
        prepare_schema({"properties": {name: {}}, "patternProperties": {pattern: {}}})
    with refused(ConfigError, "2000", "`patternProperties`", "100"):
        prepare_schema({"properties": {"a": {}}, "patternProperties": {f"^x{index}$": {} for index in range(2000)}})
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"required": True}, "`required=true`"),
        ({"properties": ["a"]}, '`properties=["a"]`'),
        ({"allOf": 5}, "`allOf=5`"),
        ({"type": "string", "format": "date", "pattern": "a", "allOf": 5}, "`allOf=5`"),
        ({"minItems": None}, "`minItems=null`"),
        ({"properties": {"a": 5}}, "`$.properties.p.properties.a`"),
        ({"items": None}, "`$.properties.p.items`"),
        ({"anyOf": [[]]}, "`$.properties.p.anyOf[0]`"),
        ({"maximum": 10**5000}, "9007199254740992"),
        ({"minLength": -1}, "`minLength=-1`"),
        ({"enum": "x"}, '`enum="x"`'),
    ],
    ids=[
        *("required", "properties", "allOf", "allOf with pattern", "minItems", "property", "items", "anyOf"),
        *("maximum", "minLength", "enum"),
    ],
)
def test_keywords_with_values_of_a_wrong_type_are_refused(schema, named):
    with refused(ConfigError, "`$.properties.p", named) as error:
        prepare_schema({"properties": {"p": schema}})
    assert len(str(error.value)) < 300


def test_boolean_schemas():
    assert prepare_schema(True) == {} and prepare_schema(False) is False
    assert prepare_schema({"properties": {"a": {"not": {}}}})["properties"] == {"a": False}
    assert allowed_tokens(constraint_of(True))
    with pytest.raises(ConfigError):
        constraint_of(False)


# Schemas that cannot be enforced, and what the error message names.
REFUSED = {
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "items": NUMBER, "contains": {"const": 3}, "minContains": 2}, "contains"),
    "not": (record({"a": {**NUMBER, "not": {"const": 1}}}), "`$.properties.a`"),
    "if": (record({"a": NUMBER}, **{"if": {"properties": {"a": {"const": 1}}}, "then": False}), "if"),
    "else": (record({"a": NUMBER}, **{"if": {"properties": {"a": {"const": 1}}}, "else": False}), "if"),
    "dependentRequired": (record({"a": NUMBER}, dependentRequired={"a": ["b"]}), "dependentRequired"),
    "dependentSchemas": (record({"a": NUMBER}, dependentSchemas={"a": False}), "dependentSchemas"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^x$"}}, "propertyNames"),
    "unevaluatedProperties": (record({"a": NUMBER}, unevaluatedProperties=False), "unevaluatedProperties"),
    "unevaluatedItems": ({"type": "array", "prefixItems": [NUMBER], "unevaluatedItems": False}, "unevaluatedItems"),
    "draft 3": ({"type": "integer", "divisibleBy": 3}, "divisibleBy"),
    "dynamic reference": ({"$dynamicRef": "#node"}, "$dynamicRef"),
    "in a definition": ({"$defs": {"a": {"not": {"const": 1}}}, "$ref": "#/$defs/a"}, "$.$defs.a"),
    "in anyOf": ({"anyOf": [{"type": "array", "uniqueItems": True}, NUMBER]}, "$.anyOf[0]"),
    "in items of draft 7": ({"type": "array", "items": [{"not": {"const": 1}}]}, "$.items[0]"),
    "in additionalProperties": (
        {"type": "object", "additionalProperties": {"not": {"const": 1}}}, "$.additionalProperties"),
    "pattern of a property": (record({"score": NUMBER}, patternProperties={"^score$": NUMBER}), '"score"'),
    "pattern of a required name": (
        {"type": "object", "patternProperties": {"^s": NUMBER}, "required": ["s"]}, '"s"'),
    "pattern of a property elsewhere": (
        {"allOf": [record({"s": NUMBER}) | {"additionalProperties": True}, {"patternProperties": {"^s$": NUMBER}}]},
        '"s"'),
    "patterns that overlap": ({"type": "object", "patternProperties": {"^a": NUMBER, "b$": WORD}}, "b$"),
    "minProperties": (
        {"type": "object", "minProperties": 2, "patternProperties": {"^x[0-9]$": NUMBER}}, "minProperties=2"),
    "large integers": (record({"a": {"const": 2**53 + 1}}), str(2**53 + 1)),
    "large integers in enum": ({"enum": [1, [{"a": 2**60}]]}, str(2**60)),
    "oneOf": ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, "oneOf"),
    "format": (record({"a": {"type": "string", "format": "regex"}}), "regex"),
    "no number": (record({"a": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}}), ""),
    "no text": (record({"a": {"type": "string", "pattern": "^[a-z]{5}$", "maxLength": 3}}), ""),
    "no constant": (record({"a": {"const": "abc", "maxLength": 2}}), ""),
    "look-ahead": (record({"a": {"type": "string", "pattern": "^(?!\\.)[a-z.]*$"}}), '`pattern="^(?!'),
    "look-behind": (record({"a": {"type": "string", "pattern": "a(?<=a)b"}}), '`pattern="a(?<=a)b"`'),
    "a list": ([], "[]"), "a number": (5, "5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_schemas_are_refused(name):
    schema, named = REFUSED[name]
    with refused(ConfigError, named) as error:
        constraint_of(schema)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED - {"then", "else", "maxContains", "minContains"}))
def test_unsupported_keywords_are_refused_by_name_at_any_depth(keyword):
    value = {"a": {"const": 1}} if keyword not in ("not", "if", "contains") else {"const": 1}
    inner = {keyword: value, "then": False} if keyword == "if" else {keyword: value}
    for schema in (
        inner,
        {"properties": {"p": inner}},
        {"items": {"anyOf": [NUMBER, inner]}},
        {"$defs": {"d": {"patternProperties": {"^p": inner}}}},
    ):
        with refused(ConfigError, f"`{keyword}="):
            prepare_schema(schema)
        prepare_schema({"properties": {keyword: NUMBER}, "enum": [inner], "default": inner})  # no keyword here
