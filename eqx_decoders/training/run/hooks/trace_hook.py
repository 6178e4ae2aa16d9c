"""The trace of JAX's profiler over some steps of a run."""

import jax

from eqx_decoders.training.run.hooks.base import Hook
from eqx_decoders.training.run.hooks.metrics_reporter import MetricsReporter
from eqx_decoders.training.run.prepared_run import PreparedRun
from eqx_decoders.training.step.train_state import TrainState


class TraceHook(Hook):
    """A trace of the steps of `profile` in the run directory; open around the steps, so that it is always written."""

    def __init__(self, run: PreparedRun, metrics: MetricsReporter):
        self.run, self.metrics = run, metrics
        self.tracing = False

    def before_step(self, step: int) -> None:
        """Start the profiler before the first step of the trace, and stop it after the last one."""
        steps = self.run.config.profile
        wanted = steps is not None and steps[0] <= step <= steps[1]
        if wanted == self.tracing:
            return
        self.metrics.read(step - 1)  # nothing is under way where a trace begins and ends
        if wanted:
            jax.profiler.start_trace(str(self.run.directory.path / "profile"))
        else:
            jax.profiler.stop_trace()
        self.tracing = wanted

    def after_step(self, step: int, state: TrainState) -> None:
        self.before_step(step + 1)

    def __enter__(self) -> "TraceHook":
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
