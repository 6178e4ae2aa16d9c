"""Residual connections of a block."""

from eqx_decoders.blocks.residual.altup import AltUp as AltUp
from eqx_decoders.blocks.residual.gated_streams import GatedStreams as GatedStreams
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections as HyperConnections
from eqx_decoders.blocks.residual.laurel import Laurel as Laurel
from eqx_decoders.blocks.residual.residual import (
    Chained as Chained,
    NoResidual as NoResidual,
    Parallel as Parallel,
    PostNorm as PostNorm,
    Sequential as Sequential,
    Weighted as Weighted,
)
