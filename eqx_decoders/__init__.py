"""Decoder language models as immutable Equinox pytrees.

    model = ed.init(ed.get_config("tiny"), key=jax.random.key(0))
    logits = model(tokens).logits

Model configurations
    `DecoderConfig`, `BlockConfig`, `ExtraLayerConfig`, `MTPConfig`, `MediaConfig`, `EncoderConfig`. Configurations of
    layers are in `eqx_decoders.layers`. `list_models` lists the published models, `get_config` returns their
    configurations, and `describe_model` returns a `ModelInfo` with the sizes of the weights and the cache.

Initialization
    `init` creates a model with random weights, `abstract` a model of `jax.ShapeDtypeStruct`s. `count_parameters`,
    `with_mtp`, `add_mtp`, `add_score_head`.

Hugging Face and GGUF checkpoints
    `load_hf`, `abstract_hf`, `save_hf`, `save_gguf`. `load_text_model` loads a model with its tokenizer and chat
    template. `register_family` and `register_models` add custom families and models.

Forward pass
    A `Decoder` returns an `Output`. `Inputs` and `Media` are optional inputs besides tokens. A decoder consists of
    `ScannedLayers` (see `find_repeats`) of `Block`s, which receive a `ForwardContext`.

Execution options
    `Execution` and `model.replace(remat="full")`; `Remat`, `Precision`, `LowPrecision`; `Layout`, `Pipeline`,
    `Offload`, `replicated_fraction`.

Training
    `Batch`, `next_token_loss` (`LossMetrics`), `Trainer`, `OptimizerConfig`, `Checkpoints`; see also
    `eqx_decoders.training`.

Fine-tuning
    `add_lora`, `merge_lora`; `load_peft` and `save_peft` read and write adapters in PEFT's format.

Statistics and router losses
    `ActivationStats`, `BlockStats`, `RoutingStats`; `load_balance_loss`, `router_z_loss`, `update_router_bias`.

Generation
    `generate`, `stream`; `Greedy`, `Sample`; `init_cache`, `abstract_cache`, `Cache`, `CacheFormat`, `PageConfig`.

Serving
    `Engine`, `EngineConfig`, `Request`; see also `eqx_decoders.serving`.

Quantization
    `quantize`, `dequantize`.

Errors
    `EqxDecodersError` and its subclasses `ConfigError`, `DataError`, `CheckpointError`, `ConversionError`.

Set `EQX_DECODERS_TYPECHECK=1` to check the shapes and dtypes of all signatures at trace time (jaxtyping with beartype).
"""

import os
from typing import TYPE_CHECKING


if os.environ.get("EQX_DECODERS_TYPECHECK", "0") not in ("", "0"):
    from jaxtyping import install_import_hook

    # is_pep484_tower: accept an int where the annotation is float
    install_import_hook("eqx_decoders", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

from eqx_decoders.core.lazy_imports import lazy


# Names are imported on first use: importing JAX and Equinox takes half a second; optax, orbax and the engine take more.
if TYPE_CHECKING:
    from eqx_decoders.blocks.block import (
        Block as Block,
        BlockConfig as BlockConfig,
        ExtraLayerConfig as ExtraLayerConfig,
    )
    from eqx_decoders.blocks.repeats import find_repeats as find_repeats
    from eqx_decoders.blocks.stack import ScannedLayers as ScannedLayers
    from eqx_decoders.blocks.stats import ActivationStats as ActivationStats, BlockStats as BlockStats
    from eqx_decoders.context import Execution as Execution, ForwardContext as ForwardContext, Inputs as Inputs
    from eqx_decoders.core.sampling import Greedy as Greedy, Sample as Sample
    from eqx_decoders.data.batch import Batch as Batch
    from eqx_decoders.encoders.media import Media as Media
    from eqx_decoders.encoders.media_config import EncoderConfig as EncoderConfig, MediaConfig as MediaConfig
    from eqx_decoders.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        ConversionError as ConversionError,
        DataError as DataError,
        EqxDecodersError as EqxDecodersError,
    )
    from eqx_decoders.families.registry import (
        get_config as get_config,
        list_models as list_models,
        register_family as register_family,
        register_models as register_models,
    )
    from eqx_decoders.families.summary import ModelInfo as ModelInfo, describe_model as describe_model
    from eqx_decoders.inference.generation import generate as generate, stream as stream
    from eqx_decoders.inference.text_model import load_text_model as load_text_model
    from eqx_decoders.io.checkpoint.checkpoints import Checkpoints as Checkpoints
    from eqx_decoders.io.gguf.gguf_export import save_gguf as save_gguf
    from eqx_decoders.io.huggingface.export import save_hf as save_hf
    from eqx_decoders.io.huggingface.load import abstract_hf as abstract_hf, load_hf as load_hf
    from eqx_decoders.io.huggingface.peft import load_peft as load_peft, save_peft as save_peft
    from eqx_decoders.layers.cache.cache import Cache as Cache
    from eqx_decoders.layers.cache.format import CacheFormat as CacheFormat
    from eqx_decoders.layers.cache.paged import PageConfig as PageConfig
    from eqx_decoders.layers.moe.router import (
        RoutingStats as RoutingStats,
        load_balance_loss as load_balance_loss,
        router_z_loss as router_z_loss,
    )
    from eqx_decoders.model.caches import abstract_cache as abstract_cache, init_cache as init_cache
    from eqx_decoders.model.decoder import Decoder as Decoder, Output as Output
    from eqx_decoders.model.decoder_config import DecoderConfig as DecoderConfig
    from eqx_decoders.model.init import (
        abstract as abstract,
        add_mtp as add_mtp,
        add_score_head as add_score_head,
        count_parameters as count_parameters,
        init as init,
        with_mtp as with_mtp,
    )
    from eqx_decoders.model.mtp_config import MTPConfig as MTPConfig
    from eqx_decoders.model.quantize import dequantize as dequantize, quantize as quantize
    from eqx_decoders.numerics.low_precision import LowPrecision as LowPrecision
    from eqx_decoders.numerics.precision import Precision as Precision
    from eqx_decoders.remat import Remat as Remat
    from eqx_decoders.serving.engine.config import EngineConfig as EngineConfig
    from eqx_decoders.serving.engine.engine import Engine as Engine
    from eqx_decoders.serving.engine.request import Request as Request
    from eqx_decoders.sharding.layout import Layout as Layout
    from eqx_decoders.sharding.offload import Offload as Offload
    from eqx_decoders.sharding.pipeline_config import Pipeline as Pipeline
    from eqx_decoders.sharding.replication import replicated_fraction as replicated_fraction
    from eqx_decoders.training.lora import add_lora as add_lora, merge_lora as merge_lora
    from eqx_decoders.training.optimizer.optimizer import OptimizerConfig as OptimizerConfig
    from eqx_decoders.training.step.loss import LossMetrics as LossMetrics, next_token_loss as next_token_loss
    from eqx_decoders.training.step.router_bias import update_router_bias as update_router_bias
    from eqx_decoders.training.step.step import Trainer as Trainer

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "blocks.block": "Block BlockConfig ExtraLayerConfig",
        "blocks.repeats": "find_repeats",
        "blocks.stack": "ScannedLayers",
        "blocks.stats": "ActivationStats BlockStats",
        "context": "ForwardContext Execution Inputs",
        "core.sampling": "Greedy Sample",
        "data.batch": "Batch",
        "encoders.media": "Media",
        "encoders.media_config": "EncoderConfig MediaConfig",
        "errors": "CheckpointError ConfigError ConversionError DataError EqxDecodersError",
        "families.registry": "get_config list_models register_family register_models",
        "families.summary": "ModelInfo describe_model",
        "inference.generation": "generate stream",
        "inference.text_model": "load_text_model",
        "io.checkpoint.checkpoints": "Checkpoints",
        "io.gguf.gguf_export": "save_gguf",
        "io.huggingface.export": "save_hf",
        "io.huggingface.load": "abstract_hf load_hf",
        "io.huggingface.peft": "load_peft save_peft",
        "layers.cache.cache": "Cache",
        "layers.cache.format": "CacheFormat",
        "layers.cache.paged": "PageConfig",
        "layers.moe.router": "RoutingStats load_balance_loss router_z_loss",
        "model.caches": "abstract_cache init_cache",
        "model.decoder": "Decoder Output",
        "model.decoder_config": "DecoderConfig",
        "model.init": "abstract add_mtp add_score_head count_parameters init with_mtp",
        "model.mtp_config": "MTPConfig",
        "model.quantize": "dequantize quantize",
        "numerics.low_precision": "LowPrecision",
        "numerics.precision": "Precision",
        "remat": "Remat",
        "serving.engine.config": "EngineConfig",
        "serving.engine.engine": "Engine",
        "serving.engine.request": "Request",
        "sharding.layout": "Layout",
        "sharding.offload": "Offload",
        "sharding.pipeline_config": "Pipeline",
        "sharding.replication": "replicated_fraction",
        "training.lora": "add_lora merge_lora",
        "training.optimizer.optimizer": "OptimizerConfig",
        "training.step.loss": "LossMetrics next_token_loss",
        "training.step.router_bias": "update_router_bias",
        "training.step.step": "Trainer",
    },
    "blocks cli context core data encoders errors families inference io layers model numerics planning remat serving"
    " sharding training",
)
