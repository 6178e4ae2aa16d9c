"""What a method gives a run: its data, its loss, and what is computed of a batch beside the steps."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.host_rows import hand_over
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.data.prompt_batches import PromptBatches
from eqx_decoders.errors import check
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.methods.held_out_figures import held_out_figures
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.log import MetricsRow
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.train_state import TrainState


Data = Batches | PreferenceBatches | PromptBatches


@runtime_checkable
class Method(Protocol):
    """What a run that learns from more than texts computes beside its steps."""

    @property
    def loss(self) -> Loss:
        """What a step minimizes."""
        ...

    @property
    def waits(self) -> bool:
        """Whether a batch is made by the weights of the step before: it can't be made while that is computed."""
        ...

    @property
    def evaluates_start(self) -> bool:
        """Whether a new run is evaluated before its first step, too."""
        ...

    def prepare(self, rows: Any, state: TrainState) -> Batch:
        """Make the batch of a step on the devices, of what the data gave, with what models say of it."""
        ...

    def figures(self) -> MetricsRow:
        """Return figures of the last batch that was prepared, beside those of its step."""
        ...

    def evaluate(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        """Compute the figures of held-out data."""
        ...

    def settle(self, state: TrainState) -> None:
        """Keep what the next step of a state needs, and a run that goes on from its checkpoint could not make again."""
        ...

    def note(self, row: MetricsRow) -> str | None:
        """Return what there is to say of a step's row beside its numbers."""
        ...

    def draw(self) -> None:
        """Draw images of the run's metrics, beside that of its losses."""
        ...


class BatchMethod:
    """A method whose data are batches, of which models may say something before the step."""

    loss: Loss
    waits = False
    evaluates_start = False

    def __init__(self, execution: Execution, rows: int):
        self._layout, self._rows = execution.layout, rows

    def prepare(self, rows: Batch, state: TrainState) -> Batch:
        """Place a batch on the devices, with the signals that models add."""
        return self.with_signals(hand_over(rows, self._layout, self._rows), state)

    def with_signals(self, batch: Batch, state: TrainState) -> Batch:
        """Return the batch: no model says anything of it."""
        return batch

    def figures(self) -> MetricsRow:
        """Return no figures."""
        return {}

    def evaluate(self, state: TrainState, batches: Iterable[Batch]) -> dict[str, float]:
        """Compute the loss and the figures of held-out batches, with the means of the weights where there are any."""
        return held_out_figures(self.loss, state, batches, lambda batch: self.prepare(batch, state))

    def settle(self, state: TrainState) -> None:
        """Do nothing: a batch follows from the data and the state."""

    def note(self, row: MetricsRow) -> str | None:
        """Say nothing."""
        return None

    def draw(self) -> None:
        """Draw nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodStart:
    """What a method finds when it opens its data.

    **Arguments:**

    - `run`: the run directory, with its settings; `target`: the shapes of the model.
    - `data`: where the data are; `reader`: the reader of images, videos and audio.
    - `options`: the folder of tokens, this process's `rows` of a batch and the chat `template`, for `make_dataset`.
    - `stack`: closes what is opened.
    """

    run: RunDirectory
    target: Decoder
    execution: Execution
    tokenizer: Tokenizer
    data: DataConfig
    reader: MediaReader | None
    options: Mapping[str, Any]
    stack: contextlib.ExitStack

    @property
    def config(self) -> TrainConfig:
        return self.run.settings

    def check_text_alone(self) -> None:
        """Raise ConfigError for a model that sees."""
        config = self.config
        rule = f"method={config.method!r} reads text alone: the model of {config.init_from!r} sees."
        check(self.reader is None, rule)


class OpenedMethod(NamedTuple):
    """Training batches, batches of each held-out set, what the run computes beside its steps, and its `Critic`.

    The first `idle_steps` are the critic's alone.
    """

    data: Data
    held_out: Mapping[str, Data]
    method: Method | None = None
    critic: Any = None
    idle_steps: int = 0
