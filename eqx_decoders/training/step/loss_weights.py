"""A loss's own weights: made, placed, and told from the model's by the paths that they have beside these."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import PRNGKeyArray, PyTree

from eqx_decoders.sharding.axes import Axes, axes, path_name
from eqx_decoders.sharding.layout import partitions


LOSS_WEIGHTS = "loss_weights."  # in front of their paths, where they stand beside the model's


@runtime_checkable
class WeightedLoss(Protocol):
    """A loss that may have weights of its own, such as a projection, which are trained and saved beside the model's.

    They are made before the first step, stand in `TrainState.loss_weights`, and are in no export.
    """

    def new_weights(self, model: Any, *, key: PRNGKeyArray) -> Any:
        """Make the weights for a model (arrays or shapes): a module whose arrays name their axes; None: there are none.

        It is called inside of `jax.jit`.
        """
        ...

    def with_weights(self, weights: Any) -> Any:
        """Return the loss with these weights."""
        ...


def loss_shapes(loss: Any, model: Any) -> PyTree:
    """Return the shapes of a loss's own weights beside a model, with their shardings; None without any."""
    if not isinstance(loss, WeightedLoss):
        return None
    shapes = jax.eval_shape(lambda key: loss.new_weights(model, key=key), jax.random.key(0))
    shardings = model.execution.layout.shardings(shapes)
    return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings)


def new_loss_weights(loss: Any, model: Any, key: PRNGKeyArray) -> PyTree:
    """Make the weights of a loss beside a model, each on its devices; None without any."""
    target, layout = loss_shapes(loss, model), model.execution.layout
    if target is None:
        return None
    make = layout.automatically(lambda key: loss.new_weights(model, key=key), lambda _: partitions(target))
    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, target))(jax.random.fold_in(key, 1))


def with_loss_weights(loss: Any, weights: PyTree) -> Any:
    """Return a loss with its own weights, if it has any."""
    return loss if weights is None else loss.with_weights(weights)


def moved_loss_weights(loss_weights: PyTree, weights: Mapping[str, Any]) -> PyTree:
    """Return the tree of a loss's own weights with those of a dictionary of weights by path, where they are in it."""

    def moved(path: tuple[Any, ...], leaf: Any) -> Any:
        return weights.get(LOSS_WEIGHTS + path_name(path), leaf).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(moved, loss_weights)


def loss_axes(loss_weights: PyTree) -> dict[str, Axes]:
    """Return the axis names of a loss's own weights, by the paths that they have beside the model's."""
    return {LOSS_WEIGHTS + name: words for name, words in axes(loss_weights).items()}
