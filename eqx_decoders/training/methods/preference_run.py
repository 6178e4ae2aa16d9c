"""What a run on preferences needs beside one on texts: its data, its loss, and the log-probs of its reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.config import TrainConfig
from eqx_decoders.training.lora import without_lora
from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.preference_data import preference_data
from eqx_decoders.training.methods.saved_reference import save_reference
from eqx_decoders.training.objectives.objectives import KTOObjective, PairObjective
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.log import MetricsRow
from eqx_decoders.training.run.model import new_base
from eqx_decoders.training.step.train_state import TrainState


FALLING = 50  # steps in a row


class PreferenceRun(BatchMethod):
    """Loss of a run on preferences, and what it computes of a batch before a step.

    **Arguments:**

    - `run`: the run directory, with settings of a method other than `sft`.
    - `target`: the shapes of the model.
    """

    def __init__(self, run: RunDirectory, target: Decoder, execution: Execution):
        config = run.settings
        super().__init__(execution, config.data.batch_size)
        self.loss = loss_of(config)
        self._kind, self._saved = reference_of(config), config.preference.save_reference
        held = not self._saved and self._kind is not None and self._kind not in ("base", "ema")
        self._reference, self._falling = load_reference(str(self._kind), run, target, execution) if held else None, 0

    def with_signals(self, batch: Batch, state: TrainState) -> Batch:
        """Add the log-probs of the reference, and KTO's estimate of the divergence, to the signals of a batch."""
        if self._kind is None:
            return batch
        reference = None if self._saved else self._reference_of(state)
        policy = state.model if isinstance(self.loss, KTOObjective) else None
        return _with_reference(reference, policy, batch)

    def note(self, row: MetricsRow) -> str | None:
        """Count steps in which chosen answers are less likely than under the reference; return a warning after many."""
        reward = row.get("chosen_reward")
        self._falling = self._falling + 1 if reward is not None and float(reward) < 0 else 0
        if self._falling != FALLING or self._kind is None:
            return None
        rule = f"warning: for {FALLING} steps chosen answers have been less likely than under the reference"
        return f"{rule}, while margins grow: what the model writes gets worse. Raise preference.nll_weight or beta."

    def _reference_of(self, state: TrainState) -> Decoder:
        if self._reference is not None:
            return self._reference
        return state.averaged if self._kind == "ema" else without_lora(state.model)


def load_reference(kind: str, run: RunDirectory, target: Decoder, execution: Execution) -> Decoder:
    """Load the model that answers are compared with: the weights that the run began with, or those of a directory."""
    if kind == "start":
        return new_base(run, execution)
    model, size = load_hf(kind, **vars(execution)), target.config.vocab_size
    rule = f"preference.reference={kind!r} has {model.config.vocab_size} ids, but the model {size}"
    check(model.config.vocab_size == size, f"{rule}: a reference must have the model's tokenizer.")
    return model


def loss_of(config: TrainConfig) -> PairObjective | KTOObjective:
    """Return the loss of a run on preferences."""
    return KTOObjective(kto=config.kto) if config.method == "kto" else PairObjective(pair=config.preference)


def reference_of(config: TrainConfig) -> str | None:
    """Return which model answers are compared with; None for a loss without one."""
    if config.method == "dpo" and not config.preference.needs_reference:
        return None
    chosen = config.preference.reference
    return ("start" if config.lora.rank is None else "base") if chosen == "auto" else chosen


def open_preferences(start: MethodStart) -> OpenedMethod:
    """Read the examples of a run, and the held-out ones, if there is a `held_out_path`; make what it computes."""
    start.check_text_alone()
    data, held_out = preference_data(start)
    if start.config.preference.save_reference:
        kind = reference_of(start.config)
        kind = "start" if kind == "base" else str(kind)  # the base of low-rank pairs is what the run began with
        load = functools.partial(load_reference, kind, start.run, start.target, start.execution)
        save_reference(start, kind, load, [data, *held_out.values()])
    return OpenedMethod(data, held_out, PreferenceRun(start.run, start.target, start.execution))


@jax.jit
def _with_reference(reference: Decoder | None, policy: Decoder | None, batch: Batch) -> Batch:
    signals = batch.signals
    if signals is None:
        raise ConfigError("Batch.signals=None: preferences need answers and weights. Take PreferenceBatches.")
    kept = jnp.asarray(signals.reference) if signals.reference is not None else None
    log_probs = kept if reference is None else token_log_probs(reference, batch)
    check(log_probs is not None, "Batch.signals.reference=None: there is no reference to compute it. Give one.")
    assert log_probs is not None
    changes: dict[str, Array] = {"reference": log_probs}
    if policy is not None:
        gap = token_log_probs(policy, batch) - log_probs
        weights = jnp.asarray(signals.divergence)
        changes["baseline"] = jnp.full_like(gap, jnp.maximum(jnp.sum(weights * gap), 0.0))
    return dataclasses.replace(batch, signals=dataclasses.replace(signals, divergence=None, **changes))
