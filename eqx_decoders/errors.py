"""Exceptions and checks: each message has field = value, the rule and the remedy.

Configurations declare the ranges of their fields in the annotations, and derive from `CheckedFields`:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RouterConfig(CheckedFields):
        num_experts: PositiveInt
        score: Literal["softmax", "sigmoid"] = "softmax"
        jitter: Annotated[float, InRange(least=0, below=1)] = 0.0
        top_groups: PositiveInt | None = None

Rules about several fields stand in `__post_init__`, after `super().__post_init__()`.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal


class EqxDecodersError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigError(EqxDecodersError, ValueError):
    """Invalid configuration of a model, a mesh or a run."""


class CheckpointError(EqxDecodersError):
    """Checkpoint that is absent, damaged, in use, or of another model."""


class DataError(EqxDecodersError):
    """Training data that cannot be read, or that the model cannot take."""


class ConversionError(EqxDecodersError):
    """Foreign checkpoint that cannot be expressed here, or the reverse."""


class MissingPackage(EqxDecodersError, ImportError):
    """Optional package that is not installed."""


def check_word(what: str, word: str, known: Iterable[str], error: type[EqxDecodersError] = ConfigError) -> str:
    """Return `word` if it is one of `known`; otherwise raise `error` with the nearest of them."""
    known = tuple(known)
    if word in known:
        return word
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise error(f"{what}={word!r} is not known.{hint} Known: {', '.join(known)}.")


def check(rule: bool, sentence: str, error: type[EqxDecodersError] = ConfigError) -> None:
    """Raise `error(sentence)` unless `rule` holds."""
    if not rule:
        raise error(sentence)


def check_integer(field: str, value: object, minimum: int = 1) -> None:
    """Raise ConfigError unless `field` is an integer of at least `minimum` (True and False are none)."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    check(good, f"{field}={value!r} must be an integer of at least {minimum}.")


def check_number(
    field: str,
    value: Any,
    *,
    above: int | float | None = None,
    least: int | float | None = None,
    below: int | float | None = None,
    most: int | float | None = None,
) -> None:
    """Raise ConfigError unless `field` is a finite number, above, at least, below and at most the bounds given."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and value - value == 0  # neither NaN nor infinite
    if good:
        good = (above is None or value > above) and (least is None or value >= least)
        good = good and (below is None or value < below) and (most is None or value <= most)
    bounds = {"above": above, "of at least": least, "below": below, "of at most": most}
    text = " and".join(f" {word} {bound}" for word, bound in bounds.items() if bound is not None)
    check(bool(good), f"{field}={value!r} must be a finite number{text}.")


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Declare a field of integers: `Annotated[int, AtLeast(2)]`."""

    minimum: int

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is an integer of at least the minimum."""
        check_integer(field, value, self.minimum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InRange:
    """Declare a field of finite numbers: `Annotated[float, InRange(least=0, below=1)]`."""

    above: int | float | None = None
    least: int | float | None = None
    below: int | float | None = None
    most: int | float | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is a finite number within the bounds."""
        check_number(field, value, **vars(self))


@dataclasses.dataclass(frozen=True)
class _OneOf:
    """The range of a field whose type is a `Literal`."""

    words: tuple[Any, ...]

    def check(self, field: str, value: Any) -> None:
        check_word(field, value, self.words)


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, InRange(above=0)]
NonNegativeFloat = Annotated[float, InRange(least=0)]


class CheckedFields:
    """Base of dataclasses that checks the declared ranges and words of all fields; None where a type has None.

    Messages name a field `Class.field`, or as `checked_name` of the class says.
    """

    checked_name: ClassVar[str | None] = None

    def __post_init__(self):
        prefix = type(self).__name__ + "." if self.checked_name is None else self.checked_name
        for name, may_be_none, check_value in _declared(type(self)):
            value = getattr(self, name)
            if value is not None or not may_be_none:
                check_value(prefix + name, value)


@functools.cache
def _declared(cls: type) -> tuple[tuple[str, bool, Callable[[str, Any], None]], ...]:
    """Return the checks of a class: field, whether it may be None, and the function that checks a value."""
    hints, checks = typing.get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]
        rules = [rule for kind in kinds[:1] if len(kinds) == 1 for rule in _rules(kind)]
        checks += [(field.name, union, rule.check) for rule in rules]
    return tuple(checks)


def _rules(kind: Any) -> list[Any]:
    if typing.get_origin(kind) is Literal:
        return [_OneOf(typing.get_args(kind))]
    return [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, AtLeast | InRange)]


def need_extra(module: str, extra: str) -> MissingPackage:
    """Return the error for an optional package that is not installed: raise it `from` the ImportError."""
    return MissingPackage(f"This needs the package {module!r}: pip install 'eqx_decoders[{extra}]'.")
