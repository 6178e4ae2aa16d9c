"""Interfaces of residual connections: how layers read the residual stream and write to it."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.context import ForwardContext
from eqx_decoders.errors import CheckedFields
from eqx_decoders.layers.norm import Norm


@dataclasses.dataclass(frozen=True)
class BranchFunction:
    """A layer of a block with its norms, as a function of its input.

    - `reads_streams`: whether it reads and returns all residual streams; else one.
    - `stream_norm`: normalizes the stream itself before the layer, which then has no norm before it; None for none.
    - `name`: that of the layer in its block: `mixer`, `mlp`, `post_layers.0`.
    """

    run: Callable[[Array], Array]
    reads_streams: bool = False
    stream_norm: Norm | None = None
    name: str = ""

    def __call__(self, x: Array) -> Array:
        return self.run(x)


@runtime_checkable
class Reader(Protocol):
    """What a residual connection must know of a layer that reads the stream."""

    @property
    def reads_streams(self) -> bool: ...

    @property
    def stream_norm(self) -> Norm | None: ...

    @property
    def name(self) -> str: ...


Dropout = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual(CheckedFields):
    """Defaults of the kinds: one stream, a norm for each layer, and features of the stream everywhere.

    - `streams`: number of residual streams.
    - `shares_norm`: an MLP without a norm of its own reads the mixer's normalized input.
    - `chains`: the MLP reads the mixer's output, whose features may be others than the stream's.
    - `keeps_normed`: norms before layers normalize the stream itself.
    - `weighted_sum`: streams are added up with weights that are learned.
    """

    streams: ClassVar[int] = 1
    shares_norm: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    keeps_normed: ClassVar[bool] = False
    weighted_sum: ClassVar[bool] = False

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length *streams embed"]:
        """Return the input of the first block for these embeddings."""
        return x

    def reduce(self, x: Float[Array, "batch length *streams embed"]) -> Float[Array, "batch length embed"]:
        """Return the input of the final norm for this output of the last block."""
        return x

    def build_maps(self, embed_dim: int, *, key: PRNGKeyArray) -> Any:
        """Build a module that does the same with weights, if there is one; None uses `expand` and `reduce`."""
        return None


@runtime_checkable
class ResidualModule(Protocol):
    """Residual connection of a block, with its weights if it has any."""

    def __call__(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: ForwardContext) -> Array:
        """Return the stream after the block.

        **Arguments:**

        - `branches`: the block's layers in order, those that it has.
        - `drop`: the block's dropout.
        """
        ...


class ReadWriteResidual(eqx.Module):
    """Residual connection that reads each layer's input from a state, and writes the layer's output to it.

    Kinds override the first four methods. Reading and writing are separate so that one part of a batch can be between
    them while another one is computed (`batch_overlap`).
    """

    def begin(self, x: Array) -> Any:
        """Return the state before the first layer, from the block's input."""
        return x

    def read(self, state: Any, reader: Reader, ctx: ForwardContext) -> tuple[Array, Any]:
        """Return the next layer's input, and coefficients for `write`."""
        return state, None

    @abc.abstractmethod
    def write(self, state: Any, out: Array, coefficients: Any = None) -> Any:
        """Return the state after a layer with this output."""

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
    """Residual connection with something of its own for each layer, but for those that read all streams.

    Its state is the stream, or the streams, and the number of such layers so far.
    """

    def begin(self, x: Array) -> tuple[Array, int]:
        return x, 0

    def end(self, state: tuple[Array, int], drop: Dropout, ctx: ForwardContext) -> Array:
        return drop(state[0])
