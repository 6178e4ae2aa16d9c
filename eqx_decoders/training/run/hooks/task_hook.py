"""Tasks that a run is measured on, as `scripts/evaluate.py` does it."""

import math
from collections.abc import Callable

from eqx_decoders.io.coordination import Stop
from eqx_decoders.training.run.goodput import WallTime
from eqx_decoders.training.run.hooks.base import Hook, evaluates_after, failures_as_warnings
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.step.train_state import TrainState


class Interrupted(Exception):
    """A signal came during an evaluation, whose results are dropped."""


class TaskHook(Hook):
    """Answers to `eval_tasks` every `eval_every` steps and at the end, graded. Nothing of the run depends on them.

    **Arguments:**

    - `lines`: about the last scores; empty if the evaluation failed or a signal came meanwhile.
    """

    def __init__(self, run: PreparedRun, trackers: Trackers, show: Callable[[str], None], time: WallTime, stop: Stop):
        self.run, self.trackers, self.show, self.time, self.stop = run, trackers, show, time, stop
        self.lines: list[str] = []

    def is_due(self, step: int) -> bool:
        return self.run.tasks is not None and evaluates_after(self.run.config, step)

    def after_step(self, step: int, state: TrainState) -> None:
        if self.is_due(step):
            with self.time.doing("evaluating"):
                self._measure(step, state, self.run.config.eval_task_examples)

    def finish(self, step: int, state: TrainState) -> None:
        self._measure(step, state, None)

    def _measure(self, step: int, state: TrainState, examples: int | None) -> None:
        """Evaluate the tasks; write and show their scores."""
        self.lines = []
        tasks = self.run.tasks
        if tasks is None or self.stop.agreed:
            return
        with failures_as_warnings("the evaluation of tasks", step, self.show):
            try:
                text = self.run.text_model(state.averaged)
                results = tasks.evaluate(text, examples=examples, progress=self._go_on)
            except Interrupted:
                return
            figures = {name: value for name, value in results.figures().items() if math.isfinite(value)}
            self.trackers.write({"step": step} | {f"task/{name}": value for name, value in figures.items()})
            self.lines = results.lines()
            self.show(f"step {step}: tasks {'; '.join(self.lines)}")

    def _go_on(self, count: int) -> None:
        """Raise Interrupted where a signal has come."""
        if self.stop():
            raise Interrupted
