"""Shardings of everything that belongs to a trainable weight: gradient, optimizer's state, running mean."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import axes, named_leaves, path_name
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.offload import Offload, is_on_host
from eqx_decoders.training.optimizer.int8_moments import EightBits
from eqx_decoders.training.step.loss_weights import LOSS_WEIGHTS, loss_axes


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Shardings of states and means: with their weight, split over its copies (ZeRO-1), or in the host's memory.

    **Arguments:**

    - `model`: the weights, arrays or shapes, and their layout.
    - `trainable`: the paths of those that are trained.
    - `over_data`: whether states and means are split over `data`, too.
    - `loss_weights`: the loss's own weights, all of which are trained.
    """

    model: Decoder
    trainable: frozenset[str]
    over_data: bool
    loss_weights: PyTree = None

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """Return the weights that are trained by path."""
        return self._trained(lambda tree: tree)

    @property
    def _layout(self) -> Layout:
        return self.model.execution.layout

    @property
    def _in_parts(self) -> bool:
        return self.over_data and not self._layout.single

    def _trained(self, function: Callable[[PyTree], PyTree]) -> dict[str, Any]:
        """Apply a function to the trees of the model and of the loss; return the results of what is trained by path."""
        leaves = {name: leaf for name, leaf in named_leaves(function(self.model)).items() if name in self.trainable}
        others = named_leaves(function(self.loss_weights))
        return leaves | {LOSS_WEIGHTS + name: leaf for name, leaf in others.items()}

    def shardings(self) -> dict[str, Sharding]:
        """Return the shardings of the state and the mean of each weight."""
        if not self.over_data and self._layout.offload == Offload():
            return {name: leaf.sharding for name, leaf in self.weights.items()}
        return self._trained(functools.partial(self._layout.state_shardings, over_data=self.over_data))

    def place(self, path: tuple[Any, ...], leaf: Any, shardings: Mapping[str, Any]) -> Any:
        """Return the sharding of a leaf of the optimizer's state, or of a dictionary of weights.

        A leaf of the shape of its weight is sharded like it in `shardings`; one with a number for each row, like its
        rows. None for a leaf that belongs to no weight.
        """
        *_, last = path
        part = last.name if isinstance(last, jax.tree_util.GetAttrKey) else None
        name = path_name(path[:-1] if part in EightBits._fields else path)
        owner = next((owner for owner in shardings if name == owner or name.endswith(f".{owner}")), None)
        if owner is None:
            return None
        shape, sharding = self.weights[owner].shape, shardings[owner]
        if leaf.shape == shape:
            return sharding
        if part != "largest" or leaf.shape != (*shape[:-1], 1):
            return None
        if not isinstance(sharding, NamedSharding):
            return sharding
        return sharding.update(spec=PartitionSpec(*sharding.spec[:-1], None))

    def in_parts(self, tree: PyTree) -> PyTree:
        """Tell XLA to split gradients or weights as their states are, if those are split over `data`."""
        if not self._in_parts:
            return tree
        shardings = self._trained(functools.partial(self._layout.on_device.state_shardings, over_data=True))

        def one(path, leaf):
            sharding = self.place(path, leaf, shardings)
            # what is on the host stays where it is
            keep = sharding is None or is_on_host(leaf)
            return leaf if keep else jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(one, tree)

    def gathered(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Tell XLA to gather the new weights as they were before the step, in their own dtype."""
        if not self._in_parts:
            return weights
        shardings, whole = self._trained(self._layout.on_device.shardings), self.weights
        return {  # a layer alone is not constrained
            name: jax.lax.with_sharding_constraint(leaf, shardings[name]) if leaf.shape == whole[name].shape else leaf
            for name, leaf in weights.items()
        }

    def streamed(self) -> dict[int, tuple[str, ...]]:
        """Return the weights that are moved one layer at a time, by their number of layers."""
        words, groups = axes(self.model) | loss_axes(self.loss_weights), {}
        for name, leaf in self.weights.items():
            if any(self._layout.offload.holds(field, name, words[name]) for field in ("weights", "optimizer")):
                groups[leaf.shape[0]] = (*groups.get(leaf.shape[0], ()), name)
        return groups
