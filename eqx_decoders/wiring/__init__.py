"""How the branches of a block are wired to the residual stream."""

from eqx_decoders.wiring.hyper_connections import HyperConnections as HyperConnections
from eqx_decoders.wiring.residual import (
    Chained as Chained,
    Parallel as Parallel,
    Plain as Plain,
    Sequential as Sequential,
)
