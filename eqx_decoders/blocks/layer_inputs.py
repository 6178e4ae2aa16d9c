"""Inputs of individual layers besides the residual stream, distributed over the scanned layers of a stack."""

from collections.abc import Mapping

from jaxtyping import Array

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.errors import check
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig, PerLayerInputConfig


class LayerInputQueue:
    """Queue of the per-layer arrays in `Inputs.by_layer`. Each `ScannedLayers` takes the arrays of its layers.

    `by_layer` has for each input name the arrays of all layers that read it, stacked in the order of the layers:
    `[layers with this input, batch, length, ...]`.
    """

    def __init__(self, by_layer: Mapping[str, Array]):
        self.by_layer = by_layer
        self.used = dict.fromkeys(by_layer, 0)

    def next_inputs(self, unit: tuple[BlockConfig, ...], repeats: int) -> tuple[dict[str, Array], ...]:
        """Return the inputs of the next `repeats` copies of `unit`: for each of its blocks, stacked over the copies."""
        inputs: list[dict[str, Array]] = [{} for _ in unit]
        for name, array in self.by_layer.items():
            readers = [index for index, block in enumerate(unit) if name in _input_names(block)]
            start = self.used[name]
            end = start + repeats * len(readers)
            self.used[name] = end
            self._check(name, end <= array.shape[0])
            arrays = array[start:end].reshape(repeats, len(readers), *array.shape[1:])
            for position, index in enumerate(readers):
                inputs[index][name] = arrays[:, position]
        return tuple(inputs)

    def check_empty(self) -> None:
        """Raise ConfigError unless all arrays have been used."""
        for name, array in self.by_layer.items():
            self._check(name, self.used[name] == array.shape[0])

    def _check(self, name: str, complete: bool) -> None:
        check(
            complete,
            f"Inputs.by_layer[{name!r}] of shape {self.by_layer[name].shape} must have one array for each layer that "
            f"reads it; the layers run so far read {self.used[name]} arrays.",
        )


def _input_names(block: BlockConfig) -> set[str]:
    """Return the names of the inputs of a block's layers, which their configurations declare in `takes`."""
    return {name for layer in block.branches().values() for name in layer.takes}


def check_per_layer(blocks: tuple[BlockConfig, ...], embedding: PerLayerEmbeddingConfig | None) -> None:
    """Raise ConfigError unless the layers read exactly the features that the per-layer embedding has."""
    provided = set() if embedding is None else {embedding.features}
    read = {layer.features for layer in per_layer_input_configs(blocks)}
    check(
        provided == read,
        f"DecoderConfig.per_layer_embedding has {sorted(provided)} features, but its layers (PerLayerInputConfig) read "
        f"{sorted(read)} features. Set both to the same number, or leave both out.",
    )


def per_layer_input_configs(blocks: tuple[BlockConfig, ...]) -> list[PerLayerInputConfig]:
    """Return the configurations of the layers that read a per-layer embedding, in order."""
    layers = (layer for block in blocks for layer in block.branches().values())
    return [layer for layer in layers if isinstance(layer, PerLayerInputConfig)]
