"""Metrics of the steps of a run: read from the devices, written, shown, and watched for divergence."""

from collections.abc import Callable
from pathlib import Path

from eqx_decoders.errors import EqxDecodersError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.training.run.messages import diverged, last_finite
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.run.progress import Progress
from eqx_decoders.training.run.trackers import Trackers
from eqx_decoders.training.step.step_log import StepLog


class MetricsReporter:
    """Reader of the metrics of steps under way; writes them to the trackers and the progress.

    **Arguments:**

    - `file`: `metrics.jsonl` of the run.
    - `max_skipped`: steps in a row that may be not finite.
    - `note`: returns what there is to say of a row beside its numbers.
    - `skipped_in_a_row`: newest steps that were not finite.
    """

    def __init__(
        self,
        file: Path,
        checkpoints: Checkpoints,
        max_skipped: int,
        steps: StepLog,
        trackers: Trackers,
        progress: Progress,
        note: Callable[[MetricsRow], str | None] = lambda row: None,
    ):
        self.file, self.checkpoints, self.max_skipped = file, checkpoints, max_skipped
        self.steps, self.trackers, self.progress = steps, trackers, progress
        self.skipped_in_a_row, self.note = 0, note

    def read(self, step: int, *, ahead: int = 0) -> None:
        """Report the metrics of all steps but the newest `ahead`; end the run after too many that were not finite."""
        while len(self.steps) > ahead:
            self.report(self.steps.read())
            if self.skipped_in_a_row >= self.max_skipped:
                ahead = 0  # if one of those under way is finite, the run goes on
        if self.skipped_in_a_row >= self.max_skipped:
            self.checkpoints.wait(drop=False)
            finite = last_finite(self.file, step - self.skipped_in_a_row)
            raise EqxDecodersError(diverged(self.steps.last, self.checkpoints, finite, self.skipped_in_a_row))

    def report(self, row: MetricsRow) -> None:
        """Write and show the metrics of one step."""
        self.trackers.write(row)
        self.progress.update(row["step"], row)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row["skipped"] else 0
        if (text := self.note(row)) is not None:
            self.progress.message(text)
