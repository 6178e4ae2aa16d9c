"""What the steps of a run become in its log: their metrics, times, waiting for data, flops and memory."""

import collections
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from eqx_decoders.model.decoder import DecoderConfig
from eqx_decoders.training.run.goodput import Goodput
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.step.balance import relative_loads, routing_report
from eqx_decoders.training.step.step import StepMetrics


LOAD_STEPS = 50  # at the end of a run, whose mean loads of experts are told
PEAK_STEPS = 8  # that are looked at together: a host that was late reads two at a time
_routing_report = jax.jit(routing_report, static_argnums=0)


class _Taken(NamedTuple):
    """A step that was given to the devices, and that may not be done yet; `begun`: when the host began with it."""

    step: int
    metrics: StepMetrics
    routing: Any
    epochs: dict[str, float]
    begun: float


class StepLog:
    """The steps that were given to the devices and whose metrics were not read yet, and the rows that these become.

    step_flops: of a step. peak_flops: that all devices can do in a second; what was seen to be done counts, too.
    """

    def __init__(self, config: DecoderConfig, *, step_flops: float, peak_flops: float, goodput: Goodput):
        self._config, self._step_flops, self._peak_flops, self._goodput = config, step_flops, peak_flops, goodput
        self.step_bytes: int | None = None  # that a step needs of a device, where the compiler tells
        self.last: MetricsRow = {}
        self._taken: collections.deque[_Taken] = collections.deque()
        self._seconds: collections.deque[float] = collections.deque(maxlen=PEAK_STEPS)
        self._expert_counts: collections.deque[np.ndarray] = collections.deque(maxlen=LOAD_STEPS)
        self._read_at = self._done_at = 0.0  # when metrics were read last; when the last step was done, if it is
        self._waited = 0.0  # seconds for which the devices had no batch, since metrics were read last

    def __len__(self) -> int:
        """How many steps are under way."""
        return len(self._taken)

    def take(self, step: int, metrics: StepMetrics, epochs: dict[str, float], begun: float) -> None:
        """Note a step that the devices were given.

        epochs: passes over the data so far, by their names in a row. begun: when the host began with it
        (`time.perf_counter`).
        """
        stats, routing = metrics.stats, None
        if stats is not None and stats.routing is not None:  # now: later it would stand behind the next steps
            routing = _routing_report(self._config, stats.routing)
        self._taken.append(_Taken(step, metrics, routing, epochs, begun))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what gets a batch: it counts as waiting for data from when the devices have nothing left to do."""
        begun, thread = time.perf_counter(), None
        if self._taken:
            thread = threading.Thread(target=self._note_done, args=(self._taken[-1].metrics.loss,), daemon=True)
            thread.start()
        yield
        if thread is None or not thread.is_alive():
            self._waited += time.perf_counter() - max(begun, self._done_at)

    def forget_waiting(self) -> None:
        """What was waited for so far was not within a step."""
        self._waited = 0.0

    def read(self) -> MetricsRow:
        """The row of the oldest step under way, as soon as it is done."""
        taken = self._taken.popleft()
        taken = taken._replace(**jax.device_get({"metrics": taken.metrics, "routing": taken.routing}))
        now = time.perf_counter()
        seconds, self._read_at = max(1e-9, now - max(self._read_at, taken.begun)), now
        waited, self._waited = self._waited, 0.0
        names = ("loss", "nll", "accuracy", "tokens", "grad_norm", "learning_rate", "skipped")
        row = {"step": taken.step} | {name: getattr(taken.metrics, name) for name in names}
        row |= {"step_seconds": seconds, "data_wait": min(1.0, waited / seconds)} | taken.epochs
        self.last = row | self._goodput.add(row) | self._use(seconds) | self._of_layers(taken)
        return self.last

    def loads(self) -> tuple[dict[str, Any], int]:
        """The mean load of every expert over the last steps, by layer, and how many steps these are."""
        count = len(self._expert_counts)
        return (relative_loads(self._config, np.sum(self._expert_counts, axis=0)) if count else {}), count

    def _use(self, seconds: float) -> MetricsRow:
        """Of the devices: the share of their peak, and memory."""
        self._seconds.append(seconds)
        self._peak_flops = max(self._peak_flops, self._step_flops * len(self._seconds) / sum(self._seconds))
        row: MetricsRow = {"mfu": min(1.0, self._step_flops / seconds / self._peak_flops)}
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", self.step_bytes)
        return row if used is None else row | {"peak_memory_gb": used / 1e9}

    def _of_layers(self, taken: _Taken) -> MetricsRow:
        """Figures of single layers and of depths of multi-token prediction, where there are any."""
        metrics, row = taken.metrics, {}
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

    def _note_done(self, loss: Any) -> None:
        with contextlib.suppress(Exception):  # of the step; whoever reads its metrics hears of it
            loss.block_until_ready()
        self._done_at = time.perf_counter()
