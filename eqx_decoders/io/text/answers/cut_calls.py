"""Required tool calls that are cut off by the end of the answer.

As in OpenAI's API, such a call is returned with a complete name and incomplete arguments, and the finish reason
`"length"`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.answers.formats import ToolCallFormat, functions_of
from eqx_decoders.io.text.answers.scanners import PYTHON_QUOTES, BracketScanner
from eqx_decoders.io.text.tool_calls import parse_tool_calls


class CutCall(NamedTuple):
    """Tool call with incomplete arguments.

    **Arguments:**

    - `name`: name of the tool.
    - `arguments`: JSON text up to the end of the answer. For formats that do not write arguments as JSON, a JSON object
        with the complete arguments.
    """

    name: str
    arguments: str


def cut_call(row: ToolCallFormat, tools: Sequence[Mapping[str, Any]], text: str, tool: str = "") -> CutCall | None:
    """Return the incomplete call in a text, or None if the name of its tool is incomplete.

    The text must be written as a constrained answer writes it, exactly like the format's row.

    **Arguments:**

    - `row`: format of the call. Special tokens are written in the same way as in `text`.
    - `tools`: tools that the answer may call.
    - `text`: text from the start of the call.
    - `tool`: name of the tool, if `text` contains only the arguments.
    """
    if tool:
        return CutCall(tool, _json_prefix(text.lstrip()))
    names = sorted((str(function["name"]) for function in functions_of(tools)), key=len, reverse=True)
    begin = re.escape(row.call_begin.lstrip()).replace(re.escape("{index}"), "[0-9]+")
    end = re.escape(row.name_end.rstrip() or row.name_end).replace(re.escape("{index}"), "[0-9]+")
    if not end:  # the arguments or the end of the call follow the name directly
        end = f"(?={re.escape(row.parameter_begin)}|{re.escape(row.call_end)})"
    found = re.search(f"{begin}({'|'.join(map(re.escape, names))}){end}", text) if names else None
    if found is None:
        return None
    name, rest = found[1], text[found.end() :].lstrip()
    if row.syntax in ("json", "named_json", "harmony"):
        return CutCall(name, _json_prefix(rest))
    if row.syntax == "xml":
        tag = "[^<>]*".join(map(re.escape, row.parameter_end.strip().split("{key}")))
        complete = max((match.end() for match in re.finditer(tag, rest)), default=-1)
    else:
        complete = _complete_arguments_end(row, rest)
    if complete < 0:
        return CutCall(name, "{}")
    closed = rest[:complete]
    complete_call = row.section_begin + row.call_begin + name + row.name_end + closed + row.call_end + row.section_end
    calls = parse_tool_calls(complete_call, row.name, tools).calls
    return CutCall(name, json.dumps(calls[0].arguments, ensure_ascii=False) if calls else "{}")


def _json_prefix(text: str) -> str:
    """Return the JSON value at the start of a text, or the entire text if the value is incomplete."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]


def _complete_arguments_end(row: ToolCallFormat, text: str) -> int:
    """Return the position after the last complete argument of a call in Python's or Gemma's syntax; -1 if all arguments
    are incomplete.
    """
    is_python = row.syntax == "python"
    brackets = BracketScanner(0, PYTHON_QUOTES if is_python else (row.quote,), escapes=is_python)
    source = ("(" if is_python else "{") + text
    try:
        end = brackets.scan(source)
    except ValueError:
        return -1
    if end is not None:
        return end - 2
    starts = brackets.argument_starts(source, 0)
    return starts[-1] - 2 if len(starts) > 1 else -1
