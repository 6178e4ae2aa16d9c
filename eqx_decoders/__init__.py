"""Decoder language models as immutable Equinox pytrees.

- A model is data: `DecoderConfig`, one `BlockConfig` for each layer (the parts are in `eqx_decoders.layers`), or
  `get_config(name)` for one of `list_models()`.
- `init(config, key=key)` makes it, `load_hf(source)` reads one from Hugging Face, `save_hf` writes it back;
  `abstract` and `abstract_hf` give its shapes alone.
- `model(tokens)` returns logits and more (`Output`), with a cache from `init_cache` if there is one.
  `generate` and `stream` let it write, `Greedy()` or a `Sample(...)` choosing the tokens.
- `next_token_loss(model, Batch(tokens=...))` is what is trained; `eqx_decoders.training` has optimizers, steps, data.
- `Execution`, `Layout`, `Precision`, `LowPrecision` and `Remat` say how and where it runs:
  `model.replace(remat="full")`.

`EQX_DECODERS_TYPECHECK=1` checks every signature's shapes and dtypes at trace time (jaxtyping with beartype).
"""

import os
from typing import TYPE_CHECKING


if os.environ.get("EQX_DECODERS_TYPECHECK", "0") not in ("", "0"):
    from jaxtyping import install_import_hook

    # the tower: whole numbers are welcome where a float is asked for
    install_import_hook("eqx_decoders", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

from eqx_decoders.block import Block as Block, BlockConfig as BlockConfig
from eqx_decoders.cache import Cache as Cache
from eqx_decoders.context import Context as Context, Execution as Execution, Inputs as Inputs
from eqx_decoders.create import (
    abstract as abstract,
    abstract_cache as abstract_cache,
    add_mtp as add_mtp,
    count_parameters as count_parameters,
    init as init,
    init_cache as init_cache,
    with_mtp as with_mtp,
)
from eqx_decoders.decoder import Decoder as Decoder, DecoderConfig as DecoderConfig, Output as Output
from eqx_decoders.encoders.encoder import EncoderConfig as EncoderConfig
from eqx_decoders.encoders.media import Media as Media
from eqx_decoders.encoders.media_config import MediaConfig as MediaConfig
from eqx_decoders.errors import (
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    ConversionError as ConversionError,
    DataError as DataError,
    EqxDecodersError as EqxDecodersError,
)
from eqx_decoders.further import BranchConfig as BranchConfig
from eqx_decoders.layers.cache_format import CacheFormat as CacheFormat
from eqx_decoders.layers.pages import PageConfig as PageConfig
from eqx_decoders.layers.router import (
    RoutingStats as RoutingStats,
    load_balance_loss as load_balance_loss,
    router_z_loss as router_z_loss,
)
from eqx_decoders.layout import Layout as Layout
from eqx_decoders.lazy import lazy
from eqx_decoders.low_precision import LowPrecision as LowPrecision
from eqx_decoders.mtp import MTPConfig as MTPConfig
from eqx_decoders.numerics import Precision as Precision
from eqx_decoders.offload import Offload as Offload
from eqx_decoders.pipeline import Pipeline as Pipeline
from eqx_decoders.remat import Remat as Remat
from eqx_decoders.sampling import Greedy as Greedy, Sample as Sample
from eqx_decoders.stack import Segment as Segment, segments as segments
from eqx_decoders.stats import ActivationStats as ActivationStats, BlockStats as BlockStats


# Imported when they are asked for: a model alone needs none of them.
if TYPE_CHECKING:
    from eqx_decoders.families import get_config as get_config, list_models as list_models
    from eqx_decoders.inference.generate import generate as generate, stream as stream
    from eqx_decoders.io.export import save_hf as save_hf
    from eqx_decoders.io.huggingface import abstract_hf as abstract_hf, load_hf as load_hf
    from eqx_decoders.model_info import ModelInfo as ModelInfo, describe_model as describe_model
    from eqx_decoders.quantization import dequantize as dequantize, quantize as quantize
    from eqx_decoders.replication import replicated_share as replicated_share
    from eqx_decoders.training.balance import update_router_bias as update_router_bias
    from eqx_decoders.training.batches import Batch as Batch
    from eqx_decoders.training.loss import LossMetrics as LossMetrics, next_token_loss as next_token_loss

__getattr__, _late = lazy(
    __name__,
    {
        "families": "get_config list_models",
        "inference.generate": "generate stream",
        "io.export": "save_hf",
        "io.huggingface": "abstract_hf load_hf",
        "model_info": "ModelInfo describe_model",
        "quantization": "dequantize quantize",
        "replication": "replicated_share",
        "training.balance": "update_router_bias",
        "training.batches": "Batch",
        "training.loss": "LossMetrics next_token_loss",
    },
    "families inference io serving training",
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_late})
