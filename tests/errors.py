"""What a test asserts of an error: its class, and the fields and values that its message names.

The wording of each kind of message is asserted once, in `test_errors.py` or beside the code that writes the message.
"""

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], *names: object) -> Iterator[pytest.ExceptionInfo]:
    """The block raises `error`, and the message has each of `names`: fields, values, files or flags.

    `refused(ConfigError, "num_heads=3", "head_dim")` looks for both texts; other objects are looked for as `str(name)`.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert_names(str(caught.value), *names)


def assert_names(message: str, *names: object) -> None:
    """`message`, of an error or on standard error, has each of these texts."""
    missing = [str(name) for name in names if str(name) not in message]
    assert not missing, f"{', '.join(map(repr, missing))} not in: {message}"
