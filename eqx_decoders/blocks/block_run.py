"""One forward pass of a block: runs its layers with their norms, and collects cache entries and statistics."""

from typing import Any

import jax
from jaxtyping import Array, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BlockLayer
from eqx_decoders.blocks.stats import ActivationStats, BlockStats
from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import BranchInputs, BranchResult
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.remat import save


# Suffix of the names of those entries of a block that are shared with later layers and not written to a cache.
SHARED_SUFFIX = ".shared"
BlockResult = tuple[Array, dict[str, Any], BlockStats]


class BlockRun:
    """One forward pass of a block: the arguments of its layers except the stream, and their collected results.

    `entries` has the new cache entries of the layers that have run, by name, and `stats` their statistics.
    """

    def __init__(self, config: Any, ctx: ForwardContext, past: dict[str, Any] | None, key: PRNGKeyArray | None):
        self.ctx = ctx
        self.past = past
        self.dropout_rate = config.dropout
        self.shortcut = config.shortcut_from
        self.layer_key, self.out_key = (None, None) if key is None else jax.random.split(key)
        self.entries: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    def enter(self, x: Array) -> Array:
        """Constrain the sharding of the block's input, and name it for the remat policy."""
        return save(self.ctx.constrain(x, _axis_names(x)), "decoder_layer_input")

    def __call__(self, layer: BlockLayer, y: Array) -> Array:
        """Run a layer with its norms on the input `y`."""
        return self.output(layer, layer.layer.branch(*self.inputs(layer, y)))

    def inputs(self, layer: BlockLayer, y: Array) -> BranchInputs:
        """Return the arguments of a layer whose input before its norm is `y`."""
        key = self.layer_key
        if layer.name != "mlp" and key is not None:
            key = jax.random.fold_in(key, len(self.entries) + 1)
        past = None if self.past is None else self.past.get(layer.name)
        return BranchInputs(y if layer.pre_norm is None else layer.pre_norm(y), self.ctx, past, key)

    def output(self, layer: BlockLayer, result: BranchResult) -> Array:
        """Return the layer's output after its norm and scale, and record its cache entries and statistics."""
        self.entries[layer.name] = result.entries
        if result.shared is not None:
            self.entries[layer.name + SHARED_SUFFIX] = result.shared
        self.stats.update(result.stats)
        out = result.out if layer.post_norm is None else layer.post_norm(result.out)
        return out if layer.scale == 1.0 else out * layer.scale

    def dropout(self, y: Array) -> Array:
        """Apply the block's dropout."""
        return dropout(y, self.dropout_rate, self.out_key)

    def leave(self, x: Array) -> BlockResult:
        """Return the result of the block; `x` is the output of its residual connection."""
        if self.shortcut is not None:
            x = x + self.ctx.shared[self.shortcut]
        x = self.ctx.constrain(x, _axis_names(x))
        if self.ctx.execution.layer_stats:
            self.stats["activations"] = ActivationStats.of(x)
        if self.ctx.execution.layer_streams:
            self.stats["streams"] = x
        entries = {name: entry for name, entry in self.entries.items() if entry is not None}
        return x, entries, BlockStats(**self.stats)


def _axis_names(x: Array) -> str:
    return "batch length embed" if x.ndim == 3 else "batch length streams embed"
