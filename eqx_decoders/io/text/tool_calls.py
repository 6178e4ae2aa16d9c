"""Parsing of the tool calls in a complete model output.

The formats and the incremental parser are in the package `output_parsing`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.output_parsing.formats import FunctionCall, ToolFormatName
from eqx_decoders.io.text.output_parsing.parser import (
    Call,
    Content,
    ContentWasReasoning,
    IncompleteCall,
    MalformedCall,
    WhitespaceFilter,
    create_text_parser,
)


class ParsedOutput(NamedTuple):
    """Content and tool calls of a model output.

    **Arguments:**

    - `content`: the reasoning and the content without tool calls; the entire text if there are no tool calls.
    - `calls`: complete tool calls, in the order of the text.
    - `malformed`: for each malformed call, the reason why the call cannot be parsed.
    - `incomplete`: text of a call that is truncated by the end of the output.
    """

    content: str
    calls: tuple[FunctionCall, ...] = ()
    malformed: tuple[str, ...] = ()
    incomplete: str = ""


def parse_tool_calls(text: str, format_name: ToolFormatName, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedOutput:
    """Parse the tool calls of a complete model output. Tool calls in the reasoning are part of the reasoning.

    **Arguments:**

    - `text`: the model output, in which special tokens are written as their names.
    - `format_name`: name of a format in `TOOL_CALL_FORMATS`.
    - `tools`: descriptions of the offered tools. Arguments that a model writes as text are converted to the types in
        the tool's JSON Schema. A call without a marker must call one of these tools; empty: any tool may be called.
    """
    parser = create_text_parser(format_name, tools)
    whitespace = WhitespaceFilter()
    content: list[str] = []
    calls: list[FunctionCall] = []
    malformed: list[str] = []
    incomplete = ""
    for event in (*parser.push(text), *parser.flush()):
        if isinstance(event, ContentWasReasoning):
            content, calls, malformed = [], [], []
            whitespace = WhitespaceFilter()
        elif isinstance(event, Content):
            content.append(whitespace.push(event.text))
        elif isinstance(event, Call):
            calls.append(event.call)
            whitespace.push_call()
        elif isinstance(event, MalformedCall):
            if event.reason:
                malformed.append(event.reason)
            whitespace.push_call()
        elif isinstance(event, IncompleteCall):
            incomplete = event.text
            whitespace.push_call()
    if not calls and not malformed and not incomplete and format_name != "harmony":
        return ParsedOutput(text)
    reasoning = text[: parser.reasoning_end]
    return ParsedOutput((reasoning + "".join(content)).rstrip(), tuple(calls), tuple(malformed), incomplete)
