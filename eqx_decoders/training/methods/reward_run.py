"""What a run that trains a reward model needs: its pairs, and its loss."""

from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.preference_data import preference_data
from eqx_decoders.training.objectives.reward_scores import RewardObjective


class RewardRun(BatchMethod):
    """Loss of a run that trains a reward model; nothing is computed beside its steps."""

    def __init__(self, start: MethodStart):
        super().__init__(start.execution, start.config.data.batch_size)
        self.loss = RewardObjective(centering=start.config.reward.centering)


def open_rewards(start: MethodStart) -> OpenedMethod:
    """Read the pairs of a run, and the held-out ones, if there is a `held_out_path`."""
    start.check_text_alone()
    return OpenedMethod(*preference_data(start), RewardRun(start))
