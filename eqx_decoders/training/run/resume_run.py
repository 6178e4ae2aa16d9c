"""Rules for resuming a run: which settings may change, and from which checkpoint its state goes on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PRNGKeyArray

from eqx_decoders.errors import check
from eqx_decoders.io.checkpoint.checkpoints import Checkpoints, Restored
from eqx_decoders.model.config_json import with_fields
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves
from eqx_decoders.training.optimizer.resume import adopt, describe_adoption, ema_weights, is_same, trained_weights
from eqx_decoders.training.run.run_directory import RunDirectory
from eqx_decoders.training.run.run_model import model_config, names_same_model, run_config
from eqx_decoders.training.settings_file import Changes, changed_settings, check_changes, settings_of
from eqx_decoders.training.step.critic import Critic
from eqx_decoders.training.step.loss_weights import LOSS_WEIGHTS
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import TrainState


def resume(run: RunDirectory) -> tuple[RunDirectory, Changes]:
    """Return a run with the settings with which it is resumed, or started if it is new, and what they change.

    `init_from` may be left out. Raises ConfigError for changes that `check_changes` refuses. A directory in which
    nothing was made yet, or that the convert program made, has not been trained, and takes any.
    """
    if not run.has_model:
        return run, {}
    settings, saved = run.settings, run.as_saved()
    old, checkpoints = saved.settings, saved.checkpoints()
    if settings.init_from is None and settings.model == old.model:
        settings = dataclasses.replace(settings, init_from=old.init_from)
        run = RunDirectory(settings)
    if not (run.has_started or checkpoints.steps) or run.is_imported:
        return run, {}
    if settings.init_from is None and old.init_from is None and not names_same_model(old, settings):
        config, same = run_config(saved), names_same_model(dataclasses.replace(old, set=settings.set), settings)
        if config == (with_fields(config, settings.set) if same else model_config(settings)):  # in other words
            settings = dataclasses.replace(settings, model=old.model, model_config=old.model_config, set=old.set)
            run = RunDirectory(settings)
    changes, trained = changed_settings(old, settings), checkpoints.latest
    check_changes(changes, run.path, allowed=settings.allow_changes, trained=trained is not None)
    if "checkpoint_dir" in changes and trained is not None:
        _check_moved(saved, run, trained)
    return run, changes


def _check_moved(saved: RunDirectory, run: RunDirectory, trained: int) -> None:
    """Raise ConfigError if a run whose checkpoints move to another directory has none of its own there."""
    was, now, settings = saved.checkpoint_directory, run.checkpoint_directory, run.settings
    rule = f"checkpoint_dir={settings.checkpoint_dir!r}, but step {trained} of {run.path} is in {was}"
    latest = Checkpoints(now).latest
    check(latest is not None and latest >= trained, f"{rule}: copy {was} to {now}, or leave checkpoint_dir as it was.")
    other = RunDirectory.download(now)
    if other is not None:
        changes = changed_settings(other.settings, settings)
        check_changes(changes, now, allowed=settings.allow_changes, trained=True)


def restore_state(
    checkpoints: Checkpoints,
    trainer: Trainer,
    model: Decoder,
    key: PRNGKeyArray,
    say: Callable[[str], None] = lambda text: None,
    critic: Critic | None = None,
) -> Restored:
    """Restore the newest state of a run, its data's state and its step, for models shaped like `model`.

    A state that was saved by another optimizer, of other weights that are trained, or with or without running means is
    read as it was saved, and goes on as one of `trainer` (see `adopt`); `say` gets a line about what is new then. So
    is that of a `critic`. Raises ConfigError if there is one in the checkpoint alone, or in the run alone.
    """
    savers: dict[int, Trainer] = {}
    critics: dict[int, Trainer] = {}

    def as_saved(manifest: dict[str, Any]) -> TrainState:
        savers[manifest["step"]] = saver = _saver(manifest, trainer, model)
        state = saver.abstract(model, key=key)
        _check_critic(manifest, critic)
        _check_loss_weights(manifest, state)
        if critic is None:
            return state
        settings = settings_of(manifest["config"])
        critics[manifest["step"]] = beside = critic.trainer if settings is None else critic.trainer_by(settings)
        return dataclasses.replace(state, critic=beside.abstract(critic.target, key=key))

    state, data_state, step = checkpoints.restore_for(as_saved)
    if not is_same(trainer, savers[step]):
        say(describe_adoption(trainer, savers[step]))
    state = adopt(trainer, state, savers[step])
    if critic is not None and state.critic is not None:
        state = dataclasses.replace(state, critic=adopt(critic.trainer, state.critic, critics[step]))
    return Restored(state, data_state, step)


def _check_critic(manifest: Mapping[str, Any], critic: Critic | None) -> None:
    saved = any(name.startswith("critic.") for name in manifest["arrays"])
    rule = f"rl.baseline: the checkpoint of step {manifest['step']} has {'a' if saved else 'no'} critic"
    remedy = "go on as the run began, or begin a new one"
    check(saved == (critic is not None), f"{rule}, but the run has {'none' if saved else 'one'}: {remedy}.")


def _check_loss_weights(manifest: Mapping[str, Any], state: TrainState) -> None:
    """Raise ConfigError unless a checkpoint has the weights that the loss of the run has of its own."""
    saved = {name: tuple(a["shape"]) for name, a in manifest["arrays"].items() if name.startswith(LOSS_WEIGHTS)}
    needed = {LOSS_WEIGHTS + name: leaf.shape for name, leaf in named_leaves(state.loss_weights).items()}
    rule = f"The checkpoint of step {manifest['step']} has {saved or 'none'} of the loss's own weights"
    check(saved == needed, f"{rule}, but the run {needed or 'none'}: go on as the run began, or begin a new one.")


def _saver(manifest: Mapping[str, Any], trainer: Trainer, model: Decoder) -> Trainer:
    """Return the trainer that saved a checkpoint, by the settings there; `trainer` where they are not known."""
    settings = settings_of(manifest["config"])
    if settings is not None:
        optimizer, trained = settings.optimizer_config(), trained_weights(manifest["arrays"], model)
        options: Any = dict(steps=settings.steps, loss=trainer.loss)
        saver = Trainer.create(optimizer, model, **options)
        if trained and trained != saver.trainable:  # its patterns meant others: those of buffers, in earlier versions
            optimizer = dataclasses.replace(optimizer, trainable=tuple(sorted(trained)))
            saver = Trainer.create(optimizer, model, **options)
        if not is_same(trainer, saver):
            trainer = saver
    return dataclasses.replace(trainer, ema_decay=0.5 if ema_weights(manifest["arrays"]) else None)
