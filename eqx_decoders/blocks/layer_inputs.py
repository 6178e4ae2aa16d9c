"""Inputs that single layers have besides the residual stream, split over the scanned layers of a stack."""

from collections.abc import Mapping

from jaxtyping import Array

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import check
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig


class LayerInputs:
    """Inputs of single layers, taken by one `ScannedLayers` after another.

    `by_layer` has, by name, an array for each of the layers that take it, in their order: `[takers, batch,
    length, ...]`.
    """

    def __init__(self, by_layer: Mapping[str, Array]):
        self.by_layer = by_layer
        self.used = dict.fromkeys(by_layer, 0)

    def cut(self, unit: tuple[BlockConfig, ...], repeats: int) -> tuple[dict[str, Array], ...]:
        """Return the inputs of the next `repeats` units, for each block of the unit, stacked over the repeats."""
        inputs: list[dict[str, Array]] = [{} for _ in unit]
        for name, array in self.by_layer.items():
            takers = [number for number, block in enumerate(unit) if name in _taken(block)]
            begin, count = self.used[name], repeats * len(takers)
            self.used[name] += count
            self._check(name, begin + count <= array.shape[0])
            arrays = array[begin : begin + count].reshape(repeats, len(takers), *array.shape[1:])
            for index, number in enumerate(takers):
                inputs[number][name] = arrays[:, index]
        return tuple(inputs)

    def finish(self) -> None:
        """Raise ConfigError if inputs are left."""
        for name, array in self.by_layer.items():
            self._check(name, self.used[name] == array.shape[0])

    def _check(self, name: str, good: bool) -> None:
        rule = "must have an array for each layer that takes it"
        check(good, f"Inputs.by_layer[{name!r}] of shape {self.by_layer[name].shape} {rule}: {self.used[name]} so far.")


def _taken(block: BlockConfig) -> set[str]:
    """Return the names of the inputs of a block's layers: each configuration's `takes`."""
    return {name for layer in block.branches().values() for name in getattr(layer, "takes", ())}


def check_per_layer(blocks: tuple[BlockConfig, ...], embedding: PerLayerEmbeddingConfig | None) -> None:
    """Raise ConfigError unless layers take exactly the features of the per-layer embedding."""
    provided = set() if embedding is None else {embedding.features}
    taken = {layer.features for layer in takers(blocks)}
    rule = f"makes {sorted(provided)} features, but layers take {sorted(taken)}: give both, equal, or neither"
    check(provided == taken, f"DecoderConfig.per_layer_embedding {rule}.")


def takers(blocks: tuple[BlockConfig, ...]) -> list[PerLayerInputConfig]:
    """Return the layers that have an embedding of their own."""
    layers = (layer for block in blocks for layer in block.branches().values())
    return [layer for layer in layers if isinstance(layer, PerLayerInputConfig)]
