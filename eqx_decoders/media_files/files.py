"""Checks of the paths of untrusted files, and errors for files that cannot be decoded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from eqx_decoders.errors import DataError, MissingPackage


def check_file(source: str | Path, where: str) -> None:
    """Raise DataError unless `source` is the path of a regular local file with content.

    URLs are errors: this package does not access the network.
    """
    if "://" in str(source)[:20] or str(source).startswith("data:"):
        raise DataError(f"{where} is a URL. Download the file and pass its path.")
    try:
        is_file = Path(source).is_file()
        size = Path(source).stat().st_size
    except (OSError, ValueError) as error:  # also for paths that are too long or contain a NUL character
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{where} cannot be opened: {cause}. Pass the path of a file.") from error
    if not is_file:
        raise DataError(f"{where} is a directory, pipe or device. Pass the path of a regular file.")
    if size == 0:
        raise DataError(f"{where} is empty (0 bytes). Replace the file or remove it from the input.")


@contextmanager
def as_data_error(
    where: str, kind: str, formats: Sequence[str], *, memory_remedy: str, describe: Callable[[Exception], str] = str
) -> Iterator[None]:
    """Return a context manager that converts errors of a decoder to a DataError with the cause and a remedy.

    **Arguments:**

    - `where`: name of the file in error messages.
    - `kind`: expected kind of the file: "image", "video" or "audio".
    - `formats`: names of the supported formats.
    - `memory_remedy`: what the user can do if the file needs too much memory, an imperative sentence without a period.
    - `describe`: returns the message of a decoder's error. If the message is empty, the error's class is reported.
    """
    try:
        yield
    except (DataError, MissingPackage):
        raise
    except MemoryError as error:
        raise DataError(f"{where} needs more memory than is available. {memory_remedy}.") from error
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, and others
        cause = (" ".join(describe(error).split())[:200] or type(error).__name__).rstrip(".")
        raise DataError(
            f"{where} is not a valid {kind} file: {cause}. Supported formats: {', '.join(formats)}. Convert the file "
            "to one of them or remove it from the input."
        ) from error
