"""Incremental scanners of tool calls: each finds the end of one call in text that comes in pieces.

A scanner gets the text from the start of the calls on, which grows between calls of `scan`. It continues where it
stopped, so that the time for long arguments is linear. What it returns depends on the text alone, and not on the
pieces in which it comes.
"""

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.io.text.answers.arguments import (
    MAX_LEVELS,
    SPELLINGS,
    ToolSchema,
    literal,
    parse_expression,
    parse_json,
    parse_json_or_python,
)
from eqx_decoders.io.text.answers.formats import FunctionCall, ToolCallFormat, functions_of


MAX_HEADER = 512  # characters from the marker of a call to its arguments
_BLANK = re.compile(r"\s*")
_BLANKS, _LINES = r"\s*", r"[\r\n]*"
_NAME = r"[^\s<>\[\](){}\"'`=,;|｜]+"
_WORD = re.compile(r"[^\s\[\]{}:,\"']+")
_JSON_WORDS = re.compile(r"true|false|null|True|False|None|NaN|-?Infinity|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_PREFIX = re.compile(r"-?[0-9.eE+-]*|[a-zA-Z]*|-[a-zA-Z]*")
_KEYWORD = re.compile(r"\s*([^=()\[\]{},\"'\s][^=()\[\]{},\"'\r\n]*?)\s*=(?!=)")
_TEXT = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}


class Found(NamedTuple):
    """Calls found in a text: they end at `end`. For a call that cannot be read, `parts` has the reason."""

    end: int
    parts: tuple[FunctionCall | str, ...]
    closed: bool  # no call can follow without a marker


class Failed(NamedTuple):
    """The text at `position` is no call; the call that cannot be read starts at `start`."""

    start: int
    position: int
    reason: str


@runtime_checkable
class CallScanner(Protocol):
    """Scanner of calls after a marker."""

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        """Return the next calls, or None if more text is needed. `final`: no more text comes."""
        ...


@dataclasses.dataclass(frozen=True)
class Context:
    """What scanners need to know.

    **Arguments:**

    - `row`: the format, with its markers as they are in the text.
    - `tools`: descriptions of the offered tools.
    - `placeholders`: names of special tokens by the characters that stand for them in the text.
    """

    row: ToolCallFormat
    tools: Sequence[Mapping[str, Any]] = ()
    placeholders: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def names(self) -> frozenset[str] | None:
        """Names of the offered tools; None: unknown."""
        return frozenset(function["name"] for function in functions_of(self.tools)) if self.tools else None

    def restore(self, text: str) -> str:
        """Replace the placeholders of special tokens in a text by their names."""
        return restore_names(text, self.placeholders)

    def schema(self, name: str) -> ToolSchema:
        """Return the parameters of a tool."""
        return ToolSchema(self.tools, name)


def skip_blanks(text: str, position: int) -> int:
    """Return the position of the next character that is no white space."""
    match = _BLANK.match(text, position)
    return position if match is None else match.end()


def partial_match(text: str, words: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may be the start of a word."""
    longest = min(max(map(len, words), default=1) - 1, len(text))
    endings = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(ending) for ending in endings if any(word.startswith(ending) for word in words)), 0)


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and the marker; None if the text has no marker.

    Of several markers at the same position, the longest is returned.
    """
    found = [(position, -len(marker), marker) for marker in markers if (position := text.find(marker)) >= 0]
    if not found:
        return None
    position, _, marker = min(found)
    return position, marker


def restore_names(text: str, names: Mapping[str, str]) -> str:
    """Replace the placeholders of special tokens in a text. `names`: replacements by placeholder."""
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text


# --- JSON -------------------------------------------------------------------------------------------------------------


class JsonScanner:
    """Scanner of one JSON object or list: it finds its end, or the first character that cannot be JSON.

    Texts may have line breaks, and may be enclosed in single quotes, as in Python.
    """

    def __init__(self, start: int):
        self.start = self.position = start
        self._stack, self._quote = list[str](), ""
        self._expects = "value"  # or: first_value, key, first_key, colon, comma

    def scan(self, text: str) -> int | None:
        """Return the end of the value; None if more text is needed. Raises ValueError for what is no JSON."""
        while True:
            if self._quote:
                if not self._skip_string(text):
                    return None
                self._after_value()
            self.position = skip_blanks(text, self.position)
            if self.position >= len(text):
                return None
            if not self._step(text, text[self.position]):
                return None
            if not self._stack and not self._quote:
                return self.position

    def _skip_string(self, text: str) -> bool:
        match = _TEXT[self._quote].match(text, self.position)
        self.position = self.position if match is None else match.end()
        while self.position < len(text):
            if text[self.position] == self._quote:
                self.position, self._quote = self.position + 1, ""
                return True
            if self.position + 1 >= len(text):
                return False
            match = _TEXT[self._quote].match(text, self.position + 2)
            self.position = self.position + 2 if match is None else match.end()
        return False

    def _after_value(self) -> None:
        self._expects = "colon" if self._expects in ("key", "first_key") else "comma"

    def _step(self, text: str, letter: str) -> bool:
        expects, is_object = self._expects, bool(self._stack) and self._stack[-1] == "}"
        if letter in "]}" and self._stack and letter == self._stack[-1]:
            if expects not in ("comma", "first_value", "first_key"):
                raise self._error(text)
            self._stack.pop()
            self._expects = "comma"
        elif expects == "comma" and letter == ",":
            self._expects = "key" if is_object else "value"
        elif expects == "colon" and letter == ":":
            self._expects = "value"
        elif letter in "\"'" and expects not in ("comma", "colon") and self._stack:
            self._quote = letter
        elif letter in "{[" and expects in ("value", "first_value"):
            if len(self._stack) >= MAX_LEVELS:
                raise ValueError(f"arguments have more than {MAX_LEVELS} levels")
            self._stack.append("}" if letter == "{" else "]")
            self._expects = "first_key" if letter == "{" else "first_value"
        elif expects in ("value", "first_value") and self._stack:
            return self._skip_word(text)
        else:
            raise self._error(text)
        self.position += 1
        return True

    def _skip_word(self, text: str) -> bool:
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


class JsonCalls:
    """Scanner of calls that are JSON objects with a name and arguments, or lists of these.

    **Arguments:**

    - `start`: position after the marker.
    - `is_bare`: there is no marker: the first object must be a call of an offered tool.
    """

    def __init__(self, context: Context, start: int, *, is_bare: bool = False):
        self._context, self._position, self._is_bare = context, start, is_bare
        self._in_list, self._num_calls = False, 0
        self._value: JsonScanner | None = None

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        if self._value is None:
            started = self._start(text, final=final)
            if not isinstance(started, int):
                return started
            self._value = JsonScanner(started)
        start = self._value.start
        if self._is_bare and self._num_calls == 0 and not self._may_be_call(text, start):
            return Failed(start, start, "no such tool is offered")
        try:
            end = self._value.scan(text)
        except ValueError as error:
            return Failed(start, self._value.position, f"invalid JSON in tool call: {error}")
        if end is None:
            return None
        part = self._call(text[start:end])
        if self._is_bare and self._num_calls == 0 and isinstance(part, str):
            return Failed(start, end, part)
        self._value, self._position = None, end
        self._num_calls += 1
        return Found(end, (part,), closed=False)

    def _start(self, text: str, *, final: bool) -> Found | Failed | int | None:
        """Return where the next object starts, the end of the calls, or that there is none."""
        position = self._position
        while True:
            position = skip_blanks(text, position)
            if position >= len(text):
                return Found(self._position, (), closed=True) if final and self._num_calls else None
            letter = text[position]
            if letter == "{":
                return position
            if self._num_calls == 0 and letter == "[" and not self._in_list:
                self._in_list, self._position = True, position + 1
            elif self._num_calls == 0 and letter == "`" and not self._in_list:
                if len(text) < position + len("```json") and not final:
                    return None
                if not text.startswith("```", position):
                    break
                position += len("```json") if text.startswith("```json", position) else len("```")
                continue
            elif letter == "]" and self._in_list:
                return Found(position + 1, (), closed=True)
            elif self._num_calls and letter in ",;":
                pass
            else:
                break
            position += 1
        if self._num_calls:
            if self._in_list:
                return Failed(position, position, f"unexpected {text[position : position + 20]!r} in a list of calls")
            return Found(self._position, (), closed=True)
        return Failed(self._position, position, f"{text[position : position + 80]!r} is not a JSON object")

    def _may_be_call(self, text: str, start: int) -> bool:
        row, names = self._context.row, self._context.names
        known = {*row.name_keys, *row.argument_keys, "type", "id"}
        head = text[start : start + MAX_HEADER]
        first = re.match(r"\{\s*\"([^\"\\]*)\"", head)
        if first is not None and first[1] not in known:
            return False
        name = re.match(r"\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"([^\"\\]*)\"", head)
        return name is None or names is None or name[1] in names

    def _call(self, text: str) -> FunctionCall | str:
        value = parse_json_or_python(self._context.restore(text))
        row = self._context.row
        if not isinstance(value, dict):
            return f"{text[:80]!r} is not a JSON object"
        if not row.name_keys:
            if len(value) != 1:
                return f"{json.dumps(value)[:80]} must have one key, the name of the tool"
            ((name, arguments),) = value.items()
            return call_of(name, arguments)
        inner = value.get("function")
        value = inner if isinstance(inner, dict) else value
        name = next((value[key] for key in row.name_keys if isinstance(value.get(key), str)), None)
        if name is None:
            return f"{json.dumps(value)[:80]} has no name"
        if self._is_bare:
            names, allowed = self._context.names, {*row.name_keys, *row.argument_keys, "type", "id"}
            has_arguments = any(key in value for key in row.argument_keys)
            if names is not None and name not in names:
                return f"no tool of the name {name!r} is offered"
            if not value.keys() <= allowed or (names is None and not has_arguments):
                return f"{json.dumps(value)[:80]} is not a call"
        arguments = next((value[key] for key in row.argument_keys if key in value), {})
        return call_of(name, arguments)


def call_of(name: str, arguments: Any) -> FunctionCall | str:
    """Return a call; arguments may be missing, or JSON in a text. Returns the reason if they cannot be read."""
    if isinstance(arguments, str):  # as in OpenAI's API
        if not arguments.strip():
            return FunctionCall(name, {})
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name} are not valid JSON: {error}"
    if arguments is None:
        return FunctionCall(name, {})
    return (
        FunctionCall(name, arguments) if isinstance(arguments, dict) else f"the arguments of {name} are not an object"
    )


class NamedJsonCall:
    """Scanner of one call whose name stands before a JSON object with its arguments.

    **Arguments:**

    - `start`: position after the marker.
    """

    def __init__(self, context: Context, start: int):
        self._context, self._start = context, start
        row = context.row

        def part(text: str) -> str:
            return re.escape(next((key for key, name in context.placeholders.items() if name == text), text))

        separator = {
            "deepseek_v3": part("<｜tool▁sep｜>"),
            "deepseek_v31": part("<｜tool▁sep｜>"),
            "kimi_k2": part("<|tool_call_argument_begin|>"),
        }.get(row.name, part("[ARGS]"))
        before = {
            "deepseek_v3": rf"(?:\w*\s*{separator})?",
            "deepseek_v31": rf"(?:function\s*{separator})?",
            "kimi_k2": r"(?:functions\.)?",
        }.get(row.name, "")
        number = r"(?::[0-9]+)?" if row.name == "kimi_k2" else rf"(?:{part('[CALL_ID]')}\w+)?"
        fence = r"(?:```(?:json)?\s*)?"
        self._header = re.compile(rf"\s*{before}\s*({_NAME}?)\s*{number}\s*(?:{separator})?\s*{fence}")
        self._name = ""
        self._value: JsonScanner | None = None

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        row = self._context.row
        if self._value is None:
            first = text.find("{", self._start, self._start + MAX_HEADER)
            limit = len(text) if first < 0 else first
            ends = [at for end in (*row.ends, *row.begins) if (at := text.find(end, self._start, limit)) >= 0]
            if ends:
                header = self._header.fullmatch(text, self._start, min(ends))
                if header is None:
                    return Failed(self._start, min(ends), f"{text[self._start : min(ends)][:80]!r} is not a name")
                return Found(min(ends), (FunctionCall(header[1], {}),), closed=True)
            if first < 0:
                if len(text) - self._start >= MAX_HEADER:
                    return Failed(self._start, len(text), "it has no arguments")
                return None
            header = self._header.fullmatch(text, self._start, limit)
            if header is None:
                return Failed(self._start, limit, f"{text[self._start : limit][:80]!r} is not a name")
            self._name, self._value = header[1], JsonScanner(limit)
        try:
            end = self._value.scan(text)
        except ValueError as error:
            return Failed(
                self._start, self._value.position, f"the arguments of {self._name} are not valid JSON: {error}"
            )
        if end is None:
            return None
        value = parse_json_or_python(self._context.restore(text[self._value.start : end]))
        return Found(end, (call_of(self._name, value),), closed=True)


# --- parameters between tags ------------------------------------------------------------------------------------------


class XmlCall:
    """Scanner of one call whose arguments stand between tags.

    Values are not escaped. A value ends where the structure of the call goes on: before the next parameter, or before
    the end of the call. A parameter that the tool does not declare, or that occurs twice, must be written as the chat
    template writes it, with the same line breaks. The last of several possible ends counts: so a call ends where the
    next call starts, or the answer ends, unless special tokens mark its end. Calls of tools that are not offered must
    be written as the template writes them, too.

    **Arguments:**

    - `start`: position of the marker.
    """

    def __init__(self, context: Context, start: int):
        row = context.row
        self._context, self._start = context, start
        self._searched, self._body = start, -1
        self._name, self._schema = "", context.schema("")
        heads = f"{row.section_begin}{row.call_begin}".split()
        self._head = heads
        name_end = row.name_end.strip()
        quote = '"' if row.call_begin.endswith('"') else ""
        name = rf'"?({_NAME})"?' if quote else rf"({_NAME})"
        literal_end = re.escape(name_end.lstrip('"'))
        starts = [r"\s*".join(re.escape(text.rstrip('"')) for text in heads[at:]) for at in range(len(heads))]
        self._call_start = re.compile(rf"(?:{'|'.join(starts)})\s*{name}\s*{literal_end}")
        self._parameter = self._parameter_pattern(row)
        close = row.parameter_end.strip()
        self._close = close
        ends = row.call_end.split()
        self._ends = ends
        written_end = row.parameter_end + row.parameter_separator
        self._written_gap = written_end[len(written_end.rstrip()) :]
        self._written_start = re.compile(
            re.escape(row.call_begin) + rf"{_NAME}" + re.escape(row.name_end).replace(re.escape("{index}"), "[0-9]+")
        )
        self._call_end = {gap: re.compile(gap.join(map(re.escape, ends))) for gap in (_LINES, _BLANKS)}
        # a marker that is a special token cannot be a part of an argument
        self._special_end = next(
            (text for text in (*ends, *row.ends) if any("\ud800" <= x <= "\udfff" for x in text)), None
        )
        # some models leave out the tag around a call
        self._call_end[""] = re.compile(re.escape(ends[0]))
        last = f"(?:{_LINES}{_LINES.join(map(re.escape, ends[1:]))})?" if len(ends) > 1 else ""
        self._closed = re.compile(re.escape(ends[0]) + last)
        tag = "[^<>]*".join(map(re.escape, close.split("{key}")))
        self._closed_parameter = re.compile(tag + _LINES + self._closed.pattern)

    @staticmethod
    def _parameter_pattern(row: ToolCallFormat) -> re.Pattern[str]:
        is_quoted = row.parameter_begin.endswith('"')
        key = r'"?([^"<>\n]{1,256}?)"?' if is_quoted else r"([^<>\n/][^<>\n]{0,255}?)"
        begin = r"\s*".join(re.escape(text) for text in row.parameter_begin.rstrip('"').split())
        if "{string}" in row.key_end:
            return re.compile(rf"{begin}{key}(?:\s+string=\"?(true|false)\"?)?\s*>()")
        pieces = row.key_end.removeprefix('"' if is_quoted else "").split()
        return re.compile(rf"{begin}\s*{key}\s*" + r"\s*".join(map(re.escape, pieces)) + "()()")

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        if self._body < 0:
            header = self._call_start.match(text, self._start)
            if header is None or (not self._context.row.name_end.strip() and header.end() == len(text) and not final):
                return self._no_header(text, final=final)
            self._name = next(group for group in header.groups() if group is not None)
            self._body = self._searched = header.end()
            self._schema = self._context.schema(self._name)
        start = skip_blanks(text, self._body)
        if start < len(text) and not final and text[start] != "{" and not self._may_start(text, start):
            return Failed(self._start, start, f"{text[start : start + 80]!r} is not a parameter")
        extent = self._extent(text)
        if extent is None and not final:
            return None
        return self._parsed(text, len(text) if extent is None else extent, start)

    def _no_header(self, text: str, *, final: bool) -> Found | Failed | None:
        """Return that there is no header, or None if more text may complete it."""
        position, head = self._start, self._head
        at = next((at for at, word in enumerate(head) if text.startswith(word, position)), -1)
        if at < 0 and not any(
            word.startswith(text[position:]) or word.rstrip('"').startswith(text[position:]) for word in head
        ):
            return Failed(self._start, position + 1, "it has no name")
        for word in head[at:] if at >= 0 else ():
            if not text.startswith(word, position):
                rest = text[position:]
                if word.startswith(rest) and not final:
                    return None
                if final and word.startswith(rest):
                    return None
                return Failed(self._start, position, f"it has no {word} with a name")
            position = skip_blanks(text, position + len(word))
        rest = text[position:]
        pieces = "".join(self._context.row.name_end.split())
        match = re.compile(_NAME).match(text, position)
        tail = "" if match is None else text[match.end() :].strip()
        if rest and (match is None or (tail and not pieces.startswith(tail) and not tail.startswith(pieces))):
            return Failed(self._start, position, f"{rest[:80]!r} is not a name")
        return None

    def _may_start(self, text: str, start: int) -> bool:
        """Return whether parameters, or the end of the call, may stand at a position."""
        rest = text[start : start + MAX_HEADER]
        words = (self._context.row.parameter_begin.split()[0], self._ends[0])
        return any(rest.startswith(word) or word.startswith(rest) for word in words)

    def _extent(self, text: str) -> int | None:
        """Return the position after which the call certainly has ended; None if more text may belong to it."""
        names, position = self._context.names, max(self._body, self._searched - MAX_HEADER)
        special = -1 if self._special_end is None else text.find(self._special_end, self._body)
        limit = len(text) if special < 0 else special + len(self._special_end or "")
        for match in self._call_start.finditer(text, position, limit):
            name = next(group for group in match.groups() if group is not None)
            may_go_on = match.end() == len(text) and not self._context.row.name_end.strip()
            if may_go_on:
                continue
            if names is not None and name not in names and not self._is_written_start(text, match):
                continue
            ends = [closed.end() for closed in self._closed_parameter.finditer(text, self._body, match.start())]
            empty = self._closed.match(text, skip_blanks(text, self._body), match.start())
            if ends or empty is not None:
                return ends[-1] if ends else empty.end() if empty is not None else None
        self._searched = len(text)
        return None if special < 0 else limit

    def _is_written_start(self, text: str, match: re.Match[str]) -> bool:
        """Return whether the start of a call is written as the chat template writes it."""
        found = self._written_start.search(text, match.start())
        return found is not None and found.start() < match.end()

    def _parsed(self, text: str, extent: int, start: int) -> Found | Failed | None:
        if text.startswith("{", start):
            return self._json_arguments(text, extent, start)
        for gap in (_LINES, _BLANKS, ""):
            found = self._parameters(text, extent, start, gap)
            if found is not None:
                values, end = found
                if (
                    gap != _LINES
                    and extent == len(text)
                    and text[end:].strip() != self._context.row.section_end.strip()
                ):
                    break  # it may be a part of an argument that was cut off
                call = FunctionCall(self._name, values)
                return Found(end, (call,), closed=True)
        if extent < len(text) or text.rstrip().endswith((self._ends[-1], *self._context.row.ends)):
            reason = f"the parameters of {self._name} cannot be read: {text[start : start + 80]!r}"
            return Failed(self._start, start, reason)
        if start < len(text) and not self._may_start(text, start):
            return Failed(self._start, start, f"{text[start : start + 80]!r} is not a parameter")
        return None

    def _json_arguments(self, text: str, extent: int, start: int) -> Found | Failed | None:
        scanner = JsonScanner(start)
        try:
            end = scanner.scan(text[:extent])
        except ValueError as error:
            return Failed(self._start, scanner.position, f"the arguments of {self._name} are not valid JSON: {error}")
        if end is None:
            return None
        closed = re.compile(_BLANKS + self._call_end[_BLANKS].pattern).match(text, end)
        value = parse_json_or_python(self._context.restore(text[start:end]))
        return Found(end if closed is None else closed.end(), (call_of(self._name, value),), closed=True)

    def _parameters(self, text: str, extent: int, position: int, gap: str) -> tuple[dict[str, Any], int] | None:
        """Return the arguments and the end of the call; None if they cannot be read."""
        values, known = dict[str, Any](), self._schema.known_names
        gaps, call_end = re.compile(gap or _LINES), self._call_end[gap]
        while True:
            position = skip_blanks(text, position)
            if not values or position < extent:
                closed = call_end.match(text, position, extent)
                if closed is not None:
                    return values, closed.end()
            opened = self._parameter.match(text, position, extent)
            if opened is None:
                return None
            key = opened[1]
            ended = self._value_end(text, opened, extent, gaps, call_end, {key, *values}, known)
            if ended is None:
                return None
            value_end, position = ended
            value = text[opened.end() : value_end]
            if self._has_lines(text, opened.end()):
                value = value[1:]
            value = self._context.restore(value)
            values[key] = value if opened[2] == "true" else self._schema.convert(key, value)

    def _has_lines(self, text: str, start: int) -> bool:
        """Return whether the value stands on lines of its own, where the format writes it so."""
        return self._context.row.key_end.endswith(">\n") and text.startswith("\n", start)

    def _value_end(
        self,
        text: str,
        opened: re.Match[str],
        extent: int,
        gap: re.Pattern[str],
        call_end: re.Pattern[str],
        used: set[str],
        known: frozenset[str] | None,
    ) -> tuple[int, int] | None:
        """Return the end of a value, and the position after its closing tag."""
        close = self._close.replace("{key}", opened[1])
        closes = f"\n{close}" if self._has_lines(text, opened.end()) and gap.pattern == _LINES else close
        last = None
        at = text.find(closes, opened.end(), extent)
        while at >= 0:
            after = at + len(closes)
            following = gap.match(text, after, extent)
            position = after if following is None else following.end()
            opens = self._parameter.match(text, position, extent)
            if opens is not None and opens[1] not in used and (known is None or opens[1] in known):
                return at, after
            is_line = closes.startswith("\n") or not self._context.row.key_end.endswith(">\n")
            if opens is not None and is_line and text[after:position] == self._written_gap:
                return at, after
            if call_end.match(text, position, extent):
                last = at, after
            at = text.find(closes, at + 1, extent)
        return last


# --- calls in the syntax of Python ------------------------------------------------------------------------------------


class BracketScanner:
    """Scanner of text in brackets with strings: it finds the end of the first bracket.

    A string ends at its delimiter where the text after it continues the list of arguments: published templates do not
    escape delimiters within strings.

    **Arguments:**

    - `start`: position of the opening bracket.
    - `quotes`: delimiters of strings.
    - `certain`: delimiters that are special tokens, which always end a string.
    """

    _PAIRS: ClassVar[Mapping[str, str]] = {"(": ")", "[": "]", "{": "}"}

    def __init__(self, start: int, quotes: Sequence[str], *, escapes: bool, certain: bool = False):
        self.position, self._quotes = start, sorted(quotes, key=len, reverse=True)
        self._escapes, self._certain, self._stack, self._quote = escapes, certain, list[str](), ""
        self.strings = list[tuple[int, int, str]]()  # start, end and delimiter
        self._string_start = 0
        letters = "".join(sorted({quote[0] for quote in quotes}))
        self._special = re.compile(f"[()\\[\\]{{}}{re.escape(letters)}]")

    def scan(self, text: str) -> int | None:
        """Return the end of the brackets; None if more text is needed. Raises ValueError for brackets that differ."""
        while True:
            if self._quote and not self._skip_string(text):
                return None
            match = self._special.search(text, self.position)
            if match is None:
                self.position = len(text)
                return None
            letter, at = match[0], match.start()
            self.position = at
            rest = text[at : at + len(self._quotes[0])]
            if any(quote.startswith(rest) and quote != rest for quote in self._quotes) and at + len(rest) == len(text):
                return None
            quote = next((quote for quote in self._quotes if rest.startswith(quote)), "")
            if quote:
                self._quote, self._string_start, self.position = quote, at, at + len(quote)
            elif letter in self._PAIRS:
                if len(self._stack) >= MAX_LEVELS:
                    raise ValueError(f"arguments have more than {MAX_LEVELS} levels")
                self._stack.append(self._PAIRS[letter])
                self.position += 1
            elif letter in self._PAIRS.values():
                if not self._stack or self._stack.pop() != letter:
                    raise ValueError(f"unexpected {text[at : at + 20]!r}")
                self.position += 1
                if not self._stack:
                    return self.position
            else:
                self.position += 1

    def argument_starts(self, text: str, opened: int) -> list[int]:
        """Return the positions at which arguments start: after the opening bracket, and after each comma that is
        within no string and no other bracket. A string that does not end has no arguments after it.
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
            letter = text[position]
            position += 1
            depth += (letter in "([{") - (letter in ")]}")
            if depth == 1 and letter in "([{," and (letter == "," or position == opened + 1):
                starts.append(position)
        return starts

    def _skip_string(self, text: str) -> bool:
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
            if not self._certain and len(quote) != 3:
                following = skip_blanks(text, end)
                if following >= len(text):
                    self.position = at
                    return False
                if text[following] not in ",)]}:":
                    self.position = at + 1
                    continue
            self.strings.append((self._string_start, end, quote))
            self.position, self._quote = end, ""
            return True


class PythonCalls:
    """Scanner of calls in the syntax of Python: in a list, or one after the other.

    **Arguments:**

    - `start`: position after the marker.
    - `is_bare`: there is no marker: the first call must be one of an offered tool.
    """

    def __init__(self, context: Context, start: int, *, is_bare: bool = False):
        self._context, self._position, self._is_bare = context, start, is_bare
        self._in_list, self._num_calls, self._start = False, 0, -1
        self._name, self._brackets = "", None

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        if self._brackets is None:
            started = self._open(text, final=final)
            if started is not None:
                return started
        if self._brackets is None:
            return None
        opened = self._opened
        try:
            end = self._brackets.scan(text)
        except ValueError as error:
            return Failed(
                self._start, self._brackets.position, f"the arguments of {self._name} cannot be read: {error}"
            )
        if end is None:
            return None
        part = self._call(text, opened, end, self._brackets)
        self._brackets, self._position = None, end
        self._num_calls += 1
        return Found(end, (part,), closed=False)

    def _open(self, text: str, *, final: bool) -> Found | Failed | None:
        """Start the next call, or return the end of the calls."""
        position = skip_blanks(text, self._position)
        if self._num_calls == 0 and not self._in_list and text.startswith("[", position):
            self._in_list, self._position = True, position + 1
            position = skip_blanks(text, self._position)
        if self._num_calls:
            position += text.startswith((",", ";"), position)
            position = skip_blanks(text, position)
        if position >= len(text):
            return Found(self._position, (), closed=True) if final and self._num_calls else None
        if self._in_list and text[position] == "]":
            if self._num_calls == 0 and self._is_bare:
                return Failed(position, position, "there is not a call")
            return Found(position + 1, (), closed=True)
        match = re.compile(rf"({_NAME})\s*").match(text, position)
        rest = "" if match is None else text[match.end() :]
        names = self._context.names
        if match is not None and not rest and (not self._is_bare or self._may_be_name(match[1], names)) and not final:
            return None
        if match is None or not rest.startswith("("):
            if self._num_calls and not self._in_list:
                return Found(self._position, (), closed=True)
            if match is not None and not rest and not (self._is_bare and not self._num_calls):
                return None
            return Failed(position, position, f"{text[position : position + 80]!r} is not a call")
        if self._is_bare and names is not None and match[1] not in names:
            return Failed(position, position, f"no tool of the name {match[1]!r} is offered")
        self._start, self._name, self._opened = position, match[1], match.end()
        self._brackets = BracketScanner(match.end(), ("'", '"', "'''", '"""'), escapes=True)
        return None

    @staticmethod
    def _may_be_name(word: str, names: frozenset[str] | None) -> bool:
        return names is None or any(name.startswith(word) for name in names)

    def _call(self, text: str, start: int, end: int, brackets: BracketScanner) -> FunctionCall | str:
        """Return the call with arguments from `start` to `end`.

        Parameters may have names that Python does not allow, such as `from` and `my-key`.
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
        source = re.sub(r"[\r\n]+", " ", source)  # strings have none any more
        schema = self._context.schema(self._name)
        try:
            node = parse_expression(source)
            if not isinstance(node, ast.Call):
                raise ValueError("not a call")
            if len(node.args) > len(schema.names):
                raise ValueError("too many positional arguments")
            values = dict(zip(schema.names, map(literal, node.args), strict=False))
            positional = set(values)
            for keyword in node.keywords:
                value = literal(keyword.value)
                if keyword.arg is None and not isinstance(value, dict):
                    raise ValueError("`**` needs a dictionary")
                for key, member in value.items() if keyword.arg is None else [(keys[int(keyword.arg[1:])], value)]:
                    if key in positional:
                        raise ValueError(f"two values for {key}")
                    values[key] = member
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            return f"the arguments of {self._name} cannot be read: {error}"
        return FunctionCall(self._name, {key: schema.check_text(key, value) for key, value in values.items()})


def _string(body: str, quote: str) -> str:
    """Return the value of a string in Python or JSON; delimiters within it need not be escaped."""
    source = body.replace("\r\n", "\n").replace("\n", "\\n").replace("\r", "\\r") if len(quote) == 1 else body
    if len(quote) == 1:
        source = re.sub(
            rf"\\(.)|{quote}", lambda match: match[0] if match[1] else "\\" + quote, source, flags=re.DOTALL
        )
    try:
        return literal(parse_expression(quote + source + quote))
    except (ValueError, SyntaxError, MemoryError):
        return body


# --- calls in the syntax of Gemma -------------------------------------------------------------------------------------


class GemmaCall:
    """Scanner of one call `call:name{key:value}`, in which strings are enclosed in a token."""

    def __init__(self, context: Context, start: int):
        self._context, self._start = context, start
        self._name, self._brackets, self._opened = "", None, 0
        quote = context.row.quote
        self._is_certain = any("\ud800" <= letter <= "\udfff" for letter in quote)

    def scan(self, text: str, *, final: bool) -> Found | Failed | None:
        if self._brackets is None:
            position = skip_blanks(text, self._start)
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
                return Failed(self._start, position, f"{rest[:80]!r} is not call:name{{…}}")
            self._name, self._opened = match[1].rstrip(":"), match.end()
            quotes = (self._context.row.quote,)
            self._brackets = BracketScanner(match.end(), quotes, escapes=False, certain=self._is_certain)
        try:
            end = self._brackets.scan(text)
            if end is None:
                return None
            arguments, stop = self._value(
                text, self._opened, {first: last for first, last, _ in self._brackets.strings}
            )
            if stop != end or not isinstance(arguments, dict):
                raise ValueError(f"unexpected {text[stop : stop + 20]!r}")
        except (ValueError, RecursionError) as error:
            return Failed(
                self._start, self._brackets.position, f"the arguments of {self._name} cannot be read: {error}"
            )
        schema = self._context.schema(self._name)
        values = {key: schema.check_text(key, value) for key, value in arguments.items()}
        return Found(end, (FunctionCall(self._name, values),), closed=True)

    def _value(self, text: str, position: int, strings: Mapping[int, int]) -> tuple[Any, int]:
        position, quote = skip_blanks(text, position), self._context.row.quote
        if position in strings:
            end = strings[position]
            return self._context.restore(text[position + len(quote) : end - len(quote)]), end
        if text[position] == "[":
            members, position = [], skip_blanks(text, position + 1)
            while text[position] != "]":
                member, position = self._value(text, position, strings)
                members.append(member)
                position = self._comma(text, position, "]")
            return members, position + 1
        if text[position] == "{":
            values, position = dict[str, Any](), skip_blanks(text, position + 1)
            while text[position] != "}":
                key, position = self._key(text, position, strings)
                values[key], position = self._value(text, position, strings)
                position = self._comma(text, position, "}")
            return values, position + 1
        match = re.compile(r"[^,\]}\[{]*").match(text, position)
        word = "" if match is None else match[0]
        try:
            value = parse_json(word.strip())
        except (ValueError, RecursionError):
            value = SPELLINGS[word.strip().lower()] if word.strip() in ("True", "False", "None") else word.strip()
        return value, position + len(word)

    def _key(self, text: str, position: int, strings: Mapping[int, int]) -> tuple[str, int]:
        if position in strings:
            key, position = self._value(text, position, strings)
            position = skip_blanks(text, position)
        else:
            quoted = re.compile(r'"([^"\n]*)"\s*(?=:)').match(text, position)
            at = text.find(":", position) if quoted is None else quoted.end()
            key, position = (text[position:at].strip().strip('"') if quoted is None else quoted[1]), at
            if at < 0 or "\n" in key:
                raise ValueError("a key has no value")
        if not text.startswith(":", position):
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        return key, position + 1

    @staticmethod
    def _comma(text: str, position: int, end: str) -> int:
        position = skip_blanks(text, position)
        if text.startswith(",", position):
            return skip_blanks(text, position + 1)
        if not text.startswith(end, position):
            raise ValueError(f"unexpected {text[position : position + 20]!r}")
        return position


def scanner_at(context: Context, text: str, start: int, marker: str, *, final: bool) -> CallScanner | None:
    """Return the scanner of calls that start with a marker at `start`, which is empty for calls without one; None if
    more text is needed to choose it.
    """
    row, after = context.row, start + len(marker)
    if row.syntax == "xml":
        return XmlCall(context, start)
    if row.syntax == "python":
        return PythonCalls(context, after, is_bare=not marker)
    if row.syntax == "gemma":
        return GemmaCall(context, after)
    if row.name in ("mistral", "mistral_v11") and marker:
        position = skip_blanks(text, after)
        if position >= len(text):
            return None
        if text[position] in "[{" and not text.startswith("[ARGS]", position):
            return JsonCalls(context, after)
        return NamedJsonCall(context, after)
    if row.syntax == "named_json":
        position = skip_blanks(text, after)
        rest = text[position:]
        if any(begin.startswith(rest) for begin in row.begins) and not final:
            return None
        inner = next((begin for begin in row.begins if rest.startswith(begin)), "")
        return NamedJsonCall(context, position + len(inner) if inner else after)
    return JsonCalls(context, after - marker.endswith("["), is_bare=not marker)
