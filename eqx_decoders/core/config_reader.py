"""Validating reader of `config.json` and similar JSON objects. Unknown keys are errors."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from eqx_decoders.errors import ConversionError, suggest


T = TypeVar("T")
REQUIRED: Any = object()
_MAX_INT32 = 2**31 - 1
_MAX_LAYERS = 1024  # each layer has a separate configuration object, so an absurd number would exhaust memory


class Fields:
    """JSON object whose keys are read one at a time, with checks of types and bounds.

    All methods raise ConversionError for invalid values. `finish` raises it for keys that were not read.

    Reading methods return `default` if the key is missing, and raise ConversionError if there is no `default`. null is
    treated as missing, unless the argument `null` says what an explicit null stands for.

    **Arguments:**

    - `content`: the JSON object.
    - `where`: name of the object in error messages.
    """

    def __init__(self, content: Mapping[str, Any], where: str = "config.json"):
        self.content = dict(content)
        self.where = where
        self._read: set[str] = set()
        self._carried: dict[str, Any] = {}

    def error(self, message: str) -> ConversionError:
        """Return an error whose message starts with the name of this object."""
        return ConversionError(f"{self.where}: {message}")

    def unknown(self, setting: str, value: Any, known: Iterable[str]) -> ConversionError:
        """Return the error for a value that is not one of `known`; `setting` is `"key=value"`."""
        return self.error(f"{setting} is not known here.{suggest(value, sorted(known))} Known: {', '.join(known)}.")

    def is_read(self, key: str) -> bool:
        """Return whether `key` was read."""
        return key in self._read

    @property
    def read_keys(self) -> frozenset[str]:
        """Keys that were read, including missing keys."""
        return frozenset(self._read)

    def without(self, *keys: str) -> "Fields":
        """Return a copy without some keys. It remembers which keys were read."""
        copy = Fields({key: value for key, value in self.content.items() if key not in keys}, self.where)
        copy._read = set(self._read)
        copy._carried = dict(self._carried)
        return copy

    def take(self, key: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return the value of `key` without checking its type."""
        self._read.add(key)
        if key in self.content and self.content[key] is None and null is not REQUIRED:
            return null
        value = self.content.get(key)
        if value is None and default is REQUIRED:
            raise self.error(f"{key} is missing, but it is required to build the model: add it.")
        return default if value is None else value

    def _checked(self, key: str, default: Any, null: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        """Return the value of `key`. Raises ConversionError if the key has a value and `is_valid` is false for it."""
        value = self.take(key, default, null)
        if value is not default and value is not null and not is_valid(value):
            raise self.error(f"{key}={abbreviate(value)} must be {expected}.")
        return value

    def integer(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED, least: int = 1) -> Any:
        """Read an integer between `least` and 2^31 - 1."""
        expected = f"an integer of at least {least}, at most {_MAX_INT32}"
        return self._checked(key, default, null, lambda x: _is_integer(x) and least <= x <= _MAX_INT32, expected)

    def layers(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """Read the number of layers, at most 1024."""
        count = self.integer(key, default, null=null)
        if count is not None and count > _MAX_LAYERS:
            raise self.error(f"{key}={count} must be at most {_MAX_LAYERS}.")
        return count

    def number(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """Read a finite number above 0, as a float."""

        def is_valid(x: Any) -> bool:
            return (_is_integer(x) or isinstance(x, float)) and 0 < x < 1e30

        value = self._checked(key, default, null, is_valid, "a finite number above 0")
        return float(value) if _is_integer(value) else value

    def flag(self, key: str, default: bool, *, null: Any = REQUIRED) -> bool:
        """Read true or false."""
        return self._checked(key, default, null, lambda x: isinstance(x, bool), "true or false")

    def integers(self, key: str, default: Sequence[int] = (), *, null: Any = REQUIRED) -> Sequence[int]:
        """Read a list of integers."""

        def is_valid(x: Any) -> bool:
            return isinstance(x, list) and all(map(_is_integer, x))

        return self._checked(key, default, null, is_valid, "a list of integers")

    def pairs(self, key: str, default: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Read a list of `[height, width]` pairs of positive integers. The list must not be empty."""

        def is_valid(x: Any) -> bool:
            if not isinstance(x, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in x):
                return False
            return len(x) > 0 and all(_is_integer(size) and 0 < size <= _MAX_INT32 for pair in x for size in pair)

        expected = "a list of [height, width] pairs of integers above 0"
        pairs = self._checked(key, default, REQUIRED, is_valid, expected)
        return tuple((height, width) for height, width in pairs)

    def word(self, key: str, known: Mapping[str, T], default: str = REQUIRED) -> T:
        """Read a string and return `known[string]`. Raises ConversionError if `known` does not have the string."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.unknown(f"{key}={abbreviate(value)}", value, known)
        return known[value]

    def table(self, key: str) -> "Fields | None":
        """Read a nested object. Returns None if it is missing."""
        value = self._checked(key, None, REQUIRED, lambda x: isinstance(x, dict), "an object")
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def carry(self, key: str, ignored: Mapping[str, Any]) -> None:
        """Add the ignored keys of the nested object `key` to the result of `self.ignored`.

        With an empty `key`, they are added at the top level.
        """
        self._carried |= {key: dict(ignored)} if key else ignored

    def ignored(
        self,
        known: Mapping[str, str],
        allowed: Mapping[str, tuple[Any, ...]],
        typed: Mapping[str, tuple[type, ...]] = {},
    ) -> dict[str, Any]:
        """Return the keys without effect and their values, so that an export can write them again.

        Raises ConversionError for unknown keys.

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
                    f"{key}={abbreviate(value)} must be of type {type_names}, because {key} is a generation setting of "
                    f"transformers. Another meaning of {key} is not supported for this model_type."
                )
        for key, values in allowed.items():
            if not self.is_read(key):
                self.allow_only(key, *values)
        known_keys = {*known, *typed}
        self.finish(known_keys)
        # These keys describe how transformers runs a model. An export does not contain them.
        internal = ("_", "attn_implementation")
        exported_keys = [key for key in self.content if key in known_keys and not key.startswith(internal)]
        return {key: self.content[key] for key in exported_keys} | self._carried

    def words(self, key: str, known: tuple[str, ...], length: int | None) -> list[str] | None:
        """Read a list of strings, which must be in `known`. Returns None if it is missing.

        `length`: required length, the number of layers. None: any length.
        """

        def is_valid(x: Any) -> bool:
            return isinstance(x, list) and all(isinstance(word, str) for word in x)

        value = self._checked(key, None, REQUIRED, is_valid, "a list of strings")
        if value is None:
            return None
        for word in value:
            if word not in known:
                raise self.unknown(f"{key}: {abbreviate(word)}", word, known)
        if length is not None and len(value) != length:
            raise self.error(f"{key} has {len(value)} entries, but there are {length} layers: add an entry per layer.")
        return value

    def allow_only(self, key: str, *allowed: Any, effect: str = "changes what the model computes") -> None:
        """Raise ConversionError unless `key` is missing or null, or has one of the `allowed` values.

        `effect`: the effect of other values, for the error message.
        """
        value = self.take(key, None)
        if value is not None and not any(type(value) is type(option) and value == option for option in allowed):
            options = [abbreviate(option) if isinstance(option, list) else json.dumps(option) for option in allowed]
            supported = " or ".join(options) or "null"
            raise self.error(f"{key}={abbreviate(value)} is not supported ({effect}). Supported: {supported}.")

    def rename(self, old: str, new: str) -> None:
        """Rename the key `old` to `new`. Raises ConversionError if both keys have values and these differ."""
        value = self.content.pop(old, None)
        if value is None:
            return
        if self.content.get(new) is not None and self.content[new] != value:
            raise self.error(
                f"{old}={abbreviate(value)} and {new}={abbreviate(self.content[new])} are the same setting: "
                "remove one of them or make them equal."
            )
        self.content[new] = value

    def supply(self, key: str, value: Any) -> None:
        """Set a key to a value that is given outside of this object. null is treated as missing.

        Raises ConversionError if this object has a different value.
        """
        if self.content.get(key) is not None and self.content[key] != value:
            raise self.error(
                f"{key}={abbreviate(self.content[key])} differs from the value outside of this object, "
                f"{abbreviate(value)}: make them equal."
            )
        self.content[key] = value

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raise ConversionError if a key has a value, was not read and is not in `ignored`."""
        keys = (key for key, value in self.content.items() if value is not None)
        unknown = [key for key in keys if key not in self._read and key not in ignored]
        if unknown:
            raise self.error(
                f"Unknown keys: {_listed(unknown)}.{suggest(unknown[0], sorted(self._read))} Remove them if they do "
                "not affect the model."
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def abbreviate(value: Any) -> str:
    """Return the text of a value for an error message, at most 60 characters."""
    try:
        text = value if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = str(type(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - 20} more" if len(keys) > 20 else ""
    return ", ".join(map(abbreviate, keys[:20])) + more
