"""Incremental parser of model outputs: splits the text into reasoning, content and tool calls.

Stop strings, constraints, log-probs and streaming apply to the separate parts of an output. The same parser reads
complete outputs and streamed outputs. The parts do not depend on how a streamed output is divided into chunks.

Special tokens are recognized by their ids, not by their names. In the text that a parser receives, each special token
that is a marker of the format is replaced by a placeholder: one character that decoded text never contains (see
`OutputFormat.placeholders`). If a model writes the name of a special token as ordinary text, the name stays ordinary
text. The parser searches the text for markers that are not special tokens of the tokenizer.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from eqx_decoders.io.text.output_parsing.formats import (
    TOOL_CALL_FORMATS_BY_NAME,
    FunctionCall,
    ReasoningFormat,
    ToolCallFormat,
    ToolFormatName,
    find_reasoning_format,
    find_tool_format,
    iter_functions,
)
from eqx_decoders.io.text.output_parsing.scanners import (
    CallScanner,
    FoundCalls,
    JsonValueScanner,
    ScanFailure,
    ScannerContext,
    create_call,
    create_scanner,
    find_first_marker,
    partial_match_length,
    restore_special_names,
    skip_whitespace,
)
from eqx_decoders.io.text.output_parsing.tool_arguments import parse_json_or_python


PROMPT_TAIL_TOKENS = 64  # number of last tokens of a prompt that are searched for reasoning markers
FIRST_PLACEHOLDER = 0xD800  # surrogates: text that is decoded from tokens never contains them
NO_REASONING = ReasoningFormat("", "", ())


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """Text of the content."""

    text: str


@dataclasses.dataclass(frozen=True)
class Call:
    """Complete tool call."""

    call: FunctionCall


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """Text of a tool call that cannot be parsed.

    **Arguments:**

    - `text`: the text, or the next part of the text.
    - `reason`: why the call cannot be parsed; empty in all events of the same call except the first.
    """

    text: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class IncompleteCall:
    """Text of a tool call that is truncated by the end of the output.

    **Arguments:**

    - `text`: text of the call; if `tool` is not empty, only the text of the arguments.
    - `tool`: name of the tool; empty if the name is part of `text`.
    """

    text: str
    tool: str = ""


@dataclasses.dataclass(frozen=True)
class ContentWasReasoning:
    """All content and calls before this event belong to the reasoning.

    The parser returns this event if the output has an end marker of the reasoning without a start marker.
    """


Event = Reasoning | Content | Call | MalformedCall | IncompleteCall | ContentWasReasoning


class OutputParser(abc.ABC):
    """Parser of one model output: a state machine with a buffer of text that is not assigned to a part yet.

    **Arguments:**

    - `output_format`: format of the output.
    - `state`: initial state.
    """

    reasoning_end: int
    """Position in the output at which the reasoning ended; 0 if there was no reasoning."""

    def __init__(self, output_format: "OutputFormat", state: str):
        self._format = output_format
        self._state = state
        self._buffer = ""
        self._num_taken = 0  # characters of the output that were removed from the buffer
        self.reasoning_end = 0

    @property
    @abc.abstractmethod
    def in_reasoning(self) -> bool:
        """Whether the parser is within the reasoning, where constraints and stop strings do not apply."""

    @property
    @abc.abstractmethod
    def is_undecided(self) -> bool:
        """Whether the text so far may be the start of the reasoning."""

    @property
    def skips_whitespace(self) -> bool:
        """Whether whitespace is skipped at this position, because the current part has no text yet."""
        return False

    @abc.abstractmethod
    def may_reason(self, text: str) -> bool:
        """Return whether the output is in its reasoning, or `text` may continue the start marker of the reasoning."""

    def push(self, text: str) -> list[Event]:
        """Append text to the output and return the events that further text cannot change."""
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[Event]:
        """Finish the output and return the remaining events."""
        return self._run(final=True)

    @abc.abstractmethod
    def _steps(self) -> Mapping[str, Callable[..., bool]]:
        """Return the step function of each state.

        A step function `(events, *, final)` reads text from the buffer and appends events to the list `events`. The
        function returns True if the next step can run, and False if more text is needed. `final`: the output is
        complete.
        """

    def _run(self, *, final: bool) -> list[Event]:
        events, steps = list[Event](), self._steps()
        while steps[self._state](events, final=final):
            pass
        return events

    def _take(self, size: int) -> str:
        """Remove text from the start of the buffer and return it."""
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._num_taken += len(text)
        return text

    def _take_until(self, markers: Sequence[str], *, final: bool) -> tuple[str, str]:
        """Remove the text before the first marker from the buffer. Returns the text and the marker.

        If the buffer contains no marker, the returned marker is empty. Text at the end of the buffer that may be the
        start of a marker stays in the buffer.
        """
        found = find_first_marker(self._buffer, markers)
        if found is not None:
            return self._take(found[0]), found[1]
        return self._take(len(self._buffer) - (0 if final else partial_match_length(self._buffer, markers))), ""

    def _add(
        self, events: list[Event], kind: type[Reasoning | Content | MalformedCall | IncompleteCall], text: str
    ) -> None:
        """Append an event if its text is not empty."""
        if text:
            events.append(kind(text))


class OutputFormat:
    """Format of a model's outputs: the markers of the reasoning and the format of tool calls.

    **Arguments:**

    - `format_name`: name of the tool-call format; None: tool calls are content.
    - `reasoning`: markers of the reasoning; None: the model does not reason.
    - `special_names`: names of the tokenizer's special tokens.
    """

    def __init__(
        self, format_name: ToolFormatName | None, reasoning: ReasoningFormat | None, special_names: Iterable[str] = ()
    ):
        tool_format = None if format_name is None else TOOL_CALL_FORMATS_BY_NAME[format_name]
        self.is_harmony = format_name == "harmony"
        markers = [*(tool_format.markers if tool_format is not None else ())]
        if reasoning is not None:
            markers += [reasoning.begin, reasoning.end, *(text for pair in reasoning.wrappers for text in pair)]
        names = sorted({name for name in special_names if name}, key=len, reverse=True)
        used = [name for name in names if any(name in marker for marker in markers)]
        self.placeholders: dict[str, str] = {name: chr(FIRST_PLACEHOLDER + index) for index, name in enumerate(used)}
        """Placeholder of each special token that is a marker, by the name of the token."""
        self.placeholder_names = {placeholder: name for name, placeholder in self.placeholders.items()}
        """Name of each special token that is a marker, by the placeholder of the token."""
        self.tool_format = None if tool_format is None else self._translate_tool_format(tool_format)
        self.reasoning = None if reasoning is None else self._translate_reasoning(reasoning)

    @classmethod
    def from_template(
        cls, source: str, special_names: Iterable[str], format_name: ToolFormatName | None
    ) -> "OutputFormat":
        """Return the format of outputs for prompts that a chat template renders.

        **Arguments:**

        - `source`: the chat template.
        - `special_names`: names of the tokenizer's special tokens.
        - `format_name`: name of the tool-call format; None: tool calls are content. Harmony templates always select the
            harmony format.
        """
        if find_tool_format(source) == "harmony":
            return cls("harmony", None, special_names)
        return cls(format_name, find_reasoning_format(source), special_names)

    def translate(self, text: str) -> str:
        """Replace the names of special tokens in a marker with their placeholders."""
        for name, placeholder in self.placeholders.items():
            text = text.replace(name, placeholder)
        return text

    def restore(self, text: str) -> str:
        """Replace placeholders with the names of their special tokens."""
        return restore_special_names(text, self.placeholder_names)

    def remove_placeholders(self, text: str) -> str:
        """Remove the placeholders of special tokens from a text."""
        return restore_special_names(text, dict.fromkeys(self.placeholder_names, ""))

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: str = "",
        parse_calls: bool = True,
        must_call: bool = False,
    ) -> OutputParser:
        """Create the parser of one output.

        **Arguments:**

        - `tools`: descriptions of the offered tools; empty: any tool may be called.
        - `prompt`: end of the prompt, with placeholders. The prompt may start or end the reasoning.
        - `parse_calls`: parse tool calls; False: tool calls are content.
        - `must_call`: the output must be a tool call, so an incomplete call without a marker is not content.
        """
        if self.is_harmony:
            return HarmonyParser(self, tools, prompt, parse_calls=parse_calls)
        return TaggedParser(self, tools, prompt, parse_calls=parse_calls, must_call=must_call)

    def _translate_tool_format(self, tool_format: ToolCallFormat) -> ToolCallFormat:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(tool_format):
            value = getattr(tool_format, field.name)
            if field.name in ("start_markers", "end_markers", "inner_markers"):
                values[field.name] = tuple(map(self.translate, value))
            elif isinstance(value, str) and field.name not in ("name", "syntax"):
                values[field.name] = self.translate(value)
        return dataclasses.replace(tool_format, **values)

    def _translate_reasoning(self, reasoning: ReasoningFormat) -> ReasoningFormat:
        wrappers = tuple((self.translate(start), self.translate(end)) for start, end in reasoning.wrappers)
        return ReasoningFormat(self.translate(reasoning.begin), self.translate(reasoning.end), (), wrappers)


class TaggedParser(OutputParser):
    """Parser of outputs with optional reasoning between markers, followed by content and tool calls.

    The states are `"start"` (before the reasoning or the content), `"reasoning"`, `"content"`, `"call"`, `"after_call"`
    and `"malformed"` (within a call that cannot be parsed).
    """

    def __init__(
        self,
        output_format: OutputFormat,
        tools: Sequence[Mapping[str, Any]],
        prompt: str,
        *,
        parse_calls: bool,
        must_call: bool,
    ):
        super().__init__(output_format, "content")
        self._must_call = must_call
        self._reasoning = output_format.reasoning or NO_REASONING
        tool_format = output_format.tool_format if parse_calls else None
        self._context = (
            None if tool_format is None else ScannerContext(tool_format, tools, output_format.placeholder_names)
        )
        self._is_xml = tool_format is not None and tool_format.syntax == "xml"
        self._call_starts = () if tool_format is None else tool_format.start_markers
        self._call_ends = () if tool_format is None else tool_format.end_markers
        self._special_token_ends = [
            marker
            for marker in self._call_ends
            if any(character in output_format.placeholder_names for character in marker)
        ]
        # Arguments may be a code block (DeepSeek V3). Its closing fence does not end a malformed call.
        is_fenced = tool_format is not None and "```" in tool_format.call_end
        self._after_call_markers = (*self._call_ends, "```") if is_fenced else self._call_ends
        # First character of a call without a start marker; empty if calls need a start marker.
        is_list = tool_format is not None and tool_format.section_begin.endswith("[")
        self._bare_start = "" if tool_format is None or not tool_format.marker_optional else "[" if is_list else "{"
        self._scanner: CallScanner | None = None
        self._num_returned = 0  # characters at the start of the buffer whose calls have been returned
        self._num_searched = 0  # characters at the start of the buffer without a special token that ends a call
        self._at_start = True  # no content and no call has been returned
        self._skips_whitespace = False  # skip whitespace at the start of the current part
        self._may_be_reasoning = False  # an end marker of the reasoning would turn the content so far into reasoning
        self._wrapper_end = ""  # end marker of the wrapper around the content
        if output_format.reasoning is not None:
            self._set_initial_state(prompt)

    def _set_initial_state(self, prompt: str) -> None:
        """Set the initial state for a model that reasons. The end of the prompt may contain reasoning markers."""
        start, end = self._reasoning.begin, self._reasoning.end
        prompt = prompt.rstrip()
        if prompt.endswith(start):
            self._state, self._skips_whitespace = "reasoning", True
            return
        last_end = prompt.rfind(end)
        has_ended = last_end > prompt.rfind(start) and not prompt[last_end + len(end) :].strip()
        self._state, self._may_be_reasoning = "start", not has_ended

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_undecided(self) -> bool:
        return self._state == "start"

    @property
    def skips_whitespace(self) -> bool:
        return self._skips_whitespace

    def may_reason(self, text: str) -> bool:
        if self._state != "start":
            return self._state == "reasoning"
        start, text = self._reasoning.begin, (self._buffer + text).lstrip()
        return text.startswith(start) or start.startswith(text)

    def _steps(self) -> Mapping[str, Callable[..., bool]]:
        return {
            "start": self._read_start,
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "call": self._read_calls,
            "after_call": self._read_after_call,
            "malformed": self._read_malformed,
        }

    def _read_start(self, events: list[Event], *, final: bool) -> bool:
        """Look for the marker that starts the reasoning."""
        start, position = self._reasoning.begin, skip_whitespace(self._buffer, 0)
        rest = self._buffer[position:]
        if rest.startswith(start):
            self._take(position + len(start))
            self._state, self._skips_whitespace = "reasoning", True
            return True
        if start.startswith(rest) and not final:
            return False
        self._state = "content"
        return True

    def _read_reasoning(self, events: list[Event], *, final: bool) -> bool:
        start, end = self._reasoning.begin, self._reasoning.end
        if self._skips_whitespace:
            position = skip_whitespace(self._buffer, 0)
            rest = self._buffer[position:]
            if rest.startswith(start):  # the model repeats the start marker of the prompt
                self._take(position + len(start))
                return True
            if start.startswith(rest) and not final:
                return False
            self._take(position)
            self._skips_whitespace = False
        markers = [end, *(marker for marker in self._call_starts if marker[:1] in self._format.placeholder_names)]
        found = find_first_marker(self._buffer, markers)
        if found is not None:
            position, marker = found
            self._add(events, Reasoning, self._take(position).rstrip())
            if marker == end:
                self._take(len(end))
                self._wrapper_end = dict(self._reasoning.wrappers).get(end, "")
            self.reasoning_end = self._num_taken
            self._state, self._skips_whitespace, self._may_be_reasoning = "content", True, False
            return True
        size = len(self._buffer) - (0 if final else partial_match_length(self._buffer, markers))
        text = self._buffer[:size].rstrip()
        self._add(events, Reasoning, self._take(len(text)))
        if final:
            self._take(len(self._buffer))
            self.reasoning_end = self._num_taken
        return False

    def _content_markers(self) -> list[str]:
        """Return the markers that may follow content in the current state."""
        markers = [*self._call_starts]
        if self._may_be_reasoning:
            markers += [self._reasoning.end, self._reasoning.begin]
        elif self._reasoning.begin[:1] in self._format.placeholder_names:
            markers.append(self._reasoning.begin)  # a special token: the model reasons again
        for start, end in self._reasoning.wrappers:
            markers += [start] if self._at_start or start in self._format.placeholder_names else []
            markers += [end] if self._wrapper_end == end or end in self._format.placeholder_names else []
        return markers

    def _read_content(self, events: list[Event], *, final: bool) -> bool:
        if self._skips_whitespace:
            position = skip_whitespace(self._buffer, 0)
            if position == len(self._buffer) and not final:
                return False
            self._take(position)
            self._skips_whitespace = False
        if self._at_start and self._bare_start:
            position = skip_whitespace(self._buffer, 0)
            rest = self._buffer[position:]
            if not rest and not final:
                return False
            if rest.startswith(self._bare_start) and not rest.startswith(self._call_starts):
                if not final and any(marker.startswith(rest) for marker in self._call_starts):
                    return False
                self._scanner = self._create_scanner(position, "", final=final)
                self._state, self._at_start = "call", False
                return True
        text, marker = self._take_until(self._content_markers(), final=final)
        self._add_content(events, text)
        if not marker:
            return False
        if marker in self._call_starts:
            self._state = "call"
        elif marker == self._reasoning.end:
            self._take(len(marker))
            events.append(ContentWasReasoning())
            self.reasoning_end = self._num_taken
            self._wrapper_end = dict(self._reasoning.wrappers).get(marker, "")
            self._may_be_reasoning, self._at_start, self._skips_whitespace = False, True, True
        elif marker == self._reasoning.begin:
            self._may_be_reasoning = False
            if marker[:1] in self._format.placeholder_names:
                self._take(len(marker))
                self._state, self._skips_whitespace = "reasoning", True
            else:  # the content mentions the markers
                self._add_content(events, self._take(len(marker)))
        else:
            self._take(len(marker))
            ends = dict(self._reasoning.wrappers)
            self._wrapper_end = ends.get(marker, "")
            self._skips_whitespace = marker in ends
        return True

    def _add_content(self, events: list[Event], text: str) -> None:
        self._add(events, Content, text)
        self._at_start = self._at_start and not text.strip()

    def _create_scanner(self, position: int, marker: str, *, final: bool) -> CallScanner | None:
        """Return the scanner of calls at a position of the buffer; None if more text is needed to select it."""
        self._num_searched = 0
        return (
            None
            if self._context is None
            else create_scanner(self._context, self._buffer, position, marker, final=final)
        )

    def _read_calls(self, events: list[Event], *, final: bool) -> bool:
        if self._scanner is None:
            marker = max((marker for marker in self._call_starts if self._buffer.startswith(marker)), key=len)
            self._scanner = self._create_scanner(0, marker, final=final)
            if self._scanner is None:
                if final:
                    self._add(events, IncompleteCall, self._take(len(self._buffer)))
                return False
        result = self._scanner.scan(self._buffer, final=final)
        if result is None or isinstance(result, FoundCalls):
            result = self._unexpected_call_end(result, final=final) or result
        if result is None:
            if final:
                has_marker = self._buffer.startswith(self._call_starts)
                is_content = not self._num_returned and not has_marker and not self._must_call
                self._take(self._num_returned)
                self._add(events, Content if is_content else IncompleteCall, self._take(len(self._buffer)))
                self._state, self._scanner, self._num_returned = "content", None, 0
            return False
        if isinstance(result, ScanFailure):
            self._fail(events, result)
            return True
        for part in result.calls:
            text = self._buffer[self._num_returned : result.end]
            events.append(
                MalformedCall(text, self._restore_escaped_placeholders(part)) if isinstance(part, str) else Call(part)
            )
        self._at_start = False
        self._num_returned = result.end
        if result.is_finished:
            self._take(result.end)
            self._state, self._scanner = "after_call", None
        return True

    def _unexpected_call_end(self, result: FoundCalls | None, *, final: bool) -> ScanFailure | None:
        """Return a failure if the call ended at a marker within an unterminated argument.

        An argument cannot contain an end marker that is a special token. It can contain any other end marker, unless
        the output is complete and another call follows this marker.
        """
        if self._is_xml:  # `XmlCallScanner` searches for special tokens itself
            return None
        overlap = max(map(len, self._call_ends), default=0)
        start = max(self._num_returned, self._num_searched - overlap)
        found = [at for marker in self._special_token_ends if (at := self._buffer.find(marker, start)) >= 0]
        if result is not None:
            found = [position for position in found if position < result.end]
        else:
            self._num_searched = len(self._buffer)
        if result is None and not found and final:
            ends = [
                at + len(marker)
                for marker in self._call_ends
                if (at := self._buffer.find(marker, self._num_returned)) >= 0
            ]
            if ends and any(self._buffer.find(marker, min(ends)) >= 0 for marker in self._call_starts):
                found = ends
        return ScanFailure(min(found), "the call ends within its arguments") if found else None

    def _restore_escaped_placeholders(self, reason: str) -> str:
        """Replace placeholders, which `repr` has escaped, with the names of their special tokens."""
        for placeholder, name in self._format.placeholder_names.items():
            reason = reason.replace(repr(placeholder)[1:-1], name)
        return reason

    def _fail(self, events: list[Event], result: ScanFailure) -> None:
        """Leave the state `"call"`: the text is content if it has no marker, and a malformed call otherwise."""
        has_marker, num_returned = self._buffer.startswith(self._call_starts), self._num_returned
        self._take(num_returned)
        self._scanner, self._num_returned = None, 0
        if not has_marker:
            self._state = "content"
            return
        self._state = "malformed"
        size = 0  # after other calls, a marker at the start of the buffer may start another call
        if num_returned == 0:
            size = max(len(marker) for marker in self._call_starts if self._buffer.startswith(marker))
            if self._is_xml:  # XML calls may have several markers
                size = max(size, result.position)
        events.append(MalformedCall(self._take(size), self._restore_escaped_placeholders(result.reason)))

    def _read_malformed(self, events: list[Event], *, final: bool) -> bool:
        """Skip to the end of a malformed call, or to the next call."""
        text, marker = self._take_until((*self._call_starts, *self._call_ends), final=final)
        is_end = marker in self._call_ends
        self._add(events, MalformedCall, text + (self._take(len(marker)) if is_end else ""))
        if not marker:
            return False
        self._state = "after_call" if is_end else "call"
        return True

    def _read_after_call(self, events: list[Event], *, final: bool) -> bool:
        """Skip whitespace and markers after a call."""
        self._num_returned = 0
        position = _skip_closing_brackets(self._buffer)
        rest = self._buffer[position:]
        if not final and self._call_ends and (not rest or any(marker.startswith(rest) for marker in self._call_ends)):
            return False
        if rest.startswith(self._call_ends):
            self._take(position)
        position = skip_whitespace(self._buffer, 0)
        rest = self._buffer[position:]
        end = next((marker for marker in self._after_call_markers if rest.startswith(marker)), None)
        if end is not None:
            self._take(position + len(end))
            return True
        if not final and (not rest or any(marker.startswith(rest) for marker in self._after_call_markers)):
            return False
        self._take(position)
        self._state = "content"
        return True


def _skip_closing_brackets(text: str) -> int:
    """Return the position after whitespace, surplus closing brackets and the end of a code block."""
    return len(text) - len(text.lstrip("}]` \t\r\n"))


class HarmonyParser(OutputParser):
    """Parser of the messages of gpt-oss (harmony format): each message has a channel and may be a tool call.

    Common mistakes of the models are accepted: a missing start or end of a message, a recipient before or after the
    channel and without `functions.`, a missing or repeated `<|message|>` before arguments, and arguments without an end
    marker.

    The states are `"header"`, `"body"`, `"call"` and `"after_call"`.
    """

    def __init__(
        self, output_format: OutputFormat, tools: Sequence[Mapping[str, Any]], prompt: str, *, parse_calls: bool
    ):
        super().__init__(output_format, "header")
        self._parse_calls = parse_calls
        self._start, self._channel, self._message, constrain, *self._ends = (
            output_format.translate(f"<|{name}|>")
            for name in ("start", "channel", "message", "constrain", "end", "call", "return")
        )
        self._header_markers = (self._start, self._channel, self._message, constrain)
        self._tool_names = {function["name"] for function in iter_functions(tools)}
        self._channel_name = re.compile(re.escape(self._channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"\bto=([\w.-]+)")
        self._may_lack_header = True
        self._header_start = ""  # part of the header that is in the prompt
        self._kind: type[Reasoning | Content | MalformedCall] = Content  # of the text of the current message
        self._tool = ""  # tool that the current message calls
        self._value: JsonValueScanner | None = None
        last_start = prompt.rfind(self._start)
        if last_start >= 0:
            self._header_start, message, _ = prompt[last_start + len(self._start) :].partition(self._message)
            if message:
                self._open_message(self._header_start)

    @property
    def in_reasoning(self) -> bool:
        return self._state == "body" and self._kind is Reasoning

    @property
    def is_undecided(self) -> bool:
        return self._state == "header"

    def may_reason(self, text: str) -> bool:
        return self.is_undecided or self.in_reasoning

    def _steps(self) -> Mapping[str, Callable[..., bool]]:
        return {
            "header": self._read_header,
            "body": self._read_body,
            "call": self._read_call,
            "after_call": self._read_after_call,
        }

    def _open_message(self, header: str) -> None:
        """Start a message with this header."""
        channel, recipient = self._channel_name.search(header), self._recipient.search(header)
        channel_name = "final" if channel is None else channel[1].lower()
        tool = "" if recipient is None else recipient[1]
        is_function = tool.startswith("functions.") or tool in self._tool_names
        is_builtin = bool(tool) and not is_function and tool not in ("user", "assistant")
        while tool.startswith("functions."):
            tool = tool.removeprefix("functions.")
        self._tool = tool.rstrip(".") if is_function else ""
        is_reasoning = channel_name.startswith("analysis") or is_builtin
        self._kind = Reasoning if is_reasoning and not self._tool else Content
        self._state = "call" if self._tool and self._parse_calls else "body"
        self._may_lack_header, self._header_start, self._value = False, "", None

    def _read_header(self, events: list[Event], *, final: bool) -> bool:
        if self._may_lack_header and self._lacks_header(final=final):
            self._state, self._kind, self._may_lack_header = "body", Content, False
            return True
        header, message, _ = self._buffer.partition(self._message)
        end = find_first_marker(header, self._ends)
        header = header if end is None else header[: end[0]]
        brace = header.find("{")
        if brace >= 0 and self._recipient.search(self._header_start + header):  # <|message|> is missing
            self._take(brace)
            self._open_message(self._header_start + header[:brace])
            return True
        if end is not None:  # a message without text
            self._take(len(header) + len(end[1]))
            self._header_start = ""
            return True
        if message:
            self._take(len(header) + len(message))
            self._open_message(self._header_start + header)
            return True
        if final:
            text = self._take(len(self._buffer))
            self._add(events, Content, "" if self._is_truncated_header(text) else text)
        return False

    def _lacks_header(self, *, final: bool) -> bool:
        """Return whether the output starts with content instead of a header."""
        if self._channel in self._header_start or "to=" in self._header_start:  # the prompt ends within a header
            return False
        text = self._buffer.lstrip()
        starts = [*self._header_markers, "to="]
        if text.startswith("assistant"):  # the role, if a header follows
            text = text.removeprefix("assistant")
            text = text.lstrip() if text[:1].isspace() or text[:1] in self._format.placeholder_names else text
        else:
            starts.append("assistant")
        may_be_header = any(text.startswith(start) or (start.startswith(text) and not final) for start in starts)
        return bool(text) and not may_be_header

    def _is_truncated_header(self, text: str) -> bool:
        """Return whether the text at the end of the output is an incomplete header."""
        words = text.split()
        if not words or words[0].startswith("<|") or any(marker in text for marker in self._header_markers):
            return True
        has_recipient = len(words) > 1 and words[1].startswith("to=")
        return words[0] == "assistant" and (has_recipient or not self._may_lack_header)

    def _read_body(self, events: list[Event], *, final: bool) -> bool:
        text, marker = self._take_until([*self._ends, self._start, self._channel], final=final)
        self._add(events, self._kind, text)
        if not marker:
            return False
        self._take(len(marker) if marker in self._ends else 0)
        self._state = "header"
        return True

    def _read_call(self, events: list[Event], *, final: bool) -> bool:
        if self._value is None:
            start = skip_whitespace(self._buffer, 0)
            rest = self._buffer[start:]
            markers = [*self._ends, self._start, self._channel, self._message]
            if not final and any(marker.startswith(rest) and marker != rest for marker in markers):
                return False
            if not rest:
                self._state = "header"
                events.append(IncompleteCall("", self._tool))
                return False
            if rest.startswith(self._message):  # the model repeats the marker
                self._take(start + len(self._message))
                return True
            if any(rest.startswith(end) for end in self._ends):
                events.append(Call(FunctionCall(self._tool, {})))
                self._state = "after_call"
                return True
            if not rest.startswith("{"):
                beginning = self._format.restore(rest[:80])
                self._fail(events, f"the arguments of {self._tool} are not a JSON object: {beginning!r}")
                return True
            self._value = JsonValueScanner(start)
        try:
            end = self._value.scan(self._buffer)
        except ValueError as error:
            self._fail(events, f"the arguments of {self._tool} are not valid JSON: {error}")
            return True
        if end is None:
            if final:
                events.append(IncompleteCall(self._take(len(self._buffer)), self._tool))
            return False
        start = self._value.start
        text = self._take(end)
        call = create_call(self._tool, parse_json_or_python(self._format.restore(text[start:])))
        events.append(MalformedCall(text, call) if isinstance(call, str) else Call(call))
        self._state = "after_call"
        return True

    def _fail(self, events: list[Event], reason: str) -> None:
        """Return the text of the current message as a malformed call."""
        events.append(MalformedCall("", reason))
        self._state, self._kind = "body", MalformedCall

    def _read_after_call(self, events: list[Event], *, final: bool) -> bool:
        """Skip the end marker of a call."""
        position = skip_whitespace(self._buffer, 0)
        rest = self._buffer[position:]
        end = next((end for end in self._ends if rest.startswith(end)), None)
        if end is not None:
            self._take(position + len(end))
            self._state = "header"
            return True
        if not final and (not rest or any(end.startswith(rest) for end in self._ends)):
            return False
        self._take(position)
        self._state = "header"
        self._may_lack_header = not rest.startswith(self._header_markers)
        return True


class WhitespaceFilter:
    """Incremental filter that removes the whitespace around tool calls from content.

    The whitespace between two texts with a tool call between them is not removed. Whitespace at the end of the content
    is buffered, because a call may follow.
    """

    def __init__(self):
        self._trailing_whitespace = ""
        self._is_after_call = False
        self._has_text = False

    def push(self, text: str) -> str:
        """Add content and return the text that further content cannot change."""
        if self._is_after_call:
            text = text.lstrip() if not self._has_text else text
            if not text.strip():
                return ""
            text = ((self._trailing_whitespace or "\n") if self._has_text else "") + text
            self._trailing_whitespace = ""
            self._is_after_call = False
        text = self._trailing_whitespace + text
        stripped = text.rstrip()
        self._trailing_whitespace = text[len(stripped) :]
        self._has_text = self._has_text or bool(stripped)
        return stripped

    def push_call(self) -> None:
        """Record that a tool call follows the content so far."""
        self._is_after_call = True

    def flush(self) -> str:
        """Finish the content and return the remaining whitespace."""
        whitespace = self._trailing_whitespace
        self._trailing_whitespace = ""
        return "" if self._is_after_call else whitespace


# Start markers of the reasoning for tool-call formats of models that do not write <think>.
_REASONING_STARTS: dict[str, str] = {
    "mistral": "[THINK]",
    "mistral_v11": "[THINK]",
    "cohere": "<|START_THINKING|>",
    "seed_oss": "<seed:think>",
    "solar_open": "<|begin|>assistant<|think|>",
    "gemma4": "<|channel>thought",
    "apertus": "<|inner_prefix|>",
    "longcat": "<longcat_think>",
    "longcat_xml": "<longcat_think>",
    "hy_v3_opensource": "<think:opensource>",
    "minimax_m3": "<mm:think>",
}


@functools.lru_cache(64)
def _format_of_text(format_name: ToolFormatName) -> OutputFormat:
    return OutputFormat(format_name, find_reasoning_format(_REASONING_STARTS.get(format_name, "<think>")))


def create_text_parser(format_name: ToolFormatName, tools: Sequence[Mapping[str, Any]]) -> OutputParser:
    """Create the parser of an output in which special tokens are written as their names.

    The markers of the reasoning are inferred from the tool-call format, because the chat template is unknown.
    """
    return _format_of_text(format_name).parser(tools)
