"""Untrusted files: checks of their paths, and errors for those that cannot be decoded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eqx_decoders.errors import DataError, MissingPackage, check


def check_file(source: str | Path, where: str) -> None:
    """Raise DataError unless it is a local file: nothing is fetched from a network."""
    remote = "://" in str(source)[:20] or str(source).startswith("data:")
    check(not remote, f"{where} is an address: download it, and give the file.", DataError)
    try:
        good, size = Path(source).is_file(), Path(source).stat().st_size
    except (OSError, ValueError) as error:  # also too long, or with a NUL
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{where} cannot be opened: {cause}. Give the path of a file.") from error
    check(good, f"{where} is no file, but a directory, pipe or device: give the path of a file.", DataError)
    check(size > 0, f"{where} is empty, it has 0 bytes: write it anew, or leave it out.", DataError)


@contextmanager
def as_data_error(
    where: str, kind: str, formats: Sequence[str], *, smaller: str, cause: Callable[[Exception], str] = str
) -> Iterator[None]:
    """Convert any error of a decoder to a DataError with its cause and a remedy.

    **Arguments:**

    - `where`: the file's name in errors.
    - `kind`: the expected kind of file.
    - `formats`: the known formats.
    - `smaller`: the remedy where memory does not suffice.
    - `cause`: returns the message of one of the decoder's errors; empty for none.
    """
    try:
        yield
    except (DataError, MissingPackage):
        raise
    except MemoryError as error:
        raise DataError(f"{where} takes more memory than there is: {smaller}.") from error
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, and others
        reason = (" ".join(cause(error).split())[:200] or type(error).__name__).rstrip(".")
        rule = f"is no {kind} of a known format ({', '.join(formats)}): {reason}"
        raise DataError(f"{where} {rule}. Convert it to one of these, or leave it out.") from error
