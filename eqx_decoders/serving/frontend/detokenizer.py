"""Incremental detokenization: text without partial characters, cut at stop strings."""

import copy
import functools
from collections.abc import Sequence

from eqx_decoders.io.text.answers.scanners import partial_match
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, decode


UNKNOWN = "\ufffd"  # what bytes that are no UTF-8 decode to
LONGEST = 3  # of these at the end may be an incomplete character: one for each of its bytes
MOST = 32  # ids that are decoded again with the next one, if they never become whole characters
CONTEXT = 16  # last ids of a prompt that are decoded before an answer


class Detokenizer:
    """Incremental converter of ids to text, which holds back text that more ids could change.

    All pieces together, and what `flush` returns, are the text of all ids; they depend on the ids alone.

    **Arguments:**

    - `before`: ids before the text. Some tokenizers write a word differently where a text begins.
    - `special`: write special tokens as their names, instead of leaving them out.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, special: bool = False):
        self._decode = functools.partial(decode, tokenizer, special=special)
        self._context: list[int] = []  # the ids of the piece before this one
        self._ids: list[int] = []  # those whose text is not whole yet
        self._shown = 0  # characters of theirs that were returned
        self._num_buffered = 0  # characters of their text that were not returned
        for token in self._last_whole(list(before[-CONTEXT:])):
            self.push(token)

    def copy(self) -> "Detokenizer":
        """Return a copy that goes on from here by itself."""
        other = copy.copy(self)
        other._context, other._ids = [*self._context], [*self._ids]
        return other

    def _last_whole(self, before: list[int]) -> list[int]:
        """Return the last ids, starting with a whole character. The last character may be cut."""

        def starts_whole(ids: list[int]) -> bool:
            shorter = (ids[: len(ids) - cut] for cut in range(LONGEST + 1))
            return any(not self._decode(ids_).startswith(UNKNOWN) for ids_ in shorter if ids_)

        ends = (before[-size:] for size in range(CONTEXT, CONTEXT - LONGEST - 1, -1))
        return next(filter(starts_whole, ends), before[-CONTEXT:])

    def push(self, token: int) -> str:
        """Add the next id, and return the text that is certain now."""
        self._ids.append(token)
        text = self._new()
        num_unknown = len(text) - len(text.rstrip(UNKNOWN))
        if len(self._ids) > MOST:
            num_unknown = 0
        piece = text[self._shown : len(text) - min(num_unknown, LONGEST)]
        self._num_buffered = len(text) - self._shown - len(piece)
        if num_unknown:
            self._shown += len(piece)
        elif text or len(self._ids) > MOST:  # special ids have none: what a word begins with depends on those before
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
        """Return the text that was held back, as no more ids come."""
        self._num_buffered = 0
        text = self._new()[self._shown :]
        self._context, self._ids, self._shown = self._ids, [], 0
        return text

    def _new(self) -> str:
        """Return the text that `self._ids` add to the ids before."""
        before, text = self._decode(self._context), self._decode(self._context + self._ids)
        return text[len(before) :] if text.startswith(before) else self._decode(self._ids)


class StopStrings:
    """Search for stop strings in text that comes in pieces; what could be the start of one is held back.

    Of several stop strings the one that ends first counts, and of equal ends the longest.

    **Arguments:**

    - `stops`: the stop strings; none is empty.
    - `include`: keep the stop string at the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops, self._include = tuple(sorted(stops, key=len, reverse=True)), include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text, and return what can be shown; nothing after a stop string."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        starts = ((pending.find(stop), stop) for stop in self._stops)
        ends = ((start + len(stop), -len(stop), stop) for start, stop in starts if start >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.found = first
            self._held = ""
            return pending[: end if self._include else end - len(self.found)]
        held = partial_match(pending, self._stops)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """Return the text that was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


class TokenTexts:
    """Texts and bytes of single tokens, for log-probabilities."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._letter = tokenizer.encode("a").tolist()[-1:]
        self._cache: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Return the text of a token, with a space before a word; U+FFFD where it's no whole character."""
        return self._text_and_bytes(token)[0]

    def content(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character."""
        return self._text_and_bytes(token)[1]

    def key(self, token: int) -> str:
        """Return the text of a token, or `bytes:\\xe4\\xbd` for a part of a character."""
        text, content = self._text_and_bytes(token)
        return text if UNKNOWN not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _text_and_bytes(self, token: int) -> tuple[str, bytes]:
        if token not in self._cache:
            text = self._text(token)
            self._cache[token] = (text, self._bytes(token, text))
        return self._cache[token]

    def _text(self, token: int) -> str:
        # behind a letter: some tokenizers drop the space of a word that stands alone
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
    """Return the byte of each letter in vocabularies like GPT-2's: printable bytes are themselves, others from 256
    on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
