"""Reader of `config.json` and other JSON objects with checks: a key that is neither read nor known is refused."""

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from eqx_decoders.errors import ConversionError


T = TypeVar("T")
REQUIRED: Any = object()
_LARGEST = 2**31 - 1
MOST_LAYERS = 1024


class Fields:
    """JSON object that is read key by key, with types and bounds; `finish` refuses unread keys.

    null counts as missing, except where a method has the argument `null`: the value of an explicit null.
    """

    def __init__(self, content: Mapping[str, Any], where: str = "config.json"):
        self.content = dict(content)
        self.where = where
        self._read: set[str] = set()
        self._carried: dict[str, Any] = {}

    def error(self, sentence: str) -> ConversionError:
        return ConversionError(f"{self.where}: {sentence}")

    def unknown(self, setting: str, word: Any, known: Iterable[str]) -> ConversionError:
        return self.error(f"{setting} is not known here.{_near(word, known)} Known: {', '.join(known)}.")

    def is_read(self, key: str) -> bool:
        """Return True if `key` was read."""
        return key in self._read

    @property
    def read_keys(self) -> frozenset[str]:
        """Keys that were asked for, there or not."""
        return frozenset(self._read)

    def without(self, *keys: str) -> "Fields":
        """Return a copy without these keys, of which the same keys are read."""
        copy = Fields({key: value for key, value in self.content.items() if key not in keys}, self.where)
        copy._read, copy._carried = set(self._read), dict(self._carried)
        return copy

    def take(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return the raw value of `key`."""
        self._read.add(key)
        if key in self.content and self.content[key] is None and null is not REQUIRED:
            return null
        value = self.content.get(key)
        if value is None and default is REQUIRED:
            raise self.error(f"{key} is missing, and the model's shape depends on it: add it.")
        return default if value is None else value

    def _checked(self, key: str, default: Any, null: Any, good: Callable[[Any], bool], rule: str) -> Any:
        """Return the value of `key`; unless it is missing or null, `good` must be true of it."""
        value = self.take(key, default, null)
        if value is not default and value is not null and not good(value):
            raise self.error(f"{key}={abbreviate(value)} must be {rule}.")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED, least: int = 1) -> Any:
        """Read an integer between `least` and 2^31 - 1."""
        rule = f"an integer of at least {least}, at most {_LARGEST}"
        return self._checked(key, default, null, lambda x: _is_integer(x) and least <= x <= _LARGEST, rule)

    def layers(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> int:
        """Read the number of layers: an integer with a bound, since each layer has a configuration of its own."""
        count = self.integer(key, default, null=null)
        if count > MOST_LAYERS:
            raise self.error(f"{key}={count} must be at most {MOST_LAYERS}.")
        return count

    def number(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """Read a finite number above 0, as a float."""
        rule = "a finite number above 0"
        value = self._checked(
            key, default, null, lambda x: (_is_integer(x) or isinstance(x, float)) and 0 < x < 1e30, rule
        )
        return float(value) if _is_integer(value) else value

    def flag(self, key: str, default: bool, *, null: Any = REQUIRED) -> bool:
        """Read true or false."""
        return self._checked(key, default, null, lambda x: isinstance(x, bool), "true or false")

    def numbers(self, key: str, default: Sequence[int] = (), *, null: Any = REQUIRED) -> Sequence[int]:
        """Read a list of integers."""
        rule = "a list of whole numbers"
        return self._checked(key, default, null, lambda x: isinstance(x, list) and all(map(_is_integer, x)), rule)

    def pairs(self, key: str, default: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Read a list of pairs of integers above 0, such as heights and widths."""

        def good(x: Any) -> bool:
            whole = isinstance(x, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in x)
            return whole and len(x) > 0 and all(_is_integer(each) and 0 < each < 2**31 for pair in x for each in pair)

        pairs = self._checked(key, default, REQUIRED, good, "a list of heights and widths: pairs of integers above 0")
        return tuple((first, second) for first, second in pairs)

    def word(self, key: str, known: Mapping[str, T], default: str = REQUIRED) -> T:
        """Return the value that `known` has for the word under `key`."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.unknown(f"{key}={abbreviate(value)}", value, known)
        return known[value]

    def table(self, key: str) -> "Fields | None":
        """Read a nested object; None where there is none."""
        value = self._checked(key, None, REQUIRED, lambda x: isinstance(x, dict), "an object")
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def carry(self, key: str, ignored: Mapping[str, Any]) -> None:
        """Add ignored keys of the nested object `key` to those that `ignored` returns; for an empty one beside them."""
        self._carried |= {key: dict(ignored)} if key else ignored

    def ignored(
        self,
        known: Mapping[str, str],
        allowed: Mapping[str, tuple[Any, ...]],
        typed: Mapping[str, tuple[type, ...]] = {},
    ) -> dict[str, Any]:
        """Return the keys without effect, which an export writes again. Raises ConversionError for unknown keys.

        **Arguments:**

        - `known`: keys without effect, with any value.
        - `allowed`: keys that have no effect if they have one of these values. Any other value is an error.
        - `typed`: keys that have no effect if their value has one of these types. A value of another type is an error.
        """
        for key, types in typed.items():
            value = self.content.get(key)
            if not (self.is_read(key) or key in known or value is None or type(value) in types):
                type_names = " or ".join(expected.__name__ for expected in types)
                raise self.error(
                    f"{key}={abbreviate(value)}: expected {type_names}, because {key} is a generation setting of "
                    f"transformers. Another meaning of {key} is not supported for this model_type."
                )
        for key, values in allowed.items():
            if not self.is_read(key):
                self.allow_only(key, *values)
        known_keys = {*known, *typed}
        self.finish(known_keys)
        internal = ("_", "attn_implementation")  # how transformers runs a model, which an export does not contain
        exported_keys = [key for key in self.content if key in known_keys and not key.startswith(internal)]
        return {key: self.content[key] for key in exported_keys} | self._carried

    def words(self, key: str, known: tuple[str, ...], length: int | None) -> list[str] | None:
        """Read a list of `length` known words, of any length for None; None where there is no list."""
        rule = "a list of words"
        value = self._checked(
            key, None, REQUIRED, lambda x: isinstance(x, list) and all(isinstance(word, str) for word in x), rule
        )
        if value is None:
            return None
        for word in value:
            if word not in known:
                raise self.unknown(f"{key}: {abbreviate(word)}", word, known)
        if length is not None and len(value) != length:
            raise self.error(f"{key} has {len(value)} entries, but there are {length} layers: give one for each.")
        return value

    def allow_only(self, key: str, *allowed: Any, effect: str = "changes what the model computes") -> None:
        """Raise ConversionError unless `key` is missing or null, or has one of the `allowed` values.

        `effect`: what other values mean, for the error message.
        """
        value = self.take(key, None)
        if value is not None and not any(type(value) is type(good) and value == good for good in allowed):
            expected = (
                " or ".join(abbreviate(good) if isinstance(good, list) else json.dumps(good) for good in allowed)
                or "null"
            )
            raise self.error(f"{key}={abbreviate(value)} is not supported ({effect}). Supported: {expected}.")

    def rename(self, old: str, new: str) -> None:
        """Rename the key `old` to `new`. Raises ConversionError if both have values that differ; null is no value."""
        value = self.content.pop(old, None)
        if value is None:
            return
        if self.content.get(new) is not None and self.content[new] != value:
            both = f"{old}={abbreviate(value)} and {new}={abbreviate(self.content[new])}"
            raise self.error(f"{both} are the same setting: make them equal.")
        self.content[new] = value

    def supply(self, key: str, value: Any) -> None:
        """Set a key from outside of this object; if it is given here too they must agree."""
        if self.content.get(key, value) != value:
            raise self.error(
                f"{key}={abbreviate(self.content[key])}, but {abbreviate(value)} outside of it: make them equal."
            )
        self.content[key] = value

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raise ConversionError if a key was neither read nor `ignored`, and has a value other than null."""
        keys = (key for key, value in self.content.items() if value is not None)
        unknown = [key for key in keys if key not in self._read and key not in ignored]
        if unknown:
            raise self.error(
                f"Unknown keys: {_listed(unknown)}.{_near(unknown[0], self._read)} Remove them if they do not affect "
                f"the model."
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def abbreviate(value: Any) -> str:
    """Return a value for an error message, in at most 60 characters."""
    try:
        text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - 20} more" if len(words) > 20 else ""
    return ", ".join(map(abbreviate, words[:20])) + more


def _near(word: Any, known: Any) -> str:
    near = difflib.get_close_matches(str(word)[:60], sorted(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
