"""Parsing of required tool calls that are truncated by the end of the output.

As in OpenAI's API, a truncated call is returned with a complete name, incomplete arguments and the finish reason
`"length"`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.output_parsing.formats import ToolCallFormat, iter_functions
from eqx_decoders.io.text.output_parsing.scanners import PYTHON_QUOTES, BracketScanner
from eqx_decoders.io.text.tool_calls import parse_tool_calls


class TruncatedCall(NamedTuple):
    """Tool call with a complete name and incomplete arguments.

    **Arguments:**

    - `name`: name of the tool.
    - `arguments`: JSON text of the arguments up to the end of the output. For formats that do not write arguments as
        JSON, a JSON object with the arguments that are complete.
    """

    name: str
    arguments: str


def parse_truncated_call(
    tool_format: ToolCallFormat, tools: Sequence[Mapping[str, Any]], text: str, tool: str = ""
) -> TruncatedCall | None:
    """Return the truncated call in a text, or None if the name of its tool is incomplete.

    The text must follow the format exactly, as the output of constrained decoding does.

    **Arguments:**

    - `tool_format`: format of the call. Special tokens are written in the same way as in `text`.
    - `tools`: descriptions of the offered tools.
    - `text`: text from the start of the call.
    - `tool`: name of the tool, if `text` contains only the arguments; empty otherwise.
    """
    if tool:
        return TruncatedCall(tool, _json_prefix(text.lstrip()))
    header = _header_pattern(tool_format, [str(function["name"]) for function in iter_functions(tools)])
    match = None if header is None else header.search(text)
    if match is None:
        return None
    name, arguments = match[1], text[match.end() :].lstrip()
    if tool_format.syntax in ("json", "named_json", "harmony"):
        return TruncatedCall(name, _json_prefix(arguments))
    if tool_format.syntax == "xml":
        closing_tag = "[^<>]*".join(map(re.escape, tool_format.parameter_end.strip().split("{key}")))
        end = max((match.end() for match in re.finditer(closing_tag, arguments)), default=-1)
    else:
        end = _complete_arguments_end(tool_format, arguments)
    if end < 0:
        return TruncatedCall(name, "{}")
    call_start = tool_format.section_begin + tool_format.call_begin + name + tool_format.name_end
    call_end = tool_format.call_end + tool_format.section_end
    calls = parse_tool_calls(call_start + arguments[:end] + call_end, tool_format.name, tools).calls
    return TruncatedCall(name, json.dumps(calls[0].arguments, ensure_ascii=False) if calls else "{}")


def _header_pattern(tool_format: ToolCallFormat, names: Sequence[str]) -> re.Pattern[str] | None:
    """Return the expression for the text of a call before its arguments. Its group is the name of the tool.

    `names`: names of the offered tools. Returns None if no tools are offered.
    """
    if not names:
        return None
    index = re.escape("{index}")
    begin = re.escape(tool_format.call_begin.lstrip()).replace(index, "[0-9]+")
    end = re.escape(tool_format.name_end.rstrip() or tool_format.name_end).replace(index, "[0-9]+")
    if not end:  # the arguments or the end of the call follow the name directly
        end = f"(?={re.escape(tool_format.parameter_begin)}|{re.escape(tool_format.call_end)})"
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"{begin}({'|'.join(map(re.escape, longest_first))}){end}")


def _json_prefix(text: str) -> str:
    """Return the JSON value at the start of a text, or the entire text if the value is incomplete."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]


def _complete_arguments_end(tool_format: ToolCallFormat, text: str) -> int:
    """Return the position after the last complete argument of a call in Python's or Gemma's syntax.

    Returns -1 if no argument is complete.
    """
    is_python = tool_format.syntax == "python"
    brackets = BracketScanner(0, PYTHON_QUOTES if is_python else (tool_format.quote,), escapes=is_python)
    opening_bracket = "(" if is_python else "{"
    source = opening_bracket + text
    try:
        end = brackets.scan(source)
    except ValueError:
        return -1
    if end is not None:  # positions in `text`, without both brackets
        return end - 2
    starts = brackets.argument_starts(source, 0)
    return starts[-1] - 2 if len(starts) > 1 else -1
