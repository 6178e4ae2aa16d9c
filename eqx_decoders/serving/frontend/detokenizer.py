"""Tokens of an answer as text, as they come: no halves of characters, and nothing of a stop string."""

import copy
import functools
from collections.abc import Sequence

from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer


UNKNOWN = "\ufffd"  # what bytes that are no UTF-8 decode to
LONGEST = 3  # of these at the end may be the beginning of a character: one for each of its bytes
MOST = 32  # ids that are decoded again with the next one, where they never become whole characters
CONTEXT = 16  # ids of a prompt that are looked at for where a text goes on


class Detokenizer:
    """The text of ids, one after the other, that is certain: what more ids could change is held back.

    All pieces together, and what `flush` returns, are the text of all ids; they depend on the ids alone.

    **Arguments:**

    - `before`: ids that the text goes on from. Some tokenizers write a word differently where a text begins.
    - `special`: special tokens stand as their names, and are not left out.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, special: bool = False):
        self._decode = functools.partial(decode, tokenizer, special=special)
        self._context: list[int] = []  # the ids of the piece before this one
        self._ids: list[int] = []  # those whose text is not whole yet
        self._shown = 0  # characters of theirs that were returned
        for token in self._end_of(list(before[-CONTEXT:])):
            self.push(token)

    def copy(self) -> "Detokenizer":
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._context, other._ids = [*self._context], [*self._ids]
        return other

    def _end_of(self, before: list[int]) -> list[int]:
        """The last ids, beginning with a whole character. The last one may be cut."""

        def begins_well(ids: list[int]) -> bool:
            wholes = (ids[: len(ids) - cut] for cut in range(LONGEST + 1))
            return any(not self._decode(whole).startswith(UNKNOWN) for whole in wholes if whole)

        ends = (before[-size:] for size in range(CONTEXT, CONTEXT - LONGEST - 1, -1))
        return next(filter(begins_well, ends), before[-CONTEXT:])

    def push(self, token: int) -> str:
        """Take the next id; the text that is certain now."""
        self._ids.append(token)
        text = self._new()
        ending = len(text) - len(text.rstrip(UNKNOWN))
        if len(self._ids) > MOST:
            ending = 0
        piece = text[self._shown : len(text) - min(ending, LONGEST)]
        if ending:
            self._shown += len(piece)
        elif text or len(self._ids) > MOST:  # special ids have none: what a word begins with depends on those before
            self._context, self._ids, self._shown = self._ids, [], 0
        return piece

    def flush(self) -> str:
        """What was held back, as no more ids come."""
        text = self._new()[self._shown :]
        self._context, self._ids, self._shown = self._ids, [], 0
        return text

    def _new(self) -> str:
        """The text of `self._ids` behind that of the ids before."""
        old, text = self._decode(self._context), self._decode(self._context + self._ids)
        return text[len(old) :] if text.startswith(old) else self._decode(self._ids)


class StopStrings:
    """Text up to the first stop string, as it comes. Of the end only what could be the beginning of one is held back.

    Of several stop strings that whose end comes first counts, and of equal ends the longest.

    **Arguments:**

    - `stops`: none of them is empty.
    - `include`: the stop string is the end of the text, and not cut off.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops, self._include = tuple(sorted(stops, key=len, reverse=True)), include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take more text; what can be shown. After a stop string has been found that is nothing."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        places = ((whole.find(stop), stop) for stop in self._stops)
        ends = ((place + len(stop), -len(stop), stop) for place, stop in places if place >= 0)
        first = min(ends, default=None)
        if first is not None:
            end, _, self.found = first
            self._held = ""
            return whole[: end if self._include else end - len(self.found)]
        keep = self._beginning(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """How many characters of the end may be the beginning of a stop string."""
        longest = min(len(self._stops[0]) - 1, len(text))
        endings = (text[len(text) - size :] for size in range(longest, 0, -1))
        return next((len(end) for end in endings if any(stop.startswith(end) for stop in self._stops)), 0)


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, special: bool = False) -> str:
    """The text of ids; with `special`, those that are special stand as their names."""
    if special and isinstance(tokenizer, JsonTokenizer):
        return tokenizer.decode(ids, special=True)
    return tokenizer.decode(ids)


class TokenTexts:
    """What single tokens are called, as texts and as bytes, where their log-probabilities are shown."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._letter = tokenizer.encode("a").tolist()[-1:]
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Its text, with a space before a word; U+FFFD where it's no whole character."""
        return self._both(token)[0]

    def content(self, token: int) -> bytes:
        """Its bytes, also of a part of a character."""
        return self._both(token)[1]

    def key(self, token: int) -> str:
        """Its text, or `bytes:\\xe4\\xbd` for a part of a character."""
        text, content = self._both(token)
        return text if UNKNOWN not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _both(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            text = self._text(token)
            self._known[token] = (text, self._bytes(token, text))
        return self._known[token]

    def _text(self, token: int) -> str:
        # behind a letter: some tokenizers drop the space of a word that stands alone
        decode_ = functools.partial(decode, self._tokenizer, special=True)
        before, both = decode_(self._letter), decode_([*self._letter, token])
        return both[len(before) :] if both.startswith(before) else decode_([token])

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
    """The letters that stand for bytes in vocabularies like GPT-2's: printable ones for themselves, others from 256."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
