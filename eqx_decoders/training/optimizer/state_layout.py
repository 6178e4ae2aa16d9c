"""Shardings of the gradients, optimizer states and moving averages of the trained weights."""

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
    """Shardings of optimizer states and moving averages: those of the weights, or split over replicas (ZeRO-1), or in
    host memory.

    **Arguments:**

    - `model`: the model, of arrays or shapes, with its layout.
    - `trainable`: paths of the trained weights.
    - `over_data`: whether states and averages are also split over the axis `data`.
    - `loss_weights`: weights of the loss, all of which are trained.
    """

    model: Decoder
    trainable: frozenset[str]
    over_data: bool
    loss_weights: PyTree = None

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """Trained weights, by path."""
        return self._trained(lambda tree: tree)

    @property
    def _layout(self) -> Layout:
        return self.model.execution.layout

    @property
    def _is_split(self) -> bool:
        return self.over_data and not self._layout.single

    def _trained(self, function: Callable[[PyTree], PyTree]) -> dict[str, Any]:
        """Apply a function to the model and to the weights of the loss; return the results for trained weights."""
        leaves = {name: leaf for name, leaf in named_leaves(function(self.model)).items() if name in self.trainable}
        others = named_leaves(function(self.loss_weights))
        return leaves | {LOSS_WEIGHTS + name: leaf for name, leaf in others.items()}

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of the optimizer state and moving average of each weight, by path."""
        if not self.over_data and self._layout.offload == Offload():
            return {name: leaf.sharding for name, leaf in self.weights.items()}
        return self._trained(functools.partial(self._layout.state_shardings, over_data=self.over_data))

    def place(self, path: tuple[Any, ...], leaf: Any, shardings: Mapping[str, Any]) -> Any:
        """Return the sharding of a leaf of the optimizer state or of a dictionary of weights.

        A leaf with the shape of its weight has the sharding of the weight in `shardings`; a leaf with one number per
        row has that of the rows. Returns None for a leaf that does not belong to a weight.
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

    def split_over_data(self, tree: PyTree) -> PyTree:
        """Constrain gradients or weights to the sharding of their states, if these are split over `data`."""
        if not self._is_split:
            return tree
        shardings = self._trained(functools.partial(self._layout.on_device.state_shardings, over_data=True))

        def constrain(path, leaf):
            sharding = self.place(path, leaf, shardings)
            if sharding is None or is_on_host(leaf):
                return leaf
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(constrain, tree)

    def gathered(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Constrain new weights to the sharding that they had before the step, in their dtype."""
        if not self._is_split:
            return weights
        shardings, whole = self._trained(self._layout.on_device.shardings), self.weights
        return {  # a single layer of a stack is not constrained
            name: jax.lax.with_sharding_constraint(leaf, shardings[name]) if leaf.shape == whole[name].shape else leaf
            for name, leaf in weights.items()
        }

    def offloaded_groups(self) -> dict[int, tuple[str, ...]]:
        """Return the paths of the offloaded weights, which are updated layer by layer, by their number of layers."""
        weight_axes, groups = axes(self.model) | loss_axes(self.loss_weights), {}
        for name, leaf in self.weights.items():
            if any(self._layout.offload.holds(field, name, weight_axes[name]) for field in ("weights", "optimizer")):
                groups[leaf.shape[0]] = (*groups.get(leaf.shape[0], ()), name)
        return groups
