"""JSON of megabytes, a little at a time: the standard library holds all threads while it reads or writes a text.

A single call here takes a millisecond or two. Bodies come from strangers: lists with too many entries are refused as
soon as they are too long.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any


SMALL = 1 << 16  # bytes that are parsed in one call
WINDOW = 1 << 14  # characters of a list or object that are parsed in one call
DEPTH = 64  # maximum nesting of larger lists and objects
NUMBER = 5000  # characters of a number, which the standard library refuses from 4,300 digits
ENTRIES = 64  # of a list that are written in one call
OPENED = 4  # levels of lists and objects whose entries are written one by one: those of choices and messages

_blanks = re.compile(r"[ \t\n\r]*")
# Inside of a string: whole escapes, and whole pairs of surrogates.
_unit = r"[^\"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_pair = r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))"
_inside = re.compile(f"(?:{_unit}|{_pair})*+")
_writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class TooMany(ValueError):
    """Error for a list or an object with too many entries."""


def read(text: str, max_entries: int) -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON, TooMany beyond `max_entries` entries of one list."""
    return _JsonReader(text, max_entries).whole()


def text(raw: bytes) -> str:
    """Decode UTF-8. Raises UnicodeDecodeError for invalid bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = [decoder.decode(raw[begin : begin + SMALL]) for begin in range(0, len(raw), SMALL)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def write(value: Any) -> bytes:
    """Write a value as JSON. Raises ValueError for NaN and infinity."""
    return b"".join(piece.encode("utf-8", "replace") for piece in _write_pieces(value, OPENED))


def number(text: str) -> float:
    """Convert a number with a point or an exponent, which must be finite."""
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def constant(name: str) -> float:
    """Refuse NaN and infinity."""
    raise ValueError(f"{name} is no number of JSON")


class _JsonReader:
    """Parser that reads each list or object in one call where it fits in a window of the text; else entry by entry."""

    def __init__(self, text: str, max_entries: int):
        self._text, self._most = text, max_entries
        self._begin, self._window = 0, text[:WINDOW]
        decoder: Any = json.JSONDecoder(parse_constant=constant, parse_float=number)
        self._scan = decoder.scan_once

    def whole(self) -> Any:
        value, at = self._value(self._after_blanks(0), 0)
        if self._after_blanks(at) < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _value(self, begin: int, depth: int) -> tuple[Any, int]:
        """Parse the value at a position; returns it and its end."""
        first = self._text[begin : begin + 1]
        if first == '"':
            return self._string(begin)
        if first not in ("[", "{"):
            try:
                value, end = self._scan(self._text[begin : begin + NUMBER], 0)
                return value, begin + end
            except StopIteration as error:
                raise json.JSONDecodeError("Expecting value", self._text, begin) from error
        for moved in (False, True):
            if moved:
                self._begin, self._window = begin, self._text[begin : begin + WINDOW]
            if 0 <= begin - self._begin < len(self._window):
                try:
                    value, end = self._scan(self._window, begin - self._begin)
                    if self._text.find("\\u", begin, self._begin + end) >= 0:
                        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a character
                    return value, self._begin + end
                except (StopIteration, json.JSONDecodeError):  # it is longer, or invalid, as its entries will show
                    pass
        if depth == DEPTH:
            raise RecursionError
        return self._entries(begin, depth, first)

    def _string(self, at: int) -> tuple[str, int]:
        """Parse the string at a position, in pieces; returns it and its end."""
        parts, begin = [], at + 1
        while True:
            match = _inside.match(self._text, begin, begin + WINDOW)
            end = begin if match is None else match.end()
            part, _ = self._scan(f'"{self._text[begin:end]}"', 0)
            part.encode()  # fails for half of a character
            parts.append(part)
            if self._text[end : end + 1] == '"':
                return "".join(parts), end + 1
            if end == begin:
                wrong = "Unterminated string" if end == len(self._text) else "Invalid \\escape"
                raise json.JSONDecodeError(wrong, self._text, end)
            begin = end

    def _entries(self, at: int, depth: int, opening: str) -> tuple[Any, int]:
        closing, values, names = "]" if opening == "[" else "}", [], []
        at = self._after_blanks(at + 1)
        if self._text[at : at + 1] == closing:
            return ([] if opening == "[" else {}), at + 1
        while True:
            if opening == "{":
                name, at = self._name(at)
                names.append(name)
            value, at = self._value(at, depth + 1)
            values.append(value)
            if len(values) > self._most:
                raise TooMany(f"a list or object has more than {self._most:,} entries, the most that are taken")
            at = self._after_blanks(at)
            mark = self._text[at : at + 1]
            if mark == closing:
                return (values if opening == "[" else dict(zip(names, values, strict=True))), at + 1
            if mark != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", self._text, at)
            at = self._after_blanks(at + 1)

    def _name(self, at: int) -> tuple[str, int]:
        if self._text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self._text, at)
        name, at = self._string(at)
        at = self._after_blanks(at)
        if self._text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", self._text, at)
        return name, self._after_blanks(at + 1)

    def _after_blanks(self, at: int) -> int:
        while (match := _blanks.match(self._text, at, at + WINDOW)) is not None and match.end() == at + WINDOW:
            at = match.end()
        return at if match is None else match.end()


def _write_pieces(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and depth:
        yield "{"
        for index, (name, entry) in enumerate(value.items()):
            yield f"{',' if index else ''}{_writer.encode(name)}:"
            yield from _write_pieces(entry, depth - 1)
        yield "}"
    elif isinstance(value, list | tuple) and depth and any(isinstance(entry, dict) for entry in value[:1]):
        yield "["
        for index, entry in enumerate(value):
            yield "," if index else ""
            yield from _write_pieces(entry, depth - 1)
        yield "]"
    elif isinstance(value, list | tuple) and len(value) > ENTRIES:
        for begin in range(0, len(value), ENTRIES):
            yield "," if begin else "["
            yield _writer.encode(value[begin : begin + ENTRIES])[1:-1]
        yield "]"
    elif isinstance(value, str) and len(value) > WINDOW:
        for begin in range(0, len(value), WINDOW):
            yield ("" if begin else '"') + _writer.encode(value[begin : begin + WINDOW])[1:-1]
        yield '"'
    else:
        yield _writer.encode(value)
