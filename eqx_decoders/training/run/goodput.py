"""Time of a run: by the activities of this process, and goodput over all the starts of the run."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from eqx_decoders.training.run.metrics import MetricsRow


class Goodput:
    """The share of a run's time that became training: seconds of the steps that count over those of its processes.

    Steps that were computed again, because a process was killed behind its last checkpoint, count once. The rows of
    `metrics.jsonl` tell of earlier starts: `run_seconds` is the time of the run up to a row. The time between two
    starts, when nothing ran, does not count, nor that of a start that was killed before its first step.

    before: rows of earlier starts. start: the first step to come, from which on rows do not count. started: when this
    start began, in seconds since 1970.
    """

    def __init__(self, before: Iterable[MetricsRow] = (), *, start: int = 0, started: float):
        rows = [row for row in before if "step_seconds" in row]
        self.productive = sum(map(_productive, (row for row in rows if row["step"] < start)))
        logged = (row.get("run_seconds", 0.0) for row in rows)
        self._earlier = max((*logged, self.productive))
        self._started = started

    @property
    def run_seconds(self) -> float:
        """Return the time of all processes of the run, one after the other."""
        return self._earlier + time.time() - self._started

    def add(self, row: MetricsRow) -> dict[str, float]:
        """Count the row of a step; return `run_seconds` and `goodput`, the share of them that was productive."""
        self.productive += _productive(row)
        seconds = max(self.run_seconds, self.productive)
        return {"run_seconds": seconds, "goodput": self.productive / seconds if seconds > 0 else 1.0}


def _productive(row: MetricsRow) -> float:
    return row["step_seconds"] * (1.0 - row.get("data_wait", 0.0))


class WallTime:
    """Seconds of this process by activity, since it has `started`; a nested activity counts for itself alone."""

    def __init__(self, part: str, started: float):
        self.seconds: dict[str, float] = {}
        self._part, self._since = part, started

    def switch(self, part: str) -> str:
        """Begin another activity; return the one so far."""
        now, was = time.time(), self._part
        self.seconds[was] = self.seconds.get(was, 0.0) + now - self._since
        self._part, self._since = part, now
        return was

    @contextlib.contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """Count the time inside for an activity."""
        was = self.switch(part)
        try:
            yield
        finally:
            self.switch(was)

    def text(self) -> str:
        """Format the shares: `"steps 81%, compiling 12%, starting 7%"`, largest first, without those below 0.5 %."""
        self.switch(self._part)
        whole = sum(self.seconds.values())
        shares = sorted(((seconds / whole, part) for part, seconds in self.seconds.items()), reverse=True)
        return ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= 0.005)


_first = True  # whether no run has started in this process


def run_start() -> float:
    """Return the start time of a run: that of the process, or now if the process had a run before."""
    global _first
    started, _first = process_start() if _first else time.time(), False
    return started


def process_start() -> float:
    """Return when this process began, in seconds since 1970; now, where the system doesn't tell."""
    try:  # the 22nd field, counted in ticks since the machine was started; the name before it may hold spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return time.time()
