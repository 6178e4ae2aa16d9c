"""Metrics of the steps of a run: losses, times, utilization and memory."""

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


LOAD_STEPS = 50  # number of last steps whose mean loads of experts are reported
PEAK_STEPS = 8  # number of steps over which the peak speed is a mean: a late host reads two steps at once
_routing_report = jax.jit(routing_report, static_argnums=0)


class _PendingStep(NamedTuple):
    """Step that was started on the devices and may not be finished. `started`: time at which the host started it."""

    step: int
    metrics: StepMetrics
    routing: Any
    epochs: dict[str, float]
    started: float


class StepLog:
    """Queue of started steps, and the rows of metrics of finished steps.

    **Arguments:**

    - `config`: configuration of the model.
    - `step_flops`: FLOPs of a step.
    - `peak_flops`: peak performance of all devices, in FLOP/s. A faster step increases it.
    - `goodput`: measures the goodput of the run.

    **Attributes:**

    - `step_bytes`: memory that a step needs per device; None if the compiler does not report it.
    - `last`: the last row.
    """

    def __init__(self, config: DecoderConfig, *, step_flops: float, peak_flops: float, goodput: Goodput):
        self._config, self._step_flops, self._peak_flops, self._goodput = config, step_flops, peak_flops, goodput
        self.step_bytes: int | None = None
        self.last: MetricsRow = {}
        self._pending: collections.deque[_PendingStep] = collections.deque()
        self._seconds: collections.deque[float] = collections.deque(maxlen=PEAK_STEPS)
        self._expert_counts: collections.deque[np.ndarray] = collections.deque(maxlen=LOAD_STEPS)
        self._read_at, self._finished = (
            0.0,
            _FinishTimes(),
        )  # time of the last `read`; times at which steps were finished
        self._waited = 0.0  # seconds without a batch since the last `read`

    def __len__(self) -> int:
        """Return the number of started steps whose metrics were not read."""
        return len(self._pending)

    def add(self, step: int, metrics: StepMetrics, epochs: dict[str, float], started: float) -> None:
        """Add a started step.

        **Arguments:**

        - `step`: number of the step.
        - `metrics`: its metrics, which may not be computed yet.
        - `epochs`: number of passes over the data so far, by name.
        - `started`: time at which the host started the step (`time.perf_counter`).
        """
        stats, routing = metrics.stats, None
        if (
            stats is not None and stats.routing is not None
        ):  # queued now: later it would be computed after the next steps
            routing = _routing_report(self._config, stats.routing)
        self._pending.append(_PendingStep(step, metrics, routing, epochs, started))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the time in the context in which the devices are idle, and add it to `data_wait`."""
        started, last = time.perf_counter(), self._pending[-1].metrics.loss if self._pending else None
        if last is not None:
            self._finished.watch(last)
        yield
        finished_at = started if last is None else self._finished.time_of(last)
        if finished_at is not None:
            self._waited += time.perf_counter() - max(started, finished_at)

    def close(self) -> None:
        """End the thread that records when steps are finished."""
        self._finished.close()

    def forget_waiting(self) -> None:
        """Discard the waiting time so far, because it was not in a step."""
        self._waited = 0.0

    def read(self) -> MetricsRow:
        """Wait for the oldest started step, and return its row of metrics."""
        pending = self._pending.popleft()
        pending = pending._replace(**jax.device_get({"metrics": pending.metrics, "routing": pending.routing}))
        now = time.perf_counter()
        seconds, self._read_at = max(1e-9, now - max(self._read_at, pending.started)), now
        waited, self._waited = self._waited, 0.0
        names = ("loss", "nll", "accuracy", "tokens", "grad_norm", "learning_rate", "skipped")
        row = {"step": pending.step} | {name: getattr(pending.metrics, name) for name in names}
        row |= {"step_seconds": seconds, "data_wait": min(1.0, waited / seconds)} | pending.epochs
        self.last = row | self._goodput.add(row) | self._utilization(seconds) | self._layer_metrics(pending)
        return self.last

    def loads(self) -> tuple[dict[str, Any], int]:
        """Return the mean load of each expert over the last steps, by layer, and the number of these steps."""
        count = len(self._expert_counts)
        return (relative_loads(self._config, np.sum(self._expert_counts, axis=0)) if count else {}), count

    def _utilization(self, seconds: float) -> MetricsRow:
        """Return the model FLOPs utilization and the peak memory of a device."""
        self._seconds.append(seconds)
        self._peak_flops = max(self._peak_flops, self._step_flops * len(self._seconds) / sum(self._seconds))
        row: MetricsRow = {"mfu": min(1.0, self._step_flops / seconds / self._peak_flops)}
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", self.step_bytes)
        return row if used is None else row | {"peak_memory_gb": used / 1e9}

    def _layer_metrics(self, pending: _PendingStep) -> MetricsRow:
        """Return metrics of layers and of depths of multi-token prediction."""
        metrics, row = pending.metrics, dict(pending.metrics.objective or {})
        if metrics.mtp_nll is not None:
            row["mtp_nll"] = metrics.mtp_nll
        if metrics.stats is not None and metrics.stats.activations is not None:
            row |= {f"activations/{name}": value for name, value in vars(metrics.stats.activations).items()}
        if metrics.stats is not None and metrics.stats.indexer is not None:
            row["indexer_loss"] = metrics.stats.indexer.loss / np.maximum(metrics.stats.indexer.tokens, 1.0)
        if metrics.stats is not None and metrics.stats.max_scores is not None:
            row["max_score"] = metrics.stats.max_scores.max(-1)
        if metrics.stats is not None and metrics.stats.routing is not None:
            row |= pending.routing
            self._expert_counts.append(np.asarray(metrics.stats.routing.counts))
        return row


class _FinishTimes:
    """Thread that records when arrays are computed. One thread for all arrays, because starting a thread is slow."""

    def __init__(self):
        self._arrays: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: tuple[Any, float] = (None, 0.0)

    def watch(self, array: Any) -> None:
        """Record when `array` is computed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._record, daemon=True)
            self._thread.start()
        self._arrays.put(array)

    def time_of(self, array: Any) -> float | None:
        """Return the time at which the last watched array was computed; None if it is not computed yet."""
        computed, time_of_array = self._last
        return time_of_array if computed is array else None

    def close(self) -> None:
        """End the thread."""
        self._arrays.put(None)
        self._thread = None

    def _record(self) -> None:
        while (array := self._arrays.get()) is not None:
            with contextlib.suppress(Exception):  # an error of the step, which `read` raises
                array.block_until_ready()
            self._last = (array, time.perf_counter())
