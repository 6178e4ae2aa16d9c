"""Methods dpo, kto and reward: they learn from pairs of completions, or from labeled completions."""

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.data.dataset import with_special_token_setting
from eqx_decoders.data.host_rows import place_read_only
from eqx_decoders.data.preference_batches import PreferenceBatches, Split
from eqx_decoders.data.preferences import Preferences, read_labeled_completions, read_pairs
from eqx_decoders.data.store.signal_cache import Column, SignalCache
from eqx_decoders.errors import ConfigError, DataError, check
from eqx_decoders.io.huggingface.hub import fingerprint
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.processes import LONG_TIMEOUT, all_gather_json, check_same
from eqx_decoders.io.status import StatusLine
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.lora import without_lora
from eqx_decoders.training.methods.method import BatchMethod, MethodStart, OpenedMethod
from eqx_decoders.training.methods.saved_signals import RowSegment, SavedSignals, rows_of_process
from eqx_decoders.training.objectives.objectives import KTOObjective, PairObjective
from eqx_decoders.training.objectives.scores import RewardObjective
from eqx_decoders.training.objectives.token_log_probs import token_log_probs
from eqx_decoders.training.run.directory import RunDirectory
from eqx_decoders.training.run.log import MetricsRow, print_status
from eqx_decoders.training.run.model import new_base
from eqx_decoders.training.settings.run import TrainConfig
from eqx_decoders.training.step.train_state import TrainState


# --- data -------------------------------------------------------------------------------------------------------------


def preference_data(start: MethodStart) -> tuple[PreferenceBatches, dict[str, PreferenceBatches]]:
    """Read the training examples of a run, and its held-out examples if there is a `held_out_path`."""
    config, data, tokenizer = start.config, start.config.data, start.tokenizer
    read = read_labeled_completions
    if config.method != "kto":
        read = functools.partial(read_pairs, margins=config.method == "reward")
    template = with_special_token_setting(data, start.options["template"], tokenizer)

    def preference_batches(path: Any, split: Split, flag: str) -> PreferenceBatches:
        preferences: Preferences = read(path, tokenizer, seq_len=data.seq_len, template=template, flag=flag)
        return PreferenceBatches(
            preferences,
            rows=start.options["rows"],
            batch_size=data.batch_size,
            seed=data.seed,
            examples_per_row=config.preference.examples_per_row,
            split=split,
        )

    train = preference_batches(data.path, "train", "--data")
    held_out = (
        {} if data.held_out_path is None else {"": preference_batches(data.held_out_path, "held_out", "--held-out")}
    )
    hashes = [batches.preferences.content_hash for batches in (train, *held_out.values())]
    check_same("the completions", hashes, "all must read the same files")
    return train, held_out


# --- dpo and kto ------------------------------------------------------------------------------------------------------


FALLING_STEPS = 50  # consecutive steps with a negative reward of chosen completions, before a warning


def open_preferences(start: MethodStart) -> OpenedMethod:
    """Open a run with method="dpo" or "kto": its data and its reference."""
    start.check_text_only()
    train, held_out = preference_data(start)
    if start.config.preference.save_reference:
        kind = reference_of(start.config)
        kind = "start" if kind == "base" else str(kind)  # the base of adapters is the initial model
        load = functools.partial(load_reference, kind, start.run, start.target, start.execution)
        save_reference(start, kind, load, [train, *held_out.values()])
    return OpenedMethod(train, held_out, PreferenceRun(start.run, start.target, start.execution))


class PreferenceRun(BatchMethod):
    """Method of a run with preferences: adds the reference log-probs to a batch.

    **Arguments:**

    - `run`: the run directory, with settings of method `dpo` or `kto`.
    - `target`: shapes of the model.
    """

    def __init__(self, run: RunDirectory, target: Decoder, execution: Execution):
        config = run.settings
        super().__init__(execution, config.data.batch_size)
        self.loss = loss_of(config)
        self._kind, self._saved = reference_of(config), config.preference.save_reference
        self._reference, self._falling_steps = None, 0
        if self._kind is not None and self._kind not in ("base", "ema") and not self._saved:
            self._reference = load_reference(self._kind, run, target, execution)

    def with_signals(self, batch: Batch, state: TrainState) -> Batch:
        """Add the reference log-probs, and KTO's estimate of the KL divergence, to the signals of a batch."""
        if self._kind is None:
            return batch
        reference = None if self._saved else self._reference_of(state)
        policy = state.model if isinstance(self.loss, KTOObjective) else None
        return _with_reference(reference, policy, batch)

    def describe_step(self, row: MetricsRow) -> str | None:
        """Return a warning after many steps in which chosen completions are less likely than under the reference."""
        reward = row.get("chosen_reward")
        self._falling_steps = self._falling_steps + 1 if reward is not None and float(reward) < 0 else 0
        if self._falling_steps != FALLING_STEPS or self._kind is None:
            return None
        return (
            f"warning: for {FALLING_STEPS} steps chosen completions have been less likely than under the reference, "
            "although the margin may grow: completions get worse. Raise preference.nll_weight or preference.beta."
        )

    def _reference_of(self, state: TrainState) -> Decoder:
        if self._reference is not None:
            return self._reference
        return state.averaged if self._kind == "ema" else without_lora(state.model)


def loss_of(config: TrainConfig) -> PairObjective | KTOObjective:
    """Return the loss of a run with method="dpo" or "kto"."""
    return KTOObjective(kto=config.kto) if config.method == "kto" else PairObjective(pair=config.preference)


def reference_of(config: TrainConfig) -> str | None:
    """Return the reference model of a run (see `PreferenceConfig.reference`); None for a loss without a reference."""
    if config.method == "dpo" and not config.preference.needs_reference:
        return None
    reference = config.preference.reference
    return ("start" if config.lora.rank is None else "base") if reference == "auto" else reference


def load_reference(kind: str, run: RunDirectory, target: Decoder, execution: Execution) -> Decoder:
    """Load a reference model: the initial weights of the run ("start"), or a Hugging Face checkpoint."""
    if kind == "start":
        return new_base(run, execution)
    model, size = load_hf(kind, **vars(execution)), target.config.vocab_size
    check(
        model.config.vocab_size == size,
        f"preference.reference={kind!r} has a vocabulary of {model.config.vocab_size}, but the model one of {size}: "
        "use a reference with the model's tokenizer.",
    )
    return model


@jax.jit
def _with_reference(reference: Decoder | None, policy: Decoder | None, batch: Batch) -> Batch:
    signals = batch.signals
    if signals is None:
        raise ConfigError("Batch.signals=None: preferences need completions and weights. Use PreferenceBatches.")
    if reference is not None:
        log_probs = token_log_probs(reference, batch)
    elif signals.reference is not None:
        log_probs = jnp.asarray(signals.reference)
    else:
        raise ConfigError("Batch.signals.reference=None: pass a reference model, or a batch with reference log-probs.")
    changes: dict[str, Array] = {"reference": log_probs}
    if policy is not None:
        log_ratio = token_log_probs(policy, batch) - log_probs
        weights = jnp.asarray(signals.divergence)
        changes["baseline"] = jnp.full_like(log_ratio, jnp.maximum(jnp.sum(weights * log_ratio), 0.0))
    return dataclasses.replace(batch, signals=dataclasses.replace(signals, divergence=None, **changes))


# --- stored reference log-probs ---------------------------------------------------------------------------------------


def save_reference(
    start: MethodStart, kind: str, load: Callable[[], Decoder], sets: Sequence[PreferenceBatches]
) -> None:
    """Store the reference log-probs of all later batches, and make the sets read them.

    Pairs are computed once. KTO also compares completions of other prompts, which depend on the order of the data: the
    log-probs of all steps are computed. The reference is only loaded if log-probs are missing, and then freed.
    """
    config, layout, rows = start.config, start.execution.layout, start.config.data.batch_size
    model = functools.cache(load)

    def compute(batch: Batch, segments: Sequence[RowSegment]) -> dict[str, np.ndarray]:
        log_probs = token_log_probs(model(), place_read_only(batch, layout, rows))
        return {"reference": rows_of_process(log_probs, layout, start.options["rows"])}

    folder, computed_by = start.run.path / "reference", _reference_identity(start, kind)
    saved = SavedSignals(_open_log_probs(folder, computed_by), compute)
    with StatusLine("computing the reference's log-probs", remains="what was computed is kept"):
        for batches in sets:
            state = batches.get_state()
            for steps, _ in enumerate(map(saved, batches), 1):
                if batches.epochs >= 1 and (batches.preferences.paired or steps >= config.steps):
                    break
            batches.set_state(state)
    all_gather_json("reference saved", seconds=LONG_TIMEOUT)  # by all processes
    saved = SavedSignals(_open_log_probs(folder, computed_by), None)
    for batches in sets:
        batches.complete = saved


def _reference_identity(start: MethodStart, kind: str) -> dict[str, Any]:
    """Return everything that the log-probs depend on besides tokens."""
    config = start.config
    identity: dict[str, Any] = {"weights": fingerprint(str(config.init_from if kind == "start" else kind))}
    identity |= {"precision": repr(start.execution.precision)}
    if kind == "start":
        identity |= {"init_weights": list(config.init_weights), "seed": config.data.seed}
    return identity


def _open_log_probs(folder: Path, computed_by: dict[str, Any]) -> SignalCache:
    """Open the directory of log-probs. If they are another reference's, delete them and print a line."""
    options: Any = ({"reference": Column("<f4")}, computed_by, jax.process_index())
    try:
        numbers, error = SignalCache(folder, *options), None
    except DataError as changed:
        numbers, error = None, changed
    if any(all_gather_json("reference is another", error is not None)):
        print_status(f"the reference is computed again: {error}")
        if jax.process_index() == 0:
            shutil.rmtree(folder)
        all_gather_json("reference removed")
        numbers = None
    return SignalCache(folder, *options) if numbers is None else numbers


# --- reward models ----------------------------------------------------------------------------------------------------


def open_rewards(start: MethodStart) -> OpenedMethod:
    """Open a run with method="reward": its pairs and its loss."""
    start.check_text_only()
    return OpenedMethod(*preference_data(start), RewardRun(start))


class RewardRun(BatchMethod):
    """Method of a run that trains a reward model."""

    def __init__(self, start: MethodStart):
        super().__init__(start.execution, start.config.data.batch_size)
        self.loss = RewardObjective(centering=start.config.reward.centering)
