"""Trainable weights of a loss, such as a projection: initialization, sharding, and their paths."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import PRNGKeyArray, PyTree

from eqx_decoders.sharding.axes import Axes, axes, path_name
from eqx_decoders.sharding.layout import partitions


LOSS_WEIGHTS = "loss_weights."  # prefix of their paths, to distinguish them from those of the model


@runtime_checkable
class WeightedLoss(Protocol):
    """Loss with trainable weights, such as a projection. They are trained and saved with the model.

    The weights are initialized before the first step, stored in `TrainState.loss_weights`, and not exported.
    """

    def new_weights(self, model: Any, *, key: PRNGKeyArray) -> Any:
        """Return initial weights for a model of arrays or shapes: a module whose arrays name their axes, or None.

        The method is called in `jax.jit`.
        """
        ...

    def with_weights(self, weights: Any) -> Any:
        """Return the loss with these weights."""
        ...


def loss_shapes(loss: Any, model: Any) -> PyTree:
    """Return the shapes and shardings of the weights of a loss for a model; None if it has no weights."""
    if not isinstance(loss, WeightedLoss):
        return None
    shapes = jax.eval_shape(lambda key: loss.new_weights(model, key=key), jax.random.key(0))
    shardings = model.execution.layout.shardings(shapes)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def new_loss_weights(loss: Any, model: Any, key: PRNGKeyArray) -> PyTree:
    """Return initial weights of a loss for a model, on their devices; None if it has no weights."""
    target, layout = loss_shapes(loss, model), model.execution.layout
    if target is None:
        return None
    initialize = layout.automatically(lambda key: loss.new_weights(model, key=key), lambda _: partitions(target))
    return jax.jit(initialize, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))(
        jax.random.fold_in(key, 1)
    )


def with_loss_weights(loss: Any, weights: PyTree) -> Any:
    """Return a loss with these weights; unchanged if `weights` is None."""
    return loss if weights is None else loss.with_weights(weights)


def replace_loss_weights(loss_weights: PyTree, weights: Mapping[str, Any]) -> PyTree:
    """Return the weights of a loss, replaced by those that the dictionary `weights` contains, by path."""

    def replacement(path: tuple[Any, ...], leaf: Any) -> Any:
        return weights.get(LOSS_WEIGHTS + path_name(path), leaf).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(replacement, loss_weights)


def loss_axes(loss_weights: PyTree) -> dict[str, Axes]:
    """Return the axis names of the weights of a loss, by path."""
    return {LOSS_WEIGHTS + name: axis_names for name, axis_names in axes(loss_weights).items()}
