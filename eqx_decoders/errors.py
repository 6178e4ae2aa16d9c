"""Exceptions of the library, and validation of configuration fields.

An error message names the field and its value, the rule that it violates, and the remedy.

Configurations derive from `CheckedFields` and declare the valid values of a field in its annotation:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RouterConfig(CheckedFields):
        num_experts: PositiveInt
        score: Literal["softmax", "sigmoid"] = "softmax"
        jitter: Annotated[float, InRange(minimum=0, below=1)] = 0.0
        top_groups: PositiveInt | None = None
        layers: Annotated[tuple[NonNegativeInt, ...], NonEmpty("layer")] = (0,)
        activation: Annotated[str, OneOf(tuple(ACTIVATIONS))] = "silu"

Rules that involve several fields are checked in `__post_init__`, after `super().__post_init__()`.
"""

import dataclasses
import difflib
import functools
import numbers
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar


T = TypeVar("T")


class EqxDecodersError(Exception):
    """Base class of all errors that this library raises."""


class ConfigError(EqxDecodersError, ValueError):
    """Invalid configuration of a model, a mesh or a run."""


class CheckpointError(EqxDecodersError):
    """Checkpoint that is missing, damaged, in use by another process, or belongs to a different model."""


class DataError(EqxDecodersError):
    """Training data that cannot be read, or that does not fit the model."""


class ConversionError(EqxDecodersError):
    """Checkpoint or configuration that cannot be converted from or to another library's format."""


class MissingPackage(EqxDecodersError, ImportError):
    """Optional package that is not installed."""


def suggest(value: Any, known: Iterable[Any]) -> str:
    """Return " Did you mean 'x'?" with the most similar string of `known`; an empty text if none is similar."""
    similar = similar_names(value, known, 1)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def similar_names(value: Any, known: Iterable[Any], count: int) -> list[str]:
    """Return up to `count` strings of `known` that are similar to `value`, the most similar string first."""
    known_strings = [option for option in known if isinstance(option, str)]
    return difflib.get_close_matches(str(value)[:60], known_strings, n=count, cutoff=0.5)


def check_option(
    field: str, value: T, known: Iterable[Any], error: type[EqxDecodersError] = ConfigError, *, listed_by: str = ""
) -> T:
    """Return `value` if it is one of `known`. Otherwise raise `error`, which suggests the most similar known value.

    `listed_by`: the command or function that lists all known values. If it is set, the message names it and up to three
    similar values. Otherwise the message lists all known values.
    """
    known = tuple(known)
    if value in known:
        return value
    message = f"{field}={value!r} is not known."
    if not listed_by:
        raise error(f"{message}{suggest(value, known)} Known: {', '.join(map(str, known))}.")
    similar = similar_names(value, known, 3)
    message += f" Similar: {', '.join(map(repr, similar))}." if similar else ""
    raise error(f"{message} {listed_by} lists all {len(known)}.")


def check(condition: bool, message: str, error: type[EqxDecodersError] = ConfigError) -> None:
    """Raise `error(message)` unless `condition` is true."""
    if not condition:
        raise error(message)


def check_integer(field: str, value: Any, minimum: int = 1, maximum: int | None = None) -> None:
    """Raise ConfigError unless `value` is an integer between `minimum` and `maximum`.

    NumPy integers are integers; booleans are not.
    """
    is_valid = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    is_valid = is_valid and int(value) >= minimum and (maximum is None or int(value) <= maximum)
    if not is_valid:
        upper_bound = "" if maximum is None else f" and at most {maximum}"
        raise ConfigError(f"{field}={value!r} must be an integer of at least {minimum}{upper_bound}.")


def check_number(
    field: str,
    value: Any,
    *,
    above: int | float | None = None,
    minimum: int | float | None = None,
    below: int | float | None = None,
    maximum: int | float | None = None,
) -> None:
    """Raise ConfigError unless `value` is a finite number within the bounds.

    NumPy scalars are numbers; booleans are not.

    **Arguments:**

    - `above`, `below`: exclusive lower and upper bound; None: unbounded.
    - `minimum`, `maximum`: inclusive lower and upper bound; None: unbounded.
    """
    number: Any = value
    is_valid = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_valid = is_valid and number - number == 0  # neither NaN nor infinite
    is_valid = is_valid and (above is None or number > above) and (minimum is None or number >= minimum)
    if not (is_valid and (below is None or number < below) and (maximum is None or number <= maximum)):
        bounds = {"above": above, "of at least": minimum, "below": below, "of at most": maximum}
        range_text = " and".join(f" {relation} {bound}" for relation, bound in bounds.items() if bound is not None)
        raise ConfigError(f"{field}={value!r} must be a finite number{range_text}.")


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """Declare an integer field with inclusive bounds: `Annotated[int, AtLeast(2)]`, or `AtLeast(1, maximum=64)`."""

    minimum: int
    maximum: int | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is an integer within the bounds."""
        check_integer(field, value, self.minimum, self.maximum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InRange:
    """Declare a field of finite numbers: `Annotated[float, InRange(minimum=0, below=1)]`.

    `above` and `below` are exclusive bounds, `minimum` and `maximum` inclusive ones (see `check_number`).
    """

    above: int | float | None = None
    minimum: int | float | None = None
    below: int | float | None = None
    maximum: int | float | None = None

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is a finite number within the bounds."""
        check_number(field, value, above=self.above, minimum=self.minimum, below=self.below, maximum=self.maximum)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Declare the valid values of a field: `Annotated[str, OneOf(tuple(TABLE))]`.

    A `Literal` type declares its values itself.
    """

    options: tuple[Any, ...]

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError unless the value is one of the options."""
        check_option(field, value, self.options)


@dataclasses.dataclass(frozen=True)
class NonEmpty:
    """Declare a tuple that must not be empty: `Annotated[tuple[int, ...], NonEmpty("layer")]`.

    `element`: name of an element in the error message.
    """

    element: str

    def check(self, field: str, value: Any) -> None:
        """Raise ConfigError if the value is empty."""
        check(len(value) > 0, f"{field}=() must have at least one {self.element}.")


@dataclasses.dataclass(frozen=True)
class _Elements:
    """Rules for the elements of a tuple.

    **Arguments:**

    - `variable_length`: whether the type is `tuple[T, ...]`, so that all elements share `rules[0]`. Otherwise `rules`
        has an entry for each element.
    """

    variable_length: bool
    rules: tuple[Sequence[Any], ...]

    def check(self, field: str, value: Any) -> None:
        all_rules = self.rules * len(value) if self.variable_length else self.rules
        if len(value) != len(all_rules):
            raise ConfigError(f"{field}={value!r} must have {len(all_rules)} elements.")
        for index, (element, rules) in enumerate(zip(value, all_rules, strict=True)):
            for rule in rules:
                rule.check(f"{field}[{index}]", element)


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, InRange(above=0)]
NonNegativeFloat = Annotated[float, InRange(minimum=0)]
Rate = Annotated[float, InRange(minimum=0, below=1)]
FiniteFloat = Annotated[float, InRange()]


class CheckedFields:
    """Base class of dataclasses that validates each field against the rules in its annotation.

    None is accepted where the type includes None. Lists and other iterables are converted to tuples in fields of type
    `tuple[T, ...]`, and NumPy scalars to Python numbers. Error messages name a field `Class.field`. A class variable
    `checked_name` replaces the prefix `Class.`.
    """

    checked_name: ClassVar[str | None] = None

    def __post_init__(self):
        for field in _declared(type(self)):
            value = getattr(self, field.name)
            if value is None and field.is_optional:
                continue
            if field.is_tuple and not isinstance(value, tuple):
                value = _as_tuple(field.shown_name, value)
            for rule in field.rules:
                rule.check(field.shown_name, value)
            object.__setattr__(self, field.name, _as_python_numbers(value))


def check_unused(config: Any, selector: str, used: Iterable[str]) -> None:
    """Raise ConfigError if a field has no effect but differs from its default.

    **Arguments:**

    - `config`: a dataclass whose field `selector` selects an implementation.
    - `used`: the fields that this implementation reads.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (selector, *used) and value != field.default:
            raise ConfigError(
                f"{type(config).__name__}.{field.name}={value!r} is not used with "
                f"{selector}={getattr(config, selector)!r}: leave it out."
            )


def _as_python_numbers(value: Any) -> Any:
    """Convert NumPy scalars, also in tuples, so that a configuration can be written as JSON and printed."""
    if type(value) is tuple:
        return tuple(_as_python_numbers(element) for element in value)
    if isinstance(value, numbers.Integral) and not isinstance(value, int):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, int | float):
        return float(value)
    return value


def _as_tuple(field: str, value: Any) -> tuple[Any, ...]:
    is_sequence = isinstance(value, Iterable) and not isinstance(value, str)
    check(is_sequence, f"{field}={value!r} must be a tuple, such as ({value!r},).")
    return tuple(value)


class _DeclaredField(NamedTuple):
    """Validation of a dataclass field; error messages name the field `shown_name`."""

    name: str
    shown_name: str
    is_optional: bool
    is_tuple: bool
    rules: Sequence[Any]


@functools.cache
def _declared(cls: Any) -> tuple[_DeclaredField, ...]:
    """Return the fields of a dataclass that have rules, or whose values are converted to tuples."""
    prefix = cls.__name__ + "." if cls.checked_name is None else cls.checked_name
    hints = typing.get_type_hints(cls, include_extras=True)
    declared = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        is_optional = False
        if _is_union(hint):
            types_without_none = [member for member in typing.get_args(hint) if member is not type(None)]
            is_optional = len(types_without_none) < len(typing.get_args(hint))
            hint = types_without_none[0] if len(types_without_none) == 1 else hint
        rules = _rules(hint)
        plain_type = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        is_tuple = typing.get_origin(plain_type) is tuple and Ellipsis in typing.get_args(plain_type)
        if rules or is_tuple:
            declared.append(_DeclaredField(field.name, prefix + field.name, is_optional, is_tuple, rules))
    return tuple(declared)


def _rules(hint: Any) -> list[Any]:
    """Return the rules that a type annotation declares."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        annotated_rules = [rule for rule in arguments[1:] if isinstance(rule, AtLeast | InRange | OneOf | NonEmpty)]
        return _rules(arguments[0]) + annotated_rules
    if origin is Literal:
        return [OneOf(arguments)]
    if origin is tuple:
        element_rules = tuple(_rules(element) for element in arguments if element is not Ellipsis)
        return [_Elements(Ellipsis in arguments, element_rules)] if any(element_rules) else []
    if _is_union(hint) and any(_rules(member) for member in arguments if typing.get_origin(member) is not Literal):
        raise TypeError(
            f"{hint}: a union declares the rules of a single type and None. Check other unions in __post_init__."
        )
    return []


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def missing_package(module: str, extra: str) -> MissingPackage:
    """Return the error for an optional package that is not installed. Raise it `from` the ImportError."""
    return MissingPackage(f"The optional package {module!r} is not installed. Run: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the checkout of this library.

    The library is not on PyPI: a command with its name could install the package of someone else.
    """
    checkout = Path(__file__).resolve().parents[1]
    return (
        f"pip install '{checkout if (checkout / 'pyproject.toml').is_file() else 'CHECKOUT_OF_EQX_DECODERS'}[{extra}]'"
    )
