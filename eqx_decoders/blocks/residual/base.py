"""Interfaces of residual connections: how layers read the residual stream and write to it."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import RegisteredConfig
from eqx_decoders.layers.norm import LayerScale, Norm


class BlockLayer(NamedTuple):
    """A layer of a block with its norms: `scale * post_norm(layer(pre_norm(x)))`.

    **Arguments:**

    - `name`: name of the layer in its block, such as `mixer`, `mlp` or `post_layers.0`.
    - `reads_streams`: whether the layer itself reads and writes all residual streams; otherwise the block's residual
        connection computes its input and adds its output.
    - `position`: number of earlier layers of the block without `reads_streams`.
    - `stream_norm`: norm that replaces the residual stream by its normalized value before the layer (`pre_norm` is then
        None); None for no norm.
    """

    name: str
    layer: Any
    pre_norm: Norm | None = None
    post_norm: Norm | LayerScale | None = None
    scale: float = 1.0
    reads_streams: bool = False
    position: int = 0
    stream_norm: Norm | None = None


Dropout = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(RegisteredConfig):
    """Base class of the configurations of residual connections. Subclasses override its properties:

    - `streams`: number of residual streams.
    - `shares_norm`: an MLP without a norm reads the mixer's normalized input.
    - `chains`: the MLP reads the mixer's output, which may have other features than the stream.
    - `keeps_normed`: the residual connection applies a layer's pre-norm itself (`BlockLayer.stream_norm`), because it
        also uses the normalized stream.
    - `weighted_sum`: the final reduction of the streams has learned weights.
    - `mtp_streams`: the depths of multi-token prediction can read all streams (`MTPConfig.all_streams`).
    """

    streams: ClassVar[int] = 1
    shares_norm: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    keeps_normed: ClassVar[bool] = False
    weighted_sum: ClassVar[bool] = False
    mtp_streams: ClassVar[bool] = False

    @abc.abstractmethod
    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ReadWriteResidual":
        """Return the residual connection of one block, with new weights.

        **Arguments:**

        - `branches`: number of layers in the block that read one stream.
        - `inner_dim`: features of the mixer's output.
        """

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length *streams embed"]:
        """Return the input of the first block for the embeddings `x`."""
        return x

    def reduce(self, x: Float[Array, "batch length *streams embed"]) -> Float[Array, "batch length embed"]:
        """Return the input of the final norm for the output `x` of the last block."""
        return x

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> "StreamMapping | None":
        """Build a module whose `expand` and `reduce` have weights; None to use `expand` and `reduce` of this class."""
        return None


@runtime_checkable
class StreamMapping(Protocol):
    """Module with weights that maps an embedding to residual streams, and these to the input of the final norm."""

    def expand(self, x: Array, ctx: ForwardContext) -> Array: ...

    def reduce(self, x: Array, ctx: ForwardContext) -> Array: ...


class ReadWriteResidual(eqx.Module):
    """Residual connection of a block, with its weights.

    It reads each layer's input from a state, and writes the layer's output to that state. Subclasses override `begin`,
    `read`, `write` and `end`. Reading and writing are separate methods, so that `batch_overlap` can run another part of
    the batch between them.
    """

    def begin(self, x: Array) -> Any:
        """Return the state before the first layer; `x` is the block's input."""
        return x

    def read(self, state: Any, layer: BlockLayer, ctx: ForwardContext) -> tuple[Array, Any]:
        """Return the input of a layer, and the coefficients that `write` needs."""
        return state, None

    @abc.abstractmethod
    def write(self, state: Any, out: Array, coefficients: Any = None) -> Any:
        """Return the state after a layer whose output is `out`."""

    def end(self, state: Any, drop: Dropout, ctx: ForwardContext) -> Array:
        """Return the block's output."""
        return drop(state)
