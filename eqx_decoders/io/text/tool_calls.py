"""Calls of tools in the text of a complete answer. See `answers` for the formats and for answers in pieces."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.answers.formats import (
    TOOL_CALL_FORMATS,
    FunctionCall,
    ToolCallFormat,
    ToolFormat,
    find_tool_format,
    tool_format,
)
from eqx_decoders.io.text.answers.parser import (
    Call,
    Content,
    ContentSpacing,
    ContentWasReasoning,
    Malformed,
    Partial,
    text_parser,
)


__all__ = [
    "TOOL_CALL_FORMATS",
    "FunctionCall",
    "ParsedAnswer",
    "ToolCallFormat",
    "ToolFormat",
    "find_tool_format",
    "parse_tool_calls",
    "tool_format",
]


class ParsedAnswer(NamedTuple):
    """Text of an answer, and its calls.

    **Arguments:**

    - `content`: the reasoning and the text around the calls; the complete text if there are no calls.
    - `calls`: calls in their order.
    - `malformed`: for each call that cannot be read, the reason.
    - `partial`: text of a call that the end of the answer cuts off.
    """

    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()
    partial: str = ""


def parse_tool_calls(text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
    """Find the calls of tools in a complete answer. Calls in the reasoning are text.

    **Arguments:**

    - `text`: the answer, with the names of special tokens.
    - `form`: name of a row of `TOOL_CALL_FORMATS`.
    - `tools`: descriptions of the offered tools. Arguments of formats without types are converted to the types in
        their schemas. Calls without a marker must be of one of these tools; empty: any tool.
    """
    parser, spacing = text_parser(form, tools), ContentSpacing()
    content, calls, malformed, partial = list[str](), list[FunctionCall](), list[str](), ""
    for event in (*parser.push(text), *parser.flush()):
        if isinstance(event, ContentWasReasoning):
            content, calls, malformed, spacing = [], [], [], ContentSpacing()
        elif isinstance(event, Content):
            content.append(spacing.push(event.text))
        elif isinstance(event, Call):
            calls.append(event.call)
            spacing.call()
        elif isinstance(event, Malformed):
            malformed += [event.reason] if event.reason else []
            spacing.call()
        elif isinstance(event, Partial):
            partial = event.text
            spacing.call()
    if not calls and not malformed and not partial and form != "harmony":
        return ParsedAnswer(text)
    reasoning = text[: parser.reasoning_end]
    return ParsedAnswer((reasoning + "".join(content)).rstrip(), tuple(calls), tuple(malformed), partial)
