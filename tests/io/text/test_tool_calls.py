"""Tool calls are parsed by the format of the model; malformed calls are returned as such."""

import json
from typing import Any

import pytest

from eqx_decoders.io.text.output_parsing.formats import FunctionCall, tool_format_or_default
from eqx_decoders.io.text.tool_calls import parse_tool_calls
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
    {"name": "now"},
]


def written(calls, form):
    """Return tool calls in the formats of the models."""
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
def test_parses_calls_in_all_formats(form):
    content = "" if form == "llama3_json" else "I'll see."
    for count in (1, 2, 3):
        text = f"{content}\n{written(CALLS[:count], form)}\n"
        found = parse_tool_calls(text, form, TOOLS)
        assert found == (content, tuple(CALLS[:count]), (), "")
    for text in ("", "It is 4.", '{"answer": 4}', "a [1] {b} < c >", f"<think>\n{written(CALLS, form)}\n</think>\n\n4"):
        if form != "mistral" or "<think>" not in text:  # Mistral's models write [THINK]
            assert parse_tool_calls(text, form, TOOLS) == (text, (), (), "")
    begin, end = ("[THINK]", "[/THINK]") if form == "mistral" else ("<think>", "</think>")
    thought = f"{begin}\n1\n{end}"
    found = parse_tool_calls(f"{thought}\n\n{written(CALLS[:1], form)}", form, TOOLS)
    assert found == (thought, (CALLS[0],), (), "")
    # reasoning that the prompt has started
    found = parse_tool_calls(f"1 {written(CALLS[1:], form)}{end}\n{written(CALLS[:1], form)}", form, TOOLS)
    assert found.calls == (CALLS[0],) and found.content.endswith(end)


def test_parses_calls_between_messages_of_gpt_oss():
    header = " to=functions.{}<|channel|>commentary json<|message|>{}"
    asks = [header.format(each.name, json.dumps(each.arguments)) for each in CALLS]
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>I'll see.<|end|>"
    text = said + "".join(f"<|start|>assistant{each}<|call|>" for each in asks)
    assert parse_tool_calls(text, "harmony", TOOLS) == ("I'll see.", tuple(CALLS), (), "")
    content, calls, reasons, partial = parse_tool_calls(text.removesuffix("}<|call|>"), "harmony", TOOLS)
    assert (content, calls, reasons) == ("I'll see.", tuple(CALLS[:-1]), ()) and partial.startswith('{"t"')


ARGUMENTS = '{"b": 1}'


@pytest.mark.parametrize(
    "text",
    [
        f"<|channel|>commentary to=functions.a <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        f"<|channel|>commentary to=functions.a<|constrain|>json<|message|>{ARGUMENTS}<|end|>",
        f" to=functions.a<|channel|>analysis code<|message|>{ARGUMENTS}<|return|>",
        f"<|start|>assistant to=functions.a<|channel|>commentary<|message|>{ARGUMENTS}",
        f"assistant<|channel|>commentary to=functions.a<|message|>{ARGUMENTS}<|start|>",
        f"<|channel|>commentary to=functions.a <|constrain|>json{ARGUMENTS}<|call|>",
        f"<|channel|>commentary to=functions.a json<|message|><|message|>{ARGUMENTS}<|call|>",
        f"<|channel|>final to=functions.functions.a<|message|>{ARGUMENTS}<|call|>",
        f"<|channel|>analysis<|message|>Hm.<|channel|>commentary to=functions.a<|message|>{ARGUMENTS}<|call|>",
    ],
    ids=["json", "end", "return", "start", "no start", "no message", "two messages", "functions twice", "reasoning"],
)
def test_accepts_common_mistakes_of_gpt_oss(text):
    assert parse_tool_calls(text, "harmony") == ("", (FunctionCall("a", {"b": 1}),), (), "")


@pytest.mark.parametrize(
    ("form", "text", "calls", "malformed", "partial"),
    [
        ("hermes", "<tool_call>{'a': 1}</tool_call>", [], 1, False),
        ("hermes", "<tool_call>{'name': 'a', 'arguments': {'b': None}}</tool_call>", [("a", {"b": None})], 0, False),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"b": ', [], 0, True),
        ("hermes", '<tool_call>{"name": "a", "arguments": {}}', [("a", {})], 0, False),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', [("a", {"b": 1})], 0, False),
        ("hermes", '<tool_call>{"name": "a", "arguments": "b"}</tool_call>', [], 1, False),
        ("hermes", '<tool_call>{"name": "a", "arguments": 1}</tool_call>', [], 1, False),
        ("hermes", '<tool_call>{"name": 1}</tool_call><tool_call>{"name": "a"}', [("a", {})], 1, False),
        ("hermes", '<tool_call>{"name": "a"}</tool_call><tool_call>{"na', [("a", {})], 0, True),
        ("hermes", "<tool_call>" + "[" * 100_000, [], 1, False),
        ("hermes", "<tool_call>" + '{"a": ' * 100_000, [], 1, False),
        ("hermes", 'Use <tool_call> as a tag: {"name": "a"}', [], 1, False),
        ("llama3_json", '<|python_tag|>{"name": "a", "parameters": {}}', [("a", {})], 0, False),
        ("llama3_json", '{"name": "add", "parameters": {}} and', [("add", {})], 0, False),
        ("llama3_json", '{"name": "add"}', [("add", {})], 0, False),
        ("llama3_json", '{"name": "add", "age": 3}', [], 0, False),
        ("llama3_json", "<|python_tag|>print(1)", [], 1, False),
        ("llama3_json", '{"type": "function", "name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})], 0, False),
        ("mistral", '[{"name": "add", "arguments": {}}]', [("add", {})], 0, False),
        ("mistral", '[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c{}', [("a", {"b": 1}), ("c", {})], 0, False),
        ("mistral", '[TOOL_CALLS]a[CALL_ID]x1[ARGS]{"b": 1}', [("a", {"b": 1})], 0, False),
        ("mistral_v11", '[TOOL_CALLS] [{"name": "a", "arguments": {"b": 1}}]', [("a", {"b": 1})], 0, False),
        ("mistral", "[TOOL_CALLS]", [], 0, True),
        ("mistral", '[TOOL_CALLS] [{"name": "a"}, {"b": 2}]', [("a", {})], 1, False),
        ("qwen3_coder", "<function=a><parameter=b>x</parameter></function>", [("a", {"b": "x"})], 0, False),
        ("qwen3_coder", XML.format("say", "<parameter=t>\n12\n</parameter>"), [("say", {"t": "12"})], 0, False),
        ("qwen3_coder", XML.format("a", "<parameter=t>\n12\n</parameter>"), [("a", {"t": 12})], 0, False),
        ("qwen3_coder", XML.format("a", "<parameter=t>12"), [], 1, False),
        ("qwen3_coder", "<tool_call><function=a>", [], 0, True),
        ("qwen3_coder", "<tool_call>{}</tool_call>", [], 1, False),
        (
            "glm4_moe",
            "<tool_call>a<arg_key>b</arg_key><arg_value>1</arg_value></tool_call>",
            [("a", {"b": 1})], 0, False,
        ),
        ("glm4_moe", "<tool_call>now</tool_call>", [("now", {})], 0, False),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", [("now", {})], 0, False),
        ("kimi_k2", "<|tool_call_begin|>functions.a.b:3<|tool_call_argument_begin|> {}", [("a.b", {})], 0, False),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="a">\n{"b": 1}\n</｜DSML｜invoke>',
            [("a", {"b": 1})], 0, False,
        ),
        (
            "olmo3",
            "<function_calls>\nsay(t='it's \"5\", or\nnot')\nnow()</function_calls>",
            [("say", {"t": 'it\'s "5", or\nnot'}), ("now", {})], 0, False,
        ),
        ("llama4_pythonic", '[add(a="1", b=[true, null])]', [("add", {"a": 1, "b": [True, None]})], 0, False),
        ("llama4_pythonic", "[say('x')]", [("say", {"t": "x"})], 0, False),
        ("llama4_pythonic", "[say(t=open('x'))]", [], 1, False),
        (
            "gemma4",
            '<|tool_call>call:a{b:{c:[1,<|"|>x, y<|"|>]},d:true}<tool_call|>',
            [("a", {"b": {"c": [1, "x, y"]}, "d": True})], 0, False,
        ),
        ("phi4_mini", 'functools[{"name": "a", "arguments": {}}]', [("a", {})], 0, False),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_unusual_and_malformed_calls(form: Any, text, calls, malformed, partial):
    found = parse_tool_calls(text, form, TOOLS)
    assert [*found.calls] == calls and len(found.malformed) == malformed and bool(found.incomplete) == partial


@pytest.mark.parametrize(("name", "form"), [("qwen3", "hermes"), ("llama3", "llama3_json"), ("mistral", "mistral")])
def test_formats_of_templates(name, form):
    assert tool_format_or_default(template_of(name).source) == form
    assert tool_format_or_default("{{ '<tool_call>\n<function=example>' }}") == "qwen3_coder"
    assert tool_format_or_default("") == "hermes"
