"""A critic: a second model with a separate trainer, which learns from the batches of the policy."""

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
    """Critic of a policy. Its state is `TrainState.critic` of the policy's state.

    **Arguments:**

    - `make_trainer`: returns a trainer for the settings of a run.
    - `trainer`: the trainer of this run.
    - `target`: shapes of the model.
    - `new_model`: creates the initial model.
    - `updates`: number of steps on each batch.
    """

    make_trainer: Callable[[Any], Trainer]
    trainer: Trainer
    target: Decoder
    new_model: Callable[[], Decoder]
    updates: int

    def first_state(self, key: PRNGKeyArray) -> TrainState:
        """Create the state before the first step."""
        return self.trainer.init(self.new_model(), key=jax.random.fold_in(key, 2))

    def step(self, trainer: Trainer, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step of the policy and `updates` steps of the critic. `state` holds both and is donated.

        Returns the policy's metrics, with `value_loss`, the metrics of the critic's objective, `critic_grad_norm` and
        `critic_learning_rate` of the critic's last step. If any of the steps is not finite, `skipped` is set.
        """
        policy, critic = _parts(state)
        policy, metrics = trainer.step(policy, batch)
        critic, critic_metrics = self.trainer.step(critic, batch)
        skipped = metrics.skipped | critic_metrics.skipped
        for _ in range(self.updates - 1):
            critic, critic_metrics = self.trainer.step(critic, batch)
            skipped = skipped | critic_metrics.skipped
        objective = {"value_loss": critic_metrics.loss, "critic_grad_norm": critic_metrics.grad_norm}
        objective |= {"critic_learning_rate": critic_metrics.learning_rate} | (critic_metrics.objective or {})
        metrics = dataclasses.replace(metrics, objective=(metrics.objective or {}) | objective, skipped=skipped)
        return dataclasses.replace(policy, critic=critic), metrics

    def compile(self, trainer: Trainer, state: TrainState, batch: Batch) -> int | None:
        """Compile both steps; return the larger memory requirement per device in bytes, if the compiler reports it."""
        policy, critic = _parts(state)
        sizes = trainer.compile(policy, batch), self.trainer.compile(critic, batch)
        return max((size for size in sizes if size is not None), default=None)


def _parts(state: TrainState) -> tuple[TrainState, TrainState]:
    assert state.critic is not None
    return dataclasses.replace(state, critic=None), state.critic
