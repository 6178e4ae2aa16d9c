"""Errors about what clients send: status, field, value, rule."""

import json
from typing import Any

from eqx_decoders.errors import EqxDecodersError


SHOWN = 60  # characters of a value in an error message

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


def refuse(param: str, value: Any, rule: str, code: str | None = None) -> ApiError:
    """Create the error for the value of a field."""
    return ApiError(400, f"{param}={shown(value)} {rule}.", param=param, code=code)


def shown(value: Any) -> str:
    """Write a value as JSON, shortened."""
    if isinstance(value, str | list | tuple):
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
