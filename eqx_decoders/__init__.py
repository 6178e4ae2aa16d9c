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

from eqx_decoders.blocks.block import Block as Block, BlockConfig as BlockConfig
from eqx_decoders.blocks.branch import ExtraLayerConfig as ExtraLayerConfig
from eqx_decoders.blocks.stack import Segment as Segment, segments as segments
from eqx_decoders.blocks.stats import ActivationStats as ActivationStats, BlockStats as BlockStats
from eqx_decoders.context import Context as Context, Execution as Execution, Inputs as Inputs
from eqx_decoders.core.lazy_imports import lazy
from eqx_decoders.core.sampling import Greedy as Greedy, Sample as Sample
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
from eqx_decoders.layers.cache.cache import Cache as Cache
from eqx_decoders.layers.cache.format import CacheFormat as CacheFormat
from eqx_decoders.layers.cache.paged import PageConfig as PageConfig
from eqx_decoders.layers.moe.router import (
    RoutingStats as RoutingStats,
    load_balance_loss as load_balance_loss,
    router_z_loss as router_z_loss,
)
from eqx_decoders.model.decoder import Decoder as Decoder, DecoderConfig as DecoderConfig, Output as Output
from eqx_decoders.model.init import (
    abstract as abstract,
    abstract_cache as abstract_cache,
    add_mtp as add_mtp,
    count_parameters as count_parameters,
    init as init,
    init_cache as init_cache,
    with_mtp as with_mtp,
)
from eqx_decoders.model.mtp import MTPConfig as MTPConfig
from eqx_decoders.numerics.int8_matmul import LowPrecision as LowPrecision
from eqx_decoders.numerics.matmul import Precision as Precision
from eqx_decoders.remat import Remat as Remat
from eqx_decoders.sharding.layout import Layout as Layout
from eqx_decoders.sharding.offload import Offload as Offload
from eqx_decoders.sharding.pipeline import Pipeline as Pipeline


# Imported when they are asked for: a model alone needs none of them.
if TYPE_CHECKING:
    from eqx_decoders.data.batches import Batch as Batch
    from eqx_decoders.families import get_config as get_config, list_models as list_models
    from eqx_decoders.families.summary import ModelInfo as ModelInfo, describe_model as describe_model
    from eqx_decoders.inference.generation import generate as generate, stream as stream
    from eqx_decoders.io.huggingface.export import save_hf as save_hf
    from eqx_decoders.io.huggingface.load import abstract_hf as abstract_hf, load_hf as load_hf
    from eqx_decoders.model.quantize import dequantize as dequantize, quantize as quantize
    from eqx_decoders.sharding.replication import replicated_fraction as replicated_fraction
    from eqx_decoders.training.step.balance import update_router_bias as update_router_bias
    from eqx_decoders.training.step.loss import LossMetrics as LossMetrics, next_token_loss as next_token_loss

__getattr__, _late = lazy(
    __name__,
    {
        "families": "get_config list_models",
        "inference.generation": "generate stream",
        "io.huggingface.export": "save_hf",
        "io.huggingface.load": "abstract_hf load_hf",
        "families.summary": "ModelInfo describe_model",
        "model.quantize": "dequantize quantize",
        "sharding.replication": "replicated_fraction",
        "training.step.balance": "update_router_bias",
        "data.batches": "Batch",
        "training.step.loss": "LossMetrics next_token_loss",
    },
    "families inference io serving training",
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_late})
