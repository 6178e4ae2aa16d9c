"""Incremental reader of chat completions: token ids to reasoning, content and tool calls.

`io.text.output_parsing` splits a completion into its parts. Special tokens are recognized by their ids. Special tokens
of the format of the model separate the parts. The names of all other special tokens are removed, or are text if the
request keeps special tokens. Stop strings and stop tokens of the request can only end the content. They do not cut the
reasoning.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from eqx_decoders.io.text.output_parsing.formats import TOOL_CALL_FORMATS_BY_NAME, FunctionCall, ToolFormatName
from eqx_decoders.io.text.output_parsing.parser import (
    Call,
    Content,
    ContentWasReasoning,
    Event,
    IncompleteCall,
    OutputFormat,
    OutputParser,
    Reasoning,
    WhitespaceFilter,
)
from eqx_decoders.io.text.output_parsing.truncated_calls import TruncatedCall, parse_truncated_call
from eqx_decoders.io.text.tokenizer import JsonTokenizer, decode
from eqx_decoders.serving.frontend.detokenizer import Detokenizer, StopStrings


class CompletionParts(NamedTuple):
    """Text and tool calls to append to the parts of a completion.

    **Arguments:**

    - `content`, `reasoning`: text that further tokens cannot change.
    - `calls`: complete tool calls. If a call is required, also a call that is cut off by the end of the completion.
    - `was_reasoning`: all earlier content and calls belong to the reasoning, because the completion has a marker that
        ends the reasoning but no marker that starts it.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[FunctionCall | TruncatedCall, ...] = ()
    was_reasoning: bool = False


class CompletionReader:
    """Incremental reader of the tokens of one completion.

    The parts of a completion do not depend on how its tokens are divided into pieces.

    **Arguments:**

    - `output_format`: format of the completion.
    - `parser`: parser of this completion.
    - `special`: keep the names of special tokens that do not belong to the format.
    - `has_calls`: whether the completion may contain tool calls.
    - `read_truncated_call`: function that parses an incomplete tool call. If this function is set and the completion
        is truncated before its first tool call is complete, the incomplete call is returned.
    """

    def __init__(
        self,
        tokenizer: JsonTokenizer,
        output_format: OutputFormat,
        parser: OutputParser,
        *,
        special: bool = False,
        has_calls: bool = True,
        read_truncated_call: Callable[[str, str], TruncatedCall | None] | None = None,
    ):
        self._format, self._parser, self._special = output_format, parser, special
        self._read_truncated_call = read_truncated_call
        self._special_names: Mapping[int, str] = tokenizer.special_ids
        self._detokenizer = Detokenizer(tokenizer)
        self.stops = StopStrings(())
        """Search for the stop strings of the content. Replace it before the first token to use stop strings."""
        self._whitespace_filter = WhitespaceFilter() if has_calls else None

    @property
    def may_reason(self) -> bool:
        """Whether the model may reason before its content."""
        return self._format.is_harmony or self._format.reasoning is not None

    @property
    def in_reasoning(self) -> bool:
        """Whether the completion is in its reasoning."""
        return self._parser.in_reasoning

    @property
    def is_undecided(self) -> bool:
        """Whether the tokens so far may be the start of the reasoning."""
        return self._parser.is_undecided

    def separates_parts(self, token: int) -> bool:
        """Return whether the last token belongs to no part: it is a marker, or a blank between parts."""
        return self._special_names.get(token) in self._format.placeholders or self._parser.skips_whitespace

    def may_stop(self, token: int) -> bool:
        """Return whether a stop token ends the completion. It does not within the reasoning or its start marker."""
        name = self._special_names.get(token)
        if name is not None and name not in self._format.placeholders:
            return not self.in_reasoning
        text = self._detokenizer.copy().push(token) if name is None else self._format.placeholders[name]
        return not self._parser.may_reason(text)

    def push(self, token: int, *, search: bool = True) -> CompletionParts:
        """Add a token and return the parts that further tokens cannot change.

        `search`: search the content for stop strings.
        """
        name = self._special_names.get(token)
        if name is None:
            return self._parts(self._parser.push(self._detokenizer.push(token)), search=search)
        text = self._detokenizer.flush()
        self._detokenizer.push(token)  # the text of the next token may depend on this token
        if name in self._format.placeholders:
            text += self._format.placeholders[name]
        elif self._special:
            text += name
        return self._parts(self._parser.push(text), search=search)

    def flush(self, *, search: bool = True) -> CompletionParts:
        """Finish the completion and return the remaining parts. After a stop string, only whitespace can remain."""
        if self.stops.found is not None:
            return CompletionParts(self._spaced("", final=True))
        parts = self._parts([*self._parser.push(self._detokenizer.flush()), *self._parser.flush()], search=search)
        rest = "" if self.stops.found is not None else self.stops.flush()
        return parts._replace(content=parts.content + self._spaced(rest, final=True))

    def _parts(self, events: Sequence[Event], *, search: bool) -> CompletionParts:
        content = reasoning = ""
        calls, was_reasoning = list[FunctionCall | TruncatedCall](), False
        for event in events:
            if self.stops.found is not None:
                break
            if isinstance(event, Reasoning):
                reasoning += self._visible(event.text)
            elif isinstance(event, ContentWasReasoning):
                reasoning, content = reasoning + content + self.stops.flush(), ""
                calls, was_reasoning = [], True
                self._whitespace_filter = None if self._whitespace_filter is None else WhitespaceFilter()
            elif isinstance(event, IncompleteCall) and (call := self._truncated_call(event)) is not None:
                calls.append(call)
            elif isinstance(event, Call):
                self._read_truncated_call = None  # after a complete call, incomplete calls are not returned
                content += self._spaced(self.stops.flush())
                calls.append(event.call)
                if self._whitespace_filter is not None:
                    self._whitespace_filter.push_call()
            elif isinstance(event, Content) and search:
                content += self._spaced(self.stops.push(self._visible(event.text)))
            else:  # content without a search for stop strings, and the text of malformed or incomplete calls
                content += self._spaced(self.stops.flush() + self._visible(event.text))
        return CompletionParts(content, reasoning, tuple(calls), was_reasoning)

    def _truncated_call(self, event: IncompleteCall) -> TruncatedCall | None:
        if self._read_truncated_call is None:
            return None
        return self._read_truncated_call(self._format.restore(event.text), event.tool)

    def _visible(self, text: str) -> str:
        """Replace the placeholders of special tokens with their names, or remove them."""
        return self._format.restore(text) if self._special else self._format.remove_placeholders(text)

    def _spaced(self, text: str, *, final: bool = False) -> str:
        """Return content without the whitespace around tool calls. `final`: the content is complete."""
        if self._whitespace_filter is None:
            return text
        return self._whitespace_filter.push(text) + (self._whitespace_filter.flush() if final else "")


@functools.lru_cache(8)
def find_output_format(source: str, special_names: tuple[str, ...], calls: ToolFormatName | None) -> OutputFormat:
    """Return the format of completions to prompts of a chat template. See `OutputFormat.from_template`."""
    return OutputFormat.from_template(source, special_names, calls)


def prompt_text(tokenizer: JsonTokenizer, output_format: OutputFormat, ids: Sequence[int]) -> str:
    """Decode the last ids of a prompt. Special tokens of the completion's format become placeholders."""
    pieces, plain = list[str](), list[int]()
    for token in ids:
        name = tokenizer.special_ids.get(token)
        if name is None:
            plain.append(token)
            continue
        pieces += decode(tokenizer, plain), output_format.placeholders.get(name, "")
        plain = []
    return "".join([*pieces, decode(tokenizer, plain)])


def create_reader(
    tokenizer: JsonTokenizer,
    source: str,
    calls: ToolFormatName | None,
    tools: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    *,
    special: bool,
    must_call: bool = False,
) -> CompletionReader | None:
    """Create the reader of a completion. Returns None if a completion has neither reasoning nor tool calls.

    **Arguments:**

    - `source`: the chat template.
    - `calls`: format of tool calls; None: tool calls are content.
    - `tools`: tools that the completion may call; empty: tool calls are content.
    - `prompt`: last ids of the prompt, which may contain the start or the end of the reasoning.
    - `special`: keep the names of special tokens that do not belong to the format.
    - `must_call`: the completion must be a tool call.
    """
    output_format = find_output_format(source, tokenizer.special_names, calls)
    has_calls = bool(tools) and calls is not None
    if not output_format.is_harmony and output_format.reasoning is None and not has_calls:
        return None
    parser = output_format.parser(
        tools, prompt=prompt_text(tokenizer, output_format, prompt), parse_calls=has_calls, must_call=must_call
    )
    read_truncated_call = None
    if must_call and calls is not None:
        read_truncated_call = functools.partial(parse_truncated_call, TOOL_CALL_FORMATS_BY_NAME[calls], tools)
    return CompletionReader(
        tokenizer, output_format, parser, special=special, has_calls=has_calls, read_truncated_call=read_truncated_call
    )
