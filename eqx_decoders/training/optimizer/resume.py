"""Training states that go on with another optimizer, or with other trainable weights."""

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
    """Make a state that `saver` trained one of `trainer`: weights, steps and key stay as they are.

    The optimizer's state stays where it is of the same optimizer, and of no fewer weights. Otherwise all of it is new
    but the position in the schedule: one count corrects the young moments of all weights (Adam's are too small at
    first), so those of some can't begin later than those of others. Running means are those of the weights that are
    trained, and begin at the weights where there are none.
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
    """Return whether the optimizer's states of both trainers have the same arrays."""
    return (trainer.name, trainer.trainable) == (saver.name, saver.trainable)


def keeps_optimizer(trainer: Trainer, saver: Trainer) -> bool:
    """Return whether `trainer` can go on with the optimizer's state of `saver`."""
    return trainer.name == saver.name and trainer.trainable <= saver.trainable


def describe_adoption(trainer: Trainer, saver: Trainer) -> str:
    """Describe in a line which part of the state is new."""
    keeps, were, are = keeps_optimizer(trainer, saver), len(saver.trainable), len(trainer.trainable)
    what = f"{'kept' if keeps else 'new'}, of {trainer.name} for {are} arrays of weights, after {saver.name} for {were}"
    return f"optimizer's state: {what}; weights, data and the place in the schedule go on"


def trained_weights(arrays: Iterable[str], model: Decoder) -> frozenset[str]:
    """Return the paths of the weights of which a checkpoint with these `arrays` has an optimizer's state.

    arrays: the paths of all that it has.
    """
    weights, trained = named_leaves(model).keys(), set()
    for name in arrays:
        first, *parts = name.split(".")
        if first == "optimizer":  # a weight's path is a part of it, and may have that of another in itself
            spans = itertools.combinations(range(len(parts) + 1), 2)
            paths = [".".join(parts[i:j]) for i, j in sorted(spans, key=lambda span: span[0] - span[1])]
            trained.update(itertools.islice((path for path in paths if path in weights), 1))
    return frozenset(trained)


def ema_weights(arrays: Mapping[str, Any]) -> list[str]:
    """Return the paths of the weights whose running means a checkpoint has, from the paths of all its arrays."""
    return [name.removeprefix("ema.") for name in arrays if name.startswith("ema.")]


def _at_step(state: TrainState, optimizer: PyTree) -> PyTree:
    """Set the schedules of a new optimizer's state to the step of `state`.

    A count beside moments counts their steps; one alone is that of a schedule.
    """
    taken = int(state.step) - int(state.skipped)

    def is_schedule(part: Any) -> bool:
        return getattr(part, "_fields", None) == ("count",)

    def moved(part: Any) -> Any:
        if not is_schedule(part):
            return part
        # a number of its own for each, whose memory JAX may share: a donated step must not be handed one buffer twice
        count = jax.make_array_from_callback((), state.step.sharding, lambda _: np.asarray(taken, np.int32))
        return part._replace(count=count)

    return jax.tree.map(moved, optimizer, is_leaf=is_schedule)
