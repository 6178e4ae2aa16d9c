"""Every format of tool calls: complete answers, answers in pieces, and answers that are cut off at any character."""

import itertools
import json
import re
import time
from typing import Any

import pytest

from eqx_decoders.io.text.output_parsing.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    FunctionCall,
    find_reasoning_format,
    find_tool_format,
)
from eqx_decoders.io.text.output_parsing.parser import (
    Call,
    Content,
    ContentWasReasoning,
    IncompleteCall,
    MalformedCall,
    OutputFormat,
    Reasoning,
    WhitespaceFilter,
)
from eqx_decoders.io.text.tool_calls import parse_tool_calls


PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("edit", "get_weather")
]
# Markers of all formats, and the punctuation of JSON, Python and XML.
MARKERS = sorted(
    {text for row in TOOL_CALL_FORMATS for text in row.markers}
    | {text for row in REASONING_FORMATS for text in (row.begin, row.end)}
    | {"</parameter>", "<parameter=", "<parameter=text>", "<function=x>", "</invoke>", "<tool_call>", "[ARGS]", "```"}
    | {'"', "'", "\\", "{", "}", "[", "]", "(", ")", "],", "\n", "é", "😀", "</tool_call>", "<|im_end|>", ");"}
)
ROWS = {row.name: row for row in TOOL_CALL_FORMATS}
# Markers that are special tokens of a tokenizer. In the tests without a tokenizer, all markers are ordinary text.
SPECIAL = {
    "gemma4": ['<|"|>', "<|tool_call>", "<tool_call|>"],
    "gemma3": ["<escape>", "<start_function_call>", "<end_function_call>"],
    "deepseek_v31": [*ROWS["deepseek_v31"].markers],
    "kimi_k2": [*ROWS["kimi_k2"].markers],
    "glm4_moe": [*ROWS["glm4_moe"].markers],
    "solar_open": [*ROWS["solar_open"].markers],
    "glm47_moe": [*ROWS["glm47_moe"].markers],
    "hy_v3_opensource": [*ROWS["hy_v3_opensource"].markers],
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"],
    "minimax_m2": ["<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
    "mistral_v11": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "mistral": ["[TOOL_CALLS]"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "granite": ["<|tool_call|>"],
    "internlm": ["<|action_start|>", "<|action_end|>", "<|plugin|>"],
}  # fmt: skip


# Two calls in the syntax that is published for each format: `edit(text="a", count=3)` and `get_weather(text="Ulm")`.
EDIT, ULM = '{"text": "a", "count": 3}', '{"text": "Ulm"}'
CALLS = [FunctionCall("edit", {"text": "a", "count": 3}), FunctionCall("get_weather", {"text": "Ulm"})]
JSON_LIST = f'[{{"name": "edit", "arguments": {EDIT}}}, {{"name": "get_weather", "arguments": {ULM}}}]'
PUBLISHED = {
    "hermes": f'<tool_call>\n{{"name": "edit", "arguments": {EDIT}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ULM}}}\n</tool_call>',
    "llama3_json": f'{{"name": "edit", "parameters": {EDIT}}}; {{"name": "get_weather", "parameters": {ULM}}}',
    "mistral": "[TOOL_CALLS] " + JSON_LIST.replace('}},', '}, "id": "abcdefgh0"},'),
    "mistral_v11": f"[TOOL_CALLS]edit[ARGS]{EDIT}[TOOL_CALLS]get_weather[ARGS]{ULM}",
    "qwen3_coder": "<tool_call>\n<function=edit>\n<parameter=text>\na\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n<parameter=text>\nUlm\n</parameter>\n</function>\n"
    "</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{EDIT}<|call|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ULM}<|call|>",
    "glm4_moe": "<tool_call>edit\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_weather\n<arg_key>text</arg_key>\n<arg_value>Ulm</arg_value>\n"
    "</tool_call>",
    "glm47_moe": "<tool_call>edit<arg_key>text</arg_key><arg_value>a</arg_value><arg_key>count</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>get_weather<arg_key>text</arg_key><arg_value>Ulm</arg_value>"
    "</tool_call>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n```json\n{EDIT}\n```"
    f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ULM}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit<｜tool▁sep｜>{EDIT}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ULM}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="edit">\n'
    '<｜DSML｜parameter name="text" string="true">a</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="text" string="true">Ulm</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>"
    f"{EDIT}<|tool_call_end|><|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{ULM}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax_m1": f'<tool_calls>\n{{"name": "edit", "arguments": {EDIT}}}\n'
    f'{{"name": "get_weather", "arguments": {ULM}}}\n</tool_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="text">a</parameter>\n'
    '<parameter name="count">3</parameter>\n</invoke>\n<invoke name="get_weather">\n'
    '<parameter name="text">Ulm</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="edit">]<]minimax[>[<text>a]<]minimax[>[</text>'
    "]<]minimax[>[<count>3]<]minimax[>[</count>]<]minimax[>[</invoke>\n"
    ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<text>Ulm]<]minimax[>[</text>]<]minimax[>[</invoke>\n'
    "]<]minimax[>[</tool_call>",
    "granite": f"<|tool_call|>{JSON_LIST}",
    "llama4_pythonic": '[edit(text="a", count=3), get_weather(text="Ulm")]',
    "olmo3": "<function_calls>\nedit(text='a', count=3)\nget_weather(text='Ulm')\n</function_calls>",
    "lfm2": "<|tool_call_start|>[edit(text='a', count=3), get_weather(text='Ulm')]<|tool_call_end|>",
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "edit", "parameters": '
    f'{EDIT}}},\n    {{"tool_call_id": "1", "tool_name": "get_weather", "parameters": {ULM}}}\n]<|END_ACTION|>',
    "hunyuan": f"<tool_calls>{JSON_LIST}</tool_calls>",
    "hy_v3": "<tool_calls>\n<tool_call>edit<tool_sep>\n<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_weather<tool_sep>\n"
    "<arg_key>text</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>\n</tool_calls>",
    "seed_oss": "<seed:tool_call>\n<function=edit>\n<parameter=text>a</parameter>\n<parameter=count>3</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=get_weather>\n<parameter=text>Ulm</parameter>\n</function>\n"
    "</seed:tool_call>",
    "gemma3": "<start_function_call>call:edit{text:<escape>a<escape>,count:3}<end_function_call>"
    "<start_function_call>call:get_weather{text:<escape>Ulm<escape>}<end_function_call>",
    "gemma4": '<|tool_call>call:edit{text:<|"|>a<|"|>,count:3}<tool_call|>'
    '<|tool_call>call:get_weather{text:<|"|>Ulm<|"|>}<tool_call|>',
    "apertus": f'<|tools_prefix|>[{{"edit": {EDIT}}}, {{"get_weather": {ULM}}}]<|tools_suffix|>',
    "nemotron": f"<TOOLCALL>{JSON_LIST}</TOOLCALL>",
    "phi4_mini": f"functools{JSON_LIST}",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "edit", "parameters": {EDIT}}}<|action_end|>'
    f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ULM}}}<|action_end|>',
    "longcat": f'<longcat_tool_call>\n{{"name": "edit", "arguments": {EDIT}}}\n</longcat_tool_call>'
    f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {ULM}}}\n</longcat_tool_call>',
    "longcat_xml": "<longcat_tool_call>edit\n<longcat_arg_key>text</longcat_arg_key>\n"
    "<longcat_arg_value>a</longcat_arg_value>\n<longcat_arg_key>count</longcat_arg_key>\n"
    "<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>get_weather\n"
    "<longcat_arg_key>text</longcat_arg_key>\n<longcat_arg_value>Ulm</longcat_arg_value>\n</longcat_tool_call>",
    "minicpm5": '<function name="edit"><param name="text">a</param><param name="count">3</param></function>\n'
    '<function name="get_weather"><param name="text">Ulm</param></function>',
    "xlam": JSON_LIST,
    "solar_open": f"<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>edit<|tool_call:args|>{EDIT}<|tool_call:end|>"
    f"<|tool_call:begin|>1<|tool_call:name|>get_weather<|tool_call:args|>{ULM}<|tool_call:end|><|calls|>",
}  # fmt: skip
PUBLISHED["deepseek_v4"] = PUBLISHED["deepseek_v32"].replace("function_calls", "tool_calls")
PUBLISHED["hy_v3_opensource"] = PUBLISHED["hy_v3"].replace(">", ":opensource>")


def events_of(form, pieces, prompt="", tools=TOOLS):
    parser = form.parser(tools, prompt=prompt)
    return [event for piece in pieces for event in parser.push(piece)] + parser.flush()


def collected(events):
    """Return the reasoning, the content, the calls, and the text of malformed and partial calls."""
    reasoning, content, calls, other, whitespace = "", "", [], "", WhitespaceFilter()
    for event in events:
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Content):
            content += whitespace.push(event.text)
        elif isinstance(event, Call):
            calls.append(event.call)
            whitespace.push_call()
        elif isinstance(event, MalformedCall | IncompleteCall):
            other += event.text
        else:
            assert isinstance(event, ContentWasReasoning)
            reasoning, content, whitespace = reasoning + content, "", WhitespaceFilter()
    return reasoning, content + whitespace.flush(), calls, other


def written(name, calls, form):
    """Return the text of calls, in which the special tokens of the format, but not of arguments, are placeholders."""
    row = ROWS[name] if form.tool_format is None else form.tool_format
    return row.write(calls)


def forms(name):
    yield OutputFormat(name, None)
    if name in SPECIAL:
        yield OutputFormat(name, None, SPECIAL[name])


def arguments_of(name):
    """Yield arguments that contain one marker, all markers, and values of all types."""
    joined = " ".join(text for text in MARKERS if text not in ("'", '"', "\\", "\n"))
    for text in (*(f"see {marker} here" for marker in MARKERS), joined, "", " a ", "true", "5", "null"):
        if name in ("gemma3", "gemma4") and text == joined:
            text = joined.replace(ROWS[name].quote + " ", "")  # as ordinary text, it ends a string before a bracket
        yield {"text": text}
    row = ROWS[name]
    if row.syntax == "xml":  # a value that contains the complete text after a value
        yield {"text": f"see {row.parameter_end}{row.call_end}{row.section_end} here".replace("{key}", "text")}
    yield {"count": 5, "ratio": 0.5, "flag": True, "items": ["a", "</tool_call>"], "options": {"a": {"b": [1, None]}}}
    yield {}


@pytest.mark.parametrize("name", ROWS)
def test_parses_the_calls_that_were_written(name):
    for form in forms(name):
        for arguments in arguments_of(name):
            one, two = FunctionCall("edit", arguments), FunctionCall("get_weather", {"text": "Ulm"})
            for calls in ([one], [one, two], [two, one]):
                text = written(name, calls, form)
                assert collected(events_of(form, [text])) == ("", "", calls, ""), text


@pytest.mark.parametrize("name", ROWS)
def test_parses_the_published_syntax(name):
    for form in forms(name):
        text = form.translate(PUBLISHED[name])
        for pieces in ([text], text):
            assert collected(events_of(form, pieces)) == ("", "", CALLS, "")


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral_v11", "qwen3_coder", "glm4_moe", "glm47_moe",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "minimax_m1", "minimax_m2", "minimax_m3",
    "granite", "olmo3", "lfm2", "cohere", "hunyuan", "hy_v3", "hy_v3_opensource", "seed_oss", "gemma3", "gemma4",
    "apertus", "nemotron", "longcat", "longcat_xml", "minicpm5",
    "xlam", "solar_open"])  # fmt: skip
def test_writes_the_published_syntax(name):
    assert ROWS[name].write(CALLS) == PUBLISHED[name]


def sample_texts(name, form):
    texts = ["see </tool_call> here", "a </parameter> </invoke> </arg_value> }]) ", 'x" \' <|call|> [ARGS]{ <|"|> é']
    calls = [FunctionCall("edit", {"text": text, "count": 3}) for text in texts]
    starts_with_call = ROWS[name].marker_optional and not ROWS[name].start_markers
    starts_with_call = starts_with_call or name in ("llama3_json", "llama4_pythonic", "harmony")
    content = "" if starts_with_call else "I see.\n\n"
    yield content, calls[:1], content + written(name, calls[:1], form)
    yield content, calls, content + written(name, calls, form)


@pytest.mark.parametrize("name", ROWS)
def test_result_does_not_depend_on_the_pieces(name):
    for form in forms(name):
        for content, calls, text in sample_texts(name, form):
            whole = collected(events_of(form, [text]))
            assert whole == ("", content.strip(), calls, ""), text
            for size in (1, 2, 3, 7, 64):
                pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
                assert collected(events_of(form, pieces)) == whole, (size, text)


@pytest.mark.slow(
    fast=(
        "harmony", "deepseek_v32", "kimi_k2", "minimax_m3", "gemma4", "seed_oss", "qwen3_coder", "glm4_moe", "mistral",
        "cohere", "hermes", "llama4_pythonic",
    )
)  # fmt: skip
@pytest.mark.parametrize("name", ROWS)
def test_cut_answer_has_a_prefix_of_the_calls(name):
    for form in forms(name):
        for content, calls, text in sample_texts(name, form):
            parser, events = form.parser(TOOLS), []
            for end in range(len(text)):
                _, shown, found, _ = collected(events_of(form, [text[:end]]))
                assert found == calls[: len(found)], text[:end]
                assert shown.startswith(content.strip()[: len(shown)]), text[:end]
                streamed = collected(events)[2]  # calls that a stream has already sent
                assert streamed == calls[: len(streamed)]
                events += parser.push(text[end])


@pytest.mark.parametrize("name", ROWS)
def test_keeps_text_around_calls(name):
    row, call = ROWS[name], FunctionCall("edit", {"text": "a"})
    for form in forms(name):
        text = written(name, [call], form)
        if name != "harmony":
            assert collected(events_of(form, [text + "\nDone."])) == ("", "Done.", [call], "")
        if not row.marker_optional and name != "harmony":
            assert collected(events_of(form, [f"Sure. {text} Done."])) == ("", "Sure. Done.", [call], "")
            two = FunctionCall("get_weather", {"text": "b"})
            between = f"Sure. {text} And: {written(name, [two], form)} Done."
            assert collected(events_of(form, [between])) == ("", "Sure. And: Done.", [call, two], "")
        for said in ("It is 4.", '{"answer": 4}', "a [1] {b} < c > (d)", "[", "{", "[edit", '{"name', "  x ", ""):
            for size in (1, 100):
                pieces = [said[begin : begin + size] for begin in range(0, len(said), size)]
                assert collected(events_of(form, pieces)) == ("", said, [], ""), said


@pytest.mark.parametrize("name", [name for name in ROWS if name != "harmony"])
@pytest.mark.parametrize("begin", [row.begin for row in REASONING_FORMATS])
def test_calls_in_the_reasoning_are_reasoning(name, begin):
    reasoning = next(row for row in REASONING_FORMATS if row.begin == begin)
    form, call = OutputFormat(name, reasoning), FunctionCall("edit", {"text": f"see {reasoning.end} here"})
    thought = written(name, [FunctionCall("edit", {"text": "a"})], form)
    answer = written(name, [call], form)
    cases = (
        ("", f"{begin}\n{thought}\n{reasoning.end}\n\n{answer}"),
        (f"x{begin}\n", f"{thought}{reasoning.end}{answer}"),
    )
    for prompt, text in cases:
        for size in (1, 5, len(text)):
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            assert collected(events_of(form, pieces, prompt)) == (thought, "", [call], "")


@pytest.mark.parametrize("name", ROWS)
def test_malformed_call_does_not_discard_other_calls(name):
    good = [FunctionCall("edit", {"text": "a"}), FunctionCall("get_weather", {"text": "b"})]
    row = ROWS[name]
    if row.section_begin or name in ("llama3_json", "llama4_pythonic"):
        pytest.skip("the calls are one list")
    form = OutputFormat(name, None)
    one, two = (row.write([call]) for call in good)
    bad = {
        "json": one.replace(': "a"', ": a b"),
        "named_json": one.replace('"a"', "a b"),
        "harmony": one.replace('"a"', "a b"),
    }
    text = bad.get(
        row.syntax,
        one.replace("text", "te}xt")
        if row.syntax == "gemma"
        else one.replace("parameter", "p").replace("arg_value", "q").replace("<param name", "<p name"),
    )
    assert text != one
    for texts in itertools.permutations((one, two, text)):
        joined = "\n".join(texts) if name != "harmony" else "".join(texts)
        calls = [good[0] if item == one else good[1] for item in texts if item != text]
        found = events_of(form, [joined])
        assert [event.call for event in found if isinstance(event, Call)] == calls, joined
        assert any(isinstance(event, MalformedCall) for event in found), joined
        assert found_in_pieces(form, joined) == (calls, 1)


def found_in_pieces(form, text):
    events = events_of(form, text)
    reasons = [event for event in events if isinstance(event, MalformedCall) and event.reason]
    return [event.call for event in events if isinstance(event, Call)], len(reasons)


def test_templates_select_the_format_of_their_calls():
    for row in TOOL_CALL_FORMATS:
        call = row.write([FunctionCall("{{ name }}", {"key": "value"})])
        if row.name not in ("llama3_json", "minimax_m1", "xlam"):
            assert find_tool_format("{% for tool in tools %}" + call) == row.name
    assert find_tool_format("{{ tools }}") is None


TEMPLATES = {
    "deepseek_v32": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}{% if message.tool_calls %}",
    "deepseek_v4": "{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}",
    "hy_v3_opensource": "{% set suffix = ':opensource' %}{{ '<tool_sep{}><arg_key{}>'.format(suffix, suffix) }}",
    "hy_v3": "{% set suffix = '' %}{{ '<tool_sep{}><arg_key{}>'.format(suffix, suffix) }}",
    "minicpm5": """{{ '<function name="f"><param name="a">' }}{{ content.split('<tool_sep>') }}""",
    "glm4_moe": "{{ '<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>' }}",
    "glm47_moe": "{{ '<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>' }}",
    "lfm2": "{{ 'List of tools: [' }}{{ tools | tojson }}",
    "xlam": "make calls in a single JSON array: {% if message.role == 'ipython' %}",
    "phi4_mini": "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_related_models_select_different_formats(name):
    assert find_tool_format(TEMPLATES[name]) == name


@pytest.mark.slow
def test_minimax_m3_writes_lists_and_objects_as_elements():
    properties = {
        "ids": {"type": "array", "items": {"type": "string"}},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        "row": {"anyOf": [{"$ref": "#/$defs/row"}, {"type": "null"}]},
        "any": {},
        "none": {"type": "array", "items": {"type": "string"}},
        "empty": {"$ref": "#/$defs/row"},
        "item": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    }
    tree = {"properties": {"id": {"type": "string"}, "item": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    row = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "n": {"type": "number"}, "row": {"type": "object"}},
    }
    tools = [{"name": "edit", "parameters": {"properties": properties, "$defs": {"row": row, "tree": tree}}}]
    values = {
        "ids": ["02134", "5", "true", "a\nb", ""],
        "rows": [{"id": "7", "n": 0.5}, {"id": "<b> [1]"}],
        "row": {"id": "x", "row": {"row": {"a": [1, [2]]}}},
        "any": {"x": [1, True, "é"], "y": {"item": 3, "z": "a"}},
        "none": [],
        "empty": {},
        "item": [{"id": "1", "item": [{"id": "2"}, {"id": "3"}]}, {"id": "4"}],
    }
    call = FunctionCall("edit", values)
    text = ROWS["minimax_m3"].write([call])
    assert "<ids>]<]minimax[>[<item>02134]<]minimax[>[</item>" in text and '"' not in text.split(">", 4)[4]
    for special in ([], ["]<]minimax[>["]):
        form = OutputFormat("minimax_m3", None, special)
        for pieces in ([form.translate(text)], form.translate(text)):
            assert collected(events_of(form, pieces, tools=tools)) == ("", "", [call], "")
    nested = "]<]minimax[>[<a>" * 5000 + "]<]minimax[>[</a>" * 5000
    found = parse_tool_calls(ROWS["minimax_m3"].write([FunctionCall("edit", {"any": nested})]), "minimax_m3", tools)
    assert len(found.calls) == 1


@pytest.mark.parametrize(("name", "other"), [("glm4_moe", "glm47_moe"), ("glm47_moe", "glm4_moe")])
def test_glm_calls_may_have_other_line_breaks(name, other):
    for form in forms(name):
        for text in (form.translate(PUBLISHED[other]), form.translate(PUBLISHED[other].replace("\n<arg_v", "<arg_v"))):
            for pieces in ([text], text):
                assert collected(events_of(form, pieces)) == ("", "", CALLS, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", f"<|tool_call_start|>{JSON_LIST}<|tool_call_end|>"),
        ("lfm2", f"<|tool_call_start|>\n[ {JSON_LIST[1:]}<|tool_call_end|>"),
        ("llama4_pythonic", f"<|python_start|>{PUBLISHED['llama3_json']}<|python_end|>"),
    ],
    ids=["lfm2", "lfm2 with blanks", "llama4"],
)
def test_calls_of_pythonic_formats_may_be_json(name, text):
    for form in forms(name):
        for pieces in ([form.translate(text)], form.translate(text)):
            assert collected(events_of(form, pieces)) == ("", "", CALLS, "")


def test_line_breaks_of_qwen3_coder_may_be_missing():
    properties = {key: {"type": "string"} for key in ("a", "b")}
    tools, form = [{"name": "edit", "parameters": {"properties": properties}}], OutputFormat("qwen3_coder", None)
    call = FunctionCall("edit", {"a": "x", "b": "y\n"})
    for a, b in itertools.product(("x", "\nx", "x\n", "\nx\n"), ("\ny\n\n", "y\n\n")):
        text = (
            f"<tool_call>\n<function=edit>\n<parameter=a>{a}</parameter>\n<parameter=b>{b}</parameter>\n</function>\n"
        )
        for pieces in ([text + "</tool_call>"], text + "</tool_call>"):
            assert collected(events_of(form, pieces, tools=tools)) == ("", "", [call], ""), (a, b)


def test_minicpm5_writes_text_with_tags_as_cdata():
    text = '<function name="edit"><param name="text"><![CDATA[<b>1 & 2</b>\n</param></function>]]></param></function>'
    call = FunctionCall("edit", {"text": "<b>1 & 2</b>\n</param></function>"})
    assert ROWS["minicpm5"].write([call]) == text
    for pieces in ([text], text):
        assert collected(events_of(OutputFormat("minicpm5", None), pieces)) == ("", "", [call], "")


def test_content_of_minimax_m2_may_be_a_response_element():
    form = OutputFormat(None, find_reasoning_format("<think></think> <minimax:tool_call> <response>"))
    answer = "<think>Hm.</think>\n<response>1</response>"
    assert collected(events_of(form, [answer]))[:2] == ("Hm.", "<response>1</response>")


def test_solar_open_writes_its_reasoning_as_a_message():
    template = "<|begin|>assistant<|think|> <|tool_call:begin|>"
    call = PUBLISHED["solar_open"].replace("begin|>0", "begin|>a1b2c3d4e5")
    special = ["<|begin|>", "<|end|>", "<|think|>", "<|content|>", *ROWS["solar_open"].markers]
    for form in (OutputFormat.from_template(template, names, find_tool_format(template)) for names in ([], special)):
        user = form.translate("<|begin|>user<|content|>Hi<|end|>")
        for thought, reasoning in (("<|think|>Hm.<|end|><|begin|>assistant", "Hm."), ("", "")):
            for rest, content, calls in (("<|content|>Yes.<|end|>", "Yes.", []), (call, "", CALLS)):
                answer = form.translate(thought + rest)
                for pieces in ([answer], answer):
                    found = collected(events_of(form, pieces, prompt=user + form.translate("<|begin|>assistant")))
                    assert found == (reasoning, content, calls, "")


def test_granite_writes_the_marker_as_text():
    form = OutputFormat("granite", None, ["<|tool_call|>"])
    assert collected(events_of(form, f"<tool_call>{JSON_LIST}")) == ("", "", CALLS, "")


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("<think></think> <response></response>", "<think>Hm.</think>\n<response>Yes.</response>"),
        ("<think></think> <answer></answer>", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
        ("after 'Here is my thought process:'", "Here is my thought process: Hm.\nHere is my response: Yes."),
        (
            "[BEGIN FINAL RESPONSE] [END FINAL RESPONSE]",
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]",
        ),
        ("{{ '<beginning_of_sentence>ai name=assistant\\n' }}", "<think>\nHm.\n</think>\n\nYes."),
        ("{% set s = ':opensource' %}{{ '<think{}>'.format(s) }}", "<think:opensource>Hm.</think:opensource>Yes."),
    ],
    ids=["response", "answer", "thought process", "final response", "no answer marker", "suffix"],
)
def test_answers_are_split_as_published(template, answer):
    form = OutputFormat(None, find_reasoning_format(template))
    for pieces in ([answer], answer):
        reasoning, content, _, _ = collected(events_of(form, pieces))
        assert (reasoning, content.strip()) == ("Hm.", "Yes.")


def test_call_without_a_marker_must_call_an_offered_tool():
    name: Any
    for name, text in (
        ("llama3_json", '{"name": "Alice", "parameters": {}}'),
        ("mistral", '[{"name": "Alice", "arguments": {}}]'),
        ("llama3_json", '{"parameters": {}, "name": "Alice"}'),
        ("llama4_pythonic", "[Alice(age=3)]"),
    ):
        assert parse_tool_calls(text, name, TOOLS) == (text, (), (), "")
        assert [call.name for call in parse_tool_calls(text.replace("Alice", "edit"), name, TOOLS).calls] == ["edit"]
    assert json.dumps(PROPERTIES)


@pytest.mark.parametrize("name", ROWS)
def test_arguments_can_be_written_as_json_in_utf_8(name):
    """Unpaired surrogates are replaced. A number that JSON cannot represent becomes a string or fails the call."""
    row = ROWS[name]
    literals = ['"\\ud83d"', '["\\ud83d"]', '{"\\ud83d": 1}', "NaN", "[NaN]", "1e999", "[-Infinity]", "[" * 900]
    literals += ["0x" + "f" * 5000, "9" * 5000]
    for value in literals:
        text = row.write([FunctionCall("edit", {"extra": 12345})]).replace("12345", value)
        for tools in (TOOLS, []):
            for call in parse_tool_calls(text, name, tools).calls:
                json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()


def test_replaces_unpaired_surrogates_in_arguments():
    found = parse_tool_calls(
        '<tool_call>{"name":"edit","arguments":{"text":"\\ud83d\\ude00\\ud83d"}}</tool_call>', "hermes"
    )
    assert found.calls == (FunctionCall("edit", {"text": "😀\ufffd"}),)


WEATHER = FunctionCall("get_weather", {"text": "a"})


@pytest.mark.parametrize(
    ("name", "call", "rest"),
    [
        ("llama3_json", '{"name": "get_weather", "parameters": {"text": "a"}}', '; {"name": }'),
        ("mistral", '[{"name": "get_weather", "arguments": {"text": "a"}}', " and more"),
        ("llama4_pythonic", "[get_weather(text='a')", ", nope(y=1)] <|python_start|>[edit("),
    ],
    ids=["llama3_json", "mistral", "llama4_pythonic"],
)
def test_returns_text_after_a_call_without_a_marker_once(name: Any, call, rest):
    for size in (1, 3, 1000):
        text = call + rest
        events = events_of(OutputFormat(name, None), [text[at : at + size] for at in range(0, len(text), size)])
        _, content, calls, other = collected(events)
        assert calls == [WEATHER] and "text" not in content + other
        assert (content + other).startswith(rest.lstrip()[:8])
        assert other in ("", "<|python_start|>[edit(")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lfm2", '<|tool_call_start|>[edit(text="x]<|tool_call_end|>Then <|tool_call_start|>[get_weather(text="a")]'),
        ("gemma3", "<start_function_call>call:edit{text:<escape>x}<end_function_call>Then "
         "<start_function_call>call:get_weather{text:<escape>a<escape>}<end_function_call>"),
        ("hermes", '<tool_call>{"name": "edit", "arguments": {"text": "x}}</tool_call>Then '
         '<tool_call>{"name": "get_weather", "arguments": {"text": "a"}}</tool_call>'),
    ],
    ids=["lfm2", "gemma3", "hermes"],
)  # fmt: skip
def test_unterminated_string_does_not_discard_the_next_call(name: Any, text):
    for special in [SPECIAL[name]] if name in SPECIAL else [[], ["<tool_call>", "</tool_call>"]]:
        form = OutputFormat(name, None, special)
        _, content, calls, other = collected(events_of(form, form.translate(text)))
        assert (content, calls) == ("Then", [WEATHER]) and "x" in other


def test_content_may_mention_the_reasoning_markers():
    form = OutputFormat(None, REASONING_FORMATS[-1])
    text = "Wrap it in `<think>` and `</think>` tags."
    assert collected(events_of(form, text)) == ("", text, [], "")
    assert collected(events_of(form, "Hm.</think>" + text)) == ("Hm.", text, [], "")


def test_assistant_is_a_role_only_before_a_header():
    form = OutputFormat("harmony", None)
    for text in ("assistants are nice", "assistant is a role", "assistant", "assistant to help"):
        for pieces in ([text], [*text]):
            assert collected(events_of(form, pieces)) == ("", text, [], "")
    for header in ("assistant<|channel|>final", "assistant to=user<|channel|>final", "assistant <|channel|>final"):
        assert collected(events_of(form, header + "<|message|>Yes")) == ("", "Yes", [], "")


def test_functools_without_a_bracket_is_content():
    form = OutputFormat("phi4_mini", None)
    assert collected(events_of(form, "Use functools.lru_cache here.")) == ("", "Use functools.lru_cache here.", [], "")
    text = 'functools[{"name": "get_weather", "arguments": {"text": "a"}}, {"name": "edit", "arguments": {}}]'
    assert collected(events_of(form, text)) == ("", "", [WEATHER, FunctionCall("edit", {})], "")


def test_removes_surplus_brackets_and_fences_before_the_end_of_a_call():
    call = '{"name": "get_weather", "arguments": {"text": "a"}}'
    for text in (f"```json\n{call}\n```", f"```json\n[{call}]\n```\n", f"{call}}}\n"):
        for pieces in ([f"<tool_call>{text}</tool_call>\nDone."], [*f"<tool_call>{text}</tool_call>\nDone."]):
            assert collected(events_of(OutputFormat("hermes", None), pieces)) == ("", "Done.", [WEATHER], "")
    code = "```python\nx\n```"
    assert collected(events_of(OutputFormat("hermes", None), f"<tool_call>{call}</tool_call>{code}"))[1] == code


@pytest.mark.parametrize("name", [row.name for row in TOOL_CALL_FORMATS if row.syntax == "python"])
def test_parameters_of_python_calls_may_have_any_name(name: Any):
    for key in ("from", "class", "my-key", "None", "a.b", "my key", "k0", "é"):
        tool = {"name": "edit", "parameters": {"properties": {key: {"type": "string"}, "x": {"type": "integer"}}}}
        arguments = {key: "a=1, class=(b", "x": 5, "options": {"from": "b=2"}}
        text = ROWS[name].write([FunctionCall("edit", arguments)])
        assert parse_tool_calls(text, name, [tool]).calls == (FunctionCall("edit", arguments),)
    for text, value in (("r'a\\d'", "a\\d"), ("'a\\\\d'", "a\\d"), ("u'a'", "a")):
        found = parse_tool_calls(ROWS[name].write([WEATHER]).replace("'a'", text), name, TOOLS)
        assert found.calls == (FunctionCall("get_weather", {"text": value}),)
    twice = parse_tool_calls(ROWS[name].write([WEATHER]).replace("text='a'", "'y', text='a'"), name, TOOLS)
    assert twice.calls == () and "text" in twice.malformed[0]


@pytest.mark.parametrize("name", [row.name for row in TOOL_CALL_FORMATS if row.syntax == "xml"])
def test_undeclared_parameters_and_tools_end_a_value(name: Any):
    call = FunctionCall("edit", {"text": "a", "units": "C"})
    for form in forms(name):
        text = written(name, [call], form)
        assert collected(events_of(form, text)) == ("", "", [call], "")
        twice = text.replace("units", "text")
        assert collected(events_of(form, twice)) == ("", "", [FunctionCall("edit", {"text": "C"})], "")
        calls = [FunctionCall("edit", {"text": "a"}), FunctionCall("nope", {"text": "b"}), WEATHER]
        for sequence in itertools.permutations(calls):
            for size in (1, 1000):
                text = written(name, sequence, form)
                pieces = [text[at : at + size] for at in range(0, len(text), size)]
                assert collected(events_of(form, pieces)) == ("", "", [*sequence], ""), text


@pytest.mark.parametrize("name", [row.name for row in TOOL_CALL_FORMATS if row.syntax in ("xml", "gemma")])
def test_names_of_parameters_may_have_punctuation(name: Any):
    for key in ("a/b", "a.b", "a-b", "$x"):
        call = FunctionCall("edit", {key: "x"})
        assert parse_tool_calls(ROWS[name].write([call]), name).calls == (call,)
    if name == "gemma4":
        found = parse_tool_calls('<|tool_call>call:edit{"a:b":1}<tool_call|>', name)
        assert found.calls == (FunctionCall("edit", {"a:b": 1}),)


def test_failure_reasons_contain_the_names_of_special_tokens():
    form = OutputFormat("hermes", None, ["<tool_call>", "</tool_call>"])
    events = events_of(form, form.translate("<tool_call>{</tool_call>"))
    (reason,) = [event.reason for event in events if isinstance(event, MalformedCall) and event.reason]
    assert "</tool_call>" in reason


def test_empty_harmony_message_does_not_depend_on_the_pieces():
    form = OutputFormat("harmony", None)
    call = ROWS["harmony"].write([WEATHER])
    for text in (f"<|start|>assistant<|call|>{call}", f"<|channel|>final<|end|>{call}"):
        assert collected(events_of(form, [text])) == collected(events_of(form, text)) == ("", "", [WEATHER], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm4_moe", "<tool_call><tool_call>find\n</tool_call>"),
        ("gemma4", "<|tool_call>call:find<|tool_call>{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:find{a<|tool_call>:1}<tool_call|>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="find<minimax:tool_call>">\n</invoke>'),
    ],
    ids=["glm4_moe", "gemma4 tool", "gemma4 parameter", "minimax_m2"],
)
def test_names_of_tools_and_parameters_contain_no_special_tokens(name: Any, text):
    form = OutputFormat(name, None, re.findall(r"<[^ <>]+>|\[[A-Z_]+\]", text))
    for pieces in ([form.translate(text)], form.translate(text)):
        parser = form.parser()
        events = [event for piece in pieces for event in parser.push(piece)] + parser.flush()
        names = [
            name for event in events if isinstance(event, Call) for name in (event.call.name, *event.call.arguments)
        ]
        assert [form.restore(name) for name in names] == names


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # a list of calls without an end
        ("hunyuan", PUBLISHED["hunyuan"].removesuffix("]</tool_calls>") + PUBLISHED["hunyuan"]),
        ("lfm2", PUBLISHED["lfm2"].removesuffix("]<|tool_call_end|>") + PUBLISHED["lfm2"]),
        # names without quotes
        ("minimax_m2", PUBLISHED["minimax_m2"].replace('<invoke name="', "<invoke name=") * 2),
        # a marker that starts like a JSON list
        ("mistral_v11", f"[TOOL_CALLS][CALL_ID]x1[ARGS]{EDIT}" + PUBLISHED["mistral_v11"] * 2),
    ],
    ids=["hunyuan", "lfm2", "minimax_m2", "mistral_v11"],
)
def test_result_of_answers_with_mistakes_does_not_depend_on_the_pieces(name: Any, text):
    for form in forms(name):
        text = form.translate(text)
        whole, pieces = (collected(events_of(form, parts)) for parts in ([text], text))
        assert whole == pieces and whole[2][-4:] == CALLS * 2


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.syntax == "xml"])
def test_reads_a_parameter_name_of_many_spaces_in_linear_time(name: Any):
    row = ROWS[name]
    text = f"{row.section_begin}{row.call_begin}edit{row.name_end}{row.parameter_begin}".rstrip('"') + " " * 20_000
    started = time.perf_counter()
    assert collected(events_of(OutputFormat(name, None), [text]))[2] == []
    assert time.perf_counter() - started < 5


def test_reads_many_code_fences_in_linear_time():
    started = time.perf_counter()
    assert collected(events_of(OutputFormat("hermes", None), ["<tool_call>", *["```"] * 10_000]))[2] == []
    assert time.perf_counter() - started < 5


def test_reasoning_without_a_start_marker_may_end_with_the_start_of_a_wrapper():
    reasoning = find_reasoning_format("[BEGIN FINAL RESPONSE]")
    for text in ("Hm.[BEGIN FINAL RESPONSE]Hi.[END FINAL RESPONSE]", "Hm.[BEGIN FINAL RESPONSE]Hi."):
        assert collected(events_of(OutputFormat(None, reasoning), text)) == ("Hm.", "Hi.", [], "")
