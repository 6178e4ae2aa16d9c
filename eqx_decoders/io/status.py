"""Status lines of long operations: progress, and what remains of their results if a signal ends the process."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


FIRST, TERMINAL, LINES = 2.0, 0.5, 5.0  # seconds before the first update, and between updates on terminals and in files

ON_ENTER: list[Callable[[], None]] = []  # functions to call when a long operation starts
_open: list["StatusLine"] = []  # the innermost operation is last
_showing = 0


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """Show operations that take longer than two seconds on standard error, inside of this context."""
    global _showing
    _showing += 1
    try:
        yield
    finally:
        _showing -= 1


class StatusLine:
    """Long operation, whose status is shown every few seconds inside of `showing()`, also during library calls.

    with StatusLine("tokenizing", remains="nothing of the tokens is kept") as status:
        for text in texts:
            status.add(len(text))

    **Arguments:**

    - `what`: name of the operation.
    - `remains`: sentence on its results if a signal ends the process.
    - `total`: number of bytes, if it is known.
    - `partial`: directory to delete if the process is ended at once.
    - `show`: function to call with the text; None: print a line.
    """

    def __init__(
        self,
        what: str,
        *,
        remains: str = "",
        total: int | None = None,
        partial: Path | None = None,
        show: Callable[[str], None] | None = None,
    ):
        self.what, self.remains, self.total, self.partial = what, remains, total, partial
        self._show, self._done, self._start = show or _show_line, 0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "StatusLine":
        self._start = time.monotonic()
        _open.append(self)
        for call in ON_ENTER:
            call()
        if _showing:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def add(self, size: int) -> None:
        """Add to the number of processed bytes."""
        self._done += size

    def counted(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, and add their sizes."""
        for text in texts:
            self.add(len(text))
            yield text

    def text(self) -> str:
        """Return `"compiling: 9s"`, `"tokenizing: 35 MB, 4.2 MB/s, 8s"`, `"loading: 1.2 of 16.1 GB, 0.4 GB/s, 3s"`."""
        seconds = time.monotonic() - self._start
        parts = [duration(seconds)]
        if self._done or self.total:
            unit, size = ("GB", 1e9) if max(self._done, self.total or 0) >= 1e9 else ("MB", 1e6)
            of = f" of {self.total / size:.1f}" if self.total else ""
            rate = self._done / size / max(seconds, 1e-9)
            parts = [f"{self._done / size:.1f}{of} {unit}", f"{rate:.2g} {unit}/s", *parts]
        return f"{self.what}: {', '.join(parts)}"

    def _tick(self) -> None:
        terminal = sys.stderr.isatty()
        shown, wait = False, FIRST
        while not self._ended.wait(wait):
            if _open[-1:] == [self]:  # otherwise an inner operation is shown
                self._show(self.text())
                shown, wait = True, TERMINAL if terminal else LINES
        if shown and terminal and self._show is _show_line:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def takes_time() -> bool:
    """Return whether a long operation is running in this process."""
    return bool(_open)


def stopped_text() -> str:
    """Return the message to print if a signal ends the process now."""
    operations = list(_open)
    remains = next((operation.remains for operation in reversed(operations) if operation.remains), "")
    where = f" while {operations[-1].what}" if operations else ""
    return f"stopped{where}" + (f": {remains}, start again with the same command" if remains else "")


def delete_partial() -> None:
    """Delete unfinished directories, before a process is ended without unwinding."""
    for operation in list(_open):
        if operation.partial is not None:
            shutil.rmtree(operation.partial, ignore_errors=True)


def duration(seconds: int | float) -> str:
    """Format seconds: 45 -> "45s", 200 -> "3m20s", 7500 -> "2h05m", 180000 -> "2d02h"."""
    whole = round(seconds)
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02d}{below}"
    return f"{whole}s"


def quantity(count: int, noun: str) -> str:
    """Format a count and its noun, with an s unless the count is 1: "1 document", "1,234 documents"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _show_line(text: str) -> None:
    """Print a line. On a terminal it replaces the previous line."""
    terminal = sys.stderr.isatty()
    print(f"\r\x1b[2K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
