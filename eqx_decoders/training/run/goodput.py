"""Where the time of a run goes: by what this process does, and goodput over all the starts of the run."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from eqx_decoders.training.run.metrics import MetricsRow


class Goodput:
    """The share of a run's time that became training: seconds of the steps that were kept over those of its processes.

    Steps that were computed again, because a process was killed behind its last checkpoint, count once. The rows of
    `metrics.jsonl` tell of earlier starts: `run_seconds` is the time of the run up to a row, kept or not. The time
    between two starts, when nothing ran, does not count, nor that of a start that was killed before its first step.

    before: rows of earlier starts. start: the first step to come, from which on rows are not kept. begun: when this
    start began, in seconds since 1970.
    """

    def __init__(self, before: Iterable[MetricsRow] = (), *, start: int = 0, begun: float):
        rows = [row for row in before if "step_seconds" in row]
        self.productive = sum(map(_productive, (row for row in rows if row["step"] < start)))
        told = (row.get("run_seconds", 0.0) for row in rows)
        self._earlier = max((*told, self.productive))
        self._begun = begun

    @property
    def run_seconds(self) -> float:
        """The time of all processes of the run, one after the other."""
        return self._earlier + time.time() - self._begun

    def add(self, row: MetricsRow) -> dict[str, float]:
        """What to add to the row of a step: `run_seconds` and `goodput`, the share of them that was productive."""
        self.productive += _productive(row)
        seconds = max(self.run_seconds, self.productive)
        return {"run_seconds": seconds, "goodput": self.productive / seconds if seconds > 0 else 1.0}


def _productive(row: MetricsRow) -> float:
    return row["step_seconds"] * (1.0 - row.get("data_wait", 0.0))


class WallTime:
    """Seconds of this process by what it does, since it has `begun`; what is nested counts for itself alone."""

    def __init__(self, part: str, begun: float):
        self.seconds: dict[str, float] = {}
        self._part, self._since = part, begun

    def switch(self, part: str) -> str:
        """From now on it does something else; what it did so far."""
        now, was = time.time(), self._part
        self.seconds[was] = self.seconds.get(was, 0.0) + now - self._since
        self._part, self._since = part, now
        return was

    @contextlib.contextmanager
    def doing(self, part: str) -> Iterator[None]:
        """What it does inside."""
        was = self.switch(part)
        try:
            yield
        finally:
            self.switch(was)

    def text(self) -> str:
        """`"steps 81%, compiling 12%, starting 7%"`, the largest part first, without what is below 0.5 %."""
        self.switch(self._part)
        whole = sum(self.seconds.values())
        shares = sorted(((seconds / whole, part) for part, seconds in self.seconds.items()), reverse=True)
        return ", ".join(f"{part} {share:.0%}" for share, part in shares if share >= 0.005)


_first = True  # whether no run has begun in this process


def run_start() -> float:
    """When a run that is about to begin in this process has begun: with the process, or now if it had one before."""
    global _first
    begun, _first = process_start() if _first else time.time(), False
    return begun


def process_start() -> float:
    """When this process began, in seconds since 1970; where the system doesn't tell, now."""
    try:  # the 22nd field, counted in ticks since the machine was started; the name before it may hold spaces
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return time.time()
