"""Names of special tokens in user text: finding the names, and keeping them plain text in rendered chat templates."""

import bisect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


FIELDS = "messages", "tools", "documents"  # variables of a chat template that contain texts from users


class SpecialNames:
    """Search for the names of special tokens. As in tokenizers, the longest name at a position matches."""

    def __init__(self, names: Iterable[str]):
        self.names = frozenset(names)
        self.lengths = sorted({len(name) for name in self.names}, reverse=True)
        self.prefixes = frozenset(name[:length] for name in self.names for length in range(1, len(name)))
        self.first_character = re.compile("[" + "".join(sorted({re.escape(name[0]) for name in self.names})) + "]")

    def spans(self, text: str, *, partial: bool = False) -> Iterator[tuple[int, int]]:
        """Yield [start, stop) of each name. `partial`: also a suffix of the text that may start a name."""
        position = 0
        while match := self.first_character.search(text, position):
            start = match.start()
            pieces = (text[start : start + length] for length in self.lengths)
            stop = start + len(next((piece for piece in pieces if piece in self.names), ""))
            if stop == start and partial and len(text) - start < self.lengths[0] and text[start:] in self.prefixes:
                stop = len(text)
            if stop > start:
                yield start, stop
            position = max(start + 1, stop)


class NameEscaper:
    """Replace the names of special tokens in messages with placeholders before a chat template is rendered.

    A placeholder is a character of Unicode's private use area that does not occur in the conversation. A suffix of a
    text that may be the start of a name is also replaced, because the template may write the rest of the name.
    """

    def __init__(self, names: Sequence[str]):
        self._names = SpecialNames(names) if names else None

    def escape(self, variables: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the template variables with placeholders, and a mapping from placeholders to names."""
        fields = {name: variables[name] for name in FIELDS if variables.get(name)}
        names = self._names
        if names is None or not any(any(names.spans(text, partial=True)) for text in _texts(fields)):
            return variables, {}
        used, placeholders = set("".join(_texts(fields))), dict[str, str]()
        unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)

        def escape_text(text: str) -> str:
            pieces, position = list[str](), 0
            for start, stop in names.spans(text, partial=True):
                name = text[start:stop]
                if name not in placeholders:
                    placeholders[name] = next(unused)
                pieces += text[position:start], placeholders[name]
                position = stop
            return "".join(pieces) + text[position:]

        escaped = variables | _map_texts(fields, escape_text)
        return escaped, {placeholder: name for name, placeholder in placeholders.items()}

    @staticmethod
    def unescape(text: str, placeholders: Mapping[str, str]) -> tuple[str, list[tuple[int, int]], Callable[[int], int]]:
        """Replace the placeholders in a rendered text with the names of special tokens.

        Returns the text, [start, stop) of each name in the text, and a function that maps positions in the rendered
        text to positions in the returned text.
        """
        # a template that writes JSON of ASCII characters writes a placeholder as \uXXXX
        names = {**placeholders, **{json.dumps(key)[1:-1]: name for key, name in placeholders.items()}}
        pieces, literal, ends, shifts, position, length = list[str](), list[tuple[int, int]](), [-1], [0], 0, 0
        for match in re.finditer("|".join(map(re.escape, names)), text):
            pieces += text[position : match.start()], names[match[0]]
            length, position = length + match.start() - position + len(pieces[-1]), match.end()
            literal.append((length - len(pieces[-1]), length))
            ends.append(position)
            shifts.append(length - position)

        def move(index: int) -> int:
            return index + shifts[bisect.bisect_right(ends, index) - 1]

        return "".join(pieces) + text[position:], literal, move


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in lists and objects, except the roles of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for member in value:
            yield from _texts(member)
    elif isinstance(value, dict):
        for key, member in value.items():
            if key != "role":
                yield from _texts(member)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to all texts in lists and objects, except the roles of messages."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(member, change) for member in value]
    if isinstance(value, dict):
        return {key: member if key == "role" else _map_texts(member, change) for key, member in value.items()}
    return value
