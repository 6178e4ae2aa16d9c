"""Calls of tools are what a model's format says, whatever stands around them; what can't be read is said."""

import json
from typing import Any

import pytest

from eqx_decoders.io.text.tool_calls import FunctionCall, parse_tool_calls, tool_format
from tests.data.test_chats import template_of


CALLS = [
    FunctionCall("add", {"a": 1, "b": [2, {"c": "}]</"}]}),
    FunctionCall("now", {}),
    FunctionCall("say", {"t": "ü\n"}),
]
XML = "<tool_call>\n<function={0}>\n{1}</function>\n</tool_call>"
TOOLS = [
    {"type": "function", "function": {"name": "say", "parameters": {"properties": {"t": {"type": "string"}}}}},
    {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}}},
]


def written(calls, form):
    """Calls as models write them."""
    plain = [{"name": each.name, "arguments": each.arguments} for each in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in plain)
    if form == "llama3_json":
        return "; ".join(json.dumps({"name": each.name, "parameters": each.arguments}) for each in calls)
    if form == "mistral":
        return "[TOOL_CALLS] " + json.dumps([each | {"id": "123456789"} for each in plain])
    value = lambda x: x if isinstance(x, str) else json.dumps(x)  # noqa: E731
    rows = [
        "".join(f"<parameter={name}>\n{value(x)}\n</parameter>\n" for name, x in each.arguments.items())
        for each in calls
    ]
    return "\n".join(XML.format(each.name, row) for each, row in zip(calls, rows, strict=True))


@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "qwen3_coder"])
def test_calls_that_are_written_are_read(form):
    content = "" if form == "llama3_json" else "I'll see."
    for count in (1, 2, 3):
        text = f"{content}\n{written(CALLS[:count], form)}\n"
        found = parse_tool_calls(text, form, TOOLS)
        assert found == (content, tuple(CALLS[:count]), ())
    for text in ("", "It is 4.", '{"answer": 4}', "a [1] {b} < c >", f"<think>\n{written(CALLS, form)}\n</think>\n\n4"):
        assert parse_tool_calls(text, form, TOOLS) == (text, (), ())
    thought = "<think>\n1\n</think>"
    found = parse_tool_calls(f"{thought}\n\n{written(CALLS[:1], form)}", form, TOOLS)
    assert found == (thought, (CALLS[0],), ())


def test_calls_among_the_messages_of_gpt_oss_are_read():
    header = " to=functions.{}<|channel|>commentary json<|message|>{}"
    asks = [header.format(each.name, json.dumps(each.arguments)) for each in CALLS]
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>I'll see.<|end|>"
    text = said + "".join(f"<|start|>assistant{each}<|call|>" for each in asks)
    assert parse_tool_calls(text, "harmony", TOOLS) == ("I'll see.", tuple(CALLS), ())
    content, calls, reasons = parse_tool_calls(text.removesuffix("}<|call|>"), "harmony", TOOLS)
    assert (content, calls, len(reasons)) == ("I'll see.", tuple(CALLS[:-1]), 1)


@pytest.mark.parametrize(
    ("form", "text", "calls", "reasons"),
    [
        ("hermes", "<tool_call>{'a': 1}</tool_call>", [], ["it is no JSON"]),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": ', [], ["it is no JSON"]),  # cut
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}', [("a", {})], []),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', [("a", {"b": 1})], []),
        ("hermes", '<tool_call>{"name": "a", "arguments": "b"}</tool_call>', [], ["the arguments of a are no JSON"]),
        ("hermes", '<tool_call>{"name": "a", "arguments": 1}</tool_call>', [], ["the arguments of a are no object"]),
        (
            "hermes",
            '<tool_call>{"name": 1}</tool_call><tool_call>{"name": "a"}',
            [("a", {})],
            ['{"name": 1} has no name'],
        ),
        ("hermes", "<tool_call>" + "[" * 100_000, [], ["it is no JSON"]),
        ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {}}', [("a", {})], []),
        ("llama3_json", '{"name": "a", "parameters": {}} and', [("a", {})], ["it is no JSON"]),
        ("llama3_json", "<|python_tag|>print(1)", [], ["it is no JSON"]),
        ("llama3_json", '{"type": "function", "name": "a", "parameters": {"b": 1}}', [("a", {"b": 1})], []),
        ("mistral", '[{"name": "a", "arguments": {}}]', [("a", {})], []),  # the special token was left out
        ("mistral", '[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c{}', [("a", {"b": 1}), ("c", {})], []),
        ("mistral", '[TOOL_CALLS]a[CALL_ID]x1[ARGS]{"b": 1}', [("a", {"b": 1})], []),
        ("mistral", "[TOOL_CALLS]", [], ["it is empty"]),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, 2]', [("a", {})], ["2 has no name"]),
        ("qwen3_coder", "<function=a><parameter=b>x</parameter></function>", [("a", {"b": "x"})], []),
        ("qwen3_coder", XML.format("say", "<parameter=t>\n12\n</parameter>"), [("say", {"t": "12"})], []),
        ("qwen3_coder", XML.format("a", "<parameter=t>\n12\n</parameter>"), [("a", {"t": 12})], []),
        ("qwen3_coder", XML.format("a", "<parameter=t>12"), [], ["is no <parameter=name>value"]),
        ("qwen3_coder", "<tool_call><function=a>", [], ["or no </function>"]),
        ("qwen3_coder", "<tool_call>{}</tool_call>", [], ["has no <function=name>"]),
    ],
)
def test_what_else_is_a_call_or_none(form: Any, text, calls, reasons):
    found = parse_tool_calls(text, form, TOOLS)
    assert [*found.calls] == calls and len(found.malformed) == len(reasons)
    assert all(reason in each for reason, each in zip(reasons, found.malformed, strict=True))


@pytest.mark.parametrize(("name", "form"), [("qwen3", "hermes"), ("llama3", "llama3_json"), ("mistral", "mistral")])
def test_formats_of_templates(name, form):
    assert tool_format(template_of(name).source) == form
    assert tool_format("{{ '<tool_call>\n<function=example>' }}") == "qwen3_coder" and tool_format("") == "hermes"
