"""Held-out evaluations of a run."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from eqx_decoders.io.coordination import Stop
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.evaluation import evaluate_sets
from eqx_decoders.training.held_out import HeldOut
from eqx_decoders.training.methods.method import Method
from eqx_decoders.training.run.goodput import WallTime
from eqx_decoders.training.run.hooks.base import Hook, evaluates_after, failures_as_warnings
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.step.train_state import TrainState


class EvaluationHook(Hook):
    """Held-out losses every `eval_every` steps, of some batches of each set, and at the end.

    **Arguments:**

    - `results`: losses of the last evaluation by the name of the held-out set; "" is the loss of all sets. Empty if
        the evaluation failed or was interrupted by a signal, or if there are no held-out sets.
    - `failed`: whether the last evaluation raised an error.
    """

    def __init__(self, run: PreparedRun, trackers: Trackers, show: Callable[[str], None], time: WallTime, stop: Stop):
        self.run, self.trackers, self.show, self.time, self.stop = run, trackers, show, time, stop
        self.results: dict[str, HeldOut] = {}
        self.failed = False

    @property
    def is_finite(self) -> bool:
        """Whether the last evaluation did not fail and all of its losses are finite."""
        return not self.failed and all(math.isfinite(result.loss) for result in self.results.values())

    def begin(self, state: TrainState) -> None:
        """Measure a new run before its first step, where its method says so."""
        if self.run.method is not None and self.run.method.evaluates_start:
            with self.time.doing("evaluating"):
                self._measure(0, state)

    def is_due(self, step: int) -> bool:
        return evaluates_after(self.run.config, step)

    def after_step(self, step: int, state: TrainState) -> None:
        if self.is_due(step):
            with self.time.doing("evaluating"):
                self._measure(step, state)

    def finish(self, step: int, state: TrainState) -> None:
        self._measure(step, state)

    def _measure(self, step: int, state: TrainState) -> None:
        self.results, self.failed = {}, True
        with failures_as_warnings("the evaluation", step, self.show):
            if self.run.method is None:
                self.results = self.evaluate(state.averaged, step)  # a copy of the weights, which may not fit
            else:
                self._measure_figures(self.run.method, step, state)
            self.failed = False

    def _held_out(self, step: int) -> dict[str, Iterator[Any]]:
        """Return the batches of each set that are evaluated after a step."""
        config = self.run.config
        most = config.eval_batches if step < config.steps else config.final_eval_batches
        return {name: itertools.islice(batches.rewind(), most) for name, batches in self.run.held_out.items()}

    def _measure_figures(self, method: Method, step: int, state: TrainState) -> None:
        """Evaluate the objective on held-out examples; write and show its figures."""
        for name, batches in self._held_out(step).items():
            figures, behind = method.evaluate(state, batches), name and f"/{name}"
            self.trackers.write({"step": step} | {f"eval_{each}{behind}": value for each, value in figures.items()})
            text = ", ".join(f"{each} {value:.4f}" for each, value in figures.items())
            self.show(f"step {step}: held-out {text}{name and f' ({name})'}")
        for batches in self.run.held_out.values():
            batches.close()
        if self.run.writes and step:
            with failures_as_warnings("drawing the metrics", step, self.show, local=True):
                method.draw()

    def evaluate(self, model: Decoder, step: int) -> dict[str, HeldOut]:
        """Evaluate a model on the held-out sets; write and show the losses."""
        sets, rows = self.run.held_out, self._held_out(step)
        try:
            whole, by_set = evaluate_sets(model, rows, self.run.config.dataset.batch_size, stop=self.stop)
        finally:
            for batches in sets.values():
                batches.close()
        if self.stop.agreed or not sets:
            return {}
        by_set = {name: result for name, result in by_set.items() if name}
        row, message = describe_evaluation(step, whole, by_set)
        self.trackers.write(row)
        self.show(message)
        return {"": whole, **by_set}


def describe_evaluation(step: int, whole: HeldOut, by_set: dict[str, HeldOut]) -> tuple[MetricsRow, str]:
    """Return the row of `metrics.jsonl` and the line of the progress about an evaluation."""
    row: dict[str, Any] = {"step": step, "eval_loss": whole.loss}
    row |= {f"eval_loss/{name}": result.loss for name, result in by_set.items()}
    message = f"step {step}: held-out loss {whole.loss:.4f} nats per token"
    if by_set:
        message += f" ({', '.join(f'{name} {result.loss:.4f}' for name, result in by_set.items())})"
    if whole.acceptance:
        row["mtp_acceptance"] = whole.acceptance
        message += f", draft tokens accepted {', '.join(f'{rate:.1%}' for rate in whole.acceptance)}"
    return row, message
