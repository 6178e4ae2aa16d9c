"""One forward pass of a block: its layers with their norms, and their results other than the stream."""

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, PRNGKeyArray

from eqx_decoders.blocks.residual.base import BranchFunction
from eqx_decoders.blocks.stats import ActivationStats, BlockStats
from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import BranchInputs, BranchResult
from eqx_decoders.layers.dropout import dropout
from eqx_decoders.layers.norm import LayerScale, Norm
from eqx_decoders.remat import save


class BlockLayer(NamedTuple):
    """A layer of a block with its norms: `scale * post_norm(layer(pre_norm(x)))`.

    `reads_streams` tells whether it reads and writes all residual streams, rather than the block for it; `stream_norm`
    normalizes the stream itself before it.
    """

    name: str
    layer: Any
    pre_norm: Norm | None
    post_norm: Norm | LayerScale | None
    scale: float = 1.0
    reads_streams: bool = False
    stream_norm: Norm | None = None

    def function(self, run: "BlockRun") -> BranchFunction:
        """Return the layer as a function of its input in one forward pass."""
        return BranchFunction(functools.partial(run, self), self.reads_streams, self.stream_norm, self.name)


# ends the names, among a block's entries, of what its layers lend to later layers, which no cache takes
LENT = ".lent"
BlockResult = tuple[Array, dict[str, Any], BlockStats]


@runtime_checkable
class AnyBlock(Protocol):
    """Block whose layers are run one by one: its residual connection, its layers in order, and its call."""

    residual: Any
    config: Any

    def layers(self) -> list[BlockLayer]: ...

    def __call__(
        self, x: Array, ctx: ForwardContext, past: dict[str, Any] | None = None, *, key: PRNGKeyArray | None = None
    ) -> BlockResult: ...


class BlockRun:
    """One forward pass of a block: arguments of its layers other than the stream, and their other results."""

    def __init__(self, block: AnyBlock, ctx: ForwardContext, past: dict[str, Any] | None, key: PRNGKeyArray | None):
        self.ctx, self.past, self.dropout_rate = ctx, past, block.config.dropout
        self.shortcut = block.config.shortcut_from
        self.layer_key, self.out_key = (None, None) if key is None else jax.random.split(key)
        self.entries: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}

    def enter(self, x: Array) -> Array:
        """Return the block's input, split over the mesh and under its name for rematerialization."""
        return save(self.ctx.constrain(x, _words(x)), "decoder_layer_input")

    def __call__(self, layer: BlockLayer, y: Array) -> Array:
        """Run a layer with its norms."""
        return self.output(layer, layer.layer.branch(*self.inputs(layer, y)))

    def inputs(self, layer: BlockLayer, y: Array) -> BranchInputs:
        """Return the layer's arguments; `y` is its input, before the norm."""
        key = self.layer_key
        if layer.name != "mlp" and key is not None:
            key = jax.random.fold_in(key, len(self.entries) + 1)
        past = None if self.past is None else self.past.get(layer.name)
        return BranchInputs(y if layer.pre_norm is None else layer.pre_norm(y), self.ctx, past, key)

    def output(self, layer: BlockLayer, result: BranchResult) -> Array:
        """Return the layer's output for the stream, after its norm; record the rest of its results."""
        self.entries[layer.name] = result.entries
        if result.lent is not None:
            self.entries[layer.name + LENT] = result.lent
        self.stats.update(result.stats)
        out = result.out if layer.post_norm is None else layer.post_norm(result.out)
        return out if layer.scale == 1.0 else out * layer.scale

    def dropout(self, y: Array) -> Array:
        """Apply the block's dropout."""
        return dropout(y, self.dropout_rate, self.out_key)

    def leave(self, x: Array) -> BlockResult:
        """Return the result of the block whose output is `x`."""
        x = self.ctx.constrain(x if self.shortcut is None else x + self.ctx.shared[self.shortcut], _words(x))
        if self.ctx.execution.layer_stats:
            self.stats["activations"] = ActivationStats.of(x)
        if self.ctx.execution.layer_streams:
            self.stats["streams"] = x
        entries = {name: entry for name, entry in self.entries.items() if entry is not None}
        return x, entries, BlockStats(**self.stats)


def _words(x: Array) -> str:
    return "batch length embed" if x.ndim == 3 else "batch length streams embed"
