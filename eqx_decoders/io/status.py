"""Status lines of long operations, which show their progress and say what remains if a signal ends them."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


FIRST, TERMINAL, LINES = 2.0, 0.5, 5.0  # seconds until it is shown first, and then between two times

ON_ENTER: list[Callable[[], None]] = []  # called whenever a long operation begins
_open: list["StatusLine"] = []  # the innermost last
_showing = 0


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """Show operations that take longer than two seconds on the standard error, while open."""
    global _showing
    _showing += 1
    try:
        yield
    finally:
        _showing -= 1


class StatusLine:
    """Long operation, whose status is shown every few seconds inside `showing()`, also during calls into libraries.

    with StatusLine("tokenizing", remains="nothing of the tokens is kept") as status:
        for text in texts:
            status.add(len(text))

    what: name of the operation. remains: sentence on its results after a signal. total: bytes, where known. partial: a
    directory to be deleted if the process is ended at once. show: called with the text; None prints a line.
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
        """Add bytes that are done."""
        self._done += size

    def counted(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, and add the size of each."""
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
            if _open[-1:] == [self]:  # an operation inside of this one is shown instead
                self._show(self.text())
                shown, wait = True, TERMINAL if terminal else LINES
        if shown and terminal and self._show is _show_line:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def takes_time() -> bool:
    """Return whether a long operation is under way in this process."""
    return bool(_open)


def stopped_text() -> str:
    """Return the message of a process that a signal ends at this moment."""
    operations = list(_open)
    remains = next((each.remains for each in reversed(operations) if each.remains), "")
    where = f" while {operations[-1].what}" if operations else ""
    return f"stopped{where}" + (f": {remains}, start again with the same command" if remains else "")


def delete_partial() -> None:
    """Delete unfinished directories, in a process that is about to end without coming back to them."""
    for each in list(_open):
        if each.partial is not None:
            shutil.rmtree(each.partial, ignore_errors=True)


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
    """Print a line, which replaces the one before on a terminal."""
    terminal = sys.stderr.isatty()
    print(f"\r\x1b[2K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
