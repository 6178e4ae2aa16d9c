"""Interface of a training method: its data, its loss, and what it computes between steps."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.batches import Batches
from eqx_decoders.data.config import DataConfig
from eqx_decoders.data.host_rows import place_read_only
from eqx_decoders.data.media_reader import MediaReader
from eqx_decoders.data.preference_batches import PreferenceBatches
from eqx_decoders.data.prompt_batches import PromptBatches
from eqx_decoders.errors import check
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.log import MetricsRow
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.loss import Loss
from eqx_decoders.training.step.loss_weights import replace_loss_weights, with_loss_weights
from eqx_decoders.training.step.train_state import TrainState


Data = Batches | PreferenceBatches | PromptBatches


@runtime_checkable
class Method(Protocol):
    """What a run calls between its steps, for methods other than `sft`."""

    @property
    def loss(self) -> Loss:
        """Loss that a step minimizes."""
        ...

    @property
    def needs_current_weights(self) -> bool:
        """Whether `prepare` reads the weights: a batch then cannot be prepared while the step before it runs."""
        ...

    @property
    def evaluates_start(self) -> bool:
        """Whether a new run is also evaluated before its first step."""
        ...

    def prepare(self, rows: Any, state: TrainState) -> Batch:
        """Return the batch of a step on the devices. `rows`: an item of the run's data."""
        ...

    def metrics(self) -> MetricsRow:
        """Return metrics of the last prepared batch, in addition to those of its step."""
        ...

    def evaluate(self, state: TrainState, batches: Iterable[Any]) -> dict[str, float]:
        """Compute metrics of held-out data."""
        ...

    def before_checkpoint(self, state: TrainState) -> None:
        """Flush everything that a run resumed from this state could not recompute."""
        ...

    def describe_step(self, row: MetricsRow) -> str | None:
        """Return text to print after a step, such as warnings or samples; `row`: the metrics of the step."""
        ...

    def plot(self) -> None:
        """Write plots of the run's metrics, in addition to the plot of its losses."""
        ...


class BatchMethod:
    """Base of methods whose data are batches. A method may add signals to a batch before its step."""

    loss: Loss
    needs_current_weights = False
    evaluates_start = False

    def __init__(self, execution: Execution, rows: int):
        self._layout, self._rows = execution.layout, rows

    def prepare(self, rows: Batch, state: TrainState) -> Batch:
        """Place a batch on the devices and add its signals."""
        return self.with_signals(place_read_only(rows, self._layout, self._rows), state)

    def with_signals(self, batch: Batch, state: TrainState) -> Batch:
        """Return the batch with the signals that models compute; by default unchanged."""
        return batch

    def metrics(self) -> MetricsRow:
        """Return no metrics."""
        return {}

    def evaluate(self, state: TrainState, batches: Iterable[Batch]) -> dict[str, float]:
        """Compute loss and metrics of held-out batches, with the EMA weights if there are any."""
        return held_out_metrics(self.loss, state, batches, lambda batch: self.prepare(batch, state))

    def before_checkpoint(self, state: TrainState) -> None:
        """Do nothing: a batch depends only on the data and the state."""

    def describe_step(self, row: MetricsRow) -> str | None:
        """Return nothing."""
        return None

    def plot(self) -> None:
        """Write no plot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodStart:
    """Arguments of the functions that open a method.

    **Arguments:**

    - `run`: the run directory, with its settings.
    - `target`: shapes of the model.
    - `data`: data settings; `reader`: reader of images, videos and audio, for vision-language models.
    - `options`: options of `make_dataset`: the folder of tokens, this process's `rows` of a batch and the chat
        `template`.
    - `stack`: closes what the method opens.
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

    def check_text_only(self) -> None:
        """Raise ConfigError for vision-language models."""
        config = self.config
        check(
            self.reader is None,
            f"method={config.method!r} reads only text, but init_from={config.init_from!r} is a vision-language model.",
        )


class OpenedMethod(NamedTuple):
    """Training batches, batches of each held-out set, the method, and its `Critic`.

    In the first `idle_steps` only the critic is trained.
    """

    data: Data
    held_out: Mapping[str, Data]
    method: Method | None = None
    critic: Any = None
    idle_steps: int = 0


COUNTS = ("pairs", "completions")  # metrics that count the examples of a batch, for losses that are not per token


def held_out_metrics(
    loss: Loss, state: TrainState, batches: Iterable[Batch], prepare: Callable[[Batch], Batch]
) -> dict[str, float]:
    """Average the loss and its metrics over the pairs, completions or tokens of batches, with EMA weights if any.

    `prepare` places a batch on the devices.
    """
    loss = with_loss_weights(loss, replace_loss_weights(state.loss_weights, state.ema or {}))
    model = state.averaged
    totals, count = dict[str, float](), 0.0
    for batch in batches:
        value, metrics, tokens = jax.device_get(_evaluated(loss, model, prepare(batch)))
        examples = float(next((metrics[name] for name in COUNTS if name in metrics), tokens))
        count += examples
        totals["loss"] = totals.get("loss", 0.0) + float(value) * (1.0 if loss.per_token else examples)
        for name, mean in metrics.items():
            totals[name] = totals.get(name, 0.0) + float(mean) * examples
    return {name: total / max(count, 1.0) for name, total in totals.items() if name not in COUNTS}


@eqx.filter_jit
def _evaluated(loss: Any, model: Decoder, batch: Batch) -> tuple[Any, dict[str, Any], Any]:
    value, metrics = loss(model, batch, key=None, full_batch=batch)
    return value, loss.metrics(metrics.sums), metrics.tokens
