"""Progress of a run: a bar of rich on a terminal, lines of text anywhere else."""

import sys
import time
from typing import Any

import numpy as np

from eqx_decoders.errors import check_integer
from eqx_decoders.io.status import duration
from eqx_decoders.training.run.metrics import MetricsRow


class Progress:
    """Progress of a run: a bar on a terminal (with rich, extra "train"), otherwise a line every few seconds.

    total: steps of the whole run. start: steps done already. every: seconds between two lines when there is no bar.
    stream: where to show it, by default the standard error.
    `update` reads `loss`, `tokens` and `step_seconds` of a row, and where they are present `mfu` (a fraction) and
    `load` (of layers with experts, the largest load over the mean), of which it shows the worst.
    """

    def __init__(self, total: int, *, start: int = 0, every: int | float = 10, stream: Any = None):
        check_integer("total", total)
        self._total, self._start, self._done, self._every = total, start, start, every
        self._stream = stream if stream is not None else sys.stderr
        self._first: tuple[int, float] | None = None  # the first step that was reported, and when
        self._shown: float | None = None
        self._bar = self._task = None
        self._columns: dict[str, int] | None = None

    def __enter__(self) -> "Progress":
        if self._stream.isatty():
            self._bar = _rich_bar(self._stream)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._start, text="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, metrics: MetricsRow) -> None:
        """Show that `step` steps are done, and the metrics of the last of them."""
        self._done = step
        now = time.monotonic()
        self._first = self._first or (step, now)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=_bar_text(metrics))
        elif self._shown is None or step >= self._total or now - self._shown >= self._every:
            self._shown = now
            self._print(step, metrics, self.seconds_left(now))

    def message(self, text: str) -> None:
        """Show a line above the bar, or among the lines."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def wait(self, text: str) -> None:
        """Show the reason for a wait before the first step: in the bar, or as a line."""
        if self._bar is not None:
            self._bar.update(self._task, text=text, refresh=True)
        else:
            self.message(text)

    def seconds_left(self, now: float | None = None) -> float | None:
        """Return time per step x steps to go; None before the second step of this process: the first is compiled."""
        if self._first is None or self._done <= self._first[0]:
            return None
        step, begun = self._first
        spent = (time.monotonic() if now is None else now) - begun
        return spent / (self._done - step) * (self._total - self._done)

    def _print(self, step: int, metrics: MetricsRow, left: float | None) -> None:
        if self._columns is None:
            self._columns = {name: width for name, width in _COLUMNS.items() if name != "load" or name in metrics}
            self._line({name: name for name in self._columns})
        time_left = "-" if left is None else duration(left)
        self._line({"step": f"{step}/{self._total}", "left": time_left} | _cells(metrics))

    def _line(self, cells: dict[str, str]) -> None:
        assert self._columns is not None
        self.message(" ".join(f"{cells[name]:>{width}}" for name, width in self._columns.items()))


_COLUMNS = {"step": 17, "loss": 9, "tokens/s": 10, "MFU": 7, "load": 7, "left": 9}


def _bar_text(metrics: MetricsRow) -> str:
    cells = _cells(metrics)
    named = [f"{name} {cells[name]}" for name in ("MFU", "load") if cells[name] != "-"]
    return "  ".join((f"loss {cells['loss']}", f"{cells['tokens/s']} tokens/s", *named))


def _cells(metrics: MetricsRow) -> dict[str, str]:
    seconds = float(metrics.get("step_seconds", 0))
    return {
        "loss": f"{float(metrics['loss']):.4f}" if "loss" in metrics else "-",
        "tokens/s": f"{float(metrics['tokens']) / seconds:,.0f}" if "tokens" in metrics and seconds > 0 else "-",
        "MFU": f"{100 * float(metrics['mfu']):.1f}%" if metrics.get("mfu") is not None else "-",
        "load": f"{float(np.max(metrics['load'])):.2f}" if metrics.get("load") is not None else "-",
    }


def _rich_bar(stream: Any) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeRemainingColumn
    except ImportError:
        return None  # lines of text serve as well
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    return Bar(*columns, console=Console(file=stream), speed_estimate_period=120, expand=True)
