"""Registry of all residual connections. Add new ones here."""

from typing import TYPE_CHECKING, Literal

from eqx_decoders.blocks.residual.altup import AltUp, StreamMaps
from eqx_decoders.blocks.residual.gated_streams import GatedMean, GatedStreams
from eqx_decoders.blocks.residual.hyper_connections import HyperConnections, StreamSum
from eqx_decoders.blocks.residual.laurel import Laurel
from eqx_decoders.blocks.residual.residual import Chained, NoResidual, Parallel, PostNorm, Sequential, Weighted


OneStream = Sequential | PostNorm | Weighted | Parallel | NoResidual | Chained | Laurel
ResidualConfig = OneStream | HyperConnections | AltUp | GatedStreams

RESIDUALS: dict[str, ResidualConfig] = {
    "sequential": Sequential(),
    "parallel": Parallel(),
    "plain": NoResidual(),
    "chained": Chained(),
}

# At run time `BlockConfig.residual` also accepts the names in `RESIDUALS`, which configurations on disk may contain.
if TYPE_CHECKING:
    ResidualOrName = ResidualConfig
else:
    ResidualOrName = ResidualConfig | Literal["sequential", "parallel", "plain", "chained"]

# modules that map an embedding to the residual streams, and the residual streams to the input of the final norm
StreamMapping = StreamMaps | StreamSum | GatedMean
