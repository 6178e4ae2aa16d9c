"""Protocols of the layers of a block."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, PRNGKeyArray, PyTree

from eqx_decoders.context import ForwardContext


class BranchResult(NamedTuple):
    """Result of a layer in a block.

    **Arguments:**

    - `out`: features for the residual stream.
    - `entries`: new entries for its cache, a tree like the cache itself; None for a layer without one.
    - `stats`: values for fields of `BlockStats`, by name.
    - `lent`: what later layers may use of it besides its entries; None for nothing.
    """

    out: Array
    entries: Any = None
    stats: Mapping[str, Any] = MappingProxyType({})
    lent: Any = None


class BranchInputs(NamedTuple):
    """Arguments of `BranchLayer.branch`."""

    x: Array
    ctx: ForwardContext
    past: Any
    key: PRNGKeyArray | None


@runtime_checkable
class BranchLayer(Protocol):
    """Layer that can stand in a block."""

    def branch(self, x: Array, ctx: ForwardContext, past: Any, key: PRNGKeyArray | None) -> BranchResult:
        """Compute the layer's result; `past` is what it reads from its cache, or None."""
        ...


@runtime_checkable
class StaggeredLayer(BranchLayer, Protocol):
    """Layer whose communication a block can hide behind the other parts of a batch: `branch` in two steps."""

    def begin(self, inputs: BranchInputs) -> PyTree:
        """Compute a part's arrays before anything is sent."""
        ...

    def finish(self, parts: Sequence[BranchInputs], prepared: Sequence[PyTree]) -> list[BranchResult]:
        """Communicate, and compute the results of all parts."""
        ...
