"""Error responses of the API."""

import json
from typing import Any

from eqx_decoders.errors import EqxDecodersError


MAX_SHOWN = 60  # characters of a value in an error message

_writer = json.JSONEncoder(ensure_ascii=False)


class ApiError(EqxDecodersError):
    """Error response to a client.

    **Arguments:**

    - `status`: HTTP status.
    - `message`: error message for people.
    - `param`: name of the invalid field.
    - `code`: machine-readable reason.
    - `retry_after`: seconds after which the client may send the request again.
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


def refuse(param: str, value: Any, rule: str, code: str | None = None) -> ApiError:
    """Create the error "field=value rule." for an invalid value of a field."""
    return ApiError(400, f"{param}={shown(value)} {rule}.", param=param, code=code)


def shown(value: Any) -> str:
    """Return a value as shortened JSON."""
    if isinstance(value, str | list | tuple):
        value = value[:MAX_SHOWN]  # the rest would be encoded in vain
    text = ""
    try:
        for piece in _writer.iterencode(value):
            text += piece[: MAX_SHOWN + 1]
            if len(text) > MAX_SHOWN:
                break
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
