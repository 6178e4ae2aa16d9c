"""JSON of megabytes, a little at a time: the standard library reads or writes it in one call, and stops all threads.

What one call does here takes a millisecond or two. Bodies come from strangers: lists of more entries than could be of
use are refused where they begin to be too long, and not when all of them are there.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any


SMALL = 1 << 16  # bytes that are read in one call
WINDOW = 1 << 14  # characters of a list or object that are
DEPTH = 64  # of lists and objects with more
NUMBER = 5000  # characters of a number, which the standard library refuses from 4,300 digits
ENTRIES = 64  # of a list that are written in one call
OPENED = 4  # lists and objects in each other whose entries are written one by one: those of choices and messages

_blanks = re.compile(r"[ \t\n\r]*")
# What may stand within a string: escapes are whole, and where two of them are one character, it is, too.
_unit = r"[^\"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_pair = r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))"
_inside = re.compile(f"(?:{_unit}|{_pair})*+")
_writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class TooMany(ValueError):
    """A list or an object has more entries than are taken."""


def read(text: str, most: int) -> Any:
    """The value of a text of JSON. Raises ValueError for what is none, TooMany beyond `most` entries of one list."""
    return _JsonReader(text, most).whole()


def text(raw: bytes) -> str:
    """What UTF-8 says. Raises UnicodeDecodeError for what is none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = [decoder.decode(raw[begin : begin + SMALL]) for begin in range(0, len(raw), SMALL)]
    return "".join([*pieces, decoder.decode(b"", final=True)])


def write(value: Any) -> bytes:
    """A value as JSON. Raises ValueError for NaN and infinity, which JSON has not."""
    return b"".join(piece.encode("utf-8", "replace") for piece in _pieces(value, OPENED))


def number(text: str) -> float:
    """What JSON's reader makes of a number with a point or an exponent, which must be finite."""
    found = float(text)
    if found in (float("inf"), -float("inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return found


def constant(name: str) -> float:
    """What it makes of NaN and infinity."""
    raise ValueError(f"{name} is no number of JSON")


class _JsonReader:
    """Tries each list and object within a window of the text, where it is short; else goes through its entries."""

    def __init__(self, text: str, most: int):
        self._text, self._most = text, most
        self._begin, self._window = 0, text[:WINDOW]
        decoder: Any = json.JSONDecoder(parse_constant=constant, parse_float=number)
        self._scan = decoder.scan_once

    def whole(self) -> Any:
        value, at = self._value(self._after_blanks(0), 0)
        if self._after_blanks(at) < len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, at)
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at a place, and where it ends."""
        head = self._text[at : at + 1]
        if head == '"':
            return self._string(at)
        if head not in ("[", "{"):
            try:
                value, end = self._scan(self._text[at : at + NUMBER], 0)
                return value, at + end
            except StopIteration as error:
                raise json.JSONDecodeError("Expecting value", self._text, at) from error
        for again in (False, True):
            if again:
                self._begin, self._window = at, self._text[at : at + WINDOW]
            if 0 <= at - self._begin < len(self._window):
                try:
                    value, end = self._scan(self._window, at - self._begin)
                    if self._text.find("\\u", at, self._begin + end) >= 0:
                        json.dumps(value, ensure_ascii=False).encode()  # fails for half of a character
                    return value, self._begin + end
                except (StopIteration, json.JSONDecodeError):  # it is longer, or wrong, as its entries will tell
                    pass
        if depth == DEPTH:
            raise RecursionError
        return self._entries(at, depth, head)

    def _string(self, at: int) -> tuple[str, int]:
        """The string that begins at a place, in pieces, and where it ends."""
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

    def _entries(self, at: int, depth: int, head: str) -> tuple[Any, int]:
        last, found, names = "]" if head == "[" else "}", [], []
        at = self._after_blanks(at + 1)
        if self._text[at : at + 1] == last:
            return ([] if head == "[" else {}), at + 1
        while True:
            if head == "{":
                name, at = self._name(at)
                names.append(name)
            value, at = self._value(at, depth + 1)
            found.append(value)
            if len(found) > self._most:
                raise TooMany(f"a list or object has more than {self._most:,} entries, the most that are taken")
            at = self._after_blanks(at)
            mark = self._text[at : at + 1]
            if mark == last:
                return (found if head == "[" else dict(zip(names, found, strict=True))), at + 1
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
        while (found := _blanks.match(self._text, at, at + WINDOW)) is not None and found.end() == at + WINDOW:
            at = found.end()
        return at if found is None else found.end()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, dict) and depth:
        yield "{"
        for place, (name, one) in enumerate(value.items()):
            yield f"{',' if place else ''}{_writer.encode(name)}:"
            yield from _pieces(one, depth - 1)
        yield "}"
    elif isinstance(value, list | tuple) and depth and any(isinstance(one, dict) for one in value[:1]):
        yield "["
        for place, one in enumerate(value):
            yield "," if place else ""
            yield from _pieces(one, depth - 1)
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
