"""A training run before its first step: everything that the steps need besides the state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.errors import CheckpointError
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints
from eqx_decoders.io.checkpoint.run_backup import GROWING
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.methods.method import Data, Method
from eqx_decoders.training.run.messages import print_status
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.settings_file import Changes
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import StepMetrics, TrainState


@dataclasses.dataclass(kw_only=True)
class PreparedRun:
    """Everything that the steps of a run need besides its state.

    **Arguments:**

    - `directory`: the run directory, with the settings of this start; `changes`: what they change of those before.
    - `target`: the shapes of the model.
    - `reader`: the reader of images, videos and audio; None for a model of text alone.
    - `data`, `held_out`: training batches, and batches of each held-out set.
    - `tasks`: the `TaskEvaluator` of the tasks that the run is measured on; None without them.
    - `method`: what a run computes that learns from preferences; None for one on texts.
    - `critic`: what is trained beside the model; None for a run without one.
    - `data_state`: the position in the data of the next step, which a checkpoint saves.
    - `writes`: whether this is the one process that writes settings, metrics and images.
    """

    directory: RunDirectory
    changes: Changes
    execution: Execution
    target: Decoder
    trainer: Trainer
    tokenizer: Tokenizer
    reader: MediaReader | None
    data: Data
    held_out: Mapping[str, Data]
    checkpoints: Checkpoints
    tasks: Any = None
    method: Method | None = None
    critic: Critic | None = None
    data_state: Any = None

    @property
    def config(self) -> TrainConfig:
        return self.directory.settings

    @property
    def writes(self) -> bool:
        return jax.process_index() == 0

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """Take a step of everything that is trained; `state` is donated."""
        return self.trainer.step(state, batch) if self.critic is None else self.critic.step(self.trainer, state, batch)

    def compile(self, state: TrainState, batch: Batch) -> int | None:
        """Compile `step`; return the bytes that it needs of a device, where the compiler tells."""
        if self.critic is None:
            return self.trainer.compile(state, batch)
        return self.critic.compile(self.trainer, state, batch)

    def text_model(self, model: Decoder) -> Any:
        """Return a model of the run as `load_text_run` loads it."""
        from eqx_decoders.training.run.run_loading import text_model_of  # late: of its imports this needs few

        return text_model_of(self.directory, model, self.tokenizer)

    def figures(self) -> MetricsRow:
        """Return what a row of metrics has of a step's batch: passes over the data so far, and what its method reports.

        The passes are of each source and of all.
        """
        sources = {f"epochs/{name}": passes for name, passes in self.data.source_epochs().items()}
        return sources | {"epochs": self.data.epochs} | ({} if self.method is None else self.method.figures())

    def back_up_metrics(self) -> None:
        """Copy the files that grow to the backup, which is a convenience: a failure is a warning."""
        try:
            if self.writes:
                self.directory.backup.save(GROWING)
        except CheckpointError as error:
            print_status(f"warning: {error}")

    def progress_so_far(self) -> str:
        """Describe what there is of the run before its first step."""
        step = self.checkpoints.latest
        return f"the run is as it was saved at step {step}" if step else "the tokenizer and the tokens are kept"
