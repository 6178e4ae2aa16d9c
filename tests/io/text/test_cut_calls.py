"""Required tool calls that are cut off at any character."""

import json

import pytest

from eqx_decoders.io.text.answers.cut_calls import cut_call
from eqx_decoders.io.text.answers.formats import TOOL_CALL_FORMATS, FunctionCall


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}} for name in ("get", "get_weather")]  # fmt: skip
CALL = FunctionCall("get_weather", {"city": "Paris", "days": 2})


@pytest.mark.parametrize("row", TOOL_CALL_FORMATS, ids=lambda row: row.name)
def test_returns_a_cut_call_once_its_name_is_complete(row):
    written = row.write([CALL])
    name_end = row.name_end.rstrip() or row.name_end or row.parameter_begin
    head = (row.section_begin + row.call_begin + CALL.name + name_end).replace("{index}", "0")
    arguments = []
    for size in range(len(written) + 1):
        call = cut_call(row, TOOLS, written[:size])
        assert (call is None) is (size < len(head)), written[:size]
        if call is not None:
            assert call.name == "get_weather"
            arguments.append(call.arguments)
    if row.syntax in ("json", "named_json", "harmony"):
        complete = json.dumps(CALL.arguments)
        assert all(complete.startswith(text) for text in arguments) and arguments[-1] == complete
    else:
        assert all(json.loads(text).items() <= CALL.arguments.items() for text in arguments)
        before_days = arguments[written.index("days") - len(head)]
        assert json.loads(before_days) == {"city": "Paris"}


def test_ignores_calls_of_tools_that_are_not_offered():
    row = TOOL_CALL_FORMATS[-1]
    assert (
        cut_call(row, TOOLS, '{"name": "gets", "parameters": {') is None and cut_call(row, [], '{"name": "get"') is None
    )
    call = cut_call(row, TOOLS, '{"city"', "get")
    assert call is not None and call == ("get", '{"city"')
