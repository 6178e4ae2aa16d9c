"""The protocol of what a run does between its steps: checkpoints, evaluations, samples, traces."""

import contextlib
from collections.abc import Callable, Iterator

import jax

from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.step.train_state import TrainState


class Hook:
    """Work of a run between its steps. The loop calls its hooks in a fixed order after each step and at the end."""

    def is_due(self, step: int) -> bool:
        """Return whether `after_step` needs the metrics of all steps, and no batch taken ahead of it."""
        return False

    def after_step(self, step: int, state: TrainState) -> None:
        """Do the work that is due after a step; called after every step."""

    def finish(self, step: int, state: TrainState) -> None:
        """Do the work that is due after the last step of a run that no signal stopped."""


def evaluates_after(config: TrainConfig, step: int) -> bool:
    """Return whether a run is evaluated after a step; the evaluation at the end does not count."""
    return bool(config.eval_every) and step % config.eval_every == 0 and step < config.steps


@contextlib.contextmanager
def failures_as_warnings(work: str, step: int, show: Callable[[str], None], *, local: bool = False) -> Iterator[None]:
    """Show an error of work that a run can do without as a warning.

    In a run of several processes the error is raised unless the work is `local`, without other processes: where one
    fails in the middle of what they compute together, the others wait for it, and can't hear of it before they are
    lost. There the run ends, and goes on from the checkpoint that is made before each evaluation.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1 and not local:
            raise
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        show(f"warning: {work} at step {step} failed, the run goes on: {message}")
