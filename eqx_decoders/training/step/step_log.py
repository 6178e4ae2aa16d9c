"""Metrics of the steps of a run: losses, times, waiting for data, FLOPs and memory."""

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.model.decoder_config import DecoderConfig
from eqx_decoders.training.run.log import Goodput, MetricsRow
from eqx_decoders.training.step.balance import relative_loads, routing_report
from eqx_decoders.training.step.train_state import StepMetrics


LOAD_STEPS = 50  # at the end of a run, whose mean loads of experts are reported
PEAK_STEPS = 8  # that are looked at together: a host that was late reads two at a time
_routing_report = jax.jit(routing_report, static_argnums=0)


class _PendingStep(NamedTuple):
    """A step that was given to the devices, and may not be done yet; `started`: when the host began with it."""

    step: int
    metrics: StepMetrics
    routing: Any
    epochs: dict[str, float]
    started: float


class StepLog:
    """Queue of the steps whose metrics were not read yet, and the rows of metrics that they become.

    step_flops: FLOPs of a step. peak_flops: FLOP/s of all devices; a faster step raises it.
    """

    def __init__(self, config: DecoderConfig, *, step_flops: float, peak_flops: float, goodput: Goodput):
        self._config, self._step_flops, self._peak_flops, self._goodput = config, step_flops, peak_flops, goodput
        self.step_bytes: int | None = None  # that a step needs of a device, where the compiler tells
        self.last: MetricsRow = {}
        self._taken: collections.deque[_PendingStep] = collections.deque()
        self._seconds: collections.deque[float] = collections.deque(maxlen=PEAK_STEPS)
        self._expert_counts: collections.deque[np.ndarray] = collections.deque(maxlen=LOAD_STEPS)
        self._read_at, self._done = 0.0, _DoneTimes()  # when metrics were read last; when steps were done
        self._waited = 0.0  # seconds for which the devices had no batch, since metrics were read last

    def __len__(self) -> int:
        """Return the number of steps under way."""
        return len(self._taken)

    def take(self, step: int, metrics: StepMetrics, epochs: dict[str, float], started: float) -> None:
        """Add a step that the devices were given.

        epochs: passes over the data so far, by their names in a row. started: when the host began with it
        (`time.perf_counter`).
        """
        stats, routing = metrics.stats, None
        if stats is not None and stats.routing is not None:  # now: later it would stand behind the next steps
            routing = _routing_report(self._config, stats.routing)
        self._taken.append(_PendingStep(step, metrics, routing, epochs, started))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data, from when the devices have nothing left to do."""
        started, last = time.perf_counter(), self._taken[-1].metrics.loss if self._taken else None
        if last is not None:
            self._done.watch(last)
        yield
        done_at = started if last is None else self._done.time_of(last)
        if done_at is not None:
            self._waited += time.perf_counter() - max(started, done_at)

    def close(self) -> None:
        """End the thread that notes when steps are done."""
        self._done.close()

    def forget_waiting(self) -> None:
        """Forget the waiting so far, which was not within a step."""
        self._waited = 0.0

    def read(self) -> MetricsRow:
        """Return the row of the oldest step under way, as soon as it is done."""
        taken = self._taken.popleft()
        taken = taken._replace(**jax.device_get({"metrics": taken.metrics, "routing": taken.routing}))
        now = time.perf_counter()
        seconds, self._read_at = max(1e-9, now - max(self._read_at, taken.started)), now
        waited, self._waited = self._waited, 0.0
        names = ("loss", "nll", "accuracy", "tokens", "grad_norm", "learning_rate", "skipped")
        row = {"step": taken.step} | {name: getattr(taken.metrics, name) for name in names}
        row |= {"step_seconds": seconds, "data_wait": min(1.0, waited / seconds)} | taken.epochs
        self.last = row | self._goodput.add(row) | self._use(seconds) | self._of_layers(taken)
        return self.last

    def loads(self) -> tuple[dict[str, Any], int]:
        """Return the mean load of every expert over the last steps, by layer, and the number of these steps."""
        count = len(self._expert_counts)
        return (relative_loads(self._config, np.sum(self._expert_counts, axis=0)) if count else {}), count

    def _use(self, seconds: float) -> MetricsRow:
        """Return the share of the devices' peak, and their peak memory."""
        self._seconds.append(seconds)
        self._peak_flops = max(self._peak_flops, self._step_flops * len(self._seconds) / sum(self._seconds))
        row: MetricsRow = {"mfu": min(1.0, self._step_flops / seconds / self._peak_flops)}
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", self.step_bytes)
        return row if used is None else row | {"peak_memory_gb": used / 1e9}

    def _of_layers(self, taken: _PendingStep) -> MetricsRow:
        """Return figures of single layers and of depths of multi-token prediction, where there are any."""
        metrics, row = taken.metrics, dict(taken.metrics.objective or {})
        if metrics.mtp_nll is not None:
            row["mtp_nll"] = metrics.mtp_nll
        if metrics.stats is not None and metrics.stats.activations is not None:
            row |= {f"activations/{name}": value for name, value in vars(metrics.stats.activations).items()}
        if metrics.stats is not None and metrics.stats.indexer is not None:
            row["indexer_loss"] = metrics.stats.indexer.loss / np.maximum(metrics.stats.indexer.tokens, 1.0)
        if metrics.stats is not None and metrics.stats.max_scores is not None:
            row["max_score"] = metrics.stats.max_scores.max(-1)
        if metrics.stats is not None and metrics.stats.routing is not None:
            row |= taken.routing
            self._expert_counts.append(np.asarray(metrics.stats.routing.counts))
        return row


class _DoneTimes:
    """Thread that notes when arrays are computed, one after the other; one for all, since starting takes longer."""

    def __init__(self):
        self._arrays: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: tuple[Any, float] = (None, 0.0)

    def watch(self, array: Any) -> None:
        """Note when `array` is computed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._note, daemon=True)
            self._thread.start()
        self._arrays.put(array)

    def time_of(self, array: Any) -> float | None:
        """Return when the array that is watched last was computed; None if it is not, yet."""
        noted, time_of_array = self._last
        return time_of_array if noted is array else None

    def close(self) -> None:
        """End the thread."""
        self._arrays.put(None)
        self._thread = None

    def _note(self) -> None:
        while (array := self._arrays.get()) is not None:
            with contextlib.suppress(Exception):  # of the step; whoever reads its metrics hears of it
                array.block_until_ready()
            self._last = (array, time.perf_counter())
