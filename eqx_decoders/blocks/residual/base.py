"""Interfaces of residual connections: how layers read the residual stream and write to it."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.layers.base import RegisteredConfig
from eqx_decoders.layers.norm import Norm


@dataclasses.dataclass(frozen=True)
class BranchFunction:
    """A layer of a block with its norms, as a function of its input.

    **Arguments:**

    - `run`: returns the layer's output for its input.
    - `reads_streams`: whether the layer reads and returns all residual streams; otherwise it reads and returns one.
    - `stream_norm`: norm that replaces the residual stream by its normalized value before the layer (the layer itself
        then has no norm of its input); None for no norm.
    - `name`: name of the layer in its block, such as `mixer`, `mlp` or `post_layers.0`.
    """

    run: Callable[[Array], Array]
    reads_streams: bool = False
    stream_norm: Norm | None = None
    name: str = ""

    def __call__(self, x: Array) -> Array:
        return self.run(x)


@runtime_checkable
class Reader(Protocol):
    """Properties of a layer that a residual connection uses; see `BranchFunction`."""

    @property
    def reads_streams(self) -> bool: ...

    @property
    def stream_norm(self) -> Norm | None: ...

    @property
    def name(self) -> str: ...


Dropout = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(RegisteredConfig):
    """Base class of the configurations of residual connections. Subclasses override its properties:

    - `streams`: number of residual streams.
    - `shares_norm`: an MLP without a norm reads the mixer's normalized input.
    - `chains`: the MLP reads the mixer's output, which may have other features than the stream.
    - `keeps_normed`: the residual connection applies a layer's pre-norm itself (`Reader.stream_norm`), because it also
        uses the normalized stream.
    - `weighted_sum`: the final reduction of the streams has learned weights.
    """

    streams: ClassVar[int] = 1
    shares_norm: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    keeps_normed: ClassVar[bool] = False
    weighted_sum: ClassVar[bool] = False

    @abc.abstractmethod
    def build(self, embed_dim: int, *, branches: int, inner_dim: int, key: PRNGKeyArray) -> "ResidualModule":
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


@runtime_checkable
class ResidualModule(Protocol):
    """Residual connection of a block, with its weights."""

    def __call__(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: ForwardContext) -> Array:
        """Return the stream after the block.

        **Arguments:**

        - `x`: the stream before the block.
        - `branches`: the block's layers, in order.
        - `drop`: applies the block's dropout.
        """
        ...


class ReadWriteResidual(eqx.Module):
    """Residual connection that reads each layer's input from a state, and writes the layer's output to that state.

    Subclasses override `begin`, `read`, `write` and `end`. Reading and writing are separate methods, so that
    `batch_overlap` can run another part of the batch between them.
    """

    def begin(self, x: Array) -> Any:
        """Return the state before the first layer; `x` is the block's input."""
        return x

    def read(self, state: Any, reader: Reader, ctx: ForwardContext) -> tuple[Array, Any]:
        """Return the input of the layer that `reader` describes, and the coefficients that `write` needs."""
        return state, None

    @abc.abstractmethod
    def write(self, state: Any, out: Array, coefficients: Any = None) -> Any:
        """Return the state after a layer whose output is `out`."""

    def end(self, state: Any, drop: Dropout, ctx: ForwardContext) -> Array:
        """Return the block's output."""
        return drop(state)

    def __call__(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: ForwardContext) -> Array:
        """Return the stream after the block."""
        state = self.begin(x)
        for branch in branches:
            y, coefficients = self.read(state, branch, ctx)
            state = self.write(state, branch(y), coefficients)
        return self.end(state, drop, ctx)


class CountingResidual(ReadWriteResidual):
    """Residual connection with separate weights or options for each layer that reads one stream.

    The state is the stream (or streams) and the number of such layers so far, which is the index of the next one.
    """

    def begin(self, x: Array) -> tuple[Array, int]:
        return x, 0

    def end(self, state: tuple[Array, int], drop: Dropout, ctx: ForwardContext) -> Array:
        return drop(state[0])
