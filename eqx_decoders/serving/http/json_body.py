"""Conversion of JSON bodies to declared types with msgspec (extra "serve"), and the errors for invalid values.

msgspec holds the interpreter lock during a call. Long texts take little time, but many entries take long, so the
entries of a large body are counted first, in small pieces.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from eqx_decoders.serving.frontend.api_errors import MAX_SHOWN, ApiError, refuse
from eqx_decoders.serving.http.unsupported_fields import ADVICE, is_neutral


SMALL = 1 << 16  # bytes of a body that is read on the event loop, without counting its entries
MAX_COMMAS = 1 << 21  # of a body, for example between token ids: reading them takes about 50 ms
LARGEST = 2**63  # bound of integers
MAX_DIGITS = 5_000  # characters of a number, whose conversion holds the interpreter lock

Kind = TypeVar("Kind")
Meta = msgspec.Meta  # rules and description of a type

_step = re.compile(r"\.(\w+)|\[(\d+)\]")


class RequestFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the declared types of bodies and of the objects in them. Fields that are null count as missing."""


def parse(content: bytes | bytearray, max_entries: int = LARGEST) -> dict[str, Any]:
    """Parse the JSON object of a body. Raises ApiError for invalid JSON, NaN, and numbers out of range.

    `max_entries`: maximum number of objects, lists and keys of a large body.
    """
    try:
        if len(content) > SMALL:
            _check_entries(content, max_entries)
        body = _decoder.decode(content)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not UTF-8: {error.reason}.") from error
    except RecursionError as error:
        raise ApiError(400, "The body is not valid JSON: it is nested too deeply.") from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {str(error).partition(' - at ')[0]}.") from error
    if not isinstance(body, dict):
        raise refuse("The body", body, "must be a JSON object")
    return body


def _check_entries(content: bytes | bytearray, max_entries: int) -> None:
    """Raise ApiError for too many entries. An entry takes a hundred times as long to read as a byte of a text."""
    in_string, escape, num_entries, num_commas = False, b"", 0, 0
    for begin in range(0, len(content), SMALL):
        piece = (escape + content[begin : begin + SMALL]).replace(b"\\\\", b"")
        escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])  # of strings
        in_string ^= len(parts) % 2 == 0
        num_entries += len(outside) - len(outside.translate(None, b"[{:"))
        num_commas += outside.count(b",")
        if num_entries > max_entries or num_commas > MAX_COMMAS:
            raise ApiError(
                400,
                f"The body has more than {max_entries:,} lists, objects and keys, or more than {MAX_COMMAS:,} commas. "
                "Send less.",
                code="context_length_exceeded",
            )


def _number(text: str) -> float:
    """Convert a number with a decimal point or an exponent. Raises ValueError if it is not finite."""
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:20]}… has more than {MAX_DIGITS:,} characters")
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


_decoder = msgspec.json.Decoder(float_hook=_number)
write = msgspec.json.encode  # JSON of any value


def read(body: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Convert a body to a declared type. Raises ApiError for unknown fields and invalid values."""
    return convert(_known_fields(body, kind, ""), kind)


def convert(value: Any, kind: Any, param: str = "") -> Any:
    """Convert a value to a type. Raises ApiError with the description of the type. `param`: name of the value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # the message may contain text of the client: the path is at the end
        message, at, path = str(error).rpartition(" - at `$")
        parts = (message, path.removesuffix("`")) if at else (path, "")
        raise _refusal(*parts, value, kind, param) from None


def _known_fields(body: Mapping[str, Any], kind: type, where: str) -> dict[str, Any]:
    """Return the fields of an object that are set. Raises ApiError for unknown fields.

    Null fields, and neutral values of the fields of other servers (`unsupported_fields`), are dropped.
    """
    fields, known = fields_of(kind), dict[str, Any]()
    for name, value in body.items():
        if value is None:
            continue
        if name in fields:
            inner = next((member for member in _members(fields[name]) if fields_of(member)), None)
            if inner is not None and isinstance(value, dict):
                known[name] = _known_fields(value, inner, f"{where}{name}.")
            else:
                known[name] = _as_integer(value)
        elif not is_neutral(name, value):
            rule = ADVICE.get(f"{where}{name}", "is an unknown field. Remove it")
            raise refuse(f"{where}{name[:MAX_SHOWN]}", value, rule, "unsupported_parameter")
    return known


def _as_integer(value: Any) -> Any:
    """Return 3 for 3.0, because JSON does not distinguish them."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST else value


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a declared type by name. Empty for other types."""
    return _type_hints(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else {}


@functools.cache
def _type_hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, through annotations. Other types are their only member."""
    if get_origin(hint) is Annotated:
        yield from _members(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _rule(hint: Any) -> str | None:
    """Return the description of a type. It completes the sentence "must be …"."""
    metadata = getattr(hint, "__metadata__", ())
    rules = [meta.description for meta in metadata if isinstance(meta, Meta) and meta.description]
    if not rules and get_origin(hint) in (Union, UnionType):
        rules = [rule for rule in map(_rule, get_args(hint)) if rule]
    return rules[0] if rules else None


def _refusal(message: str, path: str, value: Any, hint: Any, param: str) -> ApiError:
    """Create the error for the value at a path, or for the innermost value around it whose type has a description."""
    error, missing = refuse(param, value, _must_be(hint, message)), message.startswith("Object missing")
    expected = f"{param or 'The body'} {_must_be(hint, message)}"
    for name, index in _step.findall(path.partition("[...]")[0]):
        entries = (_entry(member, name) for member in _members(hint))
        hint = next((entry for entry in entries if entry is not None), None)
        try:
            value = value[name] if name else value[int(index)]
        except (LookupError, TypeError):  # not a path of the value, but text of the client
            break
        param = (f"{param}.{name}" if param else name) if name else f"{param}[{index}]"
        if _rule(hint):
            error, expected = refuse(param, value, _must_be(hint, message)), f"{param} {_must_be(hint, message)}"
    if missing:
        name = message.split("`")[1]
        inner = next((fields_of(member)[name] for member in _members(hint) if name in fields_of(member)), None)
        param = f"{param}.{name}" if param else name
        rule = f"it must be {_rule(inner)}" if _rule(inner) else expected
        error = ApiError(400, f"{param} is missing: {rule}.", param=param, code="missing_field")
    return error


def _must_be(hint: Any, message: str) -> str:
    return f"must be {_rule(hint) or message[:200].partition(', got')[0].removeprefix('Expected ')}"


def _entry(hint: Any, name: str) -> Any:
    """Return the type of a field, or of the entries of a list; None if there is no such type."""
    if name:
        return fields_of(hint).get(name)
    return get_args(hint)[0] if get_origin(hint) in (list, tuple) else None
