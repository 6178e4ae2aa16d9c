"""Decoder language models as immutable Equinox pytrees.

`EQX_DECODERS_TYPECHECK=1` checks every signature's shapes and dtypes at trace time (jaxtyping with beartype).
"""

import os


if os.environ.get("EQX_DECODERS_TYPECHECK", "0") not in ("", "0"):
    from jaxtyping import install_import_hook

    # the tower: whole numbers are welcome where a float is asked for
    install_import_hook("eqx_decoders", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

from eqx_decoders.block import ActivationStats, Block, BlockConfig, BlockStats
from eqx_decoders.context import Context, Execution
from eqx_decoders.create import abstract, abstract_cache, add_mtp, count_parameters, init, init_cache, with_mtp
from eqx_decoders.decoder import Cache, Decoder, DecoderConfig, Output
from eqx_decoders.errors import CheckpointError, ConfigError, ConversionError, DataError, EqxDecodersError
from eqx_decoders.families import get_config, list_models
from eqx_decoders.inference.generate import generate, stream
from eqx_decoders.inference.sampling import Greedy, Sample
from eqx_decoders.io.export import save_hf
from eqx_decoders.io.huggingface import abstract_hf, load_hf
from eqx_decoders.layers.router import RoutingStats, load_balance_loss, router_z_loss
from eqx_decoders.layout import Layout
from eqx_decoders.mtp import MTPConfig
from eqx_decoders.numerics import Precision
from eqx_decoders.remat import Remat
from eqx_decoders.stack import Segment, segments
from eqx_decoders.training.balance import update_router_bias
from eqx_decoders.training.data import Batch
from eqx_decoders.training.loss import LossMetrics, next_token_loss


__all__ = [
    "ActivationStats",
    "Batch",
    "Block",
    "BlockConfig",
    "BlockStats",
    "Cache",
    "CheckpointError",
    "ConfigError",
    "Context",
    "ConversionError",
    "DataError",
    "Decoder",
    "DecoderConfig",
    "EqxDecodersError",
    "Execution",
    "Greedy",
    "Layout",
    "LossMetrics",
    "MTPConfig",
    "Output",
    "Precision",
    "Remat",
    "RoutingStats",
    "Sample",
    "Segment",
    "abstract",
    "abstract_cache",
    "abstract_hf",
    "add_mtp",
    "count_parameters",
    "generate",
    "get_config",
    "init",
    "init_cache",
    "list_models",
    "load_balance_loss",
    "load_hf",
    "next_token_loss",
    "router_z_loss",
    "save_hf",
    "segments",
    "stream",
    "update_router_bias",
    "with_mtp",
]
