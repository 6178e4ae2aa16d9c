"""Where what belongs to a trainable weight lives: its gradient, its optimizer's state, its running mean."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from eqx_decoders.model.decoder import Decoder
from eqx_decoders.sharding.axes import axes, named_leaves, path_name
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.offload import Offload, is_on_host
from eqx_decoders.training.optimizer.int8_moments import EightBits


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """Beside its weight, or in parts over the copies of the weight (ZeRO-1), or in the memory of the host.

    **Arguments:**

    - `model`: the weights, arrays or shapes, and their layout.
    - `trainable`: the paths of those that are trained.
    - `over_data`: whether states and means are split over `data`, too.
    """

    model: Decoder
    trainable: frozenset[str]
    over_data: bool

    @functools.cached_property
    def weights(self) -> dict[str, Any]:
        """The trainable weights by path."""
        return self._trainable(self.model)

    @property
    def _layout(self) -> Layout:
        return self.model.execution.layout

    @property
    def _in_parts(self) -> bool:
        return self.over_data and not self._layout.single

    def _trainable(self, tree: PyTree) -> dict[str, Any]:
        return {name: leaf for name, leaf in named_leaves(tree).items() if name in self.trainable}

    def shardings(self) -> dict[str, Sharding]:
        """Where the state and the mean of each weight live."""
        if not self.over_data and self._layout.offload == Offload():
            return {name: leaf.sharding for name, leaf in self.weights.items()}
        return self._trainable(self._layout.state_shardings(self.model, over_data=self.over_data))

    def place(self, path: tuple[Any, ...], leaf: Any, places: Mapping[str, Any]) -> Any:
        """Of `places` that of a leaf of the optimizer's state, or of a dictionary of weights: of the weight of its
        shape to which it belongs, or, with one number for each row, of its rows. None for what belongs to none."""
        *_, last = path
        part = last.name if isinstance(last, jax.tree_util.GetAttrKey) else None
        name = path_name(path[:-1] if part in EightBits._fields else path)
        owner = next((owner for owner in places if name == owner or name.endswith(f".{owner}")), None)
        if owner is None:
            return None
        shape, place = self.weights[owner].shape, places[owner]
        if leaf.shape == shape:
            return place
        if part != "largest" or leaf.shape != (*shape[:-1], 1):
            return None
        return place.update(spec=PartitionSpec(*place.spec[:-1], None)) if isinstance(place, NamedSharding) else place

    def in_parts(self, tree: PyTree) -> PyTree:
        """Tell XLA to keep what belongs to a weight as its state is kept, if that is split over `data`."""
        if not self._in_parts:
            return tree
        places = self._trainable(self._layout.on_device.state_shardings(self.model, over_data=True))

        def one(path, leaf):
            place = self.place(path, leaf, places)
            # what is on the host stays where it is
            return leaf if place is None or is_on_host(leaf) else jax.lax.with_sharding_constraint(leaf, place)

        return jax.tree_util.tree_map_with_path(one, tree)

    def gathered(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Tell XLA to give each device the new weights that it had before, in their own dtype."""
        if not self._in_parts:
            return weights
        places, whole = self._trainable(self._layout.on_device.shardings(self.model)), self.weights
        return {  # a layer alone is not constrained
            name: jax.lax.with_sharding_constraint(leaf, places[name]) if leaf.shape == whole[name].shape else leaf
            for name, leaf in weights.items()
        }

    def streamed(self) -> dict[int, tuple[str, ...]]:
        """By a number of layers the weights that are moved one layer at a time: those with anything on the host."""
        words, found = axes(self.model), {}
        for name, leaf in self.weights.items():
            if any(self._layout.offload.holds(field, name, words[name]) for field in ("weights", "optimizer")):
                found[leaf.shape[0]] = (*found.get(leaf.shape[0], ()), name)
        return found
