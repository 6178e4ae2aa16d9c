"""Required tool calls that are cut off at any character."""

import json

import pytest

from eqx_decoders.io.text.output_parsing.formats import TOOL_CALL_FORMATS, FunctionCall
from eqx_decoders.io.text.output_parsing.truncated_calls import parse_truncated_call


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}} for name in ("get", "get_weather")]  # fmt: skip
CALL = FunctionCall("get_weather", {"city": "Paris", "days": 2})


@pytest.mark.parametrize("tool_format", TOOL_CALL_FORMATS, ids=lambda tool_format: tool_format.name)
def test_returns_a_cut_call_once_its_name_is_complete(tool_format):
    written = tool_format.write([CALL])
    name_end = tool_format.name_end.rstrip() or tool_format.name_end or tool_format.parameter_begin
    head = (tool_format.section_begin + tool_format.call_begin + CALL.name + name_end).replace("{index}", "0")
    arguments = []
    for size in range(len(written) + 1):
        call = parse_truncated_call(tool_format, TOOLS, written[:size])
        assert (call is None) is (size < len(head)), written[:size]
        if call is not None:
            assert call.name == "get_weather"
            arguments.append(call.arguments)
    if tool_format.syntax in ("json", "named_json", "harmony"):
        complete = json.dumps(CALL.arguments)
        assert all(complete.startswith(text) for text in arguments) and arguments[-1] == complete
    else:
        assert all(json.loads(text).items() <= CALL.arguments.items() for text in arguments)
        before_days = arguments[written.index("days") - len(head)]
        assert json.loads(before_days) == {"city": "Paris"}


def test_ignores_calls_of_tools_that_are_not_offered():
    tool_format = TOOL_CALL_FORMATS[-1]
    assert parse_truncated_call(tool_format, TOOLS, '{"name": "gets", "parameters": {') is None
    assert parse_truncated_call(tool_format, [], '{"name": "get"') is None
    call = parse_truncated_call(tool_format, TOOLS, '{"city"', "get")
    assert call is not None and call == ("get", '{"city"')
