"""How the branches of a block read the residual stream, and how what they make of it returns: one file a kind.

A wiring is called with the stream, with its branches in order (functions from what they read to what they return; those
for which there is no layer are left out) and with the block's dropout.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import equinox as eqx
from jaxtyping import Array, Float

from eqx_decoders.context import Context


@dataclasses.dataclass(frozen=True)
class BranchFunction:
    """A layer of a block with its norms, from what it reads to what it returns.

    - `reads_streams`: whether it reads and returns all residual streams; else one.
    """

    run: Callable[[Array], Array]
    reads_streams: bool = False

    def __call__(self, x: Array) -> Array:
        return self.run(x)


Dropout = Callable[[Array], Array]

# Yields a branch and what it is to read, is sent what it returns, and returns the stream after the layer.
Steps = Generator[tuple[BranchFunction, Array], Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """What the kinds share: most have one stream, a norm for each branch, and features of the stream everywhere.

    - `streams`: residual streams side by side.
    - `shares_norm`: an MLP without a norm of its own reads what the mixer reads.
    - `chains`: the MLP reads the mixer's output, whose features may be others than the stream's.
    """

    streams: ClassVar[int] = 1
    shares_norm: ClassVar[bool] = False
    chains: ClassVar[bool] = False

    def expand(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length *streams embed"]:
        """What the first layer reads, from embeddings."""
        return x

    def reduce(self, x: Float[Array, "batch length *streams embed"]) -> Float[Array, "batch length embed"]:
        """What the final norm reads, from the last layer."""
        return x


@runtime_checkable
class ResidualModule(Protocol):
    """What a wiring's configuration builds: a module with its weights, if it has any."""

    def __call__(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: Context) -> Array:
        """The stream after the layer."""
        ...


class SteppedResidual(eqx.Module):
    """A wiring that says what is to be run instead of running it, so that parts of a batch may take turns."""

    def steps(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: Context) -> Steps:
        """Yields each branch with what it reads, is sent what it returns, and returns the stream after the layer."""
        raise TypeError(f"{type(self).__name__} has no steps.")
        yield

    def __call__(self, x: Array, branches: Sequence[BranchFunction], drop: Dropout, ctx: Context) -> Array:
        """The stream after the layer."""
        walk, sent = self.steps(x, branches, drop, ctx), None
        while True:
            try:
                branch, y = walk.send(sent)  # pyright: ignore[reportArgumentType]
            except StopIteration as end:
                return end.value
            sent = branch(y)
