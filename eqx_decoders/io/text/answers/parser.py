"""Incremental parser of answers: reasoning, content and tool calls.

An answer is split first. Everything else (stop strings, constraints, special tokens, log-probs, streaming) applies to
the parts that it concerns. A complete answer is parsed by the same code, from one piece: it has the same parts.

Special tokens are known by their ids. In the text that the parser gets, each special token that is a marker of the
format is one placeholder, a character that no text has (see `AnswerFormat.placeholders`). The letters of a special
token's name, where a model writes them as text, are text. Markers that are no special tokens of the tokenizer are found
in the text.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from eqx_decoders.io.text.answers.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMAT,
    FunctionCall,
    ReasoningFormat,
    ToolCallFormat,
    ToolFormat,
    find_tool_format,
    functions_of,
    reasoning_format,
)
from eqx_decoders.io.text.answers.scanners import (
    CallScanner,
    Context,
    Failed,
    Found,
    JsonScanner,
    call_of,
    parse_json_or_python,
    partial_match,
    scanner_at,
    skip_blanks,
)


FIRST_PLACEHOLDER = 0xD800  # surrogates: no text that is decoded from tokens has any


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text that a model writes before its answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Call:
    """Complete call of a tool."""

    call: FunctionCall


@dataclasses.dataclass(frozen=True)
class Malformed:
    """Text of a call that cannot be read, and the reason; further text of the same call has no reason."""

    text: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Partial:
    """Text of a call that the end of the answer cuts off; with the name of the tool, if the text is its arguments."""

    text: str
    tool: str = ""


@dataclasses.dataclass(frozen=True)
class ContentWasReasoning:
    """The text before this event was reasoning: it ended with a marker of the end, and had none of the start."""


Event = Reasoning | Content | Call | Malformed | Partial | ContentWasReasoning


@runtime_checkable
class AnswerParser(Protocol):
    """Parser of one answer."""

    reasoning_end: int
    """Position in the text of the answer after which its reasoning has ended."""

    @property
    def in_reasoning(self) -> bool:
        """True while the answer is in its reasoning: no constraint and no stop string applies."""
        ...

    @property
    def is_undecided(self) -> bool:
        """True while the text so far may be the start of the reasoning."""
        ...

    def may_reason(self, text: str) -> bool:
        """Return whether the answer is in its reasoning, or `text` may start it."""
        ...

    def push(self, text: str) -> list[Event]:
        """Add text, and return what is certain now."""
        ...

    def flush(self) -> list[Event]:
        """Return what was held back, as no more text comes."""
        ...


class AnswerFormat:
    """Format of the answers of a model: how it reasons and calls tools.

    **Arguments:**

    - `calls`: format of tool calls; None: calls are text.
    - `reasoning`: markers of the reasoning; None: there is no reasoning.
    - `special_names`: names of the tokenizer's special tokens.
    """

    def __init__(self, calls: ToolFormat | None, reasoning: ReasoningFormat | None, special_names: Iterable[str] = ()):
        row = None if calls is None else TOOL_CALL_FORMAT[calls]
        self.is_harmony = calls == "harmony"
        markers = [*(row.markers if row is not None else ())]
        if reasoning is not None:
            markers += [reasoning.begin, reasoning.end, *(text for pair in reasoning.wrappers for text in pair)]
        names = sorted({name for name in special_names if name}, key=len, reverse=True)
        used = [name for name in names if any(name in marker for marker in markers)]
        self.placeholders: dict[str, str] = {name: chr(FIRST_PLACEHOLDER + at) for at, name in enumerate(used)}
        """Characters that stand for the special tokens that are markers, by their names."""
        self.names = {letter: name for name, letter in self.placeholders.items()}
        self.row = None if row is None else self._translated(row)
        self.reasoning = reasoning
        if reasoning is not None:
            pairs = tuple((self.translate(begin), self.translate(end)) for begin, end in reasoning.wrappers)
            begin, end = self.translate(reasoning.begin), self.translate(reasoning.end)
            self.reasoning = ReasoningFormat(begin, end, (), pairs)

    @classmethod
    def of_template(cls, source: str, special_names: Iterable[str], calls: ToolFormat | None) -> "AnswerFormat":
        """Return the format of the answers that a chat template asks for. `calls`: format of tool calls, if known."""
        if find_tool_format(source) == "harmony":
            return cls("harmony", None, special_names)
        return cls(calls, reasoning_format(source), special_names)

    def translate(self, text: str) -> str:
        """Replace the names of special tokens in a marker by their placeholders."""
        for name, letter in self.placeholders.items():
            text = text.replace(name, letter)
        return text

    def restore(self, text: str) -> str:
        """Replace placeholders in a text by the names of their special tokens."""
        return "".join(self.names.get(letter, letter) for letter in text) if self.names else text

    def without_special(self, text: str) -> str:
        """Leave out placeholders."""
        return "".join(letter for letter in text if letter not in self.names) if self.names else text

    def parser(
        self,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: str = "",
        calls: bool = True,
        must_call: bool = False,
    ) -> AnswerParser:
        """Create the parser of one answer.

        **Arguments:**

        - `tools`: descriptions of the offered tools; empty: any tool may be called.
        - `prompt`: the end of the prompt, with placeholders. It may start the reasoning, or end it.
        - `calls`: parse tool calls; False: they are content.
        - `must_call`: the answer must be a tool call. If a call without a marker is cut off, it is not content.
        """
        if self.is_harmony:
            return HarmonyParser(self, tools, prompt, calls=calls)
        return TaggedParser(self, tools, prompt, calls=calls, must_call=must_call)

    def _translated(self, row: ToolCallFormat) -> ToolCallFormat:
        values: dict[str, Any] = {}
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            if field.name in ("begins", "ends"):
                values[field.name] = tuple(map(self.translate, value))
            elif isinstance(value, str) and field.name not in ("name", "syntax"):
                values[field.name] = self.translate(value)
        return dataclasses.replace(row, **values)


class TaggedParser:
    """Parser of answers with reasoning between markers, then content and calls."""

    def __init__(
        self, form: AnswerFormat, tools: Sequence[Mapping[str, Any]], prompt: str, *, calls: bool, must_call: bool
    ):
        self._form, self._reasoning, self._must_call = form, form.reasoning, must_call
        row = form.row if calls else None
        self._context = None if row is None else Context(row, tools, form.names)
        self._begins = () if row is None else row.begins
        self._ends = () if row is None else row.ends
        # the arguments of DeepSeek V3 are a code block, whose end is no end of a call that cannot be read
        self._closings = (*self._ends, "```") if row is not None and row.name == "deepseek_v3" else self._ends
        # the letter with which calls without a marker start
        is_list = row is not None and (row.syntax == "python" or row.name == "mistral")
        self._bare = "" if row is None or not row.bare else "[" if is_list else "{"
        self._buffer = ""
        self._scanner: CallScanner | None = None
        self._done = 0  # characters at the start of the buffer whose calls were returned
        self._searched = 0  # characters at the start of the buffer without a special token that ends a call
        self._consumed = 0  # characters of the answer that left the buffer
        self.reasoning_end = 0
        """Position in the text of the answer after which its reasoning has ended."""
        self._is_fresh = True  # no content was returned yet
        self._strips = False  # blanks at the start of this part are left out
        self._watches_end = False
        self._wrapper = ""
        self._state = "content"
        if self._reasoning is not None:
            self._state = self._first_state(self._reasoning, prompt)

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    @property
    def is_undecided(self) -> bool:
        return self._state == "start"

    def may_reason(self, text: str) -> bool:
        if self._state != "start" or self._reasoning is None:
            return self._state == "reasoning"
        begin, rest = self._reasoning.begin, (self._buffer + text).lstrip()
        return rest.startswith(begin) or begin.startswith(rest)

    def _first_state(self, reasoning: ReasoningFormat, prompt: str) -> str:
        begun, ended = prompt.rfind(reasoning.begin), prompt.rfind(reasoning.end)
        tail = prompt.rstrip()
        if tail.endswith(reasoning.begin):
            self._strips = True
            return "reasoning"
        self._watches_end = not (ended > begun and not tail[ended + len(reasoning.end) :].strip())
        return "start"

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[Event]:
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        events = list[Event]()
        steps = {
            "start": self._start,
            "reasoning": self._read_reasoning,
            "content": self._read_content,
            "call": self._read_calls,
            "after": self._read_after,
            "malformed": self._read_malformed,
        }
        while steps[self._state](events, final=final):
            pass
        return events

    def _take(self, size: int) -> str:
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        self._consumed += len(text)
        self._searched = 0
        return text

    def _start(self, events: list[Event], *, final: bool) -> bool:
        """Look for the marker that starts the reasoning."""
        assert self._reasoning is not None
        begin, position = self._reasoning.begin, skip_blanks(self._buffer, 0)
        rest = self._buffer[position:]
        if rest.startswith(begin):
            self._take(position + len(begin))
            self._state, self._strips = "reasoning", True
            return True
        if begin.startswith(rest) and not final:
            return False
        self._state = "content"
        return True

    def _read_reasoning(self, events: list[Event], *, final: bool) -> bool:
        assert self._reasoning is not None
        begin, end = self._reasoning.begin, self._reasoning.end
        if self._strips:
            position = skip_blanks(self._buffer, 0)
            rest = self._buffer[position:]
            if rest.startswith(begin):  # the model repeats the marker of the prompt
                self._take(position + len(begin))
                return True
            if begin.startswith(rest) and not final:
                return False
            self._take(position)
            self._strips = False
        ends = [end, *(begin for begin in self._begins if begin[:1] in self._form.names)]
        places = [(place, text) for text in ends if (place := self._buffer.find(text)) >= 0]
        if places:
            place, found = min(places)
            self._add(events, Reasoning, self._take(place).rstrip())
            self._take(len(found) if found == end else 0)
            self.reasoning_end = self._consumed
            self._state, self._strips, self._watches_end = "content", True, False
            return True
        size = len(self._buffer) if final else len(self._buffer) - partial_match(self._buffer, ends)
        shown = self._buffer[:size].rstrip()
        self._add(events, Reasoning, self._take(len(shown)))
        if final:
            self._take(len(self._buffer))
            self.reasoning_end = self._consumed
        return False

    def _add(self, events: list[Event], kind: Any, text: str) -> None:
        if text:
            events.append(kind(text))

    def _markers(self) -> list[str]:
        """Return the texts that end a piece of content."""
        markers = [*self._begins]
        if self._reasoning is not None:
            if self._watches_end:
                markers += [self._reasoning.end, self._reasoning.begin]
            elif self._reasoning.begin[:1] in self._form.names:
                markers.append(self._reasoning.begin)  # a special token: the model reasons once more
            for begin, end in self._reasoning.wrappers:
                markers += [begin] if self._is_fresh or begin in self._form.names else []
                markers += [end] if self._wrapper == end or end in self._form.names else []
        return markers

    def _read_content(self, events: list[Event], *, final: bool) -> bool:
        if self._strips:
            position = skip_blanks(self._buffer, 0)
            if position == len(self._buffer) and not final:
                return False
            self._take(position)
            self._strips = False
        if self._is_fresh and self._bare and self._context is not None:
            position = skip_blanks(self._buffer, 0)
            letter = self._buffer[position : position + 1]
            if not letter and not final:
                return False
            if (
                letter
                and letter in self._bare
                and not any(self._buffer.startswith(text, position) for text in self._begins)
            ):
                may_be_marker = any(text.startswith(self._buffer[position:]) for text in self._begins)
                if may_be_marker and not final:
                    return False
                self._scanner = scanner_at(self._context, self._buffer, position, "", final=final)
                self._state, self._is_fresh = "call", False
                return True
        markers = self._markers()
        places = [(place, -len(text), text) for text in markers if (place := self._buffer.find(text)) >= 0]
        if not places:
            size = len(self._buffer) if final else len(self._buffer) - partial_match(self._buffer, markers)
            self._content(events, self._take(size))
            return False
        place, _, marker = min(places)
        self._content(events, self._take(place))
        if marker in self._begins:
            self._state = "call"
        elif self._reasoning is not None and marker == self._reasoning.end:
            self._take(len(marker))
            events.append(ContentWasReasoning())
            self.reasoning_end = self._consumed
            self._watches_end, self._is_fresh, self._strips = False, True, True
        elif self._reasoning is not None and marker == self._reasoning.begin:
            self._watches_end = False
            if marker[:1] in self._form.names:
                self._take(len(marker))
                self._state, self._strips = "reasoning", True
            else:  # the content mentions the markers
                self._content(events, self._take(len(marker)))
        else:
            self._take(len(marker))
            pairs = {} if self._reasoning is None else dict(self._reasoning.wrappers)
            self._wrapper = pairs.get(marker, "")
            self._strips = marker in pairs
        return True

    def _content(self, events: list[Event], text: str) -> None:
        if text:
            events.append(Content(text))
            self._is_fresh = self._is_fresh and not text.strip()

    def _read_calls(self, events: list[Event], *, final: bool) -> bool:
        assert self._context is not None
        if self._scanner is None:
            marker = max((text for text in self._begins if self._buffer.startswith(text)), key=len)
            self._scanner = scanner_at(self._context, self._buffer, 0, marker, final=final)
            if self._scanner is None:
                if final:
                    self._add(events, Partial, self._take(len(self._buffer)))
                return False
        result = self._scanner.scan(self._buffer, final=final)
        if result is None or isinstance(result, Found):
            result = self._missed_end(result, final=final) or result
        if result is None:
            if final:
                has_marker = any(self._buffer.startswith(text) for text in self._begins)
                is_text = not self._done and not has_marker and not self._must_call
                self._take(self._done)
                self._add(events, Content if is_text else Partial, self._take(len(self._buffer)))
                self._state, self._scanner, self._done = "content", None, 0
            return False
        if isinstance(result, Failed):
            return self._fail(events, result)
        for part in result.parts:
            text = self._buffer[self._done : result.end]
            events.append(Malformed(text, self._readable(part)) if isinstance(part, str) else Call(part))
        self._is_fresh = False
        self._done = result.end
        if result.closed:
            self._take(result.end)
            self._state, self._scanner = "after", None
        return True

    def _missed_end(self, result: Found | None, *, final: bool) -> Failed | None:
        """Return the failure of a call that has an end marker within an argument that does not end.

        End markers that are special tokens cannot be part of an argument. Others can, unless another call follows.
        """
        assert self._context is not None
        if self._context.row.syntax == "xml":  # its scanner knows the special tokens
            return None
        special = [text for text in self._ends if any(letter in self._form.names for letter in text)]
        start = max(self._done, self._searched - max(map(len, self._ends), default=0))
        places = [place for text in special if (place := self._buffer.find(text, start)) >= 0]
        if result is not None:
            places = [place for place in places if place < result.end]
        else:
            self._searched = len(self._buffer)
        if result is None and not places and final:
            ends = [place + len(text) for text in self._ends if (place := self._buffer.find(text, self._done)) >= 0]
            if ends and any(self._buffer.find(text, min(ends)) >= 0 for text in self._begins):
                places = ends
        return Failed(self._done, min(places), "the call ends within its arguments") if places else None

    def _readable(self, reason: str) -> str:
        """Replace placeholders of special tokens, which `repr` has escaped, by their names."""
        for letter, name in self._form.names.items():
            reason = reason.replace(repr(letter)[1:-1], name)
        return reason

    def _fail(self, events: list[Event], result: Failed) -> bool:
        """Make text that is no call to content, or to that of a call which cannot be read."""
        self._scanner = None
        if not any(self._buffer.startswith(text) for text in self._begins):  # a call without a marker: it is text
            self._take(self._done)  # the text of calls that were returned
            self._state, self._done = "content", 0
            return True
        start, self._done = self._done, 0
        self._take(start)
        self._state = "malformed"
        marker = next((text for text in self._begins if self._buffer.startswith(text)), "")
        is_xml = self._context is not None and self._context.row.syntax == "xml"
        size = result.position - start if is_xml else len(marker)  # several markers may be before the arguments
        events.append(Malformed(self._take(size), self._readable(result.reason)))
        return True

    def _read_malformed(self, events: list[Event], *, final: bool) -> bool:
        """Skip to the end of a call that cannot be read, or to the next call."""
        markers = (*self._begins, *self._ends)
        places = [(place, -len(text), text) for text in markers if (place := self._buffer.find(text)) >= 0]
        if not places:
            size = len(self._buffer) if final else len(self._buffer) - partial_match(self._buffer, markers)
            self._add(events, Malformed, self._take(size))
            return False
        place, _, marker = min(places)
        is_end = marker in self._ends
        self._add(events, Malformed, self._take(place + len(marker) if is_end else place))
        self._state = "after" if is_end else "call"
        return True

    def _read_after(self, events: list[Event], *, final: bool) -> bool:
        """Leave out blanks and markers after a call."""
        self._done = 0
        position = _skip_brackets(self._buffer)
        rest = self._buffer[position:]
        if not final and self._ends and (not rest or any(text.startswith(rest) for text in self._ends)):
            return False
        if any(rest.startswith(text) for text in self._ends):
            self._take(position)
        position = skip_blanks(self._buffer, 0)
        rest = self._buffer[position:]
        end = next((text for text in self._closings if rest.startswith(text)), None)
        if end is not None:
            self._take(position + len(end))
            return True
        if not final and (not rest or any(text.startswith(rest) for text in self._closings)):
            return False
        self._take(position)
        self._state = "content"
        return True


def _skip_brackets(text: str) -> int:
    """Return the position after blanks, superfluous brackets and the end of a code block."""
    return len(text) - len(text.lstrip("}]` \t\r\n"))


class HarmonyParser:
    """Parser of the messages of gpt-oss: each has a channel, and may call a tool.

    Common mistakes of the model are understood: a missing start or end of a message, a recipient before or after the
    channel and without `functions.`, a missing `<|message|>` before arguments, and arguments that end without a marker.
    """

    def __init__(self, form: AnswerFormat, tools: Sequence[Mapping[str, Any]], prompt: str, *, calls: bool):
        names = {
            name: form.translate(f"<|{name}|>")
            for name in ("start", "channel", "message", "constrain", "end", "call", "return")
        }
        self._form, self._calls, self._buffer = form, calls, ""
        self._start, self._channel, self._message = names["start"], names["channel"], names["message"]
        self._header_marks = [names[name] for name in ("start", "channel", "message", "constrain")]
        self._ends = [names[name] for name in ("end", "call", "return")]
        self._names = {function["name"] for function in functions_of(tools)}
        self._channel_name = re.compile(re.escape(self._channel) + r"\s*(\w+)")
        self._recipient = re.compile(r"\bto=([\w.-]+)")
        self._state, self._is_first, self._consumed, self.reasoning_end = "header", True, 0, 0
        self._prefix, self._kind, self._tool = "", "content", ""
        self._value: JsonScanner | None = None
        begun = prompt.rfind(self._start)
        if begun >= 0:
            header, is_message, _ = prompt[begun + len(self._start) :].partition(self._message)
            self._prefix = header
            if is_message:
                self._open(header)

    @property
    def in_reasoning(self) -> bool:
        return self._state == "body" and self._kind == "reasoning"

    @property
    def is_undecided(self) -> bool:
        return self._state == "header"

    def may_reason(self, text: str) -> bool:
        return self.is_undecided or self.in_reasoning

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        return self._run(final=False)

    def flush(self) -> list[Event]:
        return self._run(final=True)

    def _run(self, *, final: bool) -> list[Event]:
        events = list[Event]()
        steps = {
            "header": self._read_header,
            "body": self._read_body,
            "call": self._read_call,
            "after": self._read_after,
        }
        while steps[self._state](events, final=final):
            pass
        return events

    def _open(self, header: str) -> None:
        """Start a message with a header."""
        channel, recipient = self._channel_name.search(header), self._recipient.search(header)
        name = "final" if channel is None else channel[1].lower()
        tool = "" if recipient is None else recipient[1]
        is_function = tool.startswith("functions.") or tool in self._names
        while tool.startswith("functions."):
            tool = tool.removeprefix("functions.")
        self._tool = tool.rstrip(".") if is_function else ""
        is_reasoning = name.startswith("analysis") or (
            bool(tool) and not is_function and tool not in ("user", "assistant")
        )
        self._kind = "content" if self._tool else "reasoning" if is_reasoning else "content"
        self._state = "call" if self._tool and self._calls else "body"
        self._is_first, self._prefix, self._value = False, "", None

    def _read_header(self, events: list[Event], *, final: bool) -> bool:
        buffer = self._buffer
        if self._is_first and not self._prefix_is_open():
            rest = buffer.lstrip()
            starts = [*self._header_marks, "to="]
            if rest.startswith("assistant"):  # the role, if a header follows
                rest = rest.removeprefix("assistant")
                rest = rest.lstrip() if rest[:1].isspace() or rest[:1] in self._form.names else rest
            else:
                starts.append("assistant")
            if rest and not any(rest.startswith(text) or (text.startswith(rest) and not final) for text in starts):
                self._state, self._kind, self._is_first = "body", "content", False  # text without a header
                return True
        place = buffer.find(self._message)
        header = buffer if place < 0 else buffer[:place]
        ends = [at for end in self._ends if (at := header.find(end)) >= 0]
        header = header[: min(ends)] if ends else header
        recipient = self._recipient.search(self._prefix + header)
        brace = header.find("{")
        if recipient is not None and brace >= 0:  # <|message|> is missing
            self._buffer = buffer[brace:]
            self._open(self._prefix + header[:brace])
            return True
        if place >= 0 and not ends:
            self._buffer = buffer[place + len(self._message) :]
            self._open(self._prefix + header)
            return True
        if ends:  # a message without a text
            self._buffer = (
                buffer[min(ends) + 1 :] if self._ends[0] in self._form.names else buffer[min(ends) :].partition("|>")[2]
            )
            self._prefix = ""
            return True
        if final and buffer.strip():
            words = buffer.split()
            is_role = words[0] == "assistant" and (not self._is_first or (words[1:2] and words[1].startswith("to=")))
            is_text = not (is_role or any(mark in buffer for mark in self._header_marks) or words[0].startswith("<|"))
            self._add(events, "content", buffer if is_text else "")
        if final:
            self._buffer = ""
        return False

    def _prefix_is_open(self) -> bool:
        """Return whether the prompt ends within a header, after the role."""
        return self._channel in self._prefix or "to=" in self._prefix

    def _add(self, events: list[Event], kind: str, text: str) -> None:
        if text:
            kinds = {"reasoning": Reasoning, "content": Content, "malformed": Malformed}
            events.append(kinds[kind](text))

    def _read_body(self, events: list[Event], *, final: bool) -> bool:
        marks = [*self._ends, self._start, self._channel]
        places = [(place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0]
        if not places:
            size = len(self._buffer) if final else len(self._buffer) - partial_match(self._buffer, marks)
            self._add(events, self._kind, self._buffer[:size])
            self._buffer = self._buffer[size:]
            return False
        place, mark = min(places)
        self._add(events, self._kind, self._buffer[:place])
        self._buffer = self._buffer[place + (len(mark) if mark in self._ends else 0) :]
        self._state = "header"
        return True

    def _read_call(self, events: list[Event], *, final: bool) -> bool:
        if self._value is None:
            start = skip_blanks(self._buffer, 0)
            rest = self._buffer[start:]
            marks = [*self._ends, self._start, self._channel, self._message]
            if not rest or any(mark.startswith(rest) and mark != rest for mark in marks):
                if final and not rest:
                    self._state = "header"
                    events.append(Partial("", self._tool))
                    return False
                if not final:
                    return False
            if rest.startswith(self._message):  # written twice
                self._buffer = rest[len(self._message) :]
                return True
            if any(rest.startswith(end) for end in self._ends):
                events.append(Call(FunctionCall(self._tool, {})))
                self._state = "after"
                return True
            if not rest.startswith("{"):
                reason = f"the arguments of {self._tool} are not a JSON object: {self._form.restore(rest[:80])!r}"
                events.append(Malformed("", reason))
                self._state, self._kind = "body", "malformed"
                return True
            self._value = JsonScanner(start)
        try:
            end = self._value.scan(self._buffer)
        except ValueError as error:
            events.append(Malformed("", f"the arguments of {self._tool} are not valid JSON: {error}"))
            self._state, self._kind = "body", "malformed"
            return True
        if end is None:
            if final:
                events.append(Partial(self._buffer, self._tool))
                self._buffer = ""
            return False
        part = call_of(self._tool, parse_json_or_python(self._form.restore(self._buffer[self._value.start : end])))
        events.append(Malformed(self._buffer[:end], part) if isinstance(part, str) else Call(part))
        self._buffer, self._state = self._buffer[end:], "after"
        return True

    def _read_after(self, events: list[Event], *, final: bool) -> bool:
        """Skip the end of a call."""
        position = skip_blanks(self._buffer, 0)
        rest = self._buffer[position:]
        end = next((end for end in self._ends if rest.startswith(end)), None)
        if end is not None:
            self._buffer, self._state = rest[len(end) :], "header"
            return True
        if not final and (not rest or any(end.startswith(rest) for end in self._ends)):
            return False
        self._buffer, self._state = rest, "header"
        self._is_first = not any(rest.startswith(mark) for mark in self._header_marks)
        return True


class ContentSpacing:
    """Filter of content: blanks around calls are left out, except between two texts.

    The end of a text is held back while it is blank, as a call may follow.
    """

    def __init__(self):
        self._held, self._is_after_call, self._has_text = "", False, False

    def push(self, text: str) -> str:
        """Add content, and return what can be shown."""
        if self._is_after_call:
            text = text.lstrip() if not self._has_text else text
            if not text.strip():
                return ""
            text = ((self._held or "\n") if self._has_text else "") + text
            self._held, self._is_after_call = "", False
        text = self._held + text
        shown = text.rstrip()
        self._held, self._has_text = text[len(shown) :], self._has_text or bool(shown)
        return shown

    def call(self) -> None:
        """Mark the place of a call."""
        self._is_after_call = True

    def flush(self) -> str:
        """Return what was held back, as no more content comes."""
        held, self._held = self._held, ""
        return "" if self._is_after_call else held


@functools.lru_cache(64)
def _text_format(calls: ToolFormat, begin: str) -> AnswerFormat:
    """Return the format of answers whose special tokens are written as their names."""
    row = next((row for row in REASONING_FORMATS if row.begin == begin), None)
    return AnswerFormat(calls, row)


# Markers of the reasoning in families that do not write <think>, for parsers that do not know the chat template.
REASONING_OF: dict[str, str] = {
    "mistral": "[THINK]",
    "mistral_v11": "[THINK]",
    "cohere": "<|START_THINKING|>",
    "seed_oss": "<seed:think>",
    "gemma4": "<|channel>thought",
    "apertus": "<|inner_prefix|>",
    "longcat": "<longcat_think>",
    "minimax_m3": "<mm:think>",
}


def text_parser(calls: ToolFormat, tools: Sequence[Mapping[str, Any]], begin: str = "") -> AnswerParser:
    """Create the parser of an answer in which special tokens are written as their names."""
    return _text_format(calls, begin or REASONING_OF.get(calls, "<think>")).parser(tools)
