"""What a method gives a run: its data, its loss, and what is computed of a batch beside the steps."""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.errors import check
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.run.metrics import MetricsRow
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.train_state import TrainState


@runtime_checkable
class Method(Protocol):
    """What a run that learns from more than texts computes beside its steps."""

    @property
    def loss(self) -> Loss:
        """What a step minimizes."""
        ...

    def prepare(self, batch: Batch, state: TrainState) -> Batch:
        """Add to the signals of a batch what models say of it, before the step."""
        ...

    def evaluate(self, state: TrainState, batches: Iterable[Batch], rows: int) -> dict[str, float]:
        """Compute the figures of held-out batches of `rows` sequences."""
        ...

    def note(self, row: MetricsRow) -> str | None:
        """Return what there is to say of a step's row beside its numbers."""
        ...


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
    """Training batches, batches of each held-out set, and what the run computes beside its steps."""

    data: Batches | PreferenceBatches
    held_out: Mapping[str, Batches | PreferenceBatches]
    method: Method | None = None
