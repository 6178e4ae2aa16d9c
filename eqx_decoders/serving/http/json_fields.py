"""What clients send and are told: JSON objects, read strictly, and errors in the words of OpenAI's API."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.serving.http import incremental_json


KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
SHOWN = 60  # characters of a value in an error message
LARGEST = 2**63  # integers and numbers beyond it are no settings

Value = TypeVar("Value")

_writer = json.JSONEncoder(ensure_ascii=False)


class ApiError(EqxDecodersError):
    """What a client is told instead of an answer.

    **Arguments:**

    - `status`: of HTTP.
    - `message`: a sentence.
    - `param`: the field of the body that is wrong.
    - `code`: a word for programs.
    - `retry_after`: in how many seconds it's worth another try.
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
        """The JSON object that OpenAI's clients look for."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refuse(param: str, value: Any, rule: str, code: str | None = None) -> ApiError:
    """The error for a field of a body."""
    return ApiError(400, f"{param}={shown(value)} {rule}.", param=param, code=code)


def shown(value: Any) -> str:
    """A value as JSON, cut."""
    if isinstance(value, str | list):
        value = value[:SHOWN]  # of a megabyte no more than what is shown is written down
    text = ""
    try:
        for piece in _writer.iterencode(value):
            text += piece[: SHOWN + 1]
            if len(text) > SHOWN:
                break
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def parse(raw: bytes, most: int = LARGEST) -> dict[str, Any]:
    """The JSON object of a body, or ApiError: no NaN, no numbers of thousands of digits, no halves of characters.

    A large one may have lists of at most so many entries, and is read a little at a time.
    """
    try:
        text = incremental_json.text(raw)
        if len(raw) > incremental_json.SMALL:
            body = incremental_json.read(text, most)
        else:
            body = json.loads(text, parse_constant=incremental_json.constant, parse_float=incremental_json.number)
            if b"\\u" in raw:
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
    """The fields of a JSON object, by the type that they must have. null is the same as a field that is left out."""

    def __init__(self, body: Mapping[str, Any], where: str = ""):
        self._body, self._where = body, where

    def name(self, field: str) -> str:
        """How errors call a field."""
        return f"{self._where}.{field}" if self._where else field

    def has(self, field: str) -> bool:
        """Whether it is there, and not null."""
        return self._body.get(field) is not None

    def raw(self, field: str) -> Any:
        """As it is; None where it is left out."""
        return self._body.get(field)

    def integer(self, field: str, *, least: int = -LARGEST, most: int = LARGEST - 1) -> int | None:
        """A whole number within bounds; 3.0 is one, too."""
        value: Any = self._body.get(field)
        if value is None:
            return None
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        rule = f"must be an integer of at least {least}" if least > -LARGEST else "must be an integer of 64 bits"
        self._check(field, value, whole and value >= least, rule)
        self._check(field, value, value <= most, f"must be at most {most:,}")
        return int(value)

    def number(
        self, field: str, *, least: int | float = -1e9, most: int | float = 1e9, above: int | float | None = None
    ) -> float | None:
        """A finite number within bounds."""
        value = self._body.get(field)
        if value is None:
            return None
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
        bound = f"above {above:g}" if above is not None else f"from {least:g}"
        rule = f"must be a number {bound} to {most:g}"
        self._check(field, value, good and least <= value <= most and (above is None or value > above), rule)
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, bool), "must be true or false")
        return default if value is None else value

    def text(self, field: str, *, most: int = LARGEST) -> str | None:
        """A text of at most so many characters."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, str), "must be a text")
        self._check(field, value, value is None or len(value) <= most, f"must have at most {most:,} characters")
        return value

    def word(self, field: str, known: tuple[str, ...]) -> str | None:
        """One of these."""
        value = self._body.get(field)
        self._check(field, value, value is None or value in known, f"must be one of {', '.join(known)}")
        return value

    def many(self, field: str, read: Callable[[Any], Value | None], rule: str, *, most: int) -> tuple[Value, ...]:
        """A list of at most so many, each of which `read` takes: it gives None for what is none."""
        value = self._body.get(field)
        if value is None:
            return ()
        self._check(field, value, isinstance(value, list), f"must be a list of {rule}")
        self._check(field, value, len(value) <= most, f"has {len(value):,} entries: at most {most:,} are taken")
        found = []
        for each in value:
            one = read(each)
            if one is None:
                raise refuse(self.name(field), each, f"must be a list of {rule}")
            found.append(one)
        return tuple(found)

    def inner(self, field: str) -> "JsonFields | None":
        """A JSON object."""
        value = self._body.get(field)
        self._check(field, value, value is None or isinstance(value, dict), "must be an object")
        return None if value is None else JsonFields(value, self.name(field))

    def mapping(self, field: str) -> dict[str, Any]:
        """A JSON object as it is; empty where it is left out."""
        self.inner(field)
        return self._body.get(field) or {}

    def check_known(
        self, known: Collection[str], neutral: Mapping[str, Sequence[Any]], advice: Mapping[str, str]
    ) -> None:
        """ApiError for a field that is not among `known`, unless it is null or has a value that asks for nothing.

        `neutral` has such values, by field; `advice` says of some what helps instead.
        """
        for field, value in self._body.items():
            if value is None or field in known or any(_same(value, one) for one in neutral.get(field, ())):
                continue
            rule = advice.get(field, "is not known here: leave it out")
            raise refuse(self.name(field[:SHOWN]), value, rule, "unsupported_parameter")

    def refuse(self, field: str, rule: str, code: str | None = None) -> ApiError:
        """The error for a field."""
        return refuse(self.name(field), self._body.get(field), rule, code)

    def _check(self, field: str, value: Any, good: bool, rule: str) -> None:
        if not good:
            raise refuse(self.name(field), value, rule)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def token_of(value: Any, vocab_size: int) -> int | None:
    """A token id below `vocab_size`; None for what is none."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size
    return value if good else None
