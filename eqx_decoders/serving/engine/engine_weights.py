"""`EngineWeights`: the weights that an engine's programs read, which others like them can take the place of."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.precision import cast
from eqx_decoders.sharding.axes import named_leaves


class Models(eqx.Module):
    """The served model, and its `Drafter`, which may have a model of its own; None without drafts."""

    model: Decoder
    drafter: Any

    @property
    def execution(self) -> Any:
        """Execution options of the model."""
        return self.model.execution


class EngineWeights:
    """Weights of a model and of its drafter, as the programs read them.

    **Arguments:**

    - `model`: the model, as programs read it, with shapes in place of arrays, so that `release` drops these.
    """

    def __init__(self, models: Models):
        arrays, self._static = eqx.partition(models, eqx.is_array)
        self._arrays, self._tree = jax.tree.flatten(arrays)
        self.model = jax.tree.map(shape_of, models.model)
        named = named_leaves(self.model)
        self._shapes = {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
        self._form = jax.tree.structure(models.model)  # of the last model

    @property
    def arrays(self) -> list[Array]:
        """The arrays, in the order in which programs take them."""
        rule = "Engine.release has dropped the weights: give others by Engine.load first"
        check(len(self._arrays) == self._tree.num_leaves, f"{rule}.")
        return self._arrays

    @property
    def loaded(self) -> Models:
        """The model and its drafter with their arrays."""
        return self.combined(self.arrays)

    def combined(self, arrays: list[Array]) -> Models:
        """Return model and drafter with arrays in the order of `arrays`."""
        return eqx.combine(jax.tree.unflatten(self._tree, arrays), self._static)

    def release(self) -> None:
        """Drop the weights of the model; those of a drafter of its own are kept."""
        if len(self._arrays) == self._tree.num_leaves:
            self._arrays = self._arrays[len(self._shapes) :]

    def load(self, model: Decoder) -> None:
        """Take the weights of a model like the first, as programs read it.

        They are the same arrays where dtype and sharding agree, else copies.

        Raises ConfigError for a model with other weights.
        """
        leaves, form = jax.tree.flatten(model)
        given, known = [leaf for leaf in leaves if eqx.is_array(leaf)], [*self._shapes.values()]
        if form != self._form or [leaf.shape for leaf in given] != [leaf.shape for leaf in known]:
            self._check_like(named_leaves(eqx.filter(model, eqx.is_array)))
        self._form = form  # the next one is probably the same, and paths take time
        self.release()
        self._arrays = [_like(new, leaf) for new, leaf in zip(given, known, strict=True)] + self._arrays

    def _check_like(self, given: dict[str, Array]) -> None:
        """Check that these are the weights of a model like the first, by their names and shapes."""
        known, rule = self._shapes, "the weights are those of another model"
        other = sorted(known.keys() ^ given.keys())
        check(not other, f"Engine.load: {', '.join(other[:3])}: {rule}. Make another engine for it.")
        changed = [name for name, leaf in known.items() if leaf.shape != given[name].shape]
        check(not changed, f"Engine.load: {', '.join(changed[:3])} of another shape: {rule}.")


def shape_of(leaf: Any) -> Any:
    """Return the shape, dtype and sharding of an array; anything else as it is."""
    if not eqx.is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _like(leaf: Array, shape: jax.ShapeDtypeStruct) -> Array:
    """Return an array with the dtype and the sharding of another, itself where they agree."""
    if leaf.dtype != shape.dtype:
        return cast(leaf, shape.dtype, shape.sharding)
    return leaf if leaf.sharding == shape.sharding else jax.device_put(leaf, shape.sharding)
