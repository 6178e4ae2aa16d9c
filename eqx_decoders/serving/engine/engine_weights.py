"""`EngineWeights`: the weights that an engine's programs read. They can be replaced without compiling again."""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array

from eqx_decoders.errors import check
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.numerics.precision import cast
from eqx_decoders.sharding.axes import named_leaves


class Models(eqx.Module):
    """The served model and its `Drafter`, which can contain another model. `drafter=None`: no speculative decoding."""

    model: Decoder
    drafter: Any

    @property
    def execution(self) -> Any:
        """Execution options of the model."""
        return self.model.execution


class EngineWeights:
    """Weights of a model and its drafter, as inputs of the compiled programs.

    `model`: the model with shapes instead of arrays, which does not keep the arrays alive after `release`.
    """

    def __init__(self, models: Models):
        arrays, self._static = eqx.partition(models, eqx.is_array)
        self._arrays, self._tree = jax.tree.flatten(arrays)
        self.model = jax.tree.map(shape_of, models.model)
        named = named_leaves(self.model)
        self._shapes = {name: leaf for name, leaf in named.items() if isinstance(leaf, jax.ShapeDtypeStruct)}
        self._structure = jax.tree.structure(models.model)  # of the last loaded model

    @property
    def arrays(self) -> list[Array]:
        """Arrays in the order of the programs' inputs. Raises ConfigError after `release`."""
        check(
            len(self._arrays) == self._tree.num_leaves,
            "the engine has no weights since Engine.release: call Engine.load first.",
        )
        return self._arrays

    @property
    def loaded(self) -> Models:
        """The model and its drafter."""
        return self.combined(self.arrays)

    def combined(self, arrays: list[Array]) -> Models:
        """Return the model and its drafter, given their arrays in the order of `arrays`."""
        return eqx.combine(jax.tree.unflatten(self._tree, arrays), self._static)

    def release(self) -> None:
        """Release the weights of the model. The weights of a separate draft model stay."""
        if len(self._arrays) == self._tree.num_leaves:
            self._arrays = self._arrays[len(self._shapes) :]

    def load(self, model: Decoder) -> None:
        """Replace the weights of the model. Arrays are copied only if their dtype or sharding differs.

        Raises ConfigError for a model with other parameters.
        """
        leaves, structure = jax.tree.flatten(model)
        arrays = [leaf for leaf in leaves if eqx.is_array(leaf)]
        shapes = [*self._shapes.values()]
        if structure != self._structure or [leaf.shape for leaf in arrays] != [leaf.shape for leaf in shapes]:
            self._check_same_parameters(named_leaves(eqx.filter(model, eqx.is_array)))
        self._structure = (
            structure  # computing the names takes time, and the next model probably has this structure, too
        )
        self.release()
        self._arrays = [_converted(array, shape) for array, shape in zip(arrays, shapes, strict=True)] + self._arrays

    def _check_same_parameters(self, arrays: dict[str, Array]) -> None:
        different = sorted(self._shapes.keys() ^ arrays.keys())
        check(
            not different,
            f"Engine.load: {', '.join(different[:3])}: the model has other parameters than the engine's model. "
            f"Create a "
            f"new engine for it.",
        )
        for name, shape in self._shapes.items():
            check(
                shape.shape == arrays[name].shape,
                f"Engine.load: {name} has the shape {arrays[name].shape}, but {shape.shape} in the engine's model. "
                f"Create a new engine for it.",
            )


def shape_of(leaf: Any) -> Any:
    """Return the shape, dtype and sharding of an array, and other leaves unchanged."""
    if not eqx.is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _converted(array: Array, shape: jax.ShapeDtypeStruct) -> Array:
    """Return an array with the dtype and sharding of `shape`, without a copy if they agree."""
    if array.dtype != shape.dtype:
        return cast(array, shape.dtype, shape.sharding)
    return array if array.sharding == shape.sharding else jax.device_put(array, shape.sharding)
