"""Incremental detokenization without incomplete characters, and search for stop strings."""

import copy
import functools
from collections.abc import Sequence

from eqx_decoders.io.text.output_parsing.scanners import partial_match_length
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, decode


UNKNOWN = "\ufffd"  # replacement character, to which invalid UTF-8 is decoded
MAX_INCOMPLETE = 3  # replacement characters of an incomplete character: one per byte
MAX_BUFFERED = 32  # ids that are buffered if they never become complete characters
CONTEXT = 16  # last ids of a prompt that are decoded with a completion


class Detokenizer:
    """Incremental converter of ids to text. It buffers text that more ids could change.

    The concatenation of all pieces and of the text from `flush` is the text of all ids.

    **Arguments:**

    - `before`: ids before the text. Some tokenizers decode a word differently at the start of a text.
    - `special`: write the names of special tokens. By default special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, special: bool = False):
        self._decode = functools.partial(decode, tokenizer, special=special)
        self._context: list[int] = []  # ids of the piece before `self._ids`
        self._ids: list[int] = []  # ids whose text is not complete yet
        self._shown = 0  # characters of their text that were returned
        self._num_buffered = 0  # characters of their text that were not returned
        for token in self._last_complete(list(before[-CONTEXT:])):
            self.push(token)

    def copy(self) -> "Detokenizer":
        """Return an independent copy."""
        other = copy.copy(self)
        other._context, other._ids = [*self._context], [*self._ids]
        return other

    def _last_complete(self, before: list[int]) -> list[int]:
        """Return the last ids, starting with a complete character. The last character may be incomplete."""

        def starts_complete(ids: list[int]) -> bool:
            shorter = (ids[: len(ids) - cut] for cut in range(MAX_INCOMPLETE + 1))
            return any(not self._decode(ids_).startswith(UNKNOWN) for ids_ in shorter if ids_)

        ends = (before[-size:] for size in range(CONTEXT, CONTEXT - MAX_INCOMPLETE - 1, -1))
        return next(filter(starts_complete, ends), before[-CONTEXT:])

    def push(self, token: int) -> str:
        """Add the next id, and return the text that further ids cannot change."""
        self._ids.append(token)
        text = self._new()
        num_unknown = len(text) - len(text.rstrip(UNKNOWN))
        if len(self._ids) > MAX_BUFFERED:
            num_unknown = 0
        piece = text[self._shown : len(text) - min(num_unknown, MAX_INCOMPLETE)]
        self._num_buffered = len(text) - self._shown - len(piece)
        if num_unknown:
            self._shown += len(piece)
        elif (
            text or len(self._ids) > MAX_BUFFERED
        ):  # special ids have no text; the start of a word depends on the ids before
            self._context, self._ids, self._shown = self._ids, [], 0
        return piece

    def push_with_offset(self, token: int) -> tuple[str, int]:
        """Add the next id. Return the text that further ids cannot change, and the position of this id's text in it.

        The position is not 0 if the text starts with buffered bytes of earlier ids that are not valid UTF-8.
        """
        num_buffered = self._num_buffered
        piece = self.push(token)
        return piece, num_buffered if piece.startswith(UNKNOWN * num_buffered) else 0

    def flush(self) -> str:
        """Return the buffered text at the end of the ids."""
        self._num_buffered = 0
        text = self._new()[self._shown :]
        self._context, self._ids, self._shown = self._ids, [], 0
        return text

    def _new(self) -> str:
        """Return the text that `self._ids` add to the ids before."""
        before, text = self._decode(self._context), self._decode(self._context + self._ids)
        return text[len(before) :] if text.startswith(before) else self._decode(self._ids)


class StopStrings:
    """Search for stop strings in text that arrives in pieces. Text that may be the start of a stop string is buffered.

    Of several stop strings in a text, the first that ends is found, and of equal ends the longest.

    **Arguments:**

    - `stops`: stop strings, which must not be empty.
    - `include`: keep the stop string at the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops, self._include = tuple(sorted(stops, key=len, reverse=True)), include
        self._buffered = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text, and return the text before a stop string that further text cannot change."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        pending = self._buffered + text
        starts = ((pending.find(stop), stop) for stop in self._stops)
        ends = ((start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.found = first
            self._buffered = ""
            return pending[: end if self._include else end - len(self.found)]
        num_buffered = partial_match_length(pending, self._stops)
        self._buffered = pending[len(pending) - num_buffered :]
        return pending[: len(pending) - num_buffered]

    def flush(self) -> str:
        """Return the buffered text at the end of the text."""
        buffered, self._buffered = self._buffered, ""
        return buffered


class TokenTexts:
    """Texts and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._letter = tokenizer.encode("a").tolist()[-1:]
        self._cache: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Return the text of a token, with the space before a word. Parts of characters become U+FFFD."""
        return self._text_and_bytes(token)[0]

    def content(self, token: int) -> bytes:
        """Return the bytes of a token, which may be part of a character."""
        return self._text_and_bytes(token)[1]

    def key(self, token: int) -> str:
        """Return the text of a token, or `bytes:\\xe4\\xbd` for part of a character."""
        text, content = self._text_and_bytes(token)
        return text if UNKNOWN not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _text_and_bytes(self, token: int) -> tuple[str, bytes]:
        if token not in self._cache:
            text = self._text(token)
            self._cache[token] = (text, self._bytes(token, text))
        return self._cache[token]

    def _text(self, token: int) -> str:
        # after a letter, because some tokenizers drop the space before a single word
        decode_ = functools.partial(decode, self._tokenizer, special=True)
        before, joined = decode_(self._letter), decode_([*self._letter, token])
        return joined[len(before) :] if joined.startswith(before) else decode_([token])

    def _bytes(self, token: int, text: str) -> bytes:
        if UNKNOWN not in text:
            return text.encode()
        if not isinstance(self._tokenizer, JsonTokenizer):
            return bytes([token]) if token < 256 else b""
        name = self._tokenizer.name_of(token) or ""
        if len(name) == 6 and name.startswith("<0x"):
            return bytes([int(name[3:5], 16)])
        letters = byte_letters()
        return bytes(letters[letter] for letter in name) if all(map(letters.__contains__, name)) else text.encode()


@functools.cache
def byte_letters() -> dict[str, int]:
    """Return the byte of each character in vocabularies like GPT-2's.

    Printable bytes are their own characters. The other bytes are the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
