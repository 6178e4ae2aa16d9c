"""What single layers get beside the residual stream, cut up for the segments of a stack."""

from collections.abc import Mapping

from jaxtyping import Array

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import check
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig


class LayerInputs:
    """Hands out inputs by layer, one segment after another.

    `by_layer` has, by name, an array for each of the layers that take it, in their order: `[takers, batch,
    length, ...]`.
    """

    def __init__(self, by_layer: Mapping[str, Array]):
        self.by_layer = by_layer
        self.used = dict.fromkeys(by_layer, 0)

    def cut(self, unit: tuple[BlockConfig, ...], repeats: int) -> tuple[dict[str, Array], ...]:
        """Those of the next `repeats` units, for each block of the unit, stacked over the repeats."""
        found: list[dict[str, Array]] = [{} for _ in unit]
        for name, array in self.by_layer.items():
            takers = [place for place, block in enumerate(unit) if name in _taken(block)]
            begin, count = self.used[name], repeats * len(takers)
            self.used[name] += count
            self._check(name, begin + count <= array.shape[0])
            here = array[begin : begin + count].reshape(repeats, len(takers), *array.shape[1:])
            for index, place in enumerate(takers):
                found[place][name] = here[:, index]
        return tuple(found)

    def finish(self) -> None:
        """Raise ConfigError where inputs are left."""
        for name, array in self.by_layer.items():
            self._check(name, self.used[name] == array.shape[0])

    def _check(self, name: str, good: bool) -> None:
        rule = "must have an array for each layer that takes it"
        check(good, f"Inputs.by_layer[{name!r}] of shape {self.by_layer[name].shape} {rule}: {self.used[name]} so far.")


def _taken(block: BlockConfig) -> set[str]:
    """The names of what a block's layers take: each configuration's `takes`."""
    return {name for layer in block.branches().values() for name in getattr(layer, "takes", ())}


def check_per_layer(blocks: tuple[BlockConfig, ...], embedding: PerLayerEmbeddingConfig | None) -> None:
    """Raise ConfigError unless layers take just what the per-layer embedding makes."""
    made = set() if embedding is None else {embedding.features}
    taken = {layer.features for layer in takers(blocks)}
    rule = f"makes {sorted(made)} features, but layers take {sorted(taken)}: give both, equal, or neither"
    check(made == taken, f"DecoderConfig.per_layer_embedding {rule}.")


def takers(blocks: tuple[BlockConfig, ...]) -> list[PerLayerInputConfig]:
    """The layers that get an embedding of their own."""
    layers = (layer for block in blocks for layer in block.branches().values())
    return [layer for layer in layers if isinstance(layer, PerLayerInputConfig)]
