"""Strict reading of JSON objects, and errors in the format of OpenAI's API."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.serving.frontend import incremental_json


KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
SHOWN = 60  # characters of a value in an error message
LARGEST = 2**63  # bound of integers and numbers

Value = TypeVar("Value")

_writer = json.JSONEncoder(ensure_ascii=False)


class ApiError(EqxDecodersError):
    """Error response to a client.

    **Arguments:**

    - `status`: HTTP status.
    - `message`: error message, a sentence.
    - `param`: name of the wrong field.
    - `code`: machine-readable reason.
    - `retry_after`: seconds after which the request can be sent again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """Error object that OpenAI's clients expect."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, value: Any, rule: str, code: str | None = None) -> ApiError:
    """Create the error for the value of a field."""
    return ApiError(400, f"{param}={shown(value)} {rule}.", param=param, code=code)


def shown(value: Any) -> str:
    """Write a value as JSON, shortened."""
    if isinstance(value, str | list):
        value = value[:SHOWN]  # so that no megabytes are written
    text = ""
    try:
        for piece in _writer.iterencode(value):
            text += piece[: SHOWN + 1]
            if len(text) > SHOWN:
                break
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def parse(content: bytes, max_entries: int = LARGEST) -> dict[str, Any]:
    """Parse the JSON object of a body; ApiError for NaN, numbers of thousands of digits, and lone surrogates.

    Lists in a large body may have at most `max_entries` entries; it is parsed a little at a time.
    """
    try:
        text = incremental_json.text(content)
        if len(content) > incremental_json.SMALL:
            body = incremental_json.read(text, max_entries)
        else:
            body = json.loads(text, parse_constant=incremental_json.constant, parse_float=incremental_json.number)
            if b"\\u" in content:
                json.dumps(body, ensure_ascii=False).encode("utf-8")  # fails for a lone surrogate
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ApiError(400, f"The body is no UTF-8 text: {error.reason}.") from error
    except incremental_json.TooMany as error:
        raise ApiError(400, f"The body is too long: {error}.", code="context_length_exceeded") from error
    except (ValueError, RecursionError) as error:
        cause = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(400, f"The body is no valid JSON: {cause}.") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"The body={shown(body)} must be a JSON object.")
    return body


class JsonFields:
    """Fields of a JSON object by type. null is the same as a missing field."""

    def __init__(self, body: Mapping[str, Any], where: str = ""):
        self._body, self._where = body, where

    def name(self, field: str) -> str:
        """Return the name of a field in errors."""
        return f"{self._where}.{field}" if self._where else field

    def has(self, field: str) -> bool:
        """Return whether a field is set, and not null."""
        return self._body.get(field) is not None

    def raw(self, field: str) -> Any:
        """Return the value of a field; None if it is missing."""
        return self._body.get(field)

    def integer(self, field: str, *, minimum: int = -LARGEST, maximum: int = LARGEST - 1) -> int | None:
        """Return an integer within bounds; 3.0 is one, too."""
        value: Any = self._body.get(field)
        if value is None:
            return None
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        rule = f"must be an integer of at least {minimum}" if minimum > -LARGEST else "must be an integer of 64 bits"
        self._check(field, value, whole and value >= minimum, rule)
        self._check(field, value, value <= maximum, f"must be at most {maximum:,}")
        return int(value)

    def number(
        self, field: str, *, minimum: int | float = -1e9, maximum: int | float = 1e9, above: int | float | None = None
    ) -> float | None:
        """Return a finite number within bounds."""
        value = self._body.get(field)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        bound = f"above {above:g}" if above is not None else f"from {minimum:g}"
        rule = f"must be a number {bound} to {maximum:g}"
        self._check(field, value, good and minimum <= value <= maximum and (above is None or value > above), rule)
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, bool), "must be true or false")
        return default if value is None else value

    def text(self, field: str, *, maximum: int = LARGEST) -> str | None:
        """Return a text of at most `maximum` characters."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, str), "must be a text")
        self._check(field, value, value is None or len(value) <= maximum, f"must have at most {maximum:,} characters")
        return value

    def word(self, field: str, choices: tuple[str, ...]) -> str | None:
        """Return one of `choices`."""
        value = self._body.get(field)
        self._check(field, value, value is None or value in choices, f"must be one of {', '.join(choices)}")
        return value

    def many(self, field: str, read: Callable[[Any], Value | None], rule: str, *, maximum: int) -> tuple[Value, ...]:
        """Return a list of at most `maximum` entries, converted by `read`, which returns None for an invalid one."""
        value = self._body.get(field)
        if value is None:
            return ()
        self._check(field, value, isinstance(value, list), f"must be a list of {rule}")
        self._check(field, value, len(value) <= maximum, f"has {len(value):,} entries: at most {maximum:,} are taken")
        entries = []
        for each in value:
            entry = read(each)
            if entry is None:
                raise refuse(self.name(field), each, f"must be a list of {rule}")
            entries.append(entry)
        return tuple(entries)

    def inner(self, field: str) -> "JsonFields | None":
        """Return the fields of a JSON object."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, dict), "must be an object")
        return None if value is None else JsonFields(value, self.name(field))

    def mapping(self, field: str) -> dict[str, Any]:
        """Return a JSON object; empty if it is missing."""
        self.inner(field)
        return self._body.get(field) or {}

    def check_known(
        self, known: Collection[str], neutral: Mapping[str, Sequence[Any]], advice: Mapping[str, str]
    ) -> None:
        """Raise ApiError for a field that is not in `known`, unless it is null or has a neutral value.

        `neutral` has neutral values by field; `advice` has the rule of the error message for some fields.
        """
        for field, value in self._body.items():
            if value is None or field in known or any(_same(value, one) for one in neutral.get(field, ())):
                continue
            rule = advice.get(field, "is not known here: leave it out")
            raise refuse(self.name(field[:SHOWN]), value, rule, "unsupported_parameter")

    def refuse(self, field: str, rule: str, code: str | None = None) -> ApiError:
        """Create the error for a field."""
        return refuse(self.name(field), self._body.get(field), rule, code)

    def _check(self, field: str, value: Any, good: bool, rule: str) -> None:
        if not good:
            raise refuse(self.name(field), value, rule)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def token_of(value: Any, vocab_size: int) -> int | None:
    """Return a token id below `vocab_size`; None for any other value."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    return value if good else None
