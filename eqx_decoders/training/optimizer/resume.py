"""Conversion of a training state to another optimizer or other trainable weights."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves, path_name
from eqx_decoders.training.step.step import Trainer
from eqx_decoders.training.step.train_state import TrainState


def adopt(trainer: Trainer, state: TrainState, saver: Trainer) -> TrainState:
    """Convert a state of the trainer `saver` to a state of `trainer`. Weights, number of steps and key do not change.

    The optimizer state is kept if the optimizer is the same and no other weights are trained. Otherwise it is
    initialized, except for the position in the schedule. It cannot be kept for some weights, because one step count
    corrects the bias of the moments of all weights. Moving averages are kept for trained weights, and initialized to
    the weights where there are none.
    """
    if not is_same(trainer, saver):
        optimizer = trainer.abstract(state.model, key=state.key).optimizer
        if keeps_optimizer(trainer, saver):
            old = named_leaves(state.optimizer)
            optimizer = jax.tree_util.tree_map_with_path(lambda path, _: old[path_name(path)], optimizer)
        else:
            optimizer = _at_step(state, trainer.new_optimizer(state.model, state.loss_weights))
        state = dataclasses.replace(state, optimizer=optimizer)
    return trainer.with_ema(state)


def is_same(trainer: Trainer, saver: Trainer) -> bool:
    """Return whether the optimizer states of two trainers have the same arrays."""
    return (trainer.name, trainer.trainable) == (saver.name, saver.trainable)


def keeps_optimizer(trainer: Trainer, saver: Trainer) -> bool:
    """Return whether `trainer` can use the optimizer state of `saver`."""
    return trainer.name == saver.name and trainer.trainable <= saver.trainable


def describe_adoption(trainer: Trainer, saver: Trainer) -> str:
    """Describe, in a line, the conversion of the optimizer state of `saver`."""
    keeps, before, after = keeps_optimizer(trainer, saver), len(saver.trainable), len(trainer.trainable)
    return (
        f"optimizer state: {'kept' if keeps else 'initialized'} ({trainer.name} for {after} arrays of weights, before: "
        f"{saver.name} for {before}); weights, data and the position in the schedule are kept"
    )


def trained_weights(arrays: Iterable[str], model: Decoder) -> frozenset[str]:
    """Return the paths of the weights whose optimizer state is in a checkpoint.

    `arrays`: the paths of all arrays of the checkpoint.
    """
    weights, trained = named_leaves(model).keys(), set()
    for name in arrays:
        first, *parts = name.split(".")
        if first == "optimizer":  # the longest part that is the path of a weight
            spans = itertools.combinations(range(len(parts) + 1), 2)
            paths = [".".join(parts[i:j]) for i, j in sorted(spans, key=lambda span: span[0] - span[1])]
            trained.update(itertools.islice((path for path in paths if path in weights), 1))
    return frozenset(trained)


def ema_weights(arrays: Mapping[str, Any]) -> list[str]:
    """Return the paths of the weights whose moving averages are in a checkpoint, from the paths of its arrays."""
    return [name.removeprefix("ema.") for name in arrays if name.startswith("ema.")]


def _at_step(state: TrainState, optimizer: PyTree) -> PyTree:
    """Return an initial optimizer state whose schedules are at the step of `state`.

    A state that contains only a count belongs to a schedule; a count next to moments counts their updates.
    """
    steps = int(state.step) - int(state.skipped)

    def is_schedule(part: Any) -> bool:
        return getattr(part, "_fields", None) == ("count",)

    def at_step(part: Any) -> Any:
        if not is_schedule(part):
            return part
        # a new array for each schedule: a buffer cannot be donated twice
        count = jax.make_array_from_callback((), state.step.sharding, lambda _: np.asarray(steps, np.int32))
        return part._replace(count=count)

    return jax.tree.map(at_step, optimizer, is_leaf=is_schedule)
