"""Calls that the end of an answer cuts off, where the answer had to be a call: as OpenAI's API returns them.

The name is complete. The arguments are the text so far, which is no complete JSON: `finish_reason` is `"length"`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.answers.formats import ToolCallFormat, functions_of
from eqx_decoders.io.text.answers.scanners import BracketScanner
from eqx_decoders.io.text.tool_calls import parse_tool_calls


class CutCall(NamedTuple):
    """Call whose arguments are cut off.

    - `name`: name of the tool.
    - `arguments`: text of JSON up to its end; for formats that do not write arguments as JSON, an object with the
        arguments that are complete.
    """

    name: str
    arguments: str


def cut_call(row: ToolCallFormat, tools: Sequence[Mapping[str, Any]], text: str, tool: str = "") -> CutCall | None:
    """Return the call that a text starts, as a constrained answer writes it; None before its name is complete.

    **Arguments:**

    - `row`: format of the call, with the markers that the text has.
    - `tools`: tools that the answer may call.
    - `text`: text from the start of the call.
    - `tool`: name of the tool, if `text` has the arguments only.
    """
    if tool:
        return CutCall(tool, _json_prefix(text.lstrip()))
    names = sorted((str(function["name"]) for function in functions_of(tools)), key=len, reverse=True)
    begin = re.escape(row.call_begin.lstrip()).replace(re.escape("{index}"), "[0-9]+")
    end = re.escape(row.name_end.rstrip() or row.name_end).replace(re.escape("{index}"), "[0-9]+")
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
        complete = _last_comma(row, rest)
    if complete < 0:
        return CutCall(name, "{}")
    closed = rest[:complete]
    whole = row.section_begin + row.call_begin + name + row.name_end + closed + row.call_end + row.section_end
    calls = parse_tool_calls(whole, row.name, tools).calls
    return CutCall(name, json.dumps(calls[0].arguments, ensure_ascii=False) if calls else "{}")


def _json_prefix(text: str) -> str:
    """Return the JSON object at the start of a text, or the complete text if the object does not end."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return text
    return text[:end]


def _last_comma(row: ToolCallFormat, text: str) -> int:
    """Return the position of the comma after the last complete argument of a call in the syntax of Python or Gemma; -1
    if there is none.
    """
    is_python = row.syntax == "python"
    brackets = BracketScanner(0, ("'", '"', "'''", '"""') if is_python else (row.quote,), escapes=is_python)
    source = ("(" if is_python else "{") + text
    try:
        end = brackets.scan(source)
    except ValueError:
        return -1
    if end is not None:
        return end - 2
    starts = brackets.argument_starts(source, 0)
    return starts[-1] - 2 if len(starts) > 1 else -1
