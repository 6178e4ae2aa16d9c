"""What a run that trains a reward model needs: its pairs, and its loss."""

from collections.abc import Iterable

from eqx_decoders.data.batch import Batch
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.training.methods.held_out_figures import held_out_figures
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.methods.preference_data import preference_data
from eqx_decoders.training.objectives.reward_scores import RewardObjective
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.step.train_state import TrainState


class RewardRun:
    """Loss of a run that trains a reward model; nothing is computed beside its steps."""

    def __init__(self, start: MethodStart):
        self.loss, self._layout = RewardObjective(centering=start.config.reward.centering), start.execution.layout

    def prepare(self, batch: Batch, state: TrainState) -> Batch:
        """Return the batch."""
        return batch

    def evaluate(self, state: TrainState, batches: Iterable[Batch], rows: int) -> dict[str, float]:
        """Compute the loss and the accuracy of held-out pairs, with the means of the weights if there are any."""
        return held_out_figures(self.loss, state.averaged, batches, lambda batch: hand_over(batch, self._layout, rows))

    def note(self, row: MetricsRow) -> str | None:
        """Return nothing."""
        return None


def open_rewards(start: MethodStart) -> OpenedMethod:
    """Read the pairs of a run, and the held-out ones, if there is a `held_out_path`."""
    start.check_text_alone()
    return OpenedMethod(*preference_data(start), RewardRun(start))
