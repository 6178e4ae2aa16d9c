"""What takes time before there are steps: it shows that it is at work, and tells what is kept if a signal ends it."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


FIRST, TERMINAL, LINES = 2.0, 0.5, 5.0  # seconds until it is shown first, and then between two times

ON_ENTER: list[Callable[[], None]] = []  # called whenever something begins that takes time
_open: list["StatusLine"] = []  # the innermost last
_showing = 0


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """While open, whatever takes longer than two seconds is shown on the standard error."""
    global _showing
    _showing += 1
    try:
        yield
    finally:
        _showing -= 1


class StatusLine:
    """Something that takes time, with a `showing()` around it shown every few seconds, also from calls into libraries.

    with Waiting("tokenising", kept="nothing of the tokens is kept") as waiting:
        for text in texts:
            waiting.add(len(text))

    what: what is being done. kept: what there is afterwards if it is ended by a signal. total: bytes, where known.
    partial: a directory that a process which is ended at once deletes. show: takes the text, by default a line.
    """

    def __init__(
        self,
        what: str,
        *,
        kept: str = "",
        total: int | None = None,
        partial: Path | None = None,
        show: Callable[[str], None] | None = None,
    ):
        self.what, self.kept, self.total, self.partial = what, kept, total, partial
        self._show, self._done, self._begun = show or _show_line, 0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> "StatusLine":
        self._begun = time.monotonic()
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
        """So many bytes more are done."""
        self._done += size

    def counted(self, texts: Iterable[str]) -> Iterator[str]:
        """The texts, counted as they are taken."""
        for text in texts:
            self.add(len(text))
            yield text

    def text(self) -> str:
        """`"tokenising: 35 MB, 4.2 MB/s, 8s"`, `"loading weights: 1.2 of 16.1 GB, 0.4 GB/s, 3s"`, `"compiling: 9s"`."""
        seconds = time.monotonic() - self._begun
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
            if _open[-1:] == [self]:  # what it waits for itself is shown instead
                self._show(self.text())
                shown, wait = True, TERMINAL if terminal else LINES
        if shown and terminal and self._show is _show_line:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def takes_time() -> bool:
    """Whether this process is at something that takes time."""
    return bool(_open)


def stopped_text() -> str:
    """The sentence for a process that a signal ends at this moment."""
    waits = list(_open)
    kept = next((each.kept for each in reversed(waits) if each.kept), "")
    where = f" while {waits[-1].what}" if waits else ""
    return f"stopped{where}" + (f": {kept}, start again with the same command" if kept else "")


def delete_partial() -> None:
    """Delete what is unfinished, in a process that is about to end without coming back to it."""
    for each in list(_open):
        if each.partial is not None:
            shutil.rmtree(each.partial, ignore_errors=True)


def duration(seconds: int | float) -> str:
    """45 -> "45s", 200 -> "3m20s", 7500 -> "2h05m", 180000 -> "2d02h"."""
    whole = round(seconds)
    for unit, size, below, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // small:02d}{below}"
    return f"{whole}s"


def _show_line(text: str) -> None:
    """A line that replaces itself on a terminal, a line of its own elsewhere."""
    terminal = sys.stderr.isatty()
    print(f"\r\x1b[2K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
