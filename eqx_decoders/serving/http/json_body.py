"""Bodies of requests read into declared types, and JSON written (msgspec, extra "serve").

msgspec reads and writes hundreds of megabytes a second, but holds the interpreter's lock as long as a call takes.
Texts are copied at once; what takes time are entries, so those of a large body are counted before, a little at a time.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from eqx_decoders.serving.frontend.api_errors import SHOWN, ApiError, refuse
from eqx_decoders.serving.http.other_fields import ADVICE, changes_nothing


SMALL = 1 << 16  # bytes that are read without a look at them, on the event loop
NUMBERS = 1 << 21  # maximum commas of a body, as those between token ids: reading these takes some 50 ms
LARGEST = 2**63  # bound of whole numbers
DIGITS = 5_000  # characters of a number: megabytes of them would stop all threads

Kind = TypeVar("Kind")
Meta = msgspec.Meta  # rules and description of a declared type

_step = re.compile(r"\.(\w+)|\[(\d+)\]")


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the declared types of bodies and of the objects in them. Fields that are null count as missing."""


def parse(content: bytes | bytearray, max_entries: int = LARGEST) -> dict[str, Any]:
    """Parse the JSON object of a body; ApiError for NaN, numbers out of range, and lone surrogates.

    A large body may have at most `max_entries` objects, lists and names of fields in all.
    """
    try:
        if len(content) > SMALL:
            _check_entries(content, max_entries)
        body = _decoder.decode(content)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is no UTF-8 text: {error.reason}.") from error
    except RecursionError as error:
        raise ApiError(400, "The body is no valid JSON: it is nested too deeply.") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is no valid JSON: {str(error).partition(' - at ')[0]}.") from error
    if not isinstance(body, dict):
        raise refuse("The body", body, "must be a JSON object")
    return body


def _check_entries(content: bytes | bytearray, max_entries: int) -> None:
    """Raise ApiError for too many entries: an object in memory takes a hundred times as long as a byte of a text."""
    inside, escape, entries, numbers = False, b"", 0, 0
    for begin in range(0, len(content), SMALL):
        piece = (escape + content[begin : begin + SMALL]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[inside::2])  # of strings
        inside ^= len(parts) % 2 == 0
        entries += len(outside) - len(outside.translate(None, b"[{:"))
        numbers += outside.count(b",")
        if entries > max_entries or numbers > NUMBERS:
            most = f"{max_entries:,} lists, objects and names of fields, or {NUMBERS:,} entries"
            raise ApiError(400, f"The body is too long: it has more than {most}.", code="context_length_exceeded")


def _number(text: str) -> float:
    """Convert a number with a point or an exponent, which must be finite."""
    if len(text) > DIGITS:
        raise ValueError(f"the number {text[:20]}… has more than {DIGITS:,} characters")
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


_decoder = msgspec.json.Decoder(float_hook=_number)
write = msgspec.json.encode  # JSON of any value


def read(body: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Convert a body to a type; ApiError for other fields, and for values that the type cannot have."""
    return convert(_known(body, kind, ""), kind)


def convert(value: Any, kind: Any, param: str = "") -> Any:
    """Convert a value to a type; ApiError for others, by the rules in the type. `param`: name of the value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # a message may hold text of the client's, megabytes of it: the path is what comes last
        message, at, path = str(error).rpartition(" - at `$")
        parts = (message, path.removesuffix("`")) if at else (path, "")
        raise _refusal(*parts, value, kind, param) from None


def _known(body: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """Return the fields of an object that are set. ApiError for a field that the type does not have.

    Not for null, and not for values of other servers' fields that change nothing.
    """
    fields, known = fields_of(kind), dict[str, Any]()
    for name, value in body.items():
        if value is None:
            continue
        if name in fields:
            inner = next((each for each in _alternatives(fields[name]) if fields_of(each)), None)
            if inner is not None and isinstance(value, dict):
                known[name] = _known(value, inner, f"{where}{name}.")
            else:
                known[name] = _whole(value)
        elif not changes_nothing(name, value):
            rule = ADVICE.get(f"{where}{name}", "is an unknown field. Remove it")
            raise refuse(f"{where}{name[:SHOWN]}", value, rule, "unsupported_parameter")
    return known


def _whole(value: Any) -> Any:
    """Return 3 for 3.0: JSON does not tell them apart."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST else value


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a declared type by name; none for any other type."""
    return _type_hints(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}


@functools.cache
def _type_hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, or of an optional or annotated type."""
    if get_origin(hint) is Annotated:
        yield from _alternatives(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    else:
        yield hint


def _rule(hint: Any) -> str | None:
    """Return the description of a type: what its values must be."""
    metadata = getattr(hint, "__metadata__", ())
    rules = [each.description for each in metadata if isinstance(each, Meta) and each.description]
    if not rules and get_origin(hint) in (Union, UnionType):
        rules = [rule for rule in map(_rule, get_args(hint)) if rule]
    return rules[0] if rules else None


def _refusal(message: str, path: str, value: Any, hint: Any, param: str) -> ApiError:
    """Create the error for the value at a path, or for the innermost one around it that has a rule."""
    error, missing = refuse(param, value, _must_be(hint, message)), message.startswith("Object missing")
    whole = f"{param or 'The body'} {_must_be(hint, message)}"
    for name, index in _step.findall(path.partition("[...]")[0]):
        inner = (_entry(each, name) for each in _alternatives(hint))
        hint = next((each for each in inner if each is not None), None)
        try:
            value = value[name] if name else value[int(index)]
        except (LookupError, TypeError):  # no path of the value: a text of the client's
            break
        param = (f"{param}.{name}" if param else name) if name else f"{param}[{index}]"
        if _rule(hint):
            error, whole = refuse(param, value, _must_be(hint, message)), f"{param} {_must_be(hint, message)}"
    if missing:
        name = message.split("`")[1]
        inner = next((fields_of(each)[name] for each in _alternatives(hint) if name in fields_of(each)), None)
        param = f"{param}.{name}" if param else name
        rule = f"it must be {_rule(inner)}" if _rule(inner) else whole
        error = ApiError(400, f"{param} is missing: {rule}.", param=param, code="missing_field")
    return error


def _must_be(hint: Any, message: str) -> str:
    return f"must be {_rule(hint) or message[:200].partition(', got')[0].removeprefix('Expected ')}"


def _entry(hint: Any, name: str) -> Any:
    """Return the type of a field, or of the entries of a list; None where there is none."""
    if name:
        return fields_of(hint).get(name)
    return get_args(hint)[0] if get_origin(hint) in (list, tuple) else None
