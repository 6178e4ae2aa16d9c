"""Exceptions and checks: each message has field = value, the rule and the remedy."""

import difflib
from collections.abc import Iterable
from typing import Any


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


def check_number(field: str, value: Any, *, above: int | float | None = None, least: int | float | None = None) -> None:
    """Raise ConfigError unless `field` is a finite number, strictly above `above` or at least `least` if given."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    good = number and value - value == 0  # neither NaN nor infinite
    if good and above is not None:
        good = value > above
    if good and least is not None:
        good = value >= least
    bound = f" above {above}" if above is not None else f" of at least {least}" if least is not None else ""
    check(bool(good), f"{field}={value!r} must be a finite number{bound}.")


def need_extra(module: str, extra: str) -> MissingPackage:
    """Return the error for an optional package that is not installed: raise it `from` the ImportError."""
    return MissingPackage(f"This needs the package {module!r}: pip install 'eqx_decoders[{extra}]'.")
