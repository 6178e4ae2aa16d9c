"""Incremental scanners of tool calls. There is one scanner class for each syntax of tool calls.

A scanner finds the end of a tool call in streamed text and parses the call. The caller passes all text from the start
of the calls to `scan`, and calls `scan` again after appending text. A scanner resumes at the position where the
previous `scan` stopped, so scanning long arguments takes linear time. The results do not depend on how the streamed
text is divided into chunks.
"""

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.io.text.output_parsing.formats import FunctionCall, ToolCallFormat, iter_functions
from eqx_decoders.io.text.output_parsing.tool_arguments import (
    MAX_LEVELS,
    Elements,
    ToolSchema,
    evaluate_literal,
    parse_expression,
    parse_json,
    parse_json_or_python,
    parse_untyped_value,
)


MAX_HEADER = 512  # max. characters between the marker of a call and its arguments
_WHITESPACE = re.compile(r"\s*")
_ANY_WHITESPACE, _LINE_BREAKS = r"\s*", r"[\r\n]*"
_PLACEHOLDERS = r"\ud800-\udfff"  # special tokens: they cannot be part of a name
_NAME = rf"[^\s<>\[\](){{}}\"'`=,;|｜{_PLACEHOLDERS}]+"
_TAG_START = re.compile(rf"(?<=[>{_PLACEHOLDERS}])(?=[<{_PLACEHOLDERS}])")  # between two tags or placeholders
_CHARACTER_DATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_WORD = re.compile(r"[^\s\[\]{}:,\"']+")
_JSON_WORDS = re.compile(r"true|false|null|True|False|None|NaN|-?Infinity|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_PREFIX = re.compile(r"-?[0-9.eE+-]*|[a-zA-Z]*|-[a-zA-Z]*")
_KEYWORD = re.compile(r"\s*([^=()\[\]{},\"'\s][^=()\[\]{},\"'\r\n]*?)\s*=(?!=)")
_STRING_PART = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
PYTHON_QUOTES = ("'", '"', "'''", '"""')


class FoundCalls(NamedTuple):
    """Calls that a scanner found in a text.

    **Arguments:**

    - `end`: position after the calls.
    - `calls`: the calls. For a malformed call, the reason why the call cannot be parsed.
    - `is_finished`: the scanner is finished. A further call must start with a marker.
    """

    end: int
    calls: tuple[FunctionCall | str, ...]
    is_finished: bool


class ScanFailure(NamedTuple):
    """Failure to parse a text as a tool call.

    **Arguments:**

    - `position`: position of the first unexpected character.
    - `reason`: why the text cannot be parsed.
    """

    position: int
    reason: str


@runtime_checkable
class CallScanner(Protocol):
    """Incremental scanner of the calls after a marker."""

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        """Return the next calls, or None if more text is needed. `final`: no further text follows."""
        ...


@dataclasses.dataclass(frozen=True)
class ScannerContext:
    """Tool-call format and tools of a model output, which all scanners of the output share.

    **Arguments:**

    - `tool_format`: format of tool calls, in which placeholders replace the names of special tokens.
    - `tools`: descriptions of the offered tools.
    - `placeholder_names`: name of each special token, by the placeholder of the token.
    """

    tool_format: ToolCallFormat
    tools: Sequence[Mapping[str, Any]] = ()
    placeholder_names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def tool_names(self) -> frozenset[str] | None:
        """Names of the offered tools; None: any tool may be called."""
        return frozenset(function["name"] for function in iter_functions(self.tools)) if self.tools else None

    def restore(self, text: str) -> str:
        """Replace placeholders with the names of their special tokens."""
        return restore_special_names(text, self.placeholder_names)

    def contains_special_token(self, marker: str) -> bool:
        """Return whether a marker contains special tokens. An argument cannot contain such a marker."""
        return any(character in self.placeholder_names for character in marker)

    def schema(self, name: str) -> ToolSchema:
        """Return the schema of a tool's parameters."""
        return ToolSchema(self.tools, name)


def skip_whitespace(text: str, position: int) -> int:
    """Return the position of the first character at or after `position` that is not whitespace."""
    match = _WHITESPACE.match(text, position)
    return position if match is None else match.end()


def partial_match_length(text: str, words: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is an incomplete prefix of at least one word."""
    longest = min(max(map(len, words), default=1) - 1, len(text))
    endings = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(ending) for ending in endings if any(word.startswith(ending) for word in words)), 0)


def find_first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and the marker; None if the text has no marker.

    If several markers start at the same position, the longest marker is returned.
    """
    found = [(position, -len(marker), marker) for marker in markers if (position := text.find(marker)) >= 0]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


def restore_special_names(text: str, names: Mapping[str, str]) -> str:
    """Replace the placeholders of special tokens in a text. `names`: replacements by placeholder."""
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text


# --- JSON -------------------------------------------------------------------------------------------------------------


class JsonValueScanner:
    """Scanner that finds the end of a JSON object or list, or the first character that is not valid JSON.

    Strings may contain line breaks and may be enclosed in single quotes, as in Python.
    """

    def __init__(self, start: int):
        self.start = self.position = start
        self._stack, self._quote = list[str](), ""
        self._expects = "value"  # or "first_value", "key", "first_key", "colon", "comma"

    def scan(self, text: str) -> int | None:
        """Return the position after the value; None if more text is needed. Raises ValueError for invalid JSON."""
        while True:
            if self._quote:
                if not self._skip_string(text):
                    return None
                self._after_value()
            self.position = skip_whitespace(text, self.position)
            if self.position >= len(text):
                return None
            if not self._step(text, text[self.position]):
                return None
            if not self._stack and not self._quote:
                return self.position

    def _skip_string(self, text: str) -> bool:
        """Skip the rest of a string. Returns False if more text is needed."""
        match = _STRING_PART[self._quote].match(text, self.position)
        self.position = self.position if match is None else match.end()
        while self.position < len(text):
            if text[self.position] == self._quote:
                self.position, self._quote = self.position + 1, ""
                return True
            if self.position + 1 >= len(text):
                return False
            match = _STRING_PART[self._quote].match(text, self.position + 2)
            self.position = self.position + 2 if match is None else match.end()
        return False

    def _after_value(self) -> None:
        self._expects = "colon" if self._expects in ("key", "first_key") else "comma"

    def _step(self, text: str, character: str) -> bool:
        """Read one punctuation mark, the start of a string, or a word. Returns False if more text is needed."""
        expects, is_object = self._expects, bool(self._stack) and self._stack[-1] == "}"
        if character in "]}" and self._stack and character == self._stack[-1]:
            if expects not in ("comma", "first_value", "first_key"):
                raise self._error(text)
            self._stack.pop()
            self._expects = "comma"
        elif expects == "comma" and character == ",":
            self._expects = "key" if is_object else "value"
        elif expects == "colon" and character == ":":
            self._expects = "value"
        elif character in "\"'" and expects not in ("comma", "colon") and self._stack:
            self._quote = character
        elif character in "{[" and expects in ("value", "first_value"):
            if len(self._stack) >= MAX_LEVELS:
                raise ValueError(f"more than {MAX_LEVELS} levels of lists and objects")
            self._stack.append("}" if character == "{" else "]")
            self._expects = "first_key" if character == "{" else "first_value"
        elif expects in ("value", "first_value") and self._stack:
            return self._skip_word(text)
        else:
            raise self._error(text)
        self.position += 1
        return True

    def _skip_word(self, text: str) -> bool:
        """Skip a number or a constant. Returns False if more text is needed."""
        match = _WORD.match(text, self.position)
        if match is None:
            raise self._error(text)
        if match.end() == len(text) and _JSON_PREFIX.fullmatch(match[0]) and len(match[0]) < 400:
            return False
        if not _JSON_WORDS.fullmatch(match[0]):
            raise self._error(text)
        self.position = match.end()
        self._after_value()
        return True

    def _error(self, text: str) -> ValueError:
        return ValueError(f"unexpected {text[self.position : self.position + 20]!r}")


class JsonCallScanner:
    """Scanner of calls that are JSON objects with the tool's name and arguments, or lists of such objects.

    **Arguments:**

    - `context`: format and tools of the output.
    - `start`: position after the marker.
    - `without_marker`: the calls have no start marker. The first object must call an offered tool.
    """

    def __init__(self, context: ScannerContext, start: int, *, without_marker: bool = False):
        self._context, self._position, self._without_marker = context, start, without_marker
        self._in_list, self._num_calls = False, 0
        self._value: JsonValueScanner | None = None

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        if self._value is None:
            started = self._start(text, final=final)
            if not isinstance(started, int):
                return started
            self._value = JsonValueScanner(started)
        start = self._value.start
        if self._without_marker and self._num_calls == 0 and not self._may_be_call(text, start):
            return ScanFailure(start, "this is not a call of an offered tool")
        try:
            end = self._value.scan(text)
        except ValueError as error:
            return ScanFailure(self._value.position, f"invalid JSON in tool call: {error}")
        if end is None:
            return None
        part = self._call(text[start:end])
        if self._without_marker and self._num_calls == 0 and isinstance(part, str):
            return ScanFailure(end, part)
        self._value, self._position = None, end
        self._num_calls += 1
        return FoundCalls(end, (part,), is_finished=False)

    def _start(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | int | None:
        """Return the position of the next object, or the result of `scan` if there is no next object yet."""
        position = self._position
        while True:
            position = skip_whitespace(text, position)
            if position >= len(text):
                return FoundCalls(self._position, (), is_finished=True) if final and self._num_calls else None
            character = text[position]
            if character == "{":
                return position
            if self._num_calls == 0 and character == "[" and not self._in_list:
                self._in_list, self._position = True, position + 1
            elif self._num_calls == 0 and character == "`" and not self._in_list:
                if len(text) < position + len("```json") and not final:
                    return None
                if not text.startswith("```", position):
                    break
                position += len("```json") if text.startswith("```json", position) else len("```")
                self._position = position
                continue
            elif character == "]" and self._in_list:
                return FoundCalls(position + 1, (), is_finished=True)
            elif self._num_calls and character in ",;":
                pass
            else:
                break
            position += 1
        if self._num_calls:
            if self._in_list:
                return ScanFailure(position, f"unexpected {text[position : position + 20]!r} in a list of calls")
            return FoundCalls(self._position, (), is_finished=True)
        return ScanFailure(position, f"{text[position : position + 80]!r} is not a JSON object")

    def _may_be_call(self, text: str, start: int) -> bool:
        """Return whether the text of an object so far may be a call of an offered tool."""
        tool_format, names = self._context.tool_format, self._context.tool_names
        known = {*tool_format.name_keys, *tool_format.argument_keys, "type", "id"}
        head = text[start : start + MAX_HEADER]
        first = re.match(r"\{\s*\"([^\"\\]*)\"", head)
        if first is not None and first[1] not in known:
            return False
        name = re.match(r"\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"([^\"\\]*)\"", head)
        return name is None or names is None or name[1] in names

    def _call(self, text: str) -> FunctionCall | str:
        value = parse_json_or_python(self._context.restore(text))
        tool_format = self._context.tool_format
        if not isinstance(value, dict):
            return f"{text[:80]!r} is not a JSON object"
        if not tool_format.name_keys:
            if len(value) != 1:
                return f"{json.dumps(value)[:80]} must have a single key, the name of the tool"
            ((name, arguments),) = value.items()
            return create_call(name, arguments)
        inner = value.get("function")
        value = inner if isinstance(inner, dict) else value
        name = next((value[key] for key in tool_format.name_keys if isinstance(value.get(key), str)), None)
        if name is None:
            return f"{json.dumps(value)[:80]} has no tool name"
        if self._without_marker:
            names, allowed = (
                self._context.tool_names,
                {*tool_format.name_keys, *tool_format.argument_keys, "type", "id"},
            )
            has_arguments = any(key in value for key in tool_format.argument_keys)
            if names is not None and name not in names:
                return f"the tool {name!r} is not offered"
            if not value.keys() <= allowed or (names is None and not has_arguments):
                return f"{json.dumps(value)[:80]} is not a call"
        arguments = next((value[key] for key in tool_format.argument_keys if key in value), {})
        return create_call(name, arguments)


def create_call(name: str, arguments: Any) -> FunctionCall | str:
    """Return a call, or the reason why its arguments cannot be parsed.

    `arguments`: an object, JSON text as in OpenAI's API, or None for no arguments.
    """
    if isinstance(arguments, str):
        if not arguments.strip():
            return FunctionCall(name, {})
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name} are not valid JSON: {error}"
    if arguments is None:
        return FunctionCall(name, {})
    if not isinstance(arguments, dict):
        return f"the arguments of {name} are not a JSON object"
    return FunctionCall(name, arguments)


class NamedJsonCallScanner:
    """Scanner of one call that consists of the tool's name and a JSON object with its arguments.

    **Arguments:**

    - `context`: format and tools of the output.
    - `start`: position after the marker.
    """

    def __init__(self, context: ScannerContext, start: int):
        self._context, self._start = context, start
        tool_format = context.tool_format
        marker = f"(?:{'|'.join(map(re.escape, tool_format.inner_markers))})"
        prefix = r"(?:functions\.)?" if tool_format.call_begin.endswith("functions.") else ""
        index = "(?::[0-9]+)?" if tool_format.name_end.startswith(":{index}") else ""
        call_id = rf"(?:{re.escape(tool_format.id_marker)}\w+)?" if tool_format.id_marker else ""
        fence = r"(?:```(?:json)?\s*)?"
        # A word and a marker may precede the name: the type of the call, or its index.
        self._header = re.compile(
            rf"\s*(?:\w*\s*{marker}\s*)??{prefix}({_NAME}?)\s*{index}{call_id}\s*{marker}?\s*{fence}"
        )
        self._name = ""
        self._value: JsonValueScanner | None = None

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        tool_format = self._context.tool_format
        if self._value is None:
            first = text.find("{", self._start, self._start + MAX_HEADER)
            limit = len(text) if first < 0 else first
            ends = [
                at
                for end in (*tool_format.end_markers, *tool_format.start_markers)
                if (at := text.find(end, self._start, limit)) >= 0
            ]
            if ends:
                header = self._header.fullmatch(text, self._start, min(ends))
                if header is None:
                    return ScanFailure(min(ends), f"{text[self._start : min(ends)][:80]!r} is not a tool name")
                return FoundCalls(min(ends), (FunctionCall(header[1], {}),), is_finished=True)
            if first < 0:
                if len(text) - self._start >= MAX_HEADER:
                    return ScanFailure(len(text), "the call has no arguments")
                return None
            header = self._header.fullmatch(text, self._start, limit)
            if header is None:
                return ScanFailure(limit, f"{text[self._start : limit][:80]!r} is not a tool name")
            self._name, self._value = header[1], JsonValueScanner(limit)
        try:
            end = self._value.scan(text)
        except ValueError as error:
            return ScanFailure(self._value.position, f"the arguments of {self._name} are not valid JSON: {error}")
        if end is None:
            return None
        value = parse_json_or_python(self._context.restore(text[self._value.start : end]))
        return FoundCalls(end, (create_call(self._name, value),), is_finished=True)


# --- tags -------------------------------------------------------------------------------------------------------------


class XmlCallScanner:
    """Scanner of one call whose arguments are enclosed in tags.

    Values are not escaped, so a value may contain text that looks like a closing tag. A closing tag ends the value only
    if the next parameter or the end of the call follows. If several closing tags are followed by the end of a call, the
    last of these tags ends the value. Therefore the end of a call is known only when the next call starts or the output
    ends, unless the end marker is a special token.

    Undeclared parameters, repeated parameters, and calls of tools that are not offered are accepted only if the text
    matches the text of the chat template exactly, including line breaks.

    **Arguments:**

    - `context`: format and tools of the output.
    - `start`: position of the marker.
    """

    def __init__(self, context: ScannerContext, start: int):
        tool_format = context.tool_format
        self._context, self._start = context, start
        self._body = -1  # position of the arguments; -1: the header is incomplete
        self._searched = start  # position up to which no other call starts
        self._name, self._schema = "", context.schema("")
        # Models may omit the quotes around a name.
        self._quote = '"' if tool_format.call_begin.endswith('"') else ""
        opening_tags = self._opening_tags = [
            text.rstrip('"') for text in f"{tool_format.section_begin}{tool_format.call_begin}".split()
        ]
        name = rf'"?({_NAME})"?' if self._quote else rf"({_NAME})"
        name_end = re.escape(tool_format.name_end.strip().lstrip('"'))
        starts = [r"\s*".join(map(re.escape, opening_tags[at:])) for at in range(len(opening_tags))]
        self._call_start = re.compile(rf"(?:{'|'.join(starts)})\s*{name}\s*{name_end}")
        self._parameter = self._parameter_pattern(tool_format)
        self._close = tool_format.parameter_end.strip()
        ends = self._closing_tags = tool_format.call_end.split()
        written_end = tool_format.parameter_end + tool_format.parameter_separator
        self._template_gap = written_end[len(written_end.rstrip()) :]
        self._template_start = re.compile(
            re.escape(tool_format.call_begin)
            + rf"{_NAME}"
            + re.escape(tool_format.name_end).replace(re.escape("{index}"), "[0-9]+")
        )
        # Expression for the end of a call, by the expression for the text between its closing tags. The key "" is for
        # calls without the outer tag, which some models omit.
        self._call_end = {gap: re.compile(gap.join(map(re.escape, ends))) for gap in (_LINE_BREAKS, _ANY_WHITESPACE)}
        self._call_end[""] = re.compile(re.escape(ends[0]))
        self._special_end = next(filter(context.contains_special_token, (*ends, *tool_format.end_markers)), "")
        last = f"(?:{_LINE_BREAKS}{_LINE_BREAKS.join(map(re.escape, ends[1:]))})?" if len(ends) > 1 else ""
        self._closed = re.compile(re.escape(ends[0]) + last)
        tag = "[^<>]*".join(map(re.escape, self._close.split("{key}")))
        self._closed_parameter = re.compile(tag + _LINE_BREAKS + self._closed.pattern)

    @staticmethod
    def _parameter_pattern(tool_format: ToolCallFormat) -> re.Pattern[str]:
        """Return the expression for the start of a parameter. Group 1: key. Group 2: `true` for a string value."""
        is_quoted = tool_format.parameter_begin.endswith('"')
        # The first character is not a space, so that only one position after spaces can start a name.
        excluded = rf"<>\n{_PLACEHOLDERS}"
        key = (
            rf'"?([^\s"{excluded}][^"{excluded}]{{0,255}}?)"?'
            if is_quoted
            else rf"([^\s/{excluded}][^{excluded}]{{0,255}}?)"
        )
        begin = r"\s*".join(re.escape(text) for text in tool_format.parameter_begin.rstrip('"').split())
        if "{string}" in tool_format.key_end:
            return re.compile(rf"{begin}{key}(?:\s+string=\"?(true|false)\"?)?\s*>")
        tags = _TAG_START.sub(" ", tool_format.key_end.removeprefix('"' if is_quoted else "")).split()
        return re.compile(rf"{begin}\s*{key}\s*" + r"\s*".join(map(re.escape, tags)) + "()")

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        if self._body < 0:
            header = self._call_start.match(text, self._start)
            if header is None or (
                not self._context.tool_format.name_end.strip() and header.end() == len(text) and not final
            ):
                return self._no_header(text, final=final)
            self._name = header[1]
            self._body = self._searched = header.end()
            self._schema = self._context.schema(self._name)
        start = skip_whitespace(text, self._body)
        if start < len(text) and not final and text[start] != "{" and not self._may_start(text, start):
            return ScanFailure(start, f"{text[start : start + 80]!r} is not a parameter")
        max_end = self._max_call_end(text)
        if max_end is None and not final:
            return None
        return self._parsed(text, len(text) if max_end is None else max_end, start)

    def _no_header(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        """Return the failure of a call without a name, or None if more text may complete the header."""
        position, opening_tags = self._start, self._opening_tags
        rest = text[position:]
        first = next((index for index, head in enumerate(opening_tags) if rest.startswith(head)), None)
        if first is None:
            is_incomplete = any(head.startswith(rest) for head in opening_tags)
            return None if is_incomplete else ScanFailure(position + 1, "the call has no tool name")
        for head in opening_tags[first:]:
            rest = text[position:]
            if not rest.startswith(head):
                return (
                    None if head.startswith(rest) else ScanFailure(position, f"the call has no {head} with a tool name")
                )
            position = skip_whitespace(text, position + len(head))
        rest = text[position:].removeprefix(self._quote)
        name_end = "".join(self._context.tool_format.name_end.split()).removeprefix(self._quote)
        match = re.compile(_NAME).match(rest)
        tail = "" if match is None else rest[match.end() :].removeprefix(self._quote).strip()
        if rest and (match is None or (tail and not name_end.startswith(tail) and not tail.startswith(name_end))):
            return ScanFailure(position, f"{rest[:80]!r} is not a tool name")
        return None

    def _may_start(self, text: str, start: int) -> bool:
        """Return whether the text at a position may be a parameter or the end of the call."""
        rest = text[start : start + MAX_HEADER]
        words = (self._context.tool_format.parameter_begin.split()[0], self._closing_tags[0])
        return any(rest.startswith(word) or word.startswith(rest) for word in words)

    def _max_call_end(self, text: str) -> int | None:
        """Return the maximum end position of the call; None if further text may belong to the call."""
        names, position = self._context.tool_names, max(self._body, self._searched - MAX_HEADER)
        special = text.find(self._special_end, self._body) if self._special_end else -1
        limit = len(text) if special < 0 else special + len(self._special_end)
        for match in self._call_start.finditer(text, position, limit):
            is_incomplete = match.end() == len(text) and not self._context.tool_format.name_end.strip()
            if is_incomplete:
                continue
            if names is not None and match[1] not in names and not self._matches_template(text, match):
                continue
            ends = [closed.end() for closed in self._closed_parameter.finditer(text, self._body, match.start())]
            empty = self._closed.match(text, skip_whitespace(text, self._body), match.start())
            if ends:
                return ends[-1]
            if empty is not None:
                return empty.end()
        self._searched = len(text)
        return None if special < 0 else limit

    def _matches_template(self, text: str, match: re.Match[str]) -> bool:
        """Return whether the start of a call matches the text of the chat template exactly."""
        found = self._template_start.search(text, match.start())
        return found is not None and found.start() < match.end()

    def _parsed(self, text: str, max_end: int, start: int) -> FoundCalls | ScanFailure | None:
        if text.startswith("{", start):
            return self._json_arguments(text, max_end, start)
        for gap in (_LINE_BREAKS, _ANY_WHITESPACE, ""):
            found = self._parameters(text, max_end, start, gap)
            if found is not None:
                values, end = found
                if (
                    gap != _LINE_BREAKS
                    and max_end == len(text)
                    and text[end:].strip() != self._context.tool_format.section_end.strip()
                ):
                    break  # the end tag may be part of a truncated argument
                call = FunctionCall(self._name, values)
                return FoundCalls(end, (call,), is_finished=True)
        if max_end < len(text) or text.rstrip().endswith(
            (self._closing_tags[-1], *self._context.tool_format.end_markers)
        ):
            return ScanFailure(start, f"the parameters of {self._name} cannot be parsed: {text[start : start + 80]!r}")
        if start < len(text) and not self._may_start(text, start):
            return ScanFailure(start, f"{text[start : start + 80]!r} is not a parameter")
        return None

    def _json_arguments(self, text: str, max_end: int, start: int) -> FoundCalls | ScanFailure | None:
        scanner = JsonValueScanner(start)
        try:
            end = scanner.scan(text[:max_end])
        except ValueError as error:
            return ScanFailure(scanner.position, f"the arguments of {self._name} are not valid JSON: {error}")
        if end is None:
            return None
        closed = re.compile(_ANY_WHITESPACE + self._call_end[_ANY_WHITESPACE].pattern).match(text, end)
        value = parse_json_or_python(self._context.restore(text[start:end]))
        return FoundCalls(end if closed is None else closed.end(), (create_call(self._name, value),), is_finished=True)

    def _parameters(self, text: str, max_end: int, position: int, gap: str) -> tuple[dict[str, Any], int] | None:
        """Return the arguments and the end of the call; None if the arguments cannot be parsed.

        `gap`: expression for the text between the end tags of a parameter and of the call.
        """
        values, known = dict[str, Any](), self._schema.known_names
        gaps, call_end = re.compile(gap or _LINE_BREAKS), self._call_end[gap]
        while True:
            position = skip_whitespace(text, position)
            if not values or position < max_end:
                closed = call_end.match(text, position, max_end)
                if closed is not None:
                    return values, closed.end()
            opened = self._parameter.match(text, position, max_end)
            if opened is None:
                return None
            key = opened[1]
            ended = self._value_end(text, opened, max_end, gaps, call_end, {key, *values}, known)
            if ended is None:
                return None
            value_end, position = ended
            value = text[opened.end() : value_end]
            if self._context.tool_format.key_end.endswith(">\n"):
                value = value.removeprefix("\n")
                value = value if text[value_end] == "\n" else value.removesuffix("\n")
            if self._context.tool_format.nested:
                values[key] = self._schema.convert_elements(key, self._elements(value, MAX_LEVELS))
                continue
            character_data = _CHARACTER_DATA.fullmatch(value) if self._context.tool_format.character_data else None
            value = self._context.restore(value if character_data is None else character_data[1])
            values[key] = value if opened[2] == "true" else self._schema.convert(key, value)

    def _elements(self, text: str, max_levels: int) -> Elements:
        """Return the elements of an object or a list in a format with nested parameters.

        Text that is not a sequence of elements is returned unchanged.
        """
        elements, position = list[tuple[str, Elements]](), skip_whitespace(text, 0)
        while position < len(text):
            opened = self._parameter.match(text, position) if max_levels else None
            ended = None if opened is None else self._element_end(text, opened, len(text))
            if opened is None or ended is None:
                return self._context.restore(text)
            content = self._elements(text[opened.end() : ended[0]], max_levels - 1)
            elements.append((self._context.restore(opened[1]), content))
            position = skip_whitespace(text, ended[1])
        return elements or self._context.restore(text)

    def _element_end(self, text: str, opened: re.Match[str], max_end: int) -> tuple[int, int] | None:
        """Return the end of an element's content and the end of the element; None if the closing tag is missing."""
        close_tag = self._context.tool_format.parameter_end.replace("{key}", opened[1])
        depth = 1
        for tag in re.compile(f"{re.escape(opened[0])}|{re.escape(close_tag)}").finditer(text, opened.end(), max_end):
            depth += 1 if tag[0] == opened[0] else -1
            if depth == 0:
                return tag.span()
        return None

    def _starts_with_line_break(self, text: str, start: int) -> bool:
        """Return whether the format writes line breaks around values and the value starts with a line break."""
        return self._context.tool_format.key_end.endswith(">\n") and text.startswith("\n", start)

    def _value_end(
        self,
        text: str,
        opened: re.Match[str],
        max_end: int,
        gap: re.Pattern[str],
        call_end: re.Pattern[str],
        used: set[str],
        known: frozenset[str] | None,
    ) -> tuple[int, int] | None:
        """Return the end of a value and the position after its closing tag; None if the closing tag is missing."""
        if self._context.tool_format.nested and self._parameter.match(
            text, skip_whitespace(text, opened.end()), max_end
        ):
            ended = self._element_end(text, opened, max_end)  # an element within the value may have the same name
            if ended is not None:
                return ended
        close = self._close.replace("{key}", opened[1])
        writes_lines = self._context.tool_format.key_end.endswith(">\n")
        has_lines = self._starts_with_line_break(text, opened.end()) and gap.pattern == _LINE_BREAKS
        last = None
        at = text.find(close, opened.end(), max_end)
        while at >= 0:
            is_line = has_lines and text[at - 1] == "\n"
            begin, after = at - 1 if is_line else at, at + len(close)
            following = gap.match(text, after, max_end)
            position = after if following is None else following.end()
            opens = self._parameter.match(text, position, max_end)
            # A model may omit the line break before the tag. Only the schema distinguishes this from an argument
            # that contains the tags.
            may_end = is_line or not has_lines if known is None else opens is not None and opens[1] in known
            if opens is not None and opens[1] not in used and may_end:
                return begin, after
            if opens is not None and (is_line or not writes_lines) and text[after:position] == self._template_gap:
                return begin, after
            if (is_line or not has_lines) and call_end.match(text, position, max_end):
                last = begin, after
            at = text.find(close, at + 1, max_end)
        return last


# --- Python syntax ----------------------------------------------------------------------------------------------------


class BracketScanner:
    """Scanner that finds the bracket that closes the first bracket of a text with nested brackets and strings.

    Published chat templates do not escape delimiters within strings. Therefore a delimiter ends a string only if the
    text after the delimiter continues the list of arguments.

    **Arguments:**

    - `start`: position of the opening bracket.
    - `quotes`: delimiters of strings.
    - `escapes`: a backslash escapes the next character of a string.
    - `unambiguous`: a delimiter always ends a string, because the delimiters are special tokens.
    """

    _PAIRS: ClassVar[Mapping[str, str]] = {"(": ")", "[": "]", "{": "}"}

    def __init__(self, start: int, quotes: Sequence[str], *, escapes: bool, unambiguous: bool = False):
        self.position, self._quotes = start, sorted(quotes, key=len, reverse=True)
        self._escapes, self._unambiguous, self._stack, self._quote = escapes, unambiguous, list[str](), ""
        self.strings = list[tuple[int, int, str]]()  # (start, end, delimiter) of each string
        self._string_start = 0
        quote_starts = "".join(sorted({quote[0] for quote in quotes}))
        self._delimiters = re.compile(f"[()\\[\\]{{}}{re.escape(quote_starts)}]")

    def scan(self, text: str) -> int | None:
        """Return the position after the closing bracket; None if more text is needed.

        Raises ValueError for brackets that do not match.
        """
        while True:
            if self._quote and not self._skip_string(text):
                return None
            match = self._delimiters.search(text, self.position)
            if match is None:
                self.position = len(text)
                return None
            character, at = match[0], match.start()
            self.position = at
            rest = text[at : at + len(self._quotes[0])]
            if any(quote.startswith(rest) and quote != rest for quote in self._quotes) and at + len(rest) == len(text):
                return None
            quote = next((quote for quote in self._quotes if rest.startswith(quote)), "")
            if quote:
                self._quote, self._string_start, self.position = quote, at, at + len(quote)
            elif character in self._PAIRS:
                if len(self._stack) >= MAX_LEVELS:
                    raise ValueError(f"more than {MAX_LEVELS} levels of lists and objects")
                self._stack.append(self._PAIRS[character])
                self.position += 1
            elif character in self._PAIRS.values():
                if not self._stack or self._stack.pop() != character:
                    raise ValueError(f"unexpected {text[at : at + 20]!r}")
                self.position += 1
                if not self._stack:
                    return self.position
            else:
                self.position += 1

    def argument_starts(self, text: str, opened: int) -> list[int]:
        """Return the start positions of the arguments of the call whose bracket opens at `opened`.

        An argument starts after the opening bracket and after each comma outside strings and inner brackets.
        """
        starts, depth, strings = list[int](), 0, iter(self.strings)
        limit = self._string_start if self._quote else self.position
        first, last, _ = next(strings, (limit, limit, ""))
        position = opened
        while position < limit:
            if position == first:
                position = last
                first, last, _ = next(strings, (limit, limit, ""))
                continue
            character = text[position]
            position += 1
            depth += (character in "([{") - (character in ")]}")
            if depth == 1 and character in "([{," and (character == "," or position == opened + 1):
                starts.append(position)
        return starts

    def _skip_string(self, text: str) -> bool:
        """Skip the rest of a string. Returns False if more text is needed."""
        quote = self._quote
        while True:
            at = text.find(quote, self.position)
            slash = text.find("\\", self.position, None if at < 0 else at) if self._escapes else -1
            if slash >= 0:
                if slash + 1 >= len(text):
                    return False
                self.position = slash + 2
                continue
            if at < 0:
                self.position = max(self.position, len(text) - len(quote) + 1)
                return False
            end = at + len(quote)
            if not self._unambiguous and len(quote) != 3:
                following = skip_whitespace(text, end)
                if following >= len(text):
                    self.position = at
                    return False
                if text[following] not in ",)]}:":
                    self.position = at + 1
                    continue
            self.strings.append((self._string_start, end, quote))
            self.position, self._quote = end, ""
            return True


class PythonCallScanner:
    """Scanner of calls in Python syntax, in a list or one after another.

    **Arguments:**

    - `context`: format and tools of the output.
    - `start`: position after the marker.
    - `without_marker`: the calls have no start marker. The first call must call an offered tool.
    """

    def __init__(self, context: ScannerContext, start: int, *, without_marker: bool = False):
        self._context, self._position, self._without_marker = context, start, without_marker
        self._in_list, self._num_calls = False, 0
        self._name, self._opened = "", -1
        self._brackets: BracketScanner | None = None

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        if self._brackets is None:
            started = self._open(text, final=final)
            if not isinstance(started, BracketScanner):
                return started
            self._brackets = started
        try:
            end = self._brackets.scan(text)
        except ValueError as error:
            return ScanFailure(self._brackets.position, f"the arguments of {self._name} cannot be parsed: {error}")
        if end is None:
            return None
        part = self._call(text, self._opened, end, self._brackets)
        self._brackets, self._position = None, end
        self._num_calls += 1
        return FoundCalls(end, (part,), is_finished=False)

    def _open(self, text: str, *, final: bool) -> BracketScanner | FoundCalls | ScanFailure | None:
        """Return the scanner of the next call's arguments, or the result of `scan` if there is no next call yet."""
        position = skip_whitespace(text, self._position)
        if self._num_calls == 0 and not self._in_list and text.startswith("[", position):
            self._in_list, self._position = True, position + 1
            position = skip_whitespace(text, self._position)
        if self._num_calls:
            position += text.startswith((",", ";"), position)
            position = skip_whitespace(text, position)
        if position >= len(text):
            return FoundCalls(self._position, (), is_finished=True) if final and self._num_calls else None
        if self._in_list and text[position] == "]":
            if self._num_calls == 0 and self._without_marker:
                return ScanFailure(position, "the list has no call")
            return FoundCalls(position + 1, (), is_finished=True)
        match = re.compile(rf"({_NAME})\s*").match(text, position)
        rest = "" if match is None else text[match.end() :]
        names = self._context.tool_names
        if (
            match is not None
            and not rest
            and (not self._without_marker or self._may_be_name(match[1], names))
            and not final
        ):
            return None
        if match is None or not rest.startswith("("):
            if self._num_calls and not self._in_list:
                return FoundCalls(self._position, (), is_finished=True)
            if match is not None and not rest and not (self._without_marker and not self._num_calls):
                return None
            return ScanFailure(position, f"{text[position : position + 80]!r} is not a call")
        if self._without_marker and names is not None and match[1] not in names:
            return ScanFailure(position, f"the tool {match[1]!r} is not offered")
        self._name, self._opened = match[1], match.end()
        return BracketScanner(match.end(), PYTHON_QUOTES, escapes=True)

    @staticmethod
    def _may_be_name(word: str, names: frozenset[str] | None) -> bool:
        return names is None or any(name.startswith(word) for name in names)

    def _call(self, text: str, start: int, end: int, brackets: BracketScanner) -> FunctionCall | str:
        """Return the call whose brackets are at `start:end`, or the reason why it cannot be parsed.

        Parameters may have names that are not valid in Python, such as `from` and `my-key`. Therefore parameters are
        renamed to `k0`, `k1`, … and strings are replaced with their escaped values before the text is parsed as Python.
        """
        replaced, keys = list[tuple[int, int, str]](), list[str]()
        for first, last, quote in brackets.strings:
            body = text[first + len(quote) : last - len(quote)]
            prefix = text[first - 1] if text[first - 1] in "rRuU" and not text[first - 2].isalnum() else ""
            value = body if prefix in ("r", "R") else _string(body, quote)
            replaced.append((first - len(prefix), last, repr(self._context.restore(value))))
        for position in brackets.argument_starts(text, start):
            match = _KEYWORD.match(text, position, end)
            if match is not None:
                replaced.append((position, match.end(), f"k{len(keys)}="))
                keys.append(self._context.restore(match[1]))
        pieces, position = ["f"], start
        for first, last, piece in sorted(replaced):
            pieces += text[position:first], piece
            position = last
        source = "".join(pieces) + text[position:end]
        source = re.sub(r"[\r\n]+", " ", source)  # strings are escaped
        schema = self._context.schema(self._name)
        try:
            node = parse_expression(source)
            if not isinstance(node, ast.Call):
                raise ValueError("not a call")
            if len(node.args) > len(schema.names):
                raise ValueError("too many positional arguments")
            values = dict(zip(schema.names, map(evaluate_literal, node.args), strict=False))
            positional = set(values)
            for keyword in node.keywords:
                value = evaluate_literal(keyword.value)
                if keyword.arg is None and not isinstance(value, dict):
                    raise ValueError("`**` needs a dictionary")
                for key, member in value.items() if keyword.arg is None else [(keys[int(keyword.arg[1:])], value)]:
                    if key in positional:
                        raise ValueError(f"two values for {key}")
                    values[key] = member
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            return f"the arguments of {self._name} cannot be parsed: {error}"
        return FunctionCall(self._name, {key: schema.convert_string(key, value) for key, value in values.items()})


def _string(body: str, quote: str) -> str:
    """Return the value of a string literal in Python or JSON, in which delimiters may be unescaped."""
    source = body.replace("\r\n", "\n").replace("\n", "\\n").replace("\r", "\\r") if len(quote) == 1 else body
    if len(quote) == 1:
        source = re.sub(
            rf"\\(.)|{quote}", lambda match: match[0] if match[1] else "\\" + quote, source, flags=re.DOTALL
        )
    try:
        return evaluate_literal(parse_expression(quote + source + quote))
    except (ValueError, SyntaxError, MemoryError):
        return body


# --- Gemma's syntax ---------------------------------------------------------------------------------------------------


class GemmaCallScanner:
    """Scanner of one call `call:name{key:value}`, in which strings are enclosed in the format's `quote` marker.

    **Arguments:**

    - `context`: format and tools of the output.
    - `start`: position after the marker.
    """

    def __init__(self, context: ScannerContext, start: int):
        self._context, self._start = context, start
        self._name, self._brackets, self._opened = "", None, 0

    def scan(self, text: str, *, final: bool) -> FoundCalls | ScanFailure | None:
        if self._brackets is None:
            position = skip_whitespace(text, self._start)
            rest = text[position:]
            if "call:".startswith(rest):
                return None
            match = re.compile(rf"call:\s*({_NAME})\s*").match(text, position)
            if match is None and rest.startswith("call:") and not rest[5:].strip():
                return None
            if match is not None and match.end() == len(text) and not final:
                return None
            if match is None or not text.startswith("{", match.end()):
                if final and match is not None and match.end() == len(text):
                    return None
                return ScanFailure(position, f"{rest[:80]!r} is not a call of the form call:name{{…}}")
            self._name, self._opened = match[1].rstrip(":"), match.end()
            quote = self._context.tool_format.quote
            is_unambiguous = self._context.contains_special_token(quote)
            self._brackets = BracketScanner(match.end(), (quote,), escapes=False, unambiguous=is_unambiguous)
        try:
            end = self._brackets.scan(text)
            if end is None:
                return None
            strings = {start: stop for start, stop, _ in self._brackets.strings}
            arguments, stop = self._value(text, self._opened, strings)
            if stop != end or not isinstance(arguments, dict):
                raise ValueError(f"unexpected {text[stop : stop + 20]!r}")
        except (ValueError, RecursionError) as error:
            return ScanFailure(self._brackets.position, f"the arguments of {self._name} cannot be parsed: {error}")
        schema = self._context.schema(self._name)
        values = {key: schema.convert_string(key, value) for key, value in arguments.items()}
        return FoundCalls(end, (FunctionCall(self._name, values),), is_finished=True)

    def _value(self, text: str, position: int, strings: Mapping[int, int]) -> tuple[Any, int]:
        """Return the value at a position and the position after it. `strings`: ends of the strings by start."""
        position, quote = skip_whitespace(text, position), self._context.tool_format.quote
        if position in strings:
            end = strings[position]
            return self._context.restore(text[position + len(quote) : end - len(quote)]), end
        if text[position] == "[":
            members, position = [], skip_whitespace(text, position + 1)
            while text[position] != "]":
                member, position = self._value(text, position, strings)
                members.append(member)
                position = self._skip_comma(text, position, "]")
            return members, position + 1
        if text[position] == "{":
            values, position = dict[str, Any](), skip_whitespace(text, position + 1)
            while text[position] != "}":
                key, position = self._key(text, position, strings)
                values[key], position = self._value(text, position, strings)
                position = self._skip_comma(text, position, "}")
            return values, position + 1
        match = re.compile(r"[^,\]}\[{]*").match(text, position)
        word = "" if match is None else match[0]
        return parse_untyped_value(word.strip()), position + len(word)

    def _key(self, text: str, position: int, strings: Mapping[int, int]) -> tuple[str, int]:
        if position in strings:
            key, position = self._value(text, position, strings)
            position = skip_whitespace(text, position)
        else:
            quoted = re.compile(r'"([^"\n]*)"\s*(?=:)').match(text, position)
            at = text.find(":", position) if quoted is None else quoted.end()
            key, position = (text[position:at].strip().strip('"') if quoted is None else quoted[1]), at
            if at < 0 or "\n" in key or self._context.contains_special_token(key):
                raise ValueError("a key has no value")
        if not text.startswith(":", position):
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        return key, position + 1

    @staticmethod
    def _skip_comma(text: str, position: int, end: str) -> int:
        position = skip_whitespace(text, position)
        if text.startswith(",", position):
            return skip_whitespace(text, position + 1)
        if not text.startswith(end, position):
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        return position


def create_scanner(context: ScannerContext, text: str, start: int, marker: str, *, final: bool) -> CallScanner | None:
    """Return the scanner of the calls that start at a position; None if more text is needed to select it.

    `marker`: the marker at this position; empty for calls without a marker.
    """
    tool_format, after = context.tool_format, start + len(marker)
    if tool_format.syntax == "xml":
        return XmlCallScanner(context, start)
    if tool_format.syntax == "python":
        head = text[after : after + MAX_HEADER].replace("[", " ", 1).lstrip()
        if marker and not head and not final:
            return None
        if marker and head.startswith("{"):  # LFM2 and Llama 4 also write calls as JSON
            return JsonCallScanner(context, after)
        return PythonCallScanner(context, after, without_marker=not marker)
    if tool_format.syntax == "gemma":
        return GemmaCallScanner(context, after)
    if marker and (tool_format.syntax == "named_json" or tool_format.id_marker):
        position = skip_whitespace(text, after)
        rest = text[position:]
        if (
            any(known.startswith(rest) for known in (*tool_format.start_markers, *tool_format.inner_markers))
            and not final
        ):
            return None
        inner = next((begin for begin in tool_format.start_markers if rest.startswith(begin)), "")
        if rest.startswith(("{", "[")) and not rest.startswith(tool_format.inner_markers):
            return JsonCallScanner(context, after)
        return NamedJsonCallScanner(context, position + len(inner) if inner else after)
    return JsonCallScanner(context, after - marker.endswith("["), without_marker=not marker)
