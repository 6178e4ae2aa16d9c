"""Residual connections of a block."""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


# Names are imported on first use, so that a model imports the residual connections that it has and no others.
if TYPE_CHECKING:
    from eqx_decoders.blocks.residual.hyper_connections import HyperConnections as HyperConnections
    from eqx_decoders.blocks.residual.residual import (
        Chained as Chained,
        NoResidual as NoResidual,
        Parallel as Parallel,
        PostNorm as PostNorm,
        Sequential as Sequential,
        Weighted as Weighted,
    )
    from eqx_decoders.families.gemma.altup import AltUp as AltUp, Laurel as Laurel
    from eqx_decoders.families.qwen.gated_streams import GatedStreams as GatedStreams

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "families.gemma.altup": "AltUp Laurel",
        "families.qwen.gated_streams": "GatedStreams",
        "blocks.residual.hyper_connections": "HyperConnections",
        "blocks.residual.residual": "Chained NoResidual Parallel PostNorm Sequential Weighted",
    },
)
