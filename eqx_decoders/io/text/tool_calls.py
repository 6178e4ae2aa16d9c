"""Tool calls in the text of a complete answer. The package `answers` has the formats and the incremental parser."""

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
    """Content and tool calls of an answer.

    **Arguments:**

    - `content`: the reasoning and the content without tool calls; the entire text if there are no tool calls.
    - `calls`: complete tool calls, in the order of the text.
    - `malformed`: for each call that cannot be parsed, the reason.
    - `partial`: text of a call that is cut off by the end of the answer.
    """

    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()
    partial: str = ""


def parse_tool_calls(text: str, form: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
    """Parse the tool calls of a complete answer. Tool calls in the reasoning are part of the reasoning.

    **Arguments:**

    - `text`: the answer, in which special tokens are written as their names.
    - `form`: name of a row of `TOOL_CALL_FORMATS`.
    - `tools`: descriptions of the offered tools. Arguments that a model writes as text are converted to the types in
        the tool's JSON Schema. A call without a marker must call one of these tools; empty: any tool may be called.
    """
    parser = text_parser(form, tools)
    spacing = ContentSpacing()
    content: list[str] = []
    calls: list[FunctionCall] = []
    malformed: list[str] = []
    partial = ""
    for event in (*parser.push(text), *parser.flush()):
        if isinstance(event, ContentWasReasoning):
            content, calls, malformed = [], [], []
            spacing = ContentSpacing()
        elif isinstance(event, Content):
            content.append(spacing.push(event.text))
        elif isinstance(event, Call):
            calls.append(event.call)
            spacing.call()
        elif isinstance(event, Malformed):
            if event.reason:
                malformed.append(event.reason)
            spacing.call()
        elif isinstance(event, Partial):
            partial = event.text
            spacing.call()
    if not calls and not malformed and not partial and form != "harmony":
        return ParsedAnswer(text)
    reasoning = text[: parser.reasoning_end]
    return ParsedAnswer((reasoning + "".join(content)).rstrip(), tuple(calls), tuple(malformed), partial)
