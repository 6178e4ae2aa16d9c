"""A critic: a second model beside a policy, with a trainer of its own, that learns from the same batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from eqx_decoders.data.batch import Batch
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import StepMetrics, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
    """A model that is trained beside a policy; its state is `TrainState.critic` of the policy's.

    **Arguments:**

    - `trainer_by`: makes its trainer by the settings of a run.
    - `trainer`: that of this run.
    - `target`: the shapes of the model.
    - `new_model`: makes it before its first step.
    - `updates`: its steps on each batch.
    """

    trainer_by: Callable[[Any], Trainer]
    trainer: Trainer
    target: Decoder
    new_model: Callable[[], Decoder]
    updates: int

    def first_state(self, key: PRNGKeyArray) -> TrainState:
        """Make the state before the first step."""
        return self.trainer.init(self.new_model(), key=jax.random.fold_in(key, 2))

    def step(self, trainer: Trainer, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step of the policy, then those of the critic; `state`, of both, is donated.

        The metrics are the policy's. Its figures also have `value_loss` and what the critic's objective reports, of
        the last of its steps, with `critic_grad_norm` and `critic_learning_rate`; a step of the critic that is not
        finite makes the whole step count as one.
        """
        policy, critic = _parts(state)
        policy, metrics = trainer.step(policy, batch)
        critic, beside = self.trainer.step(critic, batch)
        skipped = metrics.skipped | beside.skipped
        for _ in range(self.updates - 1):
            critic, beside = self.trainer.step(critic, batch)
            skipped = skipped | beside.skipped
        figures = {"value_loss": beside.loss, "critic_grad_norm": beside.grad_norm}
        figures |= {"critic_learning_rate": beside.learning_rate} | (beside.objective or {})
        metrics = dataclasses.replace(metrics, objective=(metrics.objective or {}) | figures, skipped=skipped)
        return dataclasses.replace(policy, critic=critic), metrics

    def compile(self, trainer: Trainer, state: TrainState, batch: Batch) -> int | None:
        """Compile both steps; return the bytes that the larger one needs of a device, where the compiler tells."""
        policy, critic = _parts(state)
        sizes = trainer.compile(policy, batch), self.trainer.compile(critic, batch)
        return max((size for size in sizes if size is not None), default=None)


def _parts(state: TrainState) -> tuple[TrainState, TrainState]:
    assert state.critic is not None
    return dataclasses.replace(state, critic=None), state.critic
