"""What a block asks of each of its layers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, PRNGKeyArray, PyTree

from eqx_decoders.context import Context


class BranchResult(NamedTuple):
    """What a layer gives back to its block.

    **Arguments:**

    - `out`: features for the residual stream.
    - `entries`: what it proposes to its memory, a tree like that of the memory; None where it remembers nothing.
    - `stats`: values for fields of `BlockStats`, by name.
    """

    out: Array
    entries: Any = None
    stats: Mapping[str, Any] = MappingProxyType({})


class BranchInputs(NamedTuple):
    """What a block calls a layer with: the arguments of `BranchLayer.branch`."""

    x: Array
    ctx: Context
    past: Any
    key: PRNGKeyArray | None


@runtime_checkable
class BranchLayer(Protocol):
    """A layer that can stand in a block."""

    def branch(self, x: Array, ctx: Context, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Its output, given what it remembers (None: nothing)."""
        ...


@runtime_checkable
class StaggeredLayer(BranchLayer, Protocol):
    """A layer that sends and receives, and so has an order for the parts of a batch that hides it: `branch` in two."""

    def begin(self, inputs: BranchInputs) -> PyTree:
        """What a part does before it sends anything: arrays."""
        ...

    def finish(self, parts: Sequence[BranchInputs], begun: Sequence[PyTree]) -> list[BranchResult]:
        """The rest of all parts."""
        ...
