"""Exceptions and checks: each message has field = value, the rule and the remedy.

Configurations declare the ranges of their fields in the annotations, and derive from `CheckedFields`:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RouterConfig(CheckedFields):
        num_experts: PositiveInt
        score: Literal["softmax", "sigmoid"] = "softmax"
        jitter: Annotated[float, InRange(least=0, below=1)] = 0.0
        top_groups: PositiveInt | None = None
        layers: Annotated[tuple[NonNegativeInt, ...], NonEmpty("layer")] = (0,)
        activation: Annotated[str, OneOf(tuple(ACTIVATIONS))] = "silu"

Rules about several fields stand in `__post_init__`, after `super().__post_init__()`.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar


T = TypeVar("T")


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


def check_word(what: str, word: T, known: Iterable[Any], error: type[EqxDecodersError] = ConfigError) -> T:
    """Return `word` if it is one of `known`; otherwise raise `error` with the nearest of them."""
    known = tuple(known)
    if word in known:
        return word
    near = difflib.get_close_matches(str(word), [each for each in known if isinstance(each, str)], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise error(f"{what}={word!r} is not known.{hint} Known: {', '.join(map(str, known))}.")


def check(rule: bool, sentence: str, error: type[EqxDecodersError] = ConfigError) -> None:
    """Raise `error(sentence)` unless `rule` holds."""
    if not rule:
        raise error(sentence)


def check_integer(field: str, value: Any, minimum: int = 1, most: int | None = None) -> None:
    """Raise ConfigError unless `field` is an integer from `minimum` to `most` (True and False are none)."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or value < minimum or (most is not None and value > most):
        more = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{field}={value!r} must be an integer of at least {minimum}{more}.")


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
    good = good and (above is None or value > above) and (least is None or value >= least)
    if not (good and (below is None or value < below) and (most is None or value <= most)):
        bounds = {"above": above, "of at least": least, "below": below, "of at most": most}
        text = " and".join(f" {word} {bound}" for word, bound in bounds.items() if bound is not None)
        raise ConfigError(f"{field}={value!r} must be a finite number{text}.")


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Declare a field of integers: `Annotated[int, AtLeast(2)]`, `Annotated[int, AtLeast(1, most=64)]`."""

    minimum: int
    most: int | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is an integer within the bounds."""
        check_integer(field, value, self.minimum, self.most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InRange:
    """Declare a field of finite numbers: `Annotated[float, InRange(least=0, below=1)]`."""

    above: int | float | None = None
    least: int | float | None = None
    below: int | float | None = None
    most: int | float | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is a finite number within the bounds."""
        check_number(field, value, above=self.above, least=self.least, below=self.below, most=self.most)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Declare a field of a table's names: `Annotated[str, OneOf(tuple(TABLE))]`; a `Literal` needs none."""

    words: tuple[Any, ...]

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is one of the words."""
        check_word(field, value, self.words)


@dataclasses.dataclass(frozen=True)
class NonEmpty:
    """Declare a tuple that has elements: `Annotated[tuple[int, ...], NonEmpty("layer")]`."""

    element: str

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value has an element."""
        check(len(value) > 0, f"{field}=() must have at least one {self.element}.")


@dataclasses.dataclass(frozen=True)
class _Elements:
    """The rules of a tuple's elements: of all alike, or one after the other."""

    alike: bool
    rules: tuple[Sequence[Any], ...]

    def check(self, field: str, value: Any) -> None:
        all_rules = self.rules * len(value) if self.alike else self.rules
        if len(value) != len(all_rules):
            raise ConfigError(f"{field}={value!r} must have {len(all_rules)} elements.")
        for index, (each, rules) in enumerate(zip(value, all_rules, strict=True)):
            for rule in rules:
                rule.check(f"{field}[{index}]", each)


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, InRange(above=0)]
NonNegativeFloat = Annotated[float, InRange(least=0)]
Rate = Annotated[float, InRange(least=0, below=1)]
FiniteFloat = Annotated[float, InRange()]


class CheckedFields:
    """Base of dataclasses that checks the declared ranges and words of all fields; None where a type has None.

    Lists and other sequences become tuples where `tuple[..., ...]` is declared. Messages name a field `Class.field`, or
    as `checked_name` of the class says.
    """

    checked_name: ClassVar[str | None] = None

    def __post_init__(self):
        for name, shown, may_be_none, is_tuple, rules in _declared(type(self)):
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if is_tuple and not isinstance(value, tuple):
                value = _as_tuple(shown, value)
                object.__setattr__(self, name, value)
            for rule in rules:
                rule.check(shown, value)


def check_unused(config: Any, chooser: str, used: Iterable[str]) -> None:
    """Raise ConfigError for fields of a dataclass that are set though what the field `chooser` names reads only `used`.

    A field is set if its value is not the default.
    """
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), type(config).__name__
        if field.name not in (chooser, *used) and value != field.default:
            reader = f"{chooser}={getattr(config, chooser)!r}"
            raise ConfigError(f"{name}.{field.name}={value!r} is not used with {reader}: leave it out.")


def _as_tuple(field: str, value: Any) -> tuple[Any, ...]:
    good = isinstance(value, Iterable) and not isinstance(value, str)
    check(good, f"{field}={value!r} must be a tuple, such as ({value!r},).")
    return tuple(value)


@functools.cache
def _declared(cls: Any) -> tuple[tuple[str, str, bool, bool, Sequence[Any]], ...]:
    """Return the declarations: a field, its name in messages, whether it may be None or is a tuple, and its rules."""
    prefix = cls.__name__ + "." if cls.checked_name is None else cls.checked_name
    hints, declared = typing.get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        hint, may_be_none = hints[field.name], False
        if _is_union(hint):
            kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
            may_be_none = len(kinds) < len(typing.get_args(hint))
            hint = kinds[0] if len(kinds) == 1 else hint
        rules, inner = _rules(hint), typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        is_tuple = typing.get_origin(inner) is tuple and Ellipsis in typing.get_args(inner)
        if rules or is_tuple:
            declared.append((field.name, prefix + field.name, may_be_none, is_tuple, rules))
    return tuple(declared)


def _rules(hint: Any) -> list[Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        own = [each for each in arguments[1:] if isinstance(each, AtLeast | InRange | OneOf | NonEmpty)]
        return _rules(arguments[0]) + own
    if origin is Literal:
        return [OneOf(arguments)]
    if origin is tuple:
        rules = tuple(_rules(kind) for kind in arguments if kind is not Ellipsis)
        return [_Elements(Ellipsis in arguments, rules)] if any(rules) else []
    if _is_union(hint) and any(_rules(kind) for kind in arguments if typing.get_origin(kind) is not Literal):
        raise TypeError(f"{hint}: a union declares the rules of a single type and None. Check it in __post_init__.")
    return []


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def need_extra(module: str, extra: str) -> MissingPackage:
    """Return the error for an optional package that is not installed: raise it `from` the ImportError."""
    return MissingPackage(f"This needs the package {module!r}: pip install 'eqx_decoders[{extra}]'.")
