"""How the branches of a block are wired to the residual stream."""

from eqx_decoders.blocks.residual.hyper_connections import HyperConnections as HyperConnections
from eqx_decoders.blocks.residual.residual import (
    Chained as Chained,
    Parallel as Parallel,
    Plain as Plain,
    Sequential as Sequential,
)
