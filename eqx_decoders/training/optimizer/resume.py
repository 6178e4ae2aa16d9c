"""A training state that another optimizer trained, or that of other weights: what is kept of it, and what is new."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import named_leaves, path_name
from eqx_decoders.training.step.step import Trainer, TrainState


def adopt(trainer: Trainer, state: TrainState, saver: Trainer) -> TrainState:
    """Make a state that `saver` trained one of `trainer`: weights, steps and key stay as they are.

    The optimizer's state is kept where it is of the same optimizer, and of no fewer weights. Otherwise all of it is new
    but the place in the schedule: one count corrects the young moments of all weights (Adam's are too small at first),
    so those of some can't begin later than those of others. Running means are those of the weights that are trained,
    and begin at the weights where there are none.
    """
    if not is_same(trainer, saver):
        optimizer = trainer.abstract(state.model, key=state.key).optimizer
        if is_kept(trainer, saver):
            old = named_leaves(state.optimizer)
            optimizer = jax.tree_util.tree_map_with_path(lambda path, _: old[path_name(path)], optimizer)
        else:
            optimizer = _at_step(state, trainer.new_optimizer(state.model))
        state = dataclasses.replace(state, optimizer=optimizer)
    return trainer.with_ema(state)


def is_same(trainer: Trainer, saver: Trainer) -> bool:
    """Whether the optimizer's states of both are of the same arrays."""
    return (trainer.name, trainer.trainable) == (saver.name, saver.trainable)


def is_kept(trainer: Trainer, saver: Trainer) -> bool:
    """Whether `trainer` goes on with what `saver` has kept of each weight."""
    return trainer.name == saver.name and trainer.trainable <= saver.trainable


def describe_adoption(trainer: Trainer, saver: Trainer) -> str:
    """A line about what is new."""
    kept, were, are = is_kept(trainer, saver), len(saver.trainable), len(trainer.trainable)
    what = f"{'kept' if kept else 'new'}, of {trainer.name} for {are} arrays of weights, after {saver.name} for {were}"
    return f"optimizer's state: {what}; weights, data and the place in the schedule go on"


def trained_weights(arrays: Iterable[str], model: Decoder) -> frozenset[str]:
    """The paths of the weights of which a checkpoint has an optimizer's state; none where that is of no weights.

    arrays: the paths of all that it has.
    """
    weights, found = named_leaves(model).keys(), set()
    for name in arrays:
        first, *parts = name.split(".")
        if first == "optimizer":  # a weight's path is a part of it, and may have that of another in itself
            spans = itertools.combinations(range(len(parts) + 1), 2)
            paths = [".".join(parts[i:j]) for i, j in sorted(spans, key=lambda span: span[0] - span[1])]
            found.update(itertools.islice((path for path in paths if path in weights), 1))
    return frozenset(found)


def _at_step(state: TrainState, optimizer: PyTree) -> PyTree:
    """A new optimizer's state with its schedules where `state` is: a count beside moments is that of these, one alone
    is that of a schedule."""
    taken = np.asarray(int(state.step) - int(state.skipped), np.int32)

    def is_schedule(part: Any) -> bool:
        return getattr(part, "_fields", None) == ("count",)

    def moved(part: Any) -> Any:
        if not is_schedule(part):
            return part
        # an array of its own for each: a donated step must not be handed one buffer twice
        return part._replace(count=jax.make_array_from_callback((), state.step.sharding, lambda _: taken))

    return jax.tree.map(moved, optimizer, is_leaf=is_schedule)
