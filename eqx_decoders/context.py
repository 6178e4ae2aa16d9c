"""What rides along one forward pass: how it is executed, and where its tokens stand."""

import dataclasses
from typing import Any, Literal

import equinox as eqx
from jaxtyping import Array, Int

from eqx_decoders.errors import check_word
from eqx_decoders.layout import Layout
from eqx_decoders.numerics import LowRank, Precision, einsum
from eqx_decoders.remat import Remat, get_remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model runs, apart from what it computes: no choice here changes a value by more than rounding.

    **Arguments:**

    - `layout`: where weights and activations live.
    - `precision`: dtypes of weights and activations.
    - `remat`: a policy's name, a `Remat`, or None (= `"none"`).
    - `attention`: an attention kernel's name, or `"auto"`.
    - `scan`: one `lax.scan` over equal layers; False runs them one by one.
    - `layer_stats`: whether `Output.stats` describes each layer's activations.
    - `lookup`: how tokens find their embeddings: `"gather"`, or `"one_hot"`, a product of the table with one-hot rows.
        The product suits tables that are split over the vocabulary: each device multiplies its own rows and the results
        are added, no table is gathered. It costs as many operations as the head.
    """

    layout: Layout = dataclasses.field(default_factory=Layout)
    precision: Precision = dataclasses.field(default_factory=Precision)
    remat: str | Remat | None = None
    attention: str = "auto"
    scan: bool = True
    layer_stats: bool = False
    lookup: Literal["gather", "one_hot"] = "gather"

    def __post_init__(self):
        check_word("Execution.lookup", self.lookup, ("gather", "one_hot"))
        object.__setattr__(self, "remat", get_remat(self.remat))


class Context(eqx.Module):
    """Positions, documents and execution of one forward pass; every layer receives it.

    **Arguments:**

    - `positions`: position of each token in its document; -1 where there is no token (padding). Within a document
        they increase along the row.
    - `segment_ids`: which tokens of a row belong together; None when each row is one document.
    - `execution`: how the pass is run.
    - `fresh`: whether caches are known to be empty, so that nothing of the past is read.
    """

    positions: Int[Array, "batch length"]
    segment_ids: Int[Array, "batch length"] | None = None
    execution: Execution = eqx.field(static=True, default=Execution())
    fresh: bool = eqx.field(static=True, default=False)

    def constrain(self, x: Array, words: str) -> Array:
        """`layout.constrain`: how an activation is split over the mesh."""
        return self.execution.layout.constrain(x, words)

    def einsum(self, pattern: str, x: Array, weight: Array | LowRank, **options: Any) -> Array:
        """`numerics.einsum` in the form that suits the layout's devices.

        Flattened products are faster on one CPU; elsewhere XLA lays products out itself, and flattening dimensions that
        are split over different mesh axes would cost communication.
        """
        layout = self.execution.layout
        return einsum(pattern, x, weight, flatten=layout.single and layout.platform == "cpu", **options)
