"""Checkpoints of a run: after some steps, and where a signal stops it."""

import jax

from eqx_decoders.training.run.goodput import WallTime
from eqx_decoders.training.run.hooks.base import Hook, evaluates_after
from eqx_decoders.training.run.hooks.metrics_reporter import MetricsReporter
from eqx_decoders.training.run.messages import print_status
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.settings_file import settings_json
from eqx_decoders.training.step.train_state import TrainState


class CheckpointHook(Hook):
    """Checkpoints every `checkpoint_every` steps, at the last step and, with several processes, before evaluations.

    A checkpoint that is due after a step that was not finite is made after the next finite one.
    """

    def __init__(self, run: PreparedRun, metrics: MetricsReporter, time: WallTime):
        self.run, self.metrics, self.time = run, metrics, time
        self._delayed = False

    def is_due(self, step: int) -> bool:
        config = self.run.config
        if self._delayed or step % config.checkpoint_every == 0 or step == config.steps:
            return True
        return evaluates_after(config, step) and jax.process_count() > 1  # see `failures_as_warnings`

    def after_step(self, step: int, state: TrainState) -> None:
        due = self.is_due(step)
        self._delayed = due and self.metrics.skipped_in_a_row > 0 and step != self.run.config.steps
        if due and not self._delayed:
            self.save(step, state)

    def save(self, step: int, state: TrainState) -> None:
        """Start to write the checkpoint of a step, with the state of the data."""
        run = self.run
        with self.time.doing("saving"):
            if run.writes:
                run.directory.backup.check_owner()
            run.back_up_metrics()
            if run.method is not None:
                run.method.settle(state)
            config, finite = settings_json(run.config), self.metrics.skipped_in_a_row == 0
            run.checkpoints.save(step, state, data_state=run.data_state, config=config, drop=finite)

    def save_and_stop(self, step: int, state: TrainState) -> None:
        """Write the checkpoint of the last finite step before a signal, and report what is saved."""
        stuck, checkpoints = self.metrics.skipped_in_a_row, self.run.checkpoints
        if not stuck:
            self.save(step, state)
        checkpoints.wait(drop=False)
        last = checkpoints.latest
        unsaved = f": the last {stuck} steps were not finite, and are not saved" * (stuck > 0)
        print_status(f"stopped, {'nothing is saved' if last is None else f'saved at step {last}'}{unsaved}")
